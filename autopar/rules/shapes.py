"""Rules that depend on an op's attributes, each a function from the node to a `BoundRule`.

They write the rule in the notation's own terms (letters per dim); the letters' sizes come from the shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from autopar.rules.nodes import argument, pointwise_linear, result_values, shapes_of, tensor_operands
from autopar.rules.notation import BoundRule, Dims, Linear, Shape


def from_letters(
    operands: Sequence[Dims],
    results: Sequence[Dims],
    sizes: dict[str, int],
    whole: set[str] | None = None,
    linear: Linear = (),
    indexes: dict[int, str] | None = None,
    reduction: str = "sum",
) -> BoundRule:
    """A `BoundRule` from letters, those of size 1 dropped."""

    def keep(dims: Dims) -> Dims:
        return tuple(tuple(letter for letter in dim if sizes[letter] != 1) for dim in dims)

    return BoundRule(
        tuple(keep(dims) for dims in operands),
        tuple(keep(dims) for dims in results),
        sizes,
        frozenset(whole or ()),
        indexes or {},
        (reduction,) * len(results),
        linear,
    )


def _letters(shape: Shape, prefix: str) -> tuple[Dims, dict[str, int]]:
    names = [f"{prefix}{i}" for i in range(len(shape))]
    return tuple((name,) for name in names), dict(zip(names, shape, strict=True))


# -- pointwise, fallbacks ----------------------------------------------------------------------------------------
def whole(node: Node) -> BoundRule:
    """Nothing may be split: the rule of an op that has none."""
    operand_shapes, result_shapes = shapes_of(node)
    all_dims, sizes = [], {}
    for i, shape in enumerate((*operand_shapes, *result_shapes)):
        dims, new = _letters(shape, f"v{i}_")
        all_dims.append(dims)
        sizes.update(new)
    count = len(operand_shapes)
    return from_letters(all_dims[:count], all_dims[count:], sizes, set(sizes))


def pointwise(node: Node) -> BoundRule:
    """Dims align from the right; those of size 1 are broadcast."""
    operand_shapes, (result, *others) = shapes_of(node)
    dims, sizes = _letters(result, "d")

    def aligned(shape: Shape) -> Dims:
        tail = dims[len(dims) - len(shape) :]
        return tuple(() if size == 1 else dim for size, dim in zip(shape, tail, strict=True))

    results = [dims] + [aligned(shape) for shape in others]
    operands = [aligned(shape) for shape in operand_shapes]
    return from_letters(operands, results, sizes, linear=pointwise_linear(node))


def factory_like(node: Node) -> BoundRule:
    """`new_zeros(x, size)`: the result takes nothing but the dtype from its operand, whose letters don't sum."""
    (operand,), (result,) = shapes_of(node)
    operand_dims, sizes = _letters(operand, "x")
    dims, result_sizes = _letters(result, "d")
    return from_letters([operand_dims], [dims], {**sizes, **result_sizes}, set(sizes))


def copied(node: Node) -> BoundRule:
    """`... -> ...`; partial sums pass but through a cast that rounds to whole numbers, or to bool."""
    (operand,), (result,) = tensor_operands(node), result_values(node)
    assert result is not None
    source = operand.meta["val"].dtype
    rounds = result.dtype == torch.bool or (source.is_floating_point and not result.dtype.is_floating_point)
    dims, sizes = _letters(tuple(map(int, result.shape)), "d")
    return from_letters([dims], [dims], sizes, linear=() if rounds else ((0,),))


def whole_dim(dim_argument: int) -> Callable[[Node], BoundRule]:
    """Pointwise but for one dim, which every device has whole (softmax, cumsum)."""

    def rule(node: Node) -> BoundRule:
        operands, (result, *_) = shapes_of(node)
        dims, sizes = _letters(result, "d")
        dim = argument(node, dim_argument, "dim") % max(len(result), 1)
        return from_letters([dims] * len(operands), [dims], sizes, {f"d{dim}"})

    return rule


def whole_last(count: int) -> Callable[[Node], BoundRule]:
    """Pointwise but for the last `count` dims."""

    def rule(node: Node) -> BoundRule:
        operands, (result,) = shapes_of(node)
        dims, sizes = _letters(result, "d")
        kept = {f"d{i}" for i in range(len(result) - count, len(result))}
        return from_letters([dims] * len(operands), [dims], sizes, kept, linear=((0,),))

    return rule


# -- views -------------------------------------------------------------------------------------------------------
def viewed(node: Node) -> BoundRule:
    """Dims whose products line up become products of common factors.

    `[8, 64, 16] -> [512, 4, 4]` is `a b (c d) -> (a b) c d`.
    """
    (operand,), (result,) = shapes_of(node)
    return whole(node) if 0 in operand else _view_rule(operand, result)


def _view_rule(operand: Shape, result: Shape) -> BoundRule:
    """The rule of a view from one shape to another; runs of dims whose cuts don't nest are whole."""
    left: list[tuple[str, ...]] = [()] * len(operand)
    right: list[tuple[str, ...]] = [()] * len(result)
    sizes: dict[str, int] = {}
    kept: set[str] = set()
    for group, (in_dims, out_dims) in enumerate(_aligned_groups(operand, result)):
        cuts = sorted({*_cuts(operand, in_dims), *_cuts(result, out_dims)})
        if any(b % a for a, b in itertools.pairwise(cuts)):
            for side, dims, shape, mark in ((left, in_dims, operand, "x"), (right, out_dims, result, "y")):
                for d in dims:
                    side[d] = (f"{mark}{d}",)
                    sizes[f"{mark}{d}"] = shape[d]
                    kept.add(f"{mark}{d}")
            continue
        names = [f"g{group}_{i}" for i in range(len(cuts) - 1)]
        spans = list(zip(names, itertools.pairwise(cuts), strict=True))
        sizes.update({name: high // low for name, (low, high) in spans})
        for side, dims, shape in ((left, in_dims, operand), (right, out_dims, result)):
            _assign_spans(side, dims, shape, spans)
    return from_letters([tuple(left)], [tuple(right)], sizes, kept, linear=((0,),))


def _aligned_groups(operand: Shape, result: Shape) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of dims with equal products, from the right."""
    groups = []
    i, j = len(operand) - 1, len(result) - 1
    while i >= 0 or j >= 0:
        ins: list[int] = []
        outs: list[int] = []
        product_in = product_out = 1
        while True:
            if product_in <= product_out and i >= 0 and (product_in < product_out or not ins):
                ins.append(i)
                product_in *= operand[i]
                i -= 1
            elif j >= 0 and (product_out < product_in or not outs):
                outs.append(j)
                product_out *= result[j]
                j -= 1
            else:
                break
            if product_in == product_out and ins and outs:
                break
        groups.append((ins[::-1], outs[::-1]))
    return groups


def _cuts(shape: Shape, dims: list[int]) -> list[int]:
    return [math.prod(shape[d] for d in dims[k:]) for k in range(len(dims) + 1)]


def _assign_spans(
    side: list[tuple[str, ...]], dims: list[int], shape: Shape, spans: list[tuple[str, tuple[int, int]]]
) -> None:
    inner = 1
    for d in reversed(dims):
        outer = inner * shape[d]
        side[d] = tuple(name for name, (low, high) in reversed(spans) if inner <= low and high <= outer)
        inner = outer


def permuted(node: Node) -> BoundRule:
    """Letters in the order of the dims."""
    (operand,), _ = shapes_of(node)
    order = [d % len(operand) for d in argument(node, 1, "dims")]
    dims, sizes = _letters(operand, "d")
    return from_letters([dims], [tuple(dims[d] for d in order)], sizes, linear=((0,),))


def transposed(node: Node) -> BoundRule:
    """Two letters exchanged; `t` of a vector is the vector."""
    (operand,), _ = shapes_of(node)
    rank = len(operand)
    a, b = argument(node, 1, "dim0", 0), argument(node, 2, "dim1", 1)
    order = list(range(rank))
    if rank > 1:
        order[a % rank], order[b % rank] = order[b % rank], order[a % rank]
    dims, sizes = _letters(operand, "d")
    return from_letters([dims], [tuple(dims[d] for d in order)], sizes, linear=((0,),))


def expanded(node: Node) -> BoundRule:
    """A dim of size 1 becomes a letter that only the result has: the value is constant along it."""
    (operand,), (result,) = shapes_of(node)
    dims, sizes = _letters(result, "d")
    tail = dims[len(dims) - len(operand) :]
    source = tuple(() if size == 1 else dim for size, dim in zip(operand, tail, strict=True))
    return from_letters([source], [dims], sizes, linear=((0,),))


def _chunked(dim: int, big: Shape, small: Shape, start: int) -> tuple[Dims, Dims, dict[str, int], set[str]]:
    """Letters of a value and of an aligned chunk of its `dim`: `([n] c)` and `c`; a ragged piece is whole."""
    dims, sizes = _letters(big, "d")
    sizes = {**sizes, f"d{dim}": small[dim]}
    if big[dim] == small[dim]:
        return dims, dims, sizes, set()
    if small[dim] and big[dim] % small[dim] == 0 and start % small[dim] == 0:
        outer = (*dims[:dim], ("n", f"d{dim}"), *dims[dim + 1 :])
        return outer, dims, {**sizes, "n": big[dim] // small[dim]}, {"n"}
    outer = (*dims[:dim], ("x",), *dims[dim + 1 :])
    return outer, dims, {**sizes, "x": big[dim]}, {"x", f"d{dim}"}


def sliced(node: Node) -> BoundRule:
    """An aligned chunk is `([n] c) -> c`; any other slice keeps its dim whole."""
    (big,), (small,) = shapes_of(node)
    dim = argument(node, 1, "dim", 0) % len(big)
    start, step = argument(node, 2, "start") or 0, argument(node, 4, "step", 1)
    start = start + big[dim] if start < 0 else start
    outer, inner, sizes, kept = _chunked(dim, big, small, start if step == 1 else 1)
    return from_letters([outer], [inner], sizes, kept, linear=((0,),))


def slice_backward(node: Node) -> BoundRule:
    """The mirror of `sliced`."""
    (small,), (big,) = shapes_of(node)
    dim, start, step = argument(node, 2, "dim") % len(big), argument(node, 3, "start"), argument(node, 5, "step")
    start = start + big[dim] if start < 0 else start
    outer, inner, sizes, kept = _chunked(dim, big, small, start if step == 1 else 1)
    return from_letters([inner], [outer], sizes, kept, linear=((0,),))


def selected(node: Node) -> BoundRule:
    """The dim selected from is whole."""
    (operand,), _ = shapes_of(node)
    dim = argument(node, 1, "dim") % len(operand)
    dims, sizes = _letters(operand, "d")
    return from_letters([dims], [dims[:dim] + dims[dim + 1 :]], sizes, {f"d{dim}"}, linear=((0,),))


def select_backward(node: Node) -> BoundRule:
    """The mirror of `selected`."""
    _, (result,) = shapes_of(node)
    dim = argument(node, 2, "dim") % len(result)
    dims, sizes = _letters(result, "d")
    return from_letters([dims[:dim] + dims[dim + 1 :]], [dims], sizes, {f"d{dim}"}, linear=((0,),))


def split(node: Node) -> BoundRule:
    """Equal parts: `([n] c) -> c, c, …`; unequal ones keep the dim whole."""
    (big,), parts = shapes_of(node)
    dim = argument(node, 2, "dim", 0) % len(big)
    if len({part[dim] for part in parts}) == 1:
        outer, inner, sizes, kept = _chunked(dim, big, parts[0], 0)
        return from_letters([outer], [inner] * len(parts), sizes, kept, linear=((0,),))
    dims, sizes = _letters(big, "d")
    results = [(*dims[:dim], (f"p{i}",), *dims[dim + 1 :]) for i in range(len(parts))]
    sizes.update({f"p{i}": part[dim] for i, part in enumerate(parts)})
    kept = {f"d{dim}", *(f"p{i}" for i in range(len(parts)))}
    return from_letters([dims], results, sizes, kept, linear=((0,),))


def concatenated(node: Node) -> BoundRule:
    """The mirror of `split`."""
    parts, (big,) = shapes_of(node)
    if {len(part) for part in parts} != {len(big)}:
        return whole(node)  # an old-style empty operand of shape [0]
    dim = argument(node, 1, "dim", 0) % len(big)
    together: Linear = (tuple(range(len(parts))),)
    if len({part[dim] for part in parts}) == 1:
        outer, inner, sizes, kept = _chunked(dim, big, parts[0], 0)
        return from_letters([inner] * len(parts), [outer], sizes, kept, linear=together)
    dims, sizes = _letters(big, "d")
    operands = [(*dims[:dim], (f"p{i}",), *dims[dim + 1 :]) for i in range(len(parts))]
    sizes.update({f"p{i}": part[dim] for i, part in enumerate(parts)})
    kept = {f"d{dim}", *(f"p{i}" for i in range(len(parts)))}
    return from_letters(operands, [dims], sizes, kept, linear=together)


def padded(node: Node) -> BoundRule:
    """Padded dims are whole."""
    (operand,), (result,) = shapes_of(node)
    dims, sizes = _letters(operand, "d")
    pads = argument(node, 1, "pad")  # (before, after) from the last dim on; [1, -1] shifts at an equal size
    changed = [d for d in range(len(operand)) if any(pads[2 * (len(operand) - 1 - d) :][:2])]
    outer = tuple((f"y{d}",) if d in changed else dims[d] for d in range(len(operand)))
    sizes.update({f"y{d}": result[d] for d in changed})
    kept = {name for d in changed for name in (f"d{d}", f"y{d}")}
    return from_letters([dims], [outer], sizes, kept)


# -- reductions, normalisation -----------------------------------------------------------------------------------
def named_dims(dims: object, rank: int) -> set[int]:
    """The dims that an argument names; all where it names none."""
    if isinstance(dims, bool) or not isinstance(dims, (int, list, tuple)) or dims == []:
        return set(range(rank))
    return {int(d) % max(rank, 1) for d in ([dims] if isinstance(dims, int) else dims)}


def reduction(op: str | None, linear: str = "") -> Callable[[Node], BoundRule]:
    """Reduced dims vanish: split, they leave a value partial under `op`; with no op (`argmax`) they are whole."""

    def rule(node: Node) -> BoundRule:
        (operand,), results = shapes_of(node)
        dims, sizes = _letters(operand, "d")
        which = named_dims(argument(node, 1, "dim"), len(operand))
        keepdim = len(results[0]) == len(operand)
        result = tuple(() if d in which else dims[d] for d in range(len(operand)) if keepdim or d not in which)
        kept = {f"d{d}" for d in which} if op is None or len(results) > 1 else set()
        sets: Linear = ((0,),) if linear else ()
        return from_letters([dims], [result] * len(results), sizes, kept, linear=sets, reduction=op or "sum")

    return rule


def _first_normalised(node: Node, shape_argument: int, rank: int) -> int:
    return rank - len(argument(node, shape_argument, "normalized_shape"))


def layer_norm(node: Node) -> BoundRule:
    """`... [d], d, d -> ... [d], ... 1, ... 1`"""
    operands, (result, statistic, _) = shapes_of(node)
    dims, sizes = _letters(result, "d")
    first = _first_normalised(node, 1, len(result))
    weights = [dims[first:]] * (len(operands) - 1)
    statistics = tuple(dims[i] if i < first else () for i in range(len(statistic)))
    kept = {f"d{i}" for i in range(first, len(result))}
    return from_letters([dims, *weights], [dims, statistics, statistics], sizes, kept)


def layer_norm_backward(node: Node) -> BoundRule:
    """`... [d], ... [d], ... 1, ... 1, d, d -> ... [d], d, d`: the weights' gradients are partial over split rows."""
    operands, results = shapes_of(node)
    dims, sizes = _letters(operands[0], "d")
    first = _first_normalised(node, 2, len(dims))
    statistics = tuple(dims[i] if i < first else () for i in range(len(operands[2])))
    weights = [dims[first:]] * (len(operands) - 4)
    outputs = [dims if len(shape) == len(dims) and i == 0 else dims[first:] for i, shape in enumerate(results)]
    kept = {f"d{i}" for i in range(first, len(dims))}
    return from_letters([dims, dims, statistics, statistics, *weights], outputs, sizes, kept)


# -- index family ------------------------------------------------------------------------------------------------
def gather(node: Node) -> BoundRule:
    """The index's values run over the gathered dim: split, the result is a masked partial sum."""
    (operand, index), _ = shapes_of(node)
    dim = argument(node, 1, "dim") % len(operand)
    dims, sizes = _letters(index, "d")
    return _indexed(dim, dims, sizes, operand)


def scatter_add(node: Node) -> BoundRule:
    """`scatter_add(x, dim, index, source)`: source values that fall outside a shard are masked to zero."""
    (operand, index, _), _ = shapes_of(node)
    dim = argument(node, 1, "dim") % len(operand)
    dims, sizes = _letters(index, "d")
    return _indexed(dim, dims, sizes, operand, is_scatter=True)


def embedding_backward(node: Node) -> BoundRule:
    """`... d, {v}... -> v d`; gradients scaled by how often an index stands need all indices."""
    (_, index), (result,) = shapes_of(node)
    by_frequency = bool(argument(node, 4, "scale_grad_by_freq", False))
    rows = tuple(f"r{i}" for i in range(len(index)))
    sizes = {**dict(zip(rows, index, strict=True)), "v": result[0], "d": result[1]}
    rows_dims = tuple((row,) for row in rows)
    kept = {*rows, "v"} if by_frequency else set()
    gradient: Dims = (*rows_dims, ("d",))
    return from_letters([gradient, rows_dims], [(("v",), ("d",))], sizes, kept, ((0,),), indexes={1: "v"})


def _indexed(dim: int, dims: Dims, sizes: dict[str, int], operand: Shape, is_scatter: bool = False) -> BoundRule:
    """Index dims that are shorter than the operand's are whole on both sides; `v` is the dim that is indexed."""
    outer = (*dims[:dim], ("v",), *dims[dim + 1 :])
    ragged = {f"x{d}": operand[d] for d in range(len(operand)) if d != dim and operand[d] != sizes[f"d{d}"]}
    outer = tuple((f"x{d}",) if f"x{d}" in ragged else outer[d] for d in range(len(outer)))
    kept = {*ragged, *(name.replace("x", "d") for name in ragged)}
    sizes = {**sizes, **ragged, "v": operand[dim]}
    operands = [outer, dims, dims] if is_scatter else [outer, dims]
    kept = kept | ({f"d{dim}"} if is_scatter else set())
    linear: Linear = ((0, 2),) if is_scatter else ((0,),)
    return from_letters(operands, [outer if is_scatter else dims], sizes, kept, linear, indexes={1: "v"})


# -- attention ---------------------------------------------------------------------------------------------------
def _attention_letters(q: Node, k: Node, causal: bool) -> tuple[dict[str, int], set[str]]:
    batch, heads, length, width = (int(n) for n in q.meta["val"].shape)
    _, groups, keys, _ = (int(n) for n in k.meta["val"].shape)
    sizes = {"b": batch, "k": groups, "g": heads // groups, "s": length, "t": keys, "d": width}
    return sizes, {"t", "d", *(("s",) if causal else ())}


def _mask_dims(mask: Node) -> Dims:
    full: Dims = (("b",), ("k", "g"), ("s",), ("t",))
    shape = tuple(int(n) for n in mask.meta["val"].shape)
    return tuple(() if n == 1 else dim for n, dim in zip(shape, full[4 - len(shape) :], strict=True))


_Q: Dims = (("b",), ("k", "g"), ("s",), ("d",))
_KV: Dims = (("b",), ("k",), ("t",), ("d",))
_LSE: Dims = (("b",), ("k", "g"), ("s",))


def attention(node: Node) -> BoundRule:
    """`b (k g) s [d], b k [t] [d], b k [t] [d] -> b (k g) s [d], b (k g) s`; a causal query's `s` is whole."""
    q, k, _, mask, causal = node.args[:5]
    assert isinstance(q, Node) and isinstance(k, Node)
    sizes, kept = _attention_letters(q, k, bool(causal))
    masks = [_mask_dims(mask)] if isinstance(mask, Node) else []
    return from_letters([_Q, _KV, _KV, *masks], [_Q, _LSE], sizes, kept)


def attention_backward(node: Node) -> BoundRule:
    """dq follows the query; dk and dv are partial over split query groups and positions."""
    _, q, k, _, mask, _, _, causal = node.args[:8]
    assert isinstance(q, Node) and isinstance(k, Node)
    sizes, kept = _attention_letters(q, k, bool(causal))
    masks = [_mask_dims(mask)] if isinstance(mask, Node) else []
    return from_letters([_Q, _Q, _KV, _KV, *masks, _Q, _LSE], [_Q, _KV, _KV], sizes, kept, linear=((0,),))
