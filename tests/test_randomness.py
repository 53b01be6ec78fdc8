"""The counter-based generator: known words, independence of the split, and its statistics."""

from __future__ import annotations

import pytest
import torch

from autopar.randomness import bernoulli, integers, microbatch_key, normal, stream_key, uniform, words

N = 1 << 18
INDEX = torch.arange(N)
BOUND = 5 / N**0.5
"""Five standard errors of a mean of N values of variance 1."""


def test_with_a_zero_second_key_the_words_are_splitmix64() -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # seed 0
    got = words((0, 0), torch.arange(1, 4))
    assert [int(word) % 2**64 for word in got] == published


def test_a_shard_draws_its_part_of_the_whole() -> None:
    key, index = stream_key(1, 2, 3), INDEX.view(512, 512)
    for draw in (words, uniform, normal, lambda k, i: bernoulli(k, i, 0.1), lambda k, i: integers(k, i, -3, 9)):
        assert torch.equal(draw(key, index)[100:200, 7::2], draw(key, index[100:200, 7::2]))


def test_every_part_of_the_key_and_their_order_matters() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 0), (-1, 0, 0)]
    assert len({stream_key(*parts) for parts in keys}) == len(keys)
    assert microbatch_key(1, 2, 3) == stream_key(1, 2, 3)[0]
    torch.tensor([microbatch_key(seed, 0, 0) for seed in range(100)])  # all are int64


def test_moments() -> None:
    key = stream_key(3, 1)
    u, z = uniform(key, INDEX, torch.float64), normal(key, INDEX, torch.float64)
    assert abs(u.mean() - 0.5) < BOUND and abs(u.var() - 1 / 12) < BOUND and u.min() >= 0 and u.max() < 1
    assert abs(z.mean()) < BOUND and abs(z.var() - 1) < 2 * BOUND and abs((z**4).mean() - 3) < 10 * BOUND
    for p in (0.0, 0.1, 0.5, 1.0):
        mean = bernoulli(key, INDEX, p).double().mean()
        assert abs(mean - p) <= BOUND * (p * (1 - p)) ** 0.5


@pytest.mark.parametrize("other", [(3, 2), (4, 1)], ids=["next op", "next seed"])
def test_streams_are_uncorrelated(other: tuple[int, int]) -> None:
    a, b = (normal(stream_key(*key), INDEX, torch.float64) for key in ((3, 1), other))
    assert abs((a * b).mean()) < BOUND
    assert all(abs((a[lag:] * a[:-lag]).mean()) < 1.1 * BOUND for lag in (1, 2, 64, 1024))


def test_low_precision_never_reaches_one() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert uniform(stream_key(0), INDEX, dtype).max() < 1


def test_integers_are_all_as_likely() -> None:
    drawn = integers(stream_key(0), INDEX, -2, 3, torch.int32)
    assert drawn.dtype == torch.int32 and drawn.unique().tolist() == [-2, -1, 0, 1, 2]
    shares = drawn.long().add(2).bincount() / N
    assert (shares - 0.2).abs().max() < BOUND


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="lies in"):
        bernoulli(stream_key(0), INDEX, 1.5)
    with pytest.raises(ValueError, match=r"got torch\.int64"):
        uniform(stream_key(0), INDEX, torch.int64)
    with pytest.raises(ValueError, match="low < high"):
        integers(stream_key(0), INDEX, 2, 2)
