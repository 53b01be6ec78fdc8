"""Rules of convolutions, pooling and group normalisation: `n c [spatial], o c [kernel] -> n o [spatial]`.

Spatial dims are whole: neighbouring shards would have to exchange their edges. With groups, channels are whole too.
"""

from __future__ import annotations

import itertools

from torch.fx import Node

from autopar.rules.nodes import result_values, shapes_of
from autopar.rules.notation import BoundRule, Dims, Linear, Shape
from autopar.rules.shapes import from_letters


def _spatial(shape: Shape, prefix: str, sizes: dict[str, int], whole: set[str]) -> Dims:
    """The letters of the dims after the first two, all whole."""
    names = [f"{prefix}{i}" for i in range(len(shape) - 2)]
    sizes.update(zip(names, shape[2:], strict=True))
    whole.update(names)
    return tuple((name,) for name in names)


def _channels(weight: Shape, node: Node) -> tuple[Dims, Dims, Dims, dict[str, int], set[str]]:
    """Dims of input, weight and output channels, their sizes, and which are whole."""
    is_backward = len(result_values(node)) > 1
    transposed, groups = node.args[6 + is_backward], node.args[8 + is_backward]
    assert isinstance(groups, int)
    if groups > 1:
        ins, outs = weight[1] * groups, weight[0]
        sizes = dict(zip("iouv", (outs, ins, *weight[:2]) if transposed else (ins, outs, *weight[:2]), strict=True))
        return (("i",),), (("u",), ("v",)), (("o",),), sizes, set(sizes)
    first, second = ("c", "o") if transposed else ("o", "c")
    sizes = {first: weight[0], second: weight[1]}
    return (("c",),), ((first,), (second,)), (("o",),), sizes, set()


def convolution(node: Node) -> BoundRule:
    """`n c …, o c … -> n o …`; a bias would be added once a rank where `c` is split, so it keeps `c` whole."""
    (x, weight, *bias), (result,) = shapes_of(node)
    channels, kernels, outputs, sizes, whole = _channels(weight, node)
    sizes["n"] = x[0]
    operands = [(("n",), *channels, *_spatial(x, "x", sizes, whole)), (*kernels, *_spatial(weight, "k", sizes, whole))]
    out: Dims = (("n",), *outputs, *_spatial(result, "y", sizes, whole))
    linear: Linear = ((0, 2), (1, 2)) if bias else ((0,), (1,))
    if bias:
        operands.append(outputs)
        whole.add("c")
    return from_letters(operands, [out], sizes, whole & set(sizes), linear)


def convolution_backward(node: Node) -> BoundRule:
    """`n o …, n c …, o c … -> n c …, o c …, o`: linear in the gradient; the bias's knows nothing of `c`."""
    (grad, x, weight), _ = shapes_of(node)
    channels, kernels, outputs, sizes, whole = _channels(weight, node)
    sizes["n"] = x[0]
    inner: Dims = (("n",), *channels, *_spatial(x, "x", sizes, whole))
    kernel: Dims = (*kernels, *_spatial(weight, "k", sizes, whole))
    outer: Dims = (("n",), *outputs, *_spatial(grad, "y", sizes, whole))
    present = [value is not None for value in result_values(node)]
    found = list(itertools.compress((inner, kernel, outputs), present))
    if present[2]:
        whole.add("c")
    return from_letters([outer, inner, kernel], found, sizes, whole & set(sizes), ((0,),))


def pooling(node: Node) -> BoundRule:
    """Batch and channels are free, spatial dims whole; all operands and results have both in front."""
    operands, results = shapes_of(node)
    leading = len(operands[0]) - _num_spatial(node)
    names = [f"d{i}" for i in range(leading)]
    sizes, whole = dict(zip(names, operands[0], strict=False)), set[str]()
    dims = [
        (*((name,) for name in names), *_tail(shape[leading:], f"s{i}_", sizes, whole))
        for i, shape in enumerate((*operands, *results))
    ]
    indexes = {2: dims[1][-1][0]} if len(operands) == 3 else {}  # where the greatest stood in the (whole) window
    return from_letters(dims[: len(operands)], dims[len(operands) :], sizes, whole, indexes=indexes)


def _num_spatial(node: Node) -> int:
    digit = next(char for char in str(node.target) if char in "123" and f"{char}d" in str(node.target))
    return int(digit)


def _tail(shape: Shape, prefix: str, sizes: dict[str, int], whole: set[str]) -> Dims:
    names = [f"{prefix}{i}" for i in range(len(shape))]
    sizes.update(zip(names, shape, strict=True))
    whole.update(names)
    return tuple((name,) for name in names)
