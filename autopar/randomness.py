"""Counter-based random numbers: each element is a pure function of a stream's key and the element's global index.

    word  = microbatch_key(seed, step, microbatch)       # an int: what a step's graph is given
    key   = stream_key(word, name_word("blocks.3#0"))    # the stream of one of its draws, by the draw's name
    index = torch.arange(rows * columns).view(rows, columns)
    keep  = bernoulli(key, index, 0.9)                   # a shard passes its part of `index`, gets its part of `keep`

The words are SplitMix64's finalizer (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014)
over key + index × the golden gamma, with a second key added between its rounds: two streams whose counters overlap
still give other words.

Invariants:
- no state: any split, order or repetition of the indices gives the same numbers;
- words, `bernoulli`, `integers` and `uniform` are integer arithmetic and exact scaling, so that all devices agree bit
  for bit; `normal` is computed in float64 and agrees to the rounding of log and cos;
- `bernoulli` knows no dtype: a program promoted to float64 draws the same masks.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

Key = tuple[int, int]
"""A stream: two int64."""

_MODULUS = 1 << 64


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word."""
    return word - _MODULUS if word >= _MODULUS >> 1 else word


_GAMMA = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
_MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


# -- keys ------------------------------------------------------------------------------------------------------------


def stream_key(*parts: int) -> Key:
    """The key of one stream: every part, and their order, matters."""
    key = [0, _GAMMA % _MODULUS]
    for part in parts:
        key = [_mixed_int(word * _FIRST + part * _GAMMA + _SECOND) for word in key]
    return _signed(key[0]), _signed(key[1])


def microbatch_key(seed: int, step: int, microbatch: int) -> int:
    """The word that a microbatch's random ops draw from, an int64."""
    return stream_key(seed, step, microbatch)[0]


def name_word(name: str) -> int:
    """The word of a draw's name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def random_keys(seed: int, step: int, microbatches: int) -> list[Tensor]:
    """What each microbatch of a step is given: int64 scalars on the CPU."""
    return [torch.tensor(microbatch_key(seed, step, index)) for index in range(microbatches)]


def _mixed_int(word: int) -> int:
    """SplitMix64's finalizer of one word, unsigned."""
    word %= _MODULUS
    word = (word ^ (word >> 30)) * _FIRST % _MODULUS
    word = (word ^ (word >> 27)) * _SECOND % _MODULUS
    return word ^ (word >> 31)


# -- numbers ---------------------------------------------------------------------------------------------------------


def words(key: Key, index: Tensor) -> Tensor:
    """64 random bits, as int64, for each global index."""
    word = (index * _GAMMA).add_(key[0])
    word.bitwise_xor_(_shifted(word, 30)).mul_(_FIRST).add_(key[1])
    word.bitwise_xor_(_shifted(word, 27)).mul_(_SECOND)
    return word.bitwise_xor_(_shifted(word, 31))


def bernoulli(key: Key, index: Tensor, p: float) -> Tensor:
    """Boolean, True with probability `p`."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"bernoulli: a probability lies in [0, 1], got {p}")
    return _shifted(words(key, index), 11) < math.ceil(p * 2**53)


def uniform(key: Key, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform in [0, 1), in steps of the dtype's precision: never rounded up to 1."""
    if dtype not in _MANTISSA:
        raise ValueError(f"uniform: expected one of {', '.join(map(str, _MANTISSA))}, got {dtype}")
    bits = _MANTISSA[dtype]
    return (_shifted(words(key, index), 64 - bits).double() * 2.0**-bits).to(dtype)


def normal(key: Key, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal by Box and Muller's transform of a word's two halves; no value beyond 6.8."""
    word = words(key, index)
    radius = (-2.0 * torch.log((_shifted(word, 32).double() + 0.5) * 2.0**-32)).sqrt()
    return (radius * torch.cos((word & 0xFFFFFFFF).double() * (2.0 * math.pi * 2.0**-32))).to(dtype)


def integers(key: Key, index: Tensor, low: int, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Integers in [low, high); some are likelier than others by at most (high - low) / 2**63."""
    if not low < high:
        raise ValueError(f"integers: expected low < high, got {low} and {high}")
    return (_shifted(words(key, index), 1) % (high - low)).add_(low).to(dtype)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """A logical shift to the right: torch's own keeps the sign."""
    return (word >> bits).bitwise_and_((1 << (64 - bits)) - 1)
