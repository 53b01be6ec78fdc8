"""Rules of ops that read or write where indices say.

embedding:  v d, {v}... -> ... d
"""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.rules.entries import Rows, by, texts
from autopar.rules.letters import aligned, from_letters, letters, letters_along, whole
from autopar.rules.nodes import argument, shapes_of
from autopar.rules.notation import BoundRule, Dims, Linear, Shape


def gather(node: Node) -> BoundRule:
    """The index's values run over the gathered dim: split, the result is a masked partial sum."""
    (operand, index), _ = shapes_of(node)
    dim = argument(node, 1, "dim") % len(operand)
    dims, sizes = letters(index, "d")
    return _indexed(dim, dims, sizes, operand)


def scatter_add(node: Node) -> BoundRule:
    """`scatter_add(x, dim, index, source)`: source values that fall outside a shard are masked to zero."""
    (operand, index, _), _ = shapes_of(node)
    dim = argument(node, 1, "dim") % len(operand)
    dims, sizes = letters(index, "d")
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


def index_select(node: Node) -> BoundRule:
    """The dim that is selected from is whole, the index is free."""
    (operand, index), _ = shapes_of(node)
    dim, sizes, kept = argument(node, 1, "dim") % max(len(operand), 1), dict[str, int](), set[str]()
    if not operand or not index:
        return whole(node)
    outer = letters_along(operand, {dim}, 0, sizes, kept)
    sizes["i"] = index[0]
    result = (*outer[:dim], ("i",), *outer[dim + 1 :])
    return from_letters([outer, (("i",),)], [result], sizes, kept, ((0,),), indexes={1: outer[dim][0]})


def indexed(node: Node) -> BoundRule:
    """`x[…, i, j, …]`: indexed dims are whole, those of the (broadcast) indices and the rest of `x` free."""
    indices = node.args[1]
    assert isinstance(indices, (list, tuple))
    given = [d for d, index in enumerate(indices) if index is not None]
    values = [index.meta["val"] for index in indices if isinstance(index, Node)]
    if len(values) != len(given) or any(value.dtype in (torch.bool, torch.uint8) for value in values):
        return whole(node)
    (operand, *shapes), (result,) = shapes_of(node)
    sizes, kept = dict[str, int](), set[str]()
    outer = letters_along(operand, given, 0, sizes, kept)
    broadcast: Shape = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    places, place_sizes = letters(broadcast, "i")
    sizes.update(place_sizes)
    rest = [outer[d] for d in range(len(operand)) if d not in given]
    is_adjacent = given == list(range(given[0], given[-1] + 1))
    place = given[0] if is_adjacent else 0
    dims = (*rest[:place], *places, *rest[place:])
    assert len(dims) == len(result)
    return from_letters([outer, *(aligned(shape, places) for shape in shapes)], [dims], sizes, kept, ((0,),))


ROWS: Rows = {
    "aten.index": by(indexed),
    "aten.index_select": by(index_select),
    "aten.embedding": texts("0", "v d, {v}... -> ... d"),
    "aten.embedding_dense_backward": by(embedding_backward),
    "aten.gather": by(gather),
    "aten.scatter_add": by(scatter_add),
}
