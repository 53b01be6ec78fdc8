"""Layouts over factors: how the global value of one tensor lies on a mesh.

    bf16[(8@dp 4096@tp) 1024]       # dim 0 is a product of two factors, each split by an axis
    f32[(8@dp 4096) 1024] +tp       # and the whole is partial (to be summed) over tp

A dim is a product of factors, major to minor; a mesh axis splits one factor. `4096@tp.dp` is split by two axes,
tp major. The local tensor of a rank is the flattening of its local factors.

A factor that an axis doesn't divide is split into chunks of the size rounded up: `5@tp` over two ranks is 3 and 2, and
both local tensors have 3 rows. What stands in the last rank's third row, its *padding*, is undefined: whatever sums
over the factor, or gathers it, leaves padding out. A second axis splits the first's chunks.

Invariants:
- sizes are global; local tensors are equally large on all ranks, and what they hold of a factor is a prefix;
- an axis splits one factor, or the value is partial over it, or neither; never two of these;
- a dim of size 1 has no factors.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from autopar.mesh import Mesh

if TYPE_CHECKING:
    from torch import Tensor

Position = tuple[int, int]
"""(dim, index of the factor in that dim): where an axis splits a value."""


def chunk_size(size: int, ways: Iterable[int]) -> int:
    """The size of a chunk of `size` split by axes of these sizes, major to minor: rounded up at each."""
    for count in ways:
        size = -(-size // count)
    return size


def window(size: int, splits: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """(first index, number) of a factor's elements on one rank; `splits`: (coordinate, ways) per axis, major first."""
    start, count = 0, size
    for coordinate, ways in splits:
        size = chunk_size(size, (ways,))
        start += coordinate * size
        count = max(0, min(count - coordinate * size, size))
    return start, count


def is_worth_splitting(size: int, ways: Iterable[int]) -> bool:
    """Whether axes of these sizes may split a factor: more of what the ranks hold is content than padding."""
    ways = tuple(ways)
    return chunk_size(size, ways) * math.prod(ways) < 2 * size


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of a dim: its global size, and the axes that split it, major to minor."""

    size: int
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.size}@{'.'.join(self.axes)}" if self.axes else str(self.size)

    def local_size(self, mesh: Mesh) -> int:
        """The size of a rank's chunk, padding included."""
        return chunk_size(self.size, (mesh.size(axis) for axis in self.axes))

    def window(self, mesh: Mesh, coordinates: Mapping[str, int]) -> tuple[int, int]:
        """(first index, number) of the elements that the rank at `coordinates` has."""
        return window(self.size, [(coordinates[axis], mesh.size(axis)) for axis in self.axes])

    def is_padded(self, mesh: Mesh) -> bool:
        """Whether some rank's chunk holds padding."""
        return self.size % math.prod(mesh.size(axis) for axis in self.axes) != 0


@dataclass(frozen=True, slots=True)
class Layout:
    """dims → factors → axes, and the axes over which the value is partial, with their reduction."""

    dims: tuple[tuple[Factor, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.dims, self.partial)))  # layouts are keys in every inner loop

    def __hash__(self) -> int:
        return self._hash

    # -- construction and text ---------------------------------------------------------------------------------
    @classmethod
    def whole(cls, factor_sizes: tuple[tuple[int, ...], ...]) -> Layout:
        """The replicated layout of a value whose dims have these factor sizes."""
        return cls(tuple(tuple(Factor(size) for size in dim) for dim in factor_sizes))

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The inverse of `str`: `"[(8@dp 4096) 1024] +tp"`."""
        body, _, tail = text.strip().partition("]")
        dims = []
        for group in re.findall(r"\([^)]*\)|[^\s()]+", body.removeprefix("[")):
            factors = []
            for word in group.strip("()").split():
                size, _, axes = word.partition("@")
                factors.append(Factor(int(size), tuple(axes.split(".")) if axes else ()))
            dims.append(tuple(factor for factor in factors if factor.size != 1))
        partial = []
        for word in tail.split():
            op, axis = word[1:].split(":") if ":" in word else ("sum", word[1:])
            partial.append((axis, op))
        return cls(tuple(dims), tuple(sorted(partial)))

    def __str__(self) -> str:
        def dim_text(dim: tuple[Factor, ...]) -> str:
            words = " ".join(map(str, dim))
            return "1" if not dim else words if len(dim) == 1 else f"({words})"

        tail = "".join(f" +{axis}" if op == "sum" else f" +{op}:{axis}" for axis, op in self.partial)
        return f"[{' '.join(map(dim_text, self.dims))}]{tail}"

    def split(self, axis: str, position: Position) -> Layout:
        """This layout with `axis` splitting the factor at `position`, minor to the axes already there."""
        dim, index = position
        factor = self.dims[dim][index]
        return self._with_factor(position, Factor(factor.size, (*factor.axes, axis)))

    def add_partial(self, axis: str, op: str = "sum") -> Layout:
        return replace(self, partial=tuple(sorted((*self.partial, (axis, op)))))

    def drop(self, axis: str) -> Layout:
        """This layout with `axis` neither splitting a factor nor partial."""
        dims = tuple(tuple(Factor(f.size, tuple(a for a in f.axes if a != axis)) for f in dim) for dim in self.dims)
        return Layout(dims, tuple(pair for pair in self.partial if pair[0] != axis))

    def _with_factor(self, position: Position, factor: Factor) -> Layout:
        dim, index = position
        changed = (*self.dims[dim][:index], factor, *self.dims[dim][index + 1 :])
        return Layout((*self.dims[:dim], changed, *self.dims[dim + 1 :]), self.partial)

    # -- questions ---------------------------------------------------------------------------------------------
    def positions(self) -> Iterator[tuple[Position, Factor]]:
        for d, dim in enumerate(self.dims):
            for i, factor in enumerate(dim):
                yield (d, i), factor

    def position(self, axis: str) -> Position | None:
        """Where `axis` splits the value, or None."""
        return next((where for where, factor in self.positions() if axis in factor.axes), None)

    def partial_op(self, axis: str) -> str | None:
        return dict(self.partial).get(axis)

    @property
    def split_axes(self) -> tuple[str, ...]:
        return tuple(axis for _, factor in self.positions() for axis in factor.axes)

    @property
    def is_replicated(self) -> bool:
        return not self.partial and not self.split_axes

    @property
    def factor_sizes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(f.size for f in dim) for dim in self.dims)

    @property
    def global_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(f.size for f in dim) for dim in self.dims)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        return tuple(math.prod(f.local_size(mesh) for f in dim) for dim in self.dims)

    def local_factor_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The local shape with each factor as a dim of its own: what a reshard views the value into."""
        return tuple(f.local_size(mesh) for dim in self.dims for f in dim)

    # -- tensors -----------------------------------------------------------------------------------------------
    def shard(self, value: Tensor, mesh: Mesh, coordinates: dict[str, int]) -> Tensor:
        """The local tensor of the rank at `coordinates`. A partial sum stands on coordinate 0, zeros elsewhere."""
        local = self._narrow(value.reshape([f.size for dim in self.dims for f in dim]), mesh, coordinates)
        local = padded(local, self.local_factor_shape(mesh))
        absent = any(op == "sum" and coordinates[axis] != 0 for axis, op in self.partial)
        return (local.new_zeros(local.shape) if absent else local).reshape(self.local_shape(mesh))

    def unshard(self, shards: Callable[[dict[str, int]], Tensor], mesh: Mesh) -> Tensor:
        """The global value from `shards(coordinates)`: partials are reduced, replicas taken from coordinate 0."""
        origin = dict.fromkeys(mesh.names, 0)
        whole: Tensor | None = None
        for coordinates in _positions(mesh, self.split_axes, origin):
            local = self._reduce_partials(shards, mesh, coordinates)
            if whole is None:
                whole = local.new_empty([f.size for dim in self.dims for f in dim])
            self._narrow(whole, mesh, coordinates).copy_(self.content(local, mesh, coordinates))
        assert whole is not None
        return whole.reshape(self.global_shape)

    def _narrow(self, factor_view: Tensor, mesh: Mesh, coordinates: dict[str, int]) -> Tensor:
        """The part of a value, viewed into its factors, that the rank at `coordinates` has, without padding."""
        for dim, factor in enumerate(f for factors in self.dims for f in factors):
            start, count = factor.window(mesh, coordinates)
            if factor.axes:
                factor_view = factor_view.narrow(dim, min(start, factor.size), count)
        return factor_view

    def content(self, local: Tensor, mesh: Mesh, coordinates: Mapping[str, int]) -> Tensor:
        """A rank's local tensor without its padding, viewed into its factors."""
        return prefix(local.reshape(self.local_factor_shape(mesh)), self._counts(mesh, coordinates))

    def padded(self, content: Tensor, mesh: Mesh, coordinates: Mapping[str, int]) -> Tensor:
        """The local tensor with this content and zeros for padding; raises `RuntimeError` for another size."""
        own = content.reshape(self._counts(mesh, coordinates))
        return padded(own, self.local_factor_shape(mesh)).reshape(self.local_shape(mesh))

    def content_shape(self, mesh: Mesh, coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of what a rank's local tensor holds beside padding."""
        return tuple(math.prod(f.window(mesh, coordinates)[1] for f in dim) for dim in self.dims)

    def _counts(self, mesh: Mesh, coordinates: Mapping[str, int]) -> list[int]:
        return [factor.window(mesh, coordinates)[1] for dim in self.dims for factor in dim]

    def is_padded(self, mesh: Mesh) -> bool:
        """Whether some rank's local tensor holds padding."""
        return any(factor.is_padded(mesh) for _, factor in self.positions())

    def _reduce_partials(
        self, shards: Callable[[dict[str, int]], Tensor], mesh: Mesh, coordinates: dict[str, int]
    ) -> Tensor:
        if not self.partial:
            return shards(coordinates)
        (axis, op), rest = self.partial[0], replace(self, partial=self.partial[1:])
        parts = [rest._reduce_partials(shards, mesh, {**coordinates, axis: i}) for i in range(mesh.size(axis))]
        return functools.reduce(REDUCTIONS[op](), parts)


def prefix(value: Tensor, sizes: Iterable[int]) -> Tensor:
    """The first elements along each dim."""
    for dim, size in enumerate(sizes):
        value = value.narrow(dim, 0, size)
    return value


def padded(value: Tensor, sizes: tuple[int, ...], fill: float = 0) -> Tensor:
    """`value` with `fill` after it along each dim; itself where nothing is missing."""
    if tuple(value.shape) == sizes:
        return value
    whole = value.new_full(sizes, fill)
    prefix(whole, value.shape).copy_(value)
    return whole


def _combine(name: str) -> Callable[[], Callable[[Tensor, Tensor], Tensor]]:
    def load() -> Callable[[Tensor, Tensor], Tensor]:
        import torch

        combine: Callable[[Tensor, Tensor], Tensor] = getattr(torch, name)
        return combine

    return load


REDUCTIONS = {"sum": _combine("add"), "max": _combine("maximum"), "min": _combine("minimum"), "prod": _combine("mul")}
"""How the parts of a partial value combine, by the name of the reduction."""


def _positions(mesh: Mesh, axes: tuple[str, ...], origin: dict[str, int]) -> Iterator[dict[str, int]]:
    for position in itertools.product(*(range(mesh.size(axis)) for axis in axes)):
        yield {**origin, **dict(zip(axes, position, strict=True))}
