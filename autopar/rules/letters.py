"""What rules are written with: letters per dim of a value, their sizes, and the rule that follows from them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.fx import Node

from autopar.rules.nodes import shapes_of
from autopar.rules.notation import BoundRule, Dims, Linear, Shape


def from_letters(
    operands: Sequence[Dims],
    results: Sequence[Dims],
    sizes: dict[str, int],
    whole: Collection[str] = (),
    linear: Linear = (),
    indexes: dict[int, str] | None = None,
    reduction: str | tuple[str, ...] = "sum",
    same: Sequence[Collection[str]] | None = None,
) -> BoundRule:
    """A `BoundRule` from letters, those of size 1 dropped; `reduction` of all results, or of each."""

    def keep(dims: Dims) -> Dims:
        return tuple(tuple(letter for letter in dim if sizes[letter] != 1) for dim in dims)

    return BoundRule(
        tuple(keep(dims) for dims in operands),
        tuple(keep(dims) for dims in results),
        sizes,
        frozenset(whole),
        indexes or {},
        (reduction,) * len(results) if isinstance(reduction, str) else reduction,
        linear,
        same=tuple(map(frozenset, [()] * len(results) if same is None else same)),
    )


def letters(shape: Shape, prefix: str) -> tuple[Dims, dict[str, int]]:
    """A letter for each dim, `d0 d1 …` for prefix `d`, and their sizes."""
    names = [f"{prefix}{i}" for i in range(len(shape))]
    return tuple((name,) for name in names), dict(zip(names, shape, strict=True))


def letters_along(shape: Shape, along: Collection[int], value: int, sizes: dict[str, int], kept: set[str]) -> Dims:
    """`d0 d1 …`, the dims `along` by whole letters of the value's own."""
    names = [f"x{value}_{d}" if d in along else f"d{d}" for d in range(len(shape))]
    sizes.update(zip(names, shape, strict=True))
    kept.update(names[d] for d in along)
    return tuple((name,) for name in names)


def whole_letters(shape: Shape, prefix: str, sizes: dict[str, int], kept: set[str]) -> Dims:
    """Whole letters of a value's own: `x0 x1 …` for prefix `x`."""
    dims, new = letters(shape, prefix)
    sizes.update(new)
    kept.update(new)
    return dims


def named_dims(dims: object, rank: int) -> set[int]:
    """The dims that an argument names; all where it names none."""
    if isinstance(dims, bool) or not isinstance(dims, (int, list, tuple)) or dims == []:
        return set(range(rank))
    return {int(d) % max(rank, 1) for d in ([dims] if isinstance(dims, int) else dims)}


def aligned(shape: Shape, dims: Dims) -> Dims:
    """The last of `dims`, as many as the value has: aligned from the right, those of size 1 broadcast."""
    tail = dims[len(dims) - len(shape) :]
    return tuple(() if size == 1 else dim for size, dim in zip(shape, tail, strict=True))


def whole(node: Node) -> BoundRule:
    """Nothing may be split: the rule of an op that has none."""
    operands, results = shapes_of(node)
    sizes, kept = dict[str, int](), set[str]()
    values = [whole_letters(shape, f"v{i}_", sizes, kept) for i, shape in enumerate((*operands, *results))]
    return from_letters(values[: len(operands)], values[len(operands) :], sizes, kept)
