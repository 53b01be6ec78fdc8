"""Rules of normalisation: what statistics are taken over is whole, all else free."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch.fx import Node

from autopar.rules.entries import Rows, by
from autopar.rules.letters import from_letters, letters, whole_letters
from autopar.rules.nodes import argument, result_values, shapes_of
from autopar.rules.notation import BoundRule, Dims, Shape


def _first_normalised(node: Node, shape_argument: int, rank: int) -> int:
    return rank - len(argument(node, shape_argument, "normalized_shape"))


def layer_norm(node: Node) -> BoundRule:
    """`... [d], d, d -> ... [d], ... 1, ... 1`; with one statistic, `rms_norm`."""
    operands, (result, *others) = shapes_of(node)
    dims, sizes = letters(result, "d")
    first = _first_normalised(node, 1, len(result))
    weights = [dims[first:]] * (len(operands) - 1)
    statistics = [tuple(dims[i] if i < first else () for i in range(len(statistic))) for statistic in others]
    kept = {f"d{i}" for i in range(first, len(result))}
    return from_letters([dims, *weights], [dims, *statistics], sizes, kept)


def layer_norm_backward(node: Node) -> BoundRule:
    """`... [d], ... [d], ... 1, ... 1, d, d -> ... [d], d, d`: the weights' gradients are partial over split rows."""
    operands, results = shapes_of(node)
    dims, sizes = letters(operands[0], "d")
    first = _first_normalised(node, 2, len(dims))
    statistics = tuple(dims[i] if i < first else () for i in range(len(operands[2])))
    weights = [dims[first:]] * (len(operands) - 4)
    outputs = [dims if len(shape) == len(dims) and i == 0 else dims[first:] for i, shape in enumerate(results)]
    kept = {f"d{i}" for i in range(first, len(dims))}
    return from_letters([dims, dims, statistics, statistics, *weights], outputs, sizes, kept, ((0,),))


# -- groups of channels ------------------------------------------------------------------------------------------
def _grouped(x: Shape, groups: int) -> tuple[Dims, dict[str, int], set[str]]:
    """`n (g [p]) [spatial]`"""
    sizes, kept = {"n": x[0], "g": groups, "p": x[1] // groups}, {"p"}
    return (("n",), ("g", "p"), *whole_letters(x[2:], "s", sizes, kept)), sizes, kept


def group_norm(node: Node) -> BoundRule:
    """`n (g [p]) [s], g p, g p -> n (g [p]) [s], n g, n g`"""
    (x, *weights), _ = shapes_of(node)
    dims, sizes, kept = _grouped(x, argument(node, 6, "group"))
    return from_letters([dims, *[dims[1:2]] * len(weights)], [dims, *[(("n",), ("g",))] * 2], sizes, kept)


def group_norm_backward(node: Node) -> BoundRule:
    """The weights' gradients are partial over split samples."""
    (_, x, *others), _ = shapes_of(node)
    dims, sizes, kept = _grouped(x, argument(node, 8, "group"))
    statistics: list[Dims] = [(("n",), ("g",))] * 2
    present = [value is not None for value in result_values(node)]
    results = list(itertools.compress((dims, dims[1:2], dims[1:2]), present))
    return from_letters([dims, dims, *statistics, *[dims[1:2]] * (len(others) - 2)], results, sizes, kept, ((0,),))


# -- channels ----------------------------------------------------------------------------------------------------
def _channels(x: Shape, whole_batch: bool) -> tuple[Dims, dict[str, int], set[str]]:
    """`n c [spatial]`; where statistics are taken of the batch, it is whole."""
    sizes, kept = {"n": x[0], "c": x[1]}, {"n"} if whole_batch else set[str]()
    return (("n",), ("c",), *whole_letters(x[2:], "s", sizes, kept)), sizes, kept


def _of_channel(shape: Shape, value: int, sizes: dict[str, int], kept: set[str]) -> Dims:
    """Dims of a vector of channels; statistics that an op leaves empty are whole."""
    return (("c",),) if shape == (sizes["c"],) else whole_letters(shape, f"e{value}_", sizes, kept)


def batch_norm(training: int | None) -> Callable[[Node], BoundRule]:
    """`n c [s], c, … -> n c [s], c, …`; `training` is where that argument stands, None where the op doesn't train."""

    def rule(node: Node) -> BoundRule:
        (x, *channels), (_, *statistics) = shapes_of(node)
        trains = training is not None and bool(argument(node, training, "training"))
        dims, sizes, kept = _channels(x, whole_batch=trains)
        results = [_of_channel(shape, i, sizes, kept) for i, shape in enumerate(statistics)]
        same = [(), *({"n"} for _ in statistics)]  # running statistics, where the batch's are not taken
        return from_letters([dims, *[dims[1:2]] * len(channels)], [dims, *results], sizes, kept, same=same)

    return rule


def batch_norm_backward(node: Node) -> BoundRule:
    """The weights' gradients are partial over a split batch, where its statistics were not used."""
    (_, x, *others), _ = shapes_of(node)
    dims, sizes, kept = _channels(x, whole_batch=bool(argument(node, 7, "train")))
    operands = [_of_channel(shape, i, sizes, kept) for i, shape in enumerate(others)]
    present = [value is not None for value in result_values(node)]
    results = list(itertools.compress((dims, dims[1:2], dims[1:2]), present))
    return from_letters([dims, dims, *operands], results, sizes, kept, ((0,),))


# -- weights -----------------------------------------------------------------------------------------------------
def _weight_norm(v: Shape, dim: int) -> tuple[Dims, Dims, dict[str, int], set[str]]:
    """Letters of a weight and of its norms along all dims but one, which is free."""
    dims, sizes = letters(v, "d")
    norms = tuple(letter if d == dim % len(v) else () for d, letter in enumerate(dims))
    return dims, norms, sizes, {f"d{d}" for d in range(len(v)) if d != dim % len(v)}


def weight_norm(node: Node) -> BoundRule:
    """`[a] b, 1 b -> [a] b, 1 b`"""
    dims, norms, sizes, kept = _weight_norm(shapes_of(node)[0][0], argument(node, 2, "dim", 0))
    return from_letters([dims, norms], [dims, norms], sizes, kept)


def weight_norm_backward(node: Node) -> BoundRule:
    """`[a] b, [a] b, 1 b, 1 b -> [a] b, 1 b`"""
    dims, norms, sizes, kept = _weight_norm(shapes_of(node)[0][0], argument(node, 4, "dim"))
    return from_letters([dims, dims, norms, norms], [dims, norms], sizes, kept, ((0,),))


ROWS: Rows = {
    "aten.native_layer_norm": by(layer_norm),
    "aten.native_layer_norm_backward": by(layer_norm_backward),
    "aten._fused_rms_norm": by(layer_norm),
    "aten.native_group_norm": by(group_norm),
    "aten.native_group_norm_backward": by(group_norm_backward),
    "aten._native_batch_norm_legit": by(batch_norm(5)),
    "aten._native_batch_norm_legit_functional": by(batch_norm(5)),
    "aten._native_batch_norm_legit_no_training": by(batch_norm(None)),
    "aten.native_batch_norm_backward": by(batch_norm_backward),
    "aten._weight_norm_interface": by(weight_norm),
    "aten._weight_norm_interface_backward": by(weight_norm_backward),
}
