"""Rules of views: dims that are merged and taken apart are products of common factors.

[8, 64, 16] -> [512, 4, 4]:  a b (c d) -> (a b) c d
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from torch.fx import Node

from autopar.rules.entries import Rows, by, texts
from autopar.rules.letters import aligned, from_letters, letters, whole
from autopar.rules.nodes import argument, shapes_of, tensor_operands
from autopar.rules.notation import BoundRule, Shape


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


def reinterpreted(node: Node) -> BoundRule:
    """The same bytes as another dtype: the last dim becomes `(d [r])`, or was; sums don't pass."""
    (operand,), (result,) = shapes_of(node)
    if not operand or 0 in operand:
        return whole(node)
    dims, sizes = letters(operand, "d")
    last, ratio = len(operand) - 1, max(operand[-1], result[-1]) // min(operand[-1], result[-1])
    sizes |= {f"d{last}": min(operand[-1], result[-1]), "r": ratio}
    wide = (*dims[:-1], (f"d{last}", "r"))
    left, right = (wide, dims) if operand[-1] > result[-1] else (dims, wide)
    return from_letters([left], [right], sizes, {"r"})


def permuted(node: Node) -> BoundRule:
    """Letters in the order of the dims."""
    (operand,), _ = shapes_of(node)
    order = [d % len(operand) for d in argument(node, 1, "dims")]
    dims, sizes = letters(operand, "d")
    return from_letters([dims], [tuple(dims[d] for d in order)], sizes, linear=((0,),))


def transposed(node: Node) -> BoundRule:
    """Two letters exchanged; `t` of a vector is the vector."""
    (operand,), _ = shapes_of(node)
    rank = len(operand)
    a, b = argument(node, 1, "dim0", 0), argument(node, 2, "dim1", 1)
    order = list(range(rank))
    if rank > 1:
        order[a % rank], order[b % rank] = order[b % rank], order[a % rank]
    dims, sizes = letters(operand, "d")
    return from_letters([dims], [tuple(dims[d] for d in order)], sizes, linear=((0,),))


def expanded(node: Node) -> BoundRule:
    """A dim of size 1 becomes a letter that only the result has: the value is constant along it."""
    (operand,), (result,) = shapes_of(node)
    dims, sizes = letters(result, "d")
    return from_letters([aligned(operand, dims)], [dims], sizes, linear=((0,),))


def strided(node: Node) -> BoundRule:
    """A view in disguise where the result takes each element of a contiguous operand once; any other is whole."""
    (operand,), (result,) = shapes_of(node)
    order = dense_order(node)
    if order is None:
        return whole(node)
    rule = _view_rule(operand, tuple(result[d] for d in order))
    places = {d: place for place, d in enumerate(order)}
    (flat,) = rule.results
    return replace(rule, results=(tuple(flat[places[d]] for d in range(len(result))),))


def dense_order(node: Node) -> tuple[int, ...] | None:
    """The dims of an `as_strided` from the greatest stride to the least, None where it isn't a permuted view."""
    value, (result,) = tensor_operands(node)[0].meta["val"], shapes_of(node)[1]
    strides = argument(node, 2, "stride")
    order = sorted(range(len(result)), key=lambda d: (-strides[d], result[d] != 1, d))
    expected = 1
    for d in reversed(order):
        if result[d] != 1 and strides[d] != expected:
            return None
        expected *= result[d]
    offset = argument(node, 3, "storage_offset") or 0
    dense = value.is_contiguous() and value.storage_offset() == 0 and offset == 0
    return tuple(order) if dense and expected == value.numel() and expected else None


ROWS: Rows = {
    "aten.t": by(transposed),
    "aten.transpose": by(transposed),
    "aten.permute": by(permuted),
    "aten.view": by(viewed),
    "aten.view.dtype": by(reinterpreted),
    "aten._unsafe_view": by(viewed),
    "aten.reshape": by(viewed),
    "aten.unsqueeze": by(viewed),
    "aten.squeeze": by(viewed),
    "aten.expand": by(expanded),
    "aten._reshape_alias": by(viewed),
    "aten.as_strided": by(strided),
    "aten._conj": texts("0", "... -> ..."),
    "aten._neg_view": texts("0", "... -> ..."),
}
