"""Collectives on local tensors: what the localised graphs call, whoever runs them.

    y = all_gather(x, "tp", 1)                 # at once
    pending = all_gather_start(x, "tp", 1)     # in the background …
    y = wait(pending)                          # … until here

The functions are FX targets. They go to the running rank's `Communicator` (`use`); generated code binds that
communicator and calls the same methods on it. The virtual mesh recognises the targets and runs all ranks at once.

Invariants:
- all ranks of a mesh axis call the same collectives on that axis in the same order;
- chunks stand in the order of the coordinate along the axis; a split dim is divisible by the axis's size (padded);
- an axis of size 1 is the identity;
- between a start and its wait nobody writes to the input, but an all-reduce that may (`inplace`): it then gives that
  very tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from autopar.layout import REDUCTIONS

if TYPE_CHECKING:
    from torch import Tensor

Pending = Any
"""A collective in flight: made by a `…_start`, turned into its tensor by `wait`, opaque to everybody else."""


class Communicator(Protocol):
    """One rank's way to the others."""

    def all_gather(self, x: Tensor, axis: str, dim: int) -> Tensor: ...
    def reduce_scatter(self, x: Tensor, axis: str, dim: int, op: str = "sum") -> Tensor: ...
    def all_reduce(self, x: Tensor, axis: str, op: str = "sum") -> Tensor: ...
    def all_to_all(self, x: Tensor, axis: str, split_dim: int, concat_dim: int) -> Tensor: ...
    def all_gather_start(self, x: Tensor, axis: str, dim: int) -> Pending: ...
    def reduce_scatter_start(self, x: Tensor, axis: str, dim: int, op: str = "sum") -> Pending: ...
    def all_reduce_start(self, x: Tensor, axis: str, op: str = "sum", inplace: bool = False) -> Pending: ...
    def all_to_all_start(self, x: Tensor, axis: str, split_dim: int, concat_dim: int) -> Pending: ...
    def wait(self, pending: Pending) -> Tensor: ...
    def shard(self, x: Tensor, axis: str, dim: int) -> Tensor: ...
    def pad(self, x: Tensor, sizes: Sequence[int]) -> Tensor: ...
    def coordinate(self, axis: str) -> int: ...
    def first(self, size: int, *axes: str) -> int: ...
    def count(self, size: int, *axes: str) -> int: ...


_CURRENT: ContextVar[Communicator] = ContextVar("autopar_communicator")


@contextmanager
def use(communicator: Communicator) -> Iterator[None]:
    """Within the block, this thread's collectives go to `communicator`."""
    token = _CURRENT.set(communicator)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def all_gather(x: Tensor, axis: str, dim: int) -> Tensor:
    """The chunks of all ranks along `axis`, concatenated along `dim`."""
    return _CURRENT.get().all_gather(x, axis, dim)


def reduce_scatter(x: Tensor, axis: str, dim: int, op: str = "sum") -> Tensor:
    """The rank's own chunk along `dim` of the reduction over `axis`."""
    return _CURRENT.get().reduce_scatter(x, axis, dim, op)


def all_reduce(x: Tensor, axis: str, op: str = "sum") -> Tensor:
    """The reduction over `axis` (`sum`, `max`, `min` or `prod`), the same bits on every rank."""
    return _CURRENT.get().all_reduce(x, axis, op)


def all_to_all(x: Tensor, axis: str, split_dim: int, concat_dim: int) -> Tensor:
    """Chunk j of `split_dim` goes to coordinate j; what arrives is concatenated along `concat_dim`."""
    return _CURRENT.get().all_to_all(x, axis, split_dim, concat_dim)


def all_gather_start(x: Tensor, axis: str, dim: int) -> Pending:
    """Starts `all_gather`."""
    return _CURRENT.get().all_gather_start(x, axis, dim)


def reduce_scatter_start(x: Tensor, axis: str, dim: int, op: str = "sum") -> Pending:
    """Starts `reduce_scatter`."""
    return _CURRENT.get().reduce_scatter_start(x, axis, dim, op)


def all_reduce_start(x: Tensor, axis: str, op: str = "sum", inplace: bool = False) -> Pending:
    """Starts `all_reduce`; with `inplace`, of an `x` that may be overwritten."""
    return _CURRENT.get().all_reduce_start(x, axis, op, inplace)


def all_to_all_start(x: Tensor, axis: str, split_dim: int, concat_dim: int) -> Pending:
    """Starts `all_to_all`."""
    return _CURRENT.get().all_to_all_start(x, axis, split_dim, concat_dim)


def wait(pending: Pending) -> Tensor:
    """The tensor of a started collective."""
    return _CURRENT.get().wait(pending)


def shard(x: Tensor, axis: str, dim: int) -> Tensor:
    """The rank's own chunk of a value that every rank along `axis` has (no communication)."""
    return _CURRENT.get().shard(x, axis, dim)


def pad(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """`x` made longer, to `sizes`, by elements that nobody may read."""
    return _CURRENT.get().pad(x, sizes)


def coordinate(axis: str) -> int:
    """The rank's position along `axis`."""
    return _CURRENT.get().coordinate(axis)


def first(size: int, *axes: str) -> int:
    """The first index that the rank has of `size` elements split by `axes`, major first."""
    return _CURRENT.get().first(size, *axes)


def count(size: int, *axes: str) -> int:
    """How many of `size` elements split by `axes` the rank has; what its chunk holds beyond is padding."""
    return _CURRENT.get().count(size, *axes)


STARTED: dict[Callable[..., Any], Callable[..., Any]] = {
    all_gather: all_gather_start,
    reduce_scatter: reduce_scatter_start,
    all_reduce: all_reduce_start,
    all_to_all: all_to_all_start,
}
"""Each collective that communicates, with its asynchronous start."""

TARGETS: frozenset[Callable[..., Any]] = frozenset(
    {*STARTED, *STARTED.values(), wait, shard, pad, coordinate, first, count}
)
"""Every FX target of this module."""


def ordered_reduce(parts: Sequence[Tensor], op: str = "sum") -> Tensor:
    """The reduction of `parts` from first to last: the same bits wherever and however often it runs.

    More than two half-precision parts are summed in float32 and rounded once.
    """
    combine = REDUCTIONS[op]()
    if op != "sum" or len(parts) < 3 or not parts[0].is_floating_point() or parts[0].itemsize > 2:
        return functools.reduce(combine, parts)
    return functools.reduce(combine, parts[1:], parts[0].float()).to(parts[0].dtype)
