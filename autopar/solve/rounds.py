"""The second level where a rank has several stages: which layers form which, so that rounds are short.

    counts = RoundCuts(layers, num_ranks=4).counts(virtual=2)           # layers of each of the eight stages
    fitted = fit_rounds(layers, counts, num_ranks=4, microbatches=16, capacity=80e9)

With v stages a rank a step takes what `solve.ranks` says. Memory is a rank's, all of its stages together, and these
lie far apart in the model: so the cut is by time alone, and what is computed again is chosen afterwards, rank by rank.

Invariants:
- stages are contiguous, in order, and none is empty; layers take their fastest points where these fit;
- no cut has much shorter rounds (`EVEN`) at the fastest points; of leaner points, those that save most bytes a second
  are taken first.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.solve.problem import Array, Index
from autopar.solve.ranks import in_flight_of
from autopar.solve.stages import Layer, fastest_seconds

EVEN = 1e-3
"""Of a round that is as long as usual, what its being longer costs more than time: of equally fast cuts the one whose
rounds are most alike is best, since memory and the schedule are evener."""

EQUAL = 1e-6
"""Of the slowest layer's time, what is no difference between stages: of equally slow ones the last have more layers,
since their ranks hold fewer microbatches."""

TINY = 1e-30


@dataclass(frozen=True, slots=True)
class RoundCut:
    """The point of each layer, and seconds of a step; infinite where it doesn't fit."""

    points: tuple[int, ...]
    objective: float


@dataclass(slots=True)
class RoundCuts:
    """Of some layers on `num_ranks` ranks, for any number of stages a rank."""

    layers: Sequence[Layer]
    num_ranks: int
    _splits: list[Index] = field(default_factory=list)
    """[start, end]: of some ranks in a round the first layer of the last, for 2, 3, … ranks."""
    _rounds: Array | None = None
    """[start, end]: seconds of the slowest stage of a round."""

    def counts(self, virtual: int) -> tuple[int, ...]:
        """Layers of each stage: the least sum of rounds, each cut so that its slowest stage is fastest; there are at
        least as many layers as stages."""
        size, rounds = len(self.layers), self._round_seconds()
        usual = math.fsum(layer.points[0].seconds for layer in self.layers) / (virtual * self.num_ranks)
        rounds = rounds + EVEN * rounds**2 / max(usual, TINY)
        assert size >= virtual * self.num_ranks, (size, virtual, self.num_ranks)
        reach, starts = np.full(size + 1, np.inf), []
        reach[0] = 0.0
        for _ in range(virtual):
            total = reach[:, None] + rounds
            starts.append(total.argmin(axis=0))
            reach = total.min(axis=0)
        ends, end = [], size
        for round_starts in reversed(starts):
            start = int(round_starts[end])
            ends += self._ends_within(start, end)
            end = start
        return tuple(end - start for start, end in itertools.pairwise((0, *sorted(ends))))

    def _ends_within(self, start: int, end: int) -> list[int]:
        found = [end]
        for split in reversed(self._splits):
            end = int(split[start, end])
            found.append(end)
        return found

    def _round_seconds(self) -> Array:
        if self._rounds is None:
            step = TINY + EQUAL * max(layer.points[0].seconds for layer in self.layers)
            one = np.round(fastest_seconds(self.layers) / step) * step
            self._rounds = one
            for _ in range(self.num_ranks - 1):
                self._rounds, split = _joined(self._rounds, one)
                self._splits.append(split)
        return self._rounds


def fit_rounds(
    layers: Sequence[Layer], counts: Sequence[int], num_ranks: int, microbatches: int, capacity: float
) -> RoundCut:
    """The points of some layers that are cut, so that each rank has the memory."""
    held = in_flight_of(num_ranks, microbatches, len(counts) // num_ranks)
    fitting = _Fitting(layers, counts, held, spare_seconds(layers, counts, num_ranks), [0] * len(layers))
    fit = [fitting.fit(range(rank, len(counts), num_ranks), capacity) for rank in range(num_ranks)]
    seconds = step_s(layers, counts, fitting.points, num_ranks, microbatches)
    return RoundCut(tuple(fitting.points), seconds if all(fit) else math.inf)


def spare_seconds(layers: Sequence[Layer], counts: Sequence[int], num_ranks: int) -> list[float]:
    """What each stage may take longer than at its fastest points without being the slowest of its round."""
    stage_s = _stage_seconds(layers, counts, [0] * len(layers))
    rounds = (stage_s[at : at + num_ranks] for at in range(0, len(counts), num_ranks))
    return [max(own) - each for own in rounds for each in own]


def step_s(
    layers: Sequence[Layer], counts: Sequence[int], points: Sequence[int], num_ranks: int, microbatches: int
) -> float:
    """Seconds of a step."""
    stage_s = _stage_seconds(layers, counts, points)
    virtual = len(counts) // num_ranks
    rounds = (max(stage_s[at : at + num_ranks]) for at in range(0, len(counts), num_ranks))
    return (microbatches - 1 / virtual) * math.fsum(rounds) + math.fsum(stage_s) / virtual


def _stage_seconds(layers: Sequence[Layer], counts: Sequence[int], points: Sequence[int]) -> list[float]:
    stage_s = []
    for start, end in itertools.pairwise((0, *itertools.accumulate(counts))):
        own = [layers[i].points[points[i]].seconds for i in range(start, end)]
        own += [layers[start].begin_seconds] * (start > 0)
        own += [layers[end - 1].cut_seconds] * (end < len(layers))
        stage_s.append(math.fsum(own))
    return stage_s


@dataclass(slots=True)
class _Fitting:
    """Points of layers that are cut, and how much longer each stage may take for nothing."""

    layers: Sequence[Layer]
    counts: Sequence[int]
    held: Sequence[int]
    spare_s: list[float]
    points: list[int]

    def fit(self, stages: Sequence[int], capacity: float) -> bool:
        """Takes leaner points on the stages of a rank, the cheapest bytes first, until it fits; whether it does."""
        firsts = [0, *itertools.accumulate(self.counts)]
        stage_of = {i: stage for stage in stages for i in range(firsts[stage], firsts[stage + 1])}
        used = math.fsum(self._bytes(i, 0, stage) for i, stage in stage_of.items())
        leaner = [price for i, stage in stage_of.items() if (price := self._price(i, stage)) is not None]
        heapq.heapify(leaner)
        while used > capacity and leaner:
            _, i = heapq.heappop(leaner)
            price = self._price(i, stage_of[i])
            if price is not None and leaner and price > leaner[0]:  # what was spare is taken by now
                heapq.heappush(leaner, price)
                continue
            used -= self._take_next(i, stage_of[i])
            if (price := self._price(i, stage_of[i])) is not None:
                heapq.heappush(leaner, price)
        return used <= capacity

    def _take_next(self, i: int, stage: int) -> float:
        """The bytes that it saves."""
        point = self.points[i]
        self.points[i] += 1
        self.spare_s[stage] = max(0.0, self.spare_s[stage] - self._more_s(i, point))
        return self._bytes(i, point, stage) - self._bytes(i, point + 1, stage)

    def _price(self, i: int, stage: int) -> tuple[float, int] | None:
        """Seconds a byte of a layer's next point, and the layer; what is spare costs next to nothing."""
        point = self.points[i]
        if point + 1 >= len(self.layers[i].points):
            return None
        saved, more_s = self._bytes(i, point, stage) - self._bytes(i, point + 1, stage), self._more_s(i, point)
        return (max(EVEN * more_s, more_s - self.spare_s[stage]) / saved, i) if saved > 0 else None

    def _more_s(self, i: int, point: int) -> float:
        points = self.layers[i].points
        return points[point + 1].seconds - points[point].seconds

    def _bytes(self, i: int, point: int, stage: int) -> float:
        own = self.layers[i].points[point]
        return own.static_bytes + self.held[stage] * own.saved_bytes


def least_s(
    stage_s: Array, through_s: float, cut_s: float, num_ranks: int, virtuals: Sequence[int], microbatches: int
) -> float:
    """What a step takes at least, with any of some numbers of stages a rank.

    `stage_s`, [start, end]: seconds of a stage with the layers start..end-1 in each microbatch that is waited for;
    `through_s`: of all layers together in the one that fills the pipeline; `cut_s`: what each cut adds to that."""
    rounds, reach, found = _over(stage_s, num_ranks), np.full(len(stage_s), np.inf), math.inf
    reach[0] = 0.0
    for virtual in range(1, virtuals[-1] + 1):
        reach = (reach[:, None] + rounds).min(axis=0)
        if virtual in virtuals:
            filled_s = through_s + (num_ranks * virtual - 1) * cut_s
            found = min(found, (microbatches - 1 / virtual) * float(reach[-1]) + filled_s / virtual)
    return found


def _over(one: Array, num_ranks: int) -> Array:
    """[start, end]: the least slowest of as many neighbours, by halves."""
    if num_ranks == 1:
        return one
    half = _over(one, num_ranks // 2)
    both = _slowest(half, half)
    return _slowest(both, one) if num_ranks % 2 else both


def _slowest(first: Array, last: Array) -> Array:
    least: Array = np.maximum(first[:, :, None], last[None, :, :]).min(axis=1)
    return least


def _joined(first: Array, last: Array) -> tuple[Array, Index]:
    """[start, end]: the least slowest of two neighbours, and where the second begins."""
    slowest = np.maximum(first[:, :, None], last[None, :, :])
    split = slowest.argmin(axis=1)
    return np.take_along_axis(slowest, split[:, None, :], axis=1)[:, 0, :], split
