"""The random ops of ATen, by what `Draws` draws: a table from the overload to the function that gives its result.

    DRAWS[aten.normal_.default](draws, x, mean, std)        # writes draws.normal(x.shape, …) * std + mean to x

Invariants:
- an op draws once, a stream over the row-major index of its result (`multinomial`: of its weights);
- distributions are those of torch's ops, not their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.private import OpOverload

aten = torch.ops.aten
Device = torch.device | None
Shape = Sequence[int]


class Source(Protocol):
    """Where numbers come from."""

    def mask(self, shape: Shape, keep: float, device: Device = None) -> Tensor: ...
    def uniform(self, shape: Shape, dtype: torch.dtype, device: Device = None) -> Tensor: ...
    def normal(self, shape: Shape, dtype: torch.dtype, device: Device = None) -> Tensor: ...
    def integers(self, shape: Shape, low: int, high: int, dtype: torch.dtype, device: Device = None) -> Tensor: ...


Draw = Callable[..., Any]
"""(source, the op's arguments) → its result."""


# -- forms -----------------------------------------------------------------------------------------------------------


def _factory(kind: str) -> Draw:
    """`rand(size)`."""

    def draw(source: Source, size: Shape, *, dtype: Any = None, device: Device = None, **others: Any) -> Tensor:
        drawn: Tensor = getattr(source, kind)(size, dtype or torch.get_default_dtype(), device)
        return drawn

    return draw


def _like(kind: str) -> Draw:
    """`rand_like(x)`."""

    def draw(source: Source, x: Tensor, *, dtype: Any = None, device: Device = None, **others: Any) -> Tensor:
        drawn: Tensor = getattr(source, kind)(x.shape, dtype or x.dtype, device or x.device)
        return drawn

    return draw


def _in_place(values: Callable[..., Tensor]) -> Draw:
    """`normal_(x, mean, std)`: what `values` gives at the same arguments is written to `x`."""
    return lambda source, x, *args, **kwargs: x.copy_(values(source, x, *args, **kwargs))


def _functional(values: Callable[..., Tensor]) -> Draw:
    """`bernoulli(x, p)`: likewise, as a value of its own."""
    return lambda source, x, *args, **kwargs: values(source, x, *args, **kwargs).to(x.dtype)


# -- values ----------------------------------------------------------------------------------------------------------


def _mask(source: Source, x: Tensor, p: float = 0.5) -> Tensor:
    return source.mask(x.shape, p, x.device)


def _below(source: Source, x: Tensor, p: Tensor | None = None) -> Tensor:
    """True where a uniform number lies below `p` (`x` itself by default)."""
    p = x if p is None else p
    dtype = p.dtype if p.dtype.is_floating_point else torch.float32
    return source.uniform(x.shape, dtype, x.device) < p


def _uniform(source: Source, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return source.uniform(x.shape, x.dtype, x.device) * (high - low) + low


def _normal(source: Source, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return source.normal(x.shape, x.dtype, x.device) * std + mean


def _log_normal(source: Source, x: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return _normal(source, x, mean, std).exp()


def _exponential(source: Source, x: Tensor, rate: float = 1.0) -> Tensor:
    return _unit_exponential(source, x.shape, x.dtype, x.device) / rate


def _cauchy(source: Source, x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return torch.tan((source.uniform(x.shape, x.dtype, x.device) - 0.5) * math.pi) * sigma + median


def _geometric(source: Source, x: Tensor, p: float) -> Tensor:
    """How many trials it takes until one succeeds."""
    return torch.ceil(_unit_exponential(source, x.shape, torch.float64, x.device) / -math.log1p(-p))


def _unit_exponential(source: Source, shape: Shape, dtype: torch.dtype, device: Device) -> Tensor:
    """Never 0, so that its logarithm is finite (as Gumbel's distribution needs it)."""
    return (-torch.log1p(-source.uniform(shape, dtype, device))).clamp_min(torch.finfo(dtype).eps / 2)


def _integers(source: Source, x: Tensor, low: int, high: int | None) -> Tensor:
    return source.integers(x.shape, low, _end(x.dtype) if high is None else high, x.dtype, x.device)


def _end(dtype: torch.dtype) -> int:
    """One past the largest number that `random_` draws: as far as the dtype counts without a gap."""
    if dtype == torch.bool:
        return 2
    return int(2 / torch.finfo(dtype).eps) + 1 if dtype.is_floating_point else torch.iinfo(dtype).max


def _randint(source: Source, high: int, size: Shape, **others: Any) -> Tensor:
    return _randint_between(source, 0, high, size, **others)


def _randint_between(
    source: Source, low: int, high: int, size: Shape, *, dtype: Any = None, device: Device = None, **others: Any
) -> Tensor:
    return source.integers(size, low, high, dtype or torch.int64, device)


def _randint_like(source: Source, x: Tensor, high: int, **others: Any) -> Tensor:
    return _randint_like_between(source, x, 0, high, **others)


def _randint_like_between(
    source: Source, x: Tensor, low: int, high: int, *, dtype: Any = None, device: Device = None, **others: Any
) -> Tensor:
    return source.integers(x.shape, low, high, dtype or x.dtype, device or x.device)


def _permutation(source: Source, n: int, *, dtype: Any = None, device: Device = None, **others: Any) -> Tensor:
    """The order of as many numbers, all but surely distinct."""
    order = source.integers([n], 0, torch.iinfo(torch.int64).max, torch.int64, device).argsort()
    return order if dtype in (None, torch.int64) else order.to(dtype)


def _normal_by_tensors(source: Source, mean: Any, std: Any = 1.0) -> Tensor:
    """`normal(mean, std)`, one of them a tensor at least."""
    like: Tensor = mean + std
    drawn: Tensor = source.normal(like.shape, like.dtype, like.device) * std + mean
    return drawn


def _normal_of_size(source: Source, mean: float, std: float, size: Shape, **options: Any) -> Tensor:
    drawn: Tensor = _factory("normal")(source, size, **options)
    return drawn * std + mean


def _multinomial(source: Source, weights: Tensor, count: int, replacement: bool = False) -> Tensor:
    """The places of the greatest weights over exponential numbers (Efraimidis and Spirakis, 2006)."""
    shape = weights.shape
    if replacement and count > 1:
        shape, weights = torch.Size((*shape[:-1], count, shape[-1])), weights.unsqueeze(-2)
    scores = weights / _unit_exponential(source, shape, weights.dtype, weights.device)
    if replacement and count > 1:
        return scores.argmax(-1)
    return scores.argmax(-1, keepdim=True) if count == 1 else scores.topk(count).indices


def _native_dropout(source: Source, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    mask = source.mask(x.shape, 1 - p, x.device)
    return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask


DRAWS: dict[OpOverload, Draw] = {
    aten.rand.default: _factory("uniform"),
    aten.randn.default: _factory("normal"),
    aten.rand_like.default: _like("uniform"),
    aten.randn_like.default: _like("normal"),
    aten.randint.default: _randint,
    aten.randint.low: _randint_between,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like_between,
    aten.randperm.default: _permutation,
    aten.bernoulli_.float: _in_place(_mask),
    aten.bernoulli_.Tensor: _in_place(_below),
    aten.bernoulli.default: _functional(_below),
    aten.bernoulli.p: _functional(_mask),
    aten.bernoulli.Tensor: _functional(_below),
    aten.uniform_.default: _in_place(_uniform),
    aten.normal_.default: _in_place(_normal),
    aten.log_normal_.default: _in_place(_log_normal),
    aten.exponential_.default: _in_place(_exponential),
    aten.cauchy_.default: _in_place(_cauchy),
    aten.geometric_.default: _in_place(_geometric),
    aten.random_.default: _in_place(lambda source, x: _integers(source, x, 0, None)),
    aten.random_.to: _in_place(lambda source, x, high: _integers(source, x, 0, high)),
    getattr(aten.random_, "from"): _in_place(_integers),
    aten.normal.Tensor_Tensor: _normal_by_tensors,
    aten.normal.Tensor_float: _normal_by_tensors,
    aten.normal.float_Tensor: _normal_by_tensors,
    aten.normal.float_float: _normal_of_size,
    aten.multinomial.default: _multinomial,
    aten.native_dropout.default: _native_dropout,
}
"""How each random op's result is drawn."""
