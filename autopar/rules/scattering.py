"""Rules of ops that write where indices say.

What is added may come from any rank: the sum is partial, and the value that it is added to counts once. What is
overwritten depends on order: the dims that an index runs over are whole there.

index_put(x, [i], y, accumulate=True) of [12, 4]:  [v] d, i, i d -> [v] d
"""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.rules.entries import Rows, by
from autopar.rules.indexing import given_indexes, index_letters, ragged_letters
from autopar.rules.letters import aligned, from_letters, letters, letters_along, whole
from autopar.rules.nodes import argument, shapes_of, tensor_operands
from autopar.rules.notation import BoundRule, Dims


def scatter_add(node: Node) -> BoundRule:
    """`scatter_add(x, dim, index, source)`: source values that fall outside a shard are masked to zero."""
    (operand, index, _), _ = shapes_of(node)
    if not operand or not index:
        return whole(node)
    outer, inner, sizes, kept = ragged_letters(argument(node, 1, "dim") % len(operand), operand, index)
    return from_letters([outer, inner, inner], [outer], sizes, kept, ((0, 2),), indexes={1: "v"})


def scattered(node: Node) -> BoundRule:
    """`scatter(x, dim, index, source or number)`: whole along `dim`, where a later value overwrites an earlier one."""
    (operand, index, *sources), _ = shapes_of(node)
    if not operand or not index:
        return whole(node)
    dim = argument(node, 1, "dim") % len(operand)
    outer, inner, sizes, kept = ragged_letters(dim, operand, index)
    operands = [outer, inner, *([inner] * len(sources))]
    return from_letters(operands, [outer], sizes, kept | {"v", f"d{dim}"}, indexes={1: "v"})


def along_index(node: Node) -> BoundRule:
    """`index_copy(x, dim, index, source)`: whole along `dim`, all else free; a number may stand for the source."""
    (operand, index, *sources), _ = shapes_of(node)
    if not operand or not index:
        return whole(node)
    dim = argument(node, 1, "dim") % len(operand)
    sizes, kept = {"i": index[0]}, {"i"}
    outer = letters_along(operand, {dim}, 0, sizes, kept)
    inner = tuple(("i",) if d == dim else letter for d, letter in enumerate(outer))
    values = [inner if shape else () for shape in sources]
    return from_letters([outer, (("i",),), *values], [outer], sizes, kept, indexes={1: outer[dim][0]})


def index_add(node: Node) -> BoundRule:
    """`index_add(x, dim, index, source)`: the index is free, and the sum partial."""
    (operand, index, _), _ = shapes_of(node)
    if not operand or not index:
        return whole(node)
    dim, sizes, kept = argument(node, 1, "dim") % len(operand), {"i": index[0]}, set[str]()
    outer = letters_along(operand, {dim}, 0, sizes, kept)
    inner = tuple(("i",) if d == dim else letter for d, letter in enumerate(outer))
    return from_letters([outer, (("i",),), inner], [outer], sizes, kept, ((0, 2),), indexes={1: outer[dim][0]})


def index_put(node: Node) -> BoundRule:
    """`x[…, i, j, …] = y`, or `+= y` where it accumulates: then the index is free, and the sum partial."""
    found = index_letters(node)
    if found is None:
        return _masked_put(node)
    outer, indices, inner, sizes, kept = found
    accumulates = bool(argument(node, 3, "accumulate", False))
    if not accumulates:
        kept = kept | {name for dims in indices for dim in dims for name in dim}
    values = aligned(shapes_of(node)[0][-1], inner)
    linear = ((0, len(indices) + 1),) if accumulates else ()
    return from_letters([outer, *indices, values], [outer], sizes, kept, linear, given_indexes(node, outer))


def _masked_put(node: Node) -> BoundRule:
    """`x[mask] = number` is pointwise; with several values, which of them goes where depends on the whole mask."""
    (operand, *masks, value), _ = shapes_of(node)
    is_mask = tensor_operands(node)[1].meta["val"].dtype == torch.bool
    if len(masks) != 1 or len(tensor_operands(node)) != 3 or not is_mask or any(size != 1 for size in value):
        return whole(node)
    dims, sizes = letters(operand, "d")
    first = node.args[1]
    assert isinstance(first, (list, tuple))
    start = next(d for d, index in enumerate(first) if index is not None)
    operands = [dims, dims[start : start + len(masks[0])], ((),) * len(value)]
    return from_letters(operands, [dims], sizes, linear=((0, 2),))


def embedding_backward(node: Node) -> BoundRule:
    """`... d, {v}... -> v d`; gradients scaled by how often an index stands need all indices."""
    (_, index), (result,) = shapes_of(node)
    by_frequency = bool(argument(node, 4, "scale_grad_by_freq", False))
    rows, sizes = letters(index, "r")
    sizes |= {"v": result[0], "d": result[1]}
    kept = {*(name for (name,) in rows), "v"} if by_frequency else set()
    gradient: Dims = (*rows, ("d",))
    return from_letters([gradient, rows], [(("v",), ("d",))], sizes, kept, ((0,),), indexes={1: "v"})


ROWS: Rows = {
    "aten.scatter_add": by(scatter_add),
    "aten.scatter": by(scattered),
    "aten.scatter_reduce": by(scattered),
    "aten.index_copy": by(along_index),
    "aten.index_fill": by(along_index),
    "aten.index_reduce": by(along_index),
    "aten.index_add": by(index_add),
    "aten.index_put": by(index_put),
    "aten._unsafe_index_put": by(index_put),
    "aten.embedding_dense_backward": by(embedding_backward),
    # the n-th value goes to the n-th place of all: nothing can be told from a shard
    "aten.put": by(whole),
    "aten.as_strided_scatter": by(whole),
    "aten.masked_scatter": by(whole),
    "aten.masked_scatter_backward": by(whole),
}
