"""Random ops of a captured graph: pure functions of a key, the draw's name, and each element's global index.

    mask = autopar::random_mask(key, name, shape, keep)              # bool [*shape], True with probability `keep`
    u    = autopar::random_uniform(key, name, shape, dtype)          # in [0, 1)
    z    = autopar::random_normal(key, name, shape, dtype)
    n    = autopar::random_integers(key, name, shape, low, high, dtype)

`key` is an int64 scalar on the CPU (`randomness.microbatch_key`), `name` what tells a draw from the others of its
microbatch: the path of the module that draws, and a count ("blocks.3.attention#0"). An element's index is its place in
the row-major order of the whole value, whatever the strides. A shard draws its part:

    random_mask(key, name, [2, 4], keep, sizes=[2, 4], strides=[8, 1], offset=4)      # columns 4 to 7 of [2, 8]

`sizes` are the shard's factors, major to minor, `strides` the steps of the global index along them.

Invariants:
- no state, and no random tag: equal calls give equal numbers, so a node may be merged, copied and run again;
- numbers are drawn in blocks that stay in the cache (3.5 ns a mask's element on one core, 20 ns in one large piece).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar import randomness
from autopar.private import OpOverload

_BLOCK = {"cpu": 1 << 15}
_DEVICE_BLOCK = 1 << 20
"""Elements drawn at a time: as many as have their words, 8 bytes each, in a core's cache, or in a GPU's."""

Draw = Callable[[randomness.Key, Tensor], Tensor]
"""(stream, global indices) → a number for each index."""


def random_mask(key: Tensor, name: str, shape: Sequence[int], keep: float, **shard: Any) -> Tensor:
    """Bool [*shape]: True with probability `keep`. `shard`: keywords `sizes`, `strides`, `offset`, and the `device`."""
    return _drawn(key, name, shape, torch.bool, lambda k, i: randomness.bernoulli(k, i, keep), **shard)


def random_uniform(key: Tensor, name: str, shape: Sequence[int], dtype: torch.dtype, **shard: Any) -> Tensor:
    """`dtype` [*shape], uniform in [0, 1)."""
    return _drawn(key, name, shape, dtype, lambda k, i: randomness.uniform(k, i, dtype), **shard)


def random_normal(key: Tensor, name: str, shape: Sequence[int], dtype: torch.dtype, **shard: Any) -> Tensor:
    """`dtype` [*shape], standard normal."""
    return _drawn(key, name, shape, dtype, lambda k, i: randomness.normal(k, i, dtype), **shard)


def random_integers(
    key: Tensor, name: str, shape: Sequence[int], low: int, high: int, dtype: torch.dtype, **shard: Any
) -> Tensor:
    """`dtype` [*shape], integers in [low, high)."""
    return _drawn(key, name, shape, dtype, lambda k, i: randomness.integers(k, i, low, high, dtype), **shard)


# -- blocks ----------------------------------------------------------------------------------------------------------


def _drawn(
    key: Tensor,
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    draw: Draw,
    *,
    sizes: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    offset: int = 0,
    device: torch.device | None = None,
) -> Tensor:
    """A dense value, filled block by block."""
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    if out.numel() == 0:
        return out
    stream = randomness.stream_key(int(key), randomness.name_word(name))
    flat, start = out.view(-1), 0
    block = _BLOCK.get(out.device.type, _DEVICE_BLOCK)
    for index in _indices(sizes or [out.numel()], strides or [1], offset, block, out.device):
        flat[start : start + index.numel()] = draw(stream, index).view(-1)
        start += index.numel()
    return out


def _indices(
    sizes: Sequence[int], strides: Sequence[int], offset: int, block: int, device: torch.device
) -> Iterator[Tensor]:
    """The global indices in row-major order: some entries of one dim, with all of the dims after it, at a time."""
    cut, inner = len(sizes) - 1, 1
    while cut > 0 and inner * sizes[cut] <= block:
        inner *= sizes[cut]
        cut -= 1
    step = min(sizes[cut], max(1, block // inner))
    grid = _grid([step, *sizes[cut + 1 :]], strides[cut:], device)
    for outer in itertools.product(*map(range, sizes[:cut])):
        base = offset + sum(map(int.__mul__, outer, strides))
        for first in range(0, sizes[cut], step):
            here = grid if first + step <= sizes[cut] else grid[: sizes[cut] - first]
            yield here + (base + first * strides[cut])


def _grid(sizes: Sequence[int], strides: Sequence[int], device: torch.device) -> Tensor:
    steps = [torch.arange(0, size * stride, stride, device=device) for size, stride in zip(sizes, strides, strict=True)]
    return functools.reduce(lambda major, minor: major.unsqueeze(-1) + minor, steps)


def shard_arguments(sizes: Sequence[int], local: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """(`sizes`, `strides`) of a shard with `local` of each factor's `sizes`, and each factor's own stride.

    Neighbours that lie together in the whole are one.
    """
    own = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    kept: list[tuple[int, int]] = []
    for size, stride in zip(local, own, strict=True):
        if kept and kept[-1][1] == size * stride:
            size *= kept.pop()[0]
        kept.append((size, stride))
    return [size for size, _ in kept], [stride for _, stride in kept], own


# -- registration ----------------------------------------------------------------------------------------------------

_SHARD = "*, SymInt[]? sizes=None, SymInt[]? strides=None, SymInt offset=0, Device? device=None"
_SCHEMAS: dict[Callable[..., Tensor], str] = {
    random_mask: "float keep",
    random_uniform: "ScalarType dtype",
    random_normal: "ScalarType dtype",
    random_integers: "int low, int high, ScalarType dtype",
}


def _fake(key: Tensor, name: str, shape: Sequence[int], *parameters: Any, device: Any = None, **shard: Any) -> Tensor:
    dtypes = [value for value in parameters if isinstance(value, torch.dtype)]
    return torch.empty(shape, dtype=dtypes[0] if dtypes else torch.bool, device=device)


def _register() -> Any:
    library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
    for function, parameters in _SCHEMAS.items():
        op = function.__name__
        library.define(f"{op}(Tensor key, str name, SymInt[] shape, {parameters}, {_SHARD}) -> Tensor")
        library.impl(op, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"autopar::{op}", _fake, lib=library)
    return library


_LIBRARY = _register()
"""Kept alive: dropping it would unregister the ops."""

LOWERED: dict[OpOverload, Callable[..., Tensor]] = {
    getattr(torch.ops.autopar, function.__name__).default: function for function in _SCHEMAS
}
"""What generated code calls in place of each op."""
