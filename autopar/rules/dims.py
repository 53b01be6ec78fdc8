"""Rules of ops that work along some dims: those are whole, all others free.

sort(x, dim=1):  a [b] c -> a [b] c, a [b] c         stack([x, y], 1):  a b, a b -> a [n] b
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch.fx import Node

from autopar.rules.nodes import argument, shapes_of
from autopar.rules.notation import BoundRule, Dims, Linear, Shape
from autopar.rules.shapes import from_letters, named_dims, whole


def _letters(shape: Shape, along: Collection[int], value: int, sizes: dict[str, int], kept: set[str]) -> Dims:
    """`d0 d1 …`, the dims `along` by whole letters of the value's own."""
    names = [f"x{value}_{d}" if d in along else f"d{d}" for d in range(len(shape))]
    sizes.update(zip(names, shape, strict=True))
    kept.update(names[d] for d in along)
    return tuple((name,) for name in names)


def along(index: int, name: str, default: object, linear: Linear = ()) -> Callable[[Node], BoundRule]:
    """An op whose operands and results have the same dims, but for the sizes of those that it works along."""

    def rule(node: Node) -> BoundRule:
        operands, results = shapes_of(node)
        dims = named_dims(argument(node, index, name, default), len(operands[0]))
        sizes, kept = dict[str, int](), set[str]()
        values = [_letters(shape, dims, i, sizes, kept) for i, shape in enumerate((*operands, *results))]
        return from_letters(values[: len(operands)], values[len(operands) :], sizes, kept, linear)

    return rule


def stacked(node: Node) -> BoundRule:
    """The new dim is whole; jointly linear."""
    operands, (result,) = shapes_of(node)
    dim = argument(node, 1, "dim", 0) % len(result)
    sizes, kept = dict[str, int](), set[str]()
    outer = _letters(result, {dim}, 0, sizes, kept)
    inner = outer[:dim] + outer[dim + 1 :]
    return from_letters([inner] * len(operands), [outer], sizes, kept, (tuple(range(len(operands))),))


def unbound(node: Node) -> BoundRule:
    """The dim that is taken apart is whole."""
    (operand,), results = shapes_of(node)
    dim, sizes, kept = argument(node, 1, "dim", 0) % len(operand), dict[str, int](), set[str]()
    outer = _letters(operand, {dim}, 0, sizes, kept)
    return from_letters([outer], [outer[:dim] + outer[dim + 1 :]] * len(results), sizes, kept, ((0,),))


def select_scatter(node: Node) -> BoundRule:
    """The dim into which a slice is put is whole; jointly linear."""
    (operand, _), _ = shapes_of(node)
    dim, sizes, kept = argument(node, 2, "dim", 0) % len(operand), dict[str, int](), set[str]()
    outer = _letters(operand, {dim}, 0, sizes, kept)
    return from_letters([outer, outer[:dim] + outer[dim + 1 :]], [outer], sizes, kept, ((0, 1),))


def index_select(node: Node) -> BoundRule:
    """The dim that is selected from is whole, the index is free."""
    (operand, index), _ = shapes_of(node)
    dim, sizes, kept = argument(node, 1, "dim") % max(len(operand), 1), dict[str, int](), set[str]()
    if not operand or not index:
        return whole(node)
    outer = _letters(operand, {dim}, 0, sizes, kept)
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
    outer = _letters(operand, given, 0, sizes, kept)
    broadcast: Shape = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    letters: Dims = tuple((f"i{d}",) for d in range(len(broadcast)))
    sizes.update({f"i{d}": size for d, size in enumerate(broadcast)})
    aligned = [
        tuple(() if size == 1 else dim for size, dim in zip(shape, letters[len(letters) - len(shape) :], strict=True))
        for shape in shapes
    ]
    rest = [outer[d] for d in range(len(operand)) if d not in given]
    is_adjacent = given == list(range(given[0], given[-1] + 1))
    place = given[0] if is_adjacent else 0
    dims = (*rest[:place], *letters, *rest[place:])
    assert len(dims) == len(result)
    return from_letters([outer, *aligned], [dims], sizes, kept, ((0,),))
