"""What the ranks of a pipeline hold of their stages, at the moments when that may be most.

    held_at(num_ranks=2, microbatches=8, virtual=2)[0]      # of rank 0
    # (Held(at=1, kept=(3, 2), summed=(1, 1)), Held(at=0, kept=(4, 1), summed=(1, 1)))

A rank begins the backward of a microbatch on one of its stages (`at`) while it keeps the activations of so many
microbatches of each of them, and has summed gradients of those that a backward of is over. Between these moments what
it holds rises or falls evenly, however much each stage holds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.program.generators import round_of
from autopar.solve.problem import Array

PERIODS = 3
"""Rounds through all stages after which a schedule repeats itself."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds when it begins a backward on its stage of number `at`, by stage."""

    at: int
    kept: tuple[int, ...]
    """Microbatches whose activations are there."""
    summed: tuple[int, ...]
    """1 where gradients are there, of microbatches before."""


@functools.lru_cache(maxsize=64)
def held_at(num_ranks: int, microbatches: int, virtual: int = 1) -> tuple[tuple[Held, ...], ...]:
    """Of each rank, under 1F1B, interleaved where ranks have several stages; none that others exceed at every stage."""
    return tuple(tuple(worst([*_moments(rank, num_ranks, microbatches, virtual)])) for rank in range(num_ranks))


@functools.lru_cache(maxsize=64)
def fullest(num_ranks: int, microbatches: int, virtual: int = 1) -> tuple[tuple[Held, ...], ...]:
    """Of each rank those of `held_at` that others don't exceed, whichever stage begins a backward."""
    ranks = held_at(num_ranks, microbatches, virtual)
    return tuple(tuple(worst([replace(each, at=0) for each in own])) for own in ranks)


def worst(moments: Sequence[Held]) -> Iterator[Held]:
    """Those that no other one, and no two others together, exceed, of each stage that begins a backward."""
    for at in sorted({each.at for each in moments}, reverse=True):
        own = list({(each.kept, each.summed): each for each in moments if each.at == at}.values())
        sizes = np.array([[*each.kept, *each.summed] for each in own], float)
        left = list(range(len(own)))
        for number in range(len(own)):
            others = [other for other in left if other != number]
            if others and _is_exceeded(sizes[number], sizes[others]):
                left.remove(number)
        yield from (own[number] for number in left)


def _is_exceeded(one: Array, others: Array) -> bool:
    """Whether it is nowhere more than some mean of two others."""
    if (one <= others).all(axis=1).any():
        return True
    for first, last in itertools.combinations(others, 2):
        slope, room = first - last, one - last
        with np.errstate(divide="ignore", invalid="ignore"):
            part = room / slope
        low = np.where(slope > 0, part, -np.inf).max()
        high = np.where(slope < 0, part, np.inf).min()
        if max(low, 0.0) <= min(high, 1.0) and (room[slope == 0] <= 0).all():
            return True
    return False


def _moments(rank: int, num_ranks: int, microbatches: int, virtual: int) -> Iterator[Held]:
    """Wherever a stage's forwards or backwards begin, or those of gradients come to be."""
    total = virtual * microbatches
    size = round_of(num_ranks, microbatches) if virtual > 1 else microbatches
    ahead = (virtual - 1) * size + 2 * (num_ranks - 1 - rank) + 1 if virtual > 1 else num_ranks - rank
    ahead = min(ahead, total)
    upto = min(total, PERIODS * virtual * size)
    turns = [turn for turn in range(upto) if turn % size in (0, 1) or (ahead + turn) % size == 0]
    for turn in sorted({*turns, min(total - ahead, upto - 1), upto - 1}):
        forwards, backwards = min(ahead + turn, total), turn
        done = [_runs(backwards, virtual - 1 - stage, size, virtual) for stage in range(virtual)]
        begun = [_runs(forwards, stage, size, virtual) for stage in range(virtual)]
        kept = tuple(more - less for more, less in zip(begun, done, strict=True))
        yield Held(virtual - 1 - turn // size % virtual, kept, tuple(int(count > 0) for count in done))


def _runs(actions: int, chunk: int, size: int, virtual: int) -> int:
    """How many of the first so many actions are of the chunk that comes in that place in each round."""
    rounds, rest = divmod(actions, size * virtual)
    return rounds * size + min(max(rest - chunk * size, 0), size)
