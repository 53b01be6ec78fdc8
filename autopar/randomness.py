"""Counter-based random numbers: each element is a pure function of a stream's key and the element's global index.

    key   = stream_key(seed, step, microbatch, op)       # int64 [2]; each of them an int or an int64 scalar tensor
    index = torch.arange(rows * columns).view(rows, columns)
    keep  = bernoulli(key, index, 0.9)                   # a shard passes its part of `index`, gets its part of `keep`

The words are SplitMix64's finalizer (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014)
over key + index × the golden gamma, with a second key added between its rounds: two streams whose counters overlap
still give other words.

Invariants:
- no state: any split, order or repetition of the indices gives the same numbers;
- words, `bernoulli` and `uniform` are integer arithmetic and exact scaling, so that all devices agree bit for bit;
  `normal` is computed in float64 and agrees to the rounding of log and cos;
- `bernoulli` knows no dtype: a program promoted to float64 draws the same masks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word."""
    return word - (1 << 64) if word >= 1 << 63 else word


_GAMMA = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
_MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def stream_key(*parts: int | Tensor, device: torch.device | str | None = None) -> Tensor:
    """The key of one stream, int64 [2]: every part, and their order, matters."""
    key = torch.tensor([0, _GAMMA], dtype=torch.int64, device=device)
    for part in parts:
        number = part if isinstance(part, Tensor) else torch.tensor(_signed(part % (1 << 64)), device=device)
        key = _mixed(key * _FIRST + number * _GAMMA + _SECOND, torch.zeros_like(key))
    return key


def words(key: Tensor, index: Tensor) -> Tensor:
    """64 random bits, as int64, for each global index."""
    return _mixed((index * _GAMMA).add_(key[0]), key[1])


def bernoulli(key: Tensor, index: Tensor, p: float) -> Tensor:
    """Boolean, True with probability `p`."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"bernoulli: a probability lies in [0, 1], got {p}")
    return _shifted(words(key, index), 11) < math.ceil(p * 2**53)


def uniform(key: Tensor, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform in [0, 1), in steps of the dtype's precision: never rounded up to 1."""
    if dtype not in _MANTISSA:
        raise ValueError(f"uniform: expected one of {', '.join(map(str, _MANTISSA))}, got {dtype}")
    bits = _MANTISSA[dtype]
    return (_shifted(words(key, index), 64 - bits).double() * 2.0**-bits).to(dtype)


def normal(key: Tensor, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal by Box and Muller's transform of a word's two halves; no value beyond 6.8."""
    word = words(key, index)
    radius = (-2.0 * torch.log((_shifted(word, 32).double() + 0.5) * 2.0**-32)).sqrt()
    return (radius * torch.cos((word & 0xFFFFFFFF).double() * (2.0 * math.pi * 2.0**-32))).to(dtype)


def _mixed(word: Tensor, between: Tensor) -> Tensor:
    """The word after both rounds, computed in its own memory."""
    word.bitwise_xor_(_shifted(word, 30)).mul_(_FIRST).add_(between)
    word.bitwise_xor_(_shifted(word, 27)).mul_(_SECOND)
    return word.bitwise_xor_(_shifted(word, 31))


def _shifted(word: Tensor, bits: int) -> Tensor:
    """A logical shift to the right: torch's own keeps the sign."""
    return (word >> bits).bitwise_and_((1 << (64 - bits)) - 1)
