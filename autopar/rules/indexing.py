"""Rules of ops that read where indices say.

embedding:  v d, {v}... -> ... d       x[i, j] of [8, 8, 12]:  [a] [b] c, i, i -> i c
"""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.rules.entries import Rows, by, texts
from autopar.rules.letters import aligned, from_letters, letters, letters_along, whole, whole_letters
from autopar.rules.nodes import argument, shapes_of
from autopar.rules.notation import BoundRule, Dims, Shape


def ragged_letters(dim: int, operand: Shape, index: Shape) -> tuple[Dims, Dims, dict[str, int], set[str]]:
    """Letters of a value that is indexed along `dim` by an index of its rank, of the index, their sizes, whole ones.

    `v` is the dim that is indexed; other dims in which the index is shorter are whole on both sides.
    """
    inner, sizes = letters(index, "d")
    sizes["v"] = operand[dim]
    outer, kept = list(inner), set[str]()
    outer[dim] = ("v",)
    for d in range(len(operand)):
        if d != dim and operand[d] != index[d]:
            outer[d] = (f"x{d}",)
            sizes[f"x{d}"] = operand[d]
            kept |= {f"x{d}", f"d{d}"}
    return tuple(outer), inner, sizes, kept


def gather(node: Node) -> BoundRule:
    """The index's values run over the gathered dim: split, the result is a masked partial sum."""
    (operand, index), _ = shapes_of(node)
    dim = argument(node, 1, "dim") % max(len(operand), 1)
    if not operand or not index:
        return whole(node)
    outer, inner, sizes, kept = ragged_letters(dim, operand, index)
    return from_letters([outer, inner], [inner], sizes, kept, ((0,),), indexes={1: "v"})


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


def index_letters(node: Node) -> tuple[Dims, list[Dims], Dims, dict[str, int], set[str]] | None:
    """Letters of `x[…, i, j, …]`: of `x`, of each index, of the result, their sizes, and which are whole.

    Indexed dims are whole, those of the (broadcast) indices and the rest of `x` free. None where an index is a mask.
    """
    indices = node.args[1]
    assert isinstance(indices, (list, tuple))
    given = [d for d, index in enumerate(indices) if index is not None]
    values = [index.meta["val"] for index in indices if isinstance(index, Node)]
    if len(values) != len(given) or any(value.dtype in (torch.bool, torch.uint8) for value in values):
        return None
    operand, *shapes = shapes_of(node)[0][: 1 + len(given)]
    sizes, kept = dict[str, int](), set[str]()
    outer = letters_along(operand, given, 0, sizes, kept)
    broadcast: Shape = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    places, place_sizes = letters(broadcast, "i")
    sizes.update(place_sizes)
    rest = [outer[d] for d in range(len(operand)) if d not in given]
    place = given[0] if given == list(range(given[0], given[-1] + 1)) else 0
    return outer, [aligned(shape, places) for shape in shapes], (*rest[:place], *places, *rest[place:]), sizes, kept


def given_indexes(node: Node, outer: Dims) -> dict[int, str]:
    """Which (whole) letter each index operand runs over."""
    indices = node.args[1]
    assert isinstance(indices, (list, tuple))
    given = [d for d, index in enumerate(indices) if index is not None]
    return {i + 1: outer[d][0] for i, d in enumerate(given)}


def indexed(node: Node) -> BoundRule:
    """`x[…, i, j, …]`"""
    found = index_letters(node)
    if found is None:
        return whole(node)
    outer, indices, result, sizes, kept = found
    return from_letters([outer, *indices], [result], sizes, kept, ((0,),), given_indexes(node, outer))


def taken(node: Node) -> BoundRule:
    """`x.flatten()[i]`: the index is free."""
    (operand, index), _ = shapes_of(node)
    inner, sizes = letters(index, "i")
    kept = set[str]()
    outer = whole_letters(operand, "x", sizes, kept)
    indexes = {1: outer[-1][0]} if outer else {}
    return from_letters([outer, inner], [inner], sizes, kept, ((0,),), indexes)


def looked_up(node: Node, values: int, adds_up: bool = False) -> BoundRule:
    """Each element of operand `values` is looked up in the others, which are whole unless what is found adds up.

    The place in ascending boundaries does: it is the number of those below.
    """
    operands, (result,) = shapes_of(node)
    dims, sizes = letters(result, "d")
    kept = set[str]()
    others = [whole_letters(shape, f"b{i}_", sizes, kept) for i, shape in enumerate(operands)]
    found = [dims if i == values else other for i, other in enumerate(others)]
    return from_letters(found, [dims], sizes, () if adds_up else kept)


def bucketize(node: Node) -> BoundRule:
    """`… , b -> …`"""
    return looked_up(node, 0, adds_up=True) if len(shapes_of(node)[0]) == 2 else whole(node)


def isin(node: Node) -> BoundRule:
    """What is looked for is free, where it is looked for whole."""
    return looked_up(node, 0) if isinstance(node.args[0], Node) else whole(node)


def searchsorted(node: Node) -> BoundRule:
    """`s, … -> …`, or row by row `… s, … v -> … v`; an order given apart needs all."""
    operands, (result,) = shapes_of(node)
    if len(operands) < 2 or not isinstance(node.args[1], Node):
        return whole(node)
    if len(operands[0]) == 1:
        return looked_up(node, 1, adds_up=len(operands) == 2)
    dims, sizes = letters(result, "d")
    sizes["s"] = operands[0][-1]
    rows: Dims = (*dims[:-1], ("s",))
    sorters = [rows] * (len(operands) - 2)
    return from_letters([rows, dims, *sorters], [dims], sizes, {"s"} if sorters else ())


def embedding_bag(node: Node) -> BoundRule:
    """`[v] d, … -> [bags] d`: columns are free; what the other results count doesn't depend on them."""
    (weight, *others), (bags, *counts) = shapes_of(node)
    if argument(node, 4, "mode", 0) == 0:
        return whole(node)  # torch's fake kernel gives the counts of sums other sizes than they have
    sizes, kept = {"d": weight[1], "v": weight[0], "n": bags[0]}, {"v", "n"}
    operands = [whole_letters(shape, f"i{i}_", sizes, kept) for i, shape in enumerate(others)]
    results = [whole_letters(shape, f"c{i}_", sizes, kept) for i, shape in enumerate(counts)]
    if len(counts[-1]) == 2 and counts[-1][1] == weight[1]:  # where the greatest stood, column by column
        results[-1] = (results[-1][0], ("d",))
    return from_letters(
        [(("v",), ("d",)), *operands],
        [(("n",), ("d",)), *results],
        sizes,
        kept,
        indexes={1: "v"},
        same=[(), *({"d"} for _ in counts)],
    )


ROWS: Rows = {
    "aten.index": by(indexed),
    "aten._unsafe_index": by(indexed),
    "aten.index_select": by(index_select),
    "aten.embedding": texts("0", "v d, {v}... -> ... d"),
    "aten._embedding_bag": by(embedding_bag),
    "aten._embedding_bag_forward_only": by(embedding_bag),
    "aten.gather": by(gather),
    "aten.take": by(taken),
    "aten.bucketize": by(bucketize),
    "aten.searchsorted": by(searchsorted),
    "aten.isin": by(isin),
}
