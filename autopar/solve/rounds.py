"""The second level where a rank has several stages: which layers form which, so that rounds are short.

    cut = RoundCuts(layers, num_ranks=4).cut(virtual=2, microbatches=16, capacity=80e9)
    cut.counts          # layers of each of the eight stages

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

TINY = 1e-30


@dataclass(frozen=True, slots=True)
class RoundCut:
    """Layers of each stage, the point of each layer, and seconds of a step; infinite where it doesn't fit."""

    counts: tuple[int, ...]
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

    def cut(self, virtual: int, microbatches: int, capacity: float) -> RoundCut:
        """The best for `virtual` stages a rank; there are at least as many layers as stages."""
        ends = self._ends(virtual)
        counts = tuple(end - start for start, end in itertools.pairwise((0, *ends)))
        held = in_flight_of(self.num_ranks, microbatches, virtual)
        points = [0] * len(self.layers)
        fit = [self._fit(rank, counts, held, capacity, points) for rank in range(self.num_ranks)]
        seconds = self.step_s(counts, points, microbatches)
        return RoundCut(counts, tuple(points), seconds if all(fit) else math.inf)

    def step_s(self, counts: Sequence[int], points: Sequence[int], microbatches: int) -> float:
        """Seconds of a step."""
        stage_s = []
        for start, end in itertools.pairwise((0, *itertools.accumulate(counts))):
            own = [self.layers[i].points[points[i]].seconds for i in range(start, end)]
            own += [self.layers[start].begin_seconds] * (start > 0)
            own += [self.layers[end - 1].cut_seconds] * (end < len(self.layers))
            stage_s.append(math.fsum(own))
        virtual = len(counts) // self.num_ranks
        rounds = (max(stage_s[at : at + self.num_ranks]) for at in range(0, len(counts), self.num_ranks))
        return (microbatches - 1 / virtual) * math.fsum(rounds) + math.fsum(stage_s) / virtual

    # -- time ----------------------------------------------------------------------------------------------------
    def _ends(self, virtual: int) -> list[int]:
        """The end of each stage: the least sum of rounds, each cut so that its slowest stage is fastest."""
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
        return sorted(ends)

    def _ends_within(self, start: int, end: int) -> list[int]:
        found = [end]
        for split in reversed(self._splits):
            end = int(split[start, end])
            found.append(end)
        return found

    def _round_seconds(self) -> Array:
        if self._rounds is None:
            one = fastest_seconds(self.layers)
            self._rounds = one
            for _ in range(self.num_ranks - 1):
                self._rounds, split = _joined(self._rounds, one)
                self._splits.append(split)
        return self._rounds

    # -- memory --------------------------------------------------------------------------------------------------
    def _fit(self, rank: int, counts: Sequence[int], held: Sequence[int], capacity: float, points: list[int]) -> bool:
        """Takes leaner points on a rank, the cheapest bytes first, until it fits; whether it does."""
        times = [held[stage] for stage, count in enumerate(counts) for _ in range(count)]
        stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
        own = [i for i, stage in enumerate(stage_of) if stage % self.num_ranks == rank]
        used = math.fsum(_bytes(self.layers[i], 0, times[i]) for i in own)
        leaner = [price for i in own if (price := self._price(i, 0, times[i])) is not None]
        heapq.heapify(leaner)
        while used > capacity and leaner:
            _, i, point = heapq.heappop(leaner)
            used += _bytes(self.layers[i], point, times[i]) - _bytes(self.layers[i], points[i], times[i])
            points[i] = point
            if (price := self._price(i, point, times[i])) is not None:
                heapq.heappush(leaner, price)
        return used <= capacity

    def _price(self, i: int, point: int, times: int) -> tuple[float, int, int] | None:
        """Seconds a byte of a layer's next point, the layer and the point."""
        layer = self.layers[i]
        if point + 1 >= len(layer.points):
            return None
        saved = _bytes(layer, point, times) - _bytes(layer, point + 1, times)
        more_s = layer.points[point + 1].seconds - layer.points[point].seconds
        return (more_s / saved, i, point + 1) if saved > 0 else None


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


def _bytes(layer: Layer, point: int, times: int) -> float:
    own = layer.points[point]
    return own.static_bytes + times * own.saved_bytes


def _joined(first: Array, last: Array) -> tuple[Array, Index]:
    """[start, end]: the least slowest of two neighbours, and where the second begins."""
    slowest = np.maximum(first[:, :, None], last[None, :, :])
    split = slowest.argmin(axis=1)
    return np.take_along_axis(slowest, split[:, None, :], axis=1)[:, 0, :], split
