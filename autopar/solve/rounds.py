"""The second level where a rank has several stages: which layers form which, so that rounds are short.

    found = RoundCuts(layers, num_ranks=4).counts(virtual=2, microbatches=16)   # layers of each of the eight stages
    fitted = fit_rounds(layers, found.counts, num_ranks=4, microbatches=16, capacity=80e9)

With v stages a rank a step takes what `solve.ranks` says. Memory is a rank's, all of its stages together, and these
lie far apart in the model: so the cut is by time first, and what is computed again is chosen afterwards, rank by rank.

Invariants:
- stages are contiguous, in order, and none is empty; layers take their fastest points where these fit;
- no cut has much shorter rounds (`EVEN`) at the fastest points; of leaner points, those that save most bytes for each
  second by which a round gets longer are taken first.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.solve.in_flight import Held, fullest
from autopar.solve.problem import Array, Index
from autopar.solve.stages import Layer, fastest_seconds
from autopar.solve.waiting import waited_s

EVEN = 1e-3
"""What memory counts beside time: of equally fast cuts the one is best whose ranks hold the least at most."""

APART = (0.0, 0.3)
"""What neighbouring rounds cost more, in parts of their difference, in the cuts that are looked at."""

HONEST = 0.02
"""By which part a simulated step may take longer than is said of it."""

LEAN = 0.5
"""What a stage that is faster than the slowest of its round holds, about, of what it would: the rest it computes again
for nothing."""

MOST_LIMITS = 64
"""On a round's time that are looked at."""

EQUAL = 1e-6
"""Of the slowest layer's time, what is no difference between stages."""

TINY = 1e-30


@dataclass(frozen=True, slots=True)
class RoundCut:
    """The point of each layer, and seconds of a step; infinite where it doesn't fit."""

    points: tuple[int, ...]
    objective: float


@dataclass(frozen=True, slots=True)
class RoundCounts:
    """Layers of each stage; what a step takes by simulation, and by `step_s`, layers being at their fastest points."""

    counts: tuple[int, ...]
    waited_s: float
    said_s: float

    @property
    def is_honest(self) -> bool:
        """Whether ranks don't wait for other rounds than their own, or little."""
        return self.waited_s <= self.said_s * (1 + HONEST)


@dataclass(slots=True)
class RoundCuts:
    """Of some layers on `num_ranks` ranks, for any number of stages a rank."""

    layers: Sequence[Layer]
    num_ranks: int
    _limits: list[float] = field(default_factory=list)
    """What the slowest stage of a round may take."""
    _lengths: list[list[Index]] = field(default_factory=list)
    """By limit and rank, [start, end]: layers of the last of the stages on the ranks up to it."""
    _costs: Array | None = None
    """By limit, [start, end]: what a round costs, time first."""
    _stage_s: Array = field(default_factory=lambda: np.zeros((0, 0)))

    def counts(self, virtual: int, microbatches: int) -> RoundCounts:
        """The cut of which a step takes least, simulated, among those with the least sum of rounds where unlike rounds
        cost more or less; there are at least as many layers as stages."""
        assert len(self.layers) >= virtual * self.num_ranks, (len(self.layers), virtual, self.num_ranks)
        fastest = [0] * len(self.layers)
        found = []
        for apart in APART:
            counts = self._evened(self._cheapest(virtual, apart), microbatches)
            stage_s = _stage_seconds(self.layers, counts, fastest)
            waited = waited_s(stage_s, self.num_ranks, microbatches)
            said = step_s(self.layers, counts, fastest, self.num_ranks, microbatches)
            found.append(RoundCounts(counts, waited, said))
        return min(found, key=lambda each: each.waited_s)

    def _cheapest(self, virtual: int, apart: float) -> list[int]:
        """Layers of each stage, where neighbouring rounds cost `apart` of their difference more."""
        size, costs = len(self.layers), self._rounds()
        more = apart * np.abs(np.subtract.outer(self._limits, self._limits))
        reach, starts, befores = np.full((len(costs), size + 1), np.inf), list[Index](), list[Index]()
        reach[:, 0] = 0.0
        for number in range(virtual):
            ahead = reach[:, None, :] + (more * (number > 0))[:, :, None]  # [limit before, limit, start]
            befores.append(ahead.argmin(axis=0))
            total = ahead.min(axis=0)[:, :, None] + costs
            starts.append(total.argmin(axis=1))
            reach = total.min(axis=1)
        found: list[int] = []
        end, limit = size, int(reach[:, size].argmin())
        for start_of, before in zip(reversed(starts), reversed(befores), strict=True):
            start = int(start_of[limit, end])
            found += self._within(start, end, self._lengths[limit])
            end, limit = start, int(before[limit, start])
        return found[::-1]

    def _within(self, start: int, end: int, lengths: Sequence[Index]) -> Iterator[int]:
        """Layers of the stages of a round, the last first."""
        for of_rank in reversed(lengths):
            length = int(of_rank[start, end])
            yield length
            end -= length

    def _evened(self, counts: list[int], microbatches: int) -> tuple[int, ...]:
        """With a layer less on the rank that holds most for as long as another rank may take it in one of the rounds,
        no round getting longer, and none holds as much then."""
        size = self.num_ranks
        rounds = [counts[at : at + size] for at in range(0, len(counts), size)]
        firsts = [0, *itertools.accumulate(map(sum, rounds))]
        held = [np.array([each.kept for each in own]) for own in fullest(size, microbatches, len(rounds))]
        loads = np.array([self._loads(first, own) for first, own in zip(firsts, rounds, strict=False)])
        while True:
            total = self._fullest(held, loads)
            most = int(total.argmax())
            found = []
            for at, taker in itertools.product(range(len(rounds)), range(size)):
                if moved := self._moved(firsts[at], rounds[at], most, taker):
                    new = loads.copy()
                    new[at] = self._loads(firsts[at], moved)
                    worst = round(float(self._fullest(held, new).max()), 6)
                    found.append((worst, at, taker, moved, new))
            if not found or min(found, key=lambda each: each[:3])[0] >= total[most]:
                return tuple(itertools.chain.from_iterable(rounds))
            _, at, _, rounds[at], loads = min(found, key=lambda each: each[:3])

    def _fullest(self, held: Sequence[Array], loads: Array) -> Array:
        """What each rank holds at most, about: a layer for each microbatch of a stage."""
        return np.array([(moments @ loads[:, rank]).max() for rank, moments in enumerate(held)])

    def _loads(self, first: int, lengths: Sequence[int]) -> list[float]:
        """What each rank holds of a round for each microbatch, in layers."""
        times = self._times(first, lengths)
        return [length * (LEAN if s < max(times) else 1.0) for length, s in zip(lengths, times, strict=True)]

    def _moved(self, first: int, lengths: Sequence[int], giver: int, taker: int) -> list[int]:
        """Of the stages of a round, a layer fewer on one and one more on another; empty where it gets longer."""
        if giver == taker or lengths[giver] == 1:
            return []
        moved = list(lengths)
        moved[giver] -= 1
        moved[taker] += 1
        return moved if max(self._times(first, moved)) <= max(self._times(first, lengths)) else []

    def _times(self, first: int, lengths: Sequence[int]) -> list[float]:
        """Seconds of the stages of a round whose first layer is `first`."""
        ends = itertools.accumulate(lengths, initial=first)
        return [float(self._stage_s[span]) for span in itertools.pairwise(ends)]

    def _rounds(self) -> Array:
        if self._costs is None:
            step = TINY + EQUAL * max(layer.points[0].seconds for layer in self.layers)
            self._stage_s = np.round(fastest_seconds(self.layers) / step) * step
            found, usual = [], len(self.layers) / self.num_ranks
            self._limits = self._possible()
            for limit in self._limits:
                spread, lengths = self._spread(limit)
                self._lengths.append(lengths)
                found.append(limit * (1 + EVEN * spread / (self.num_ranks * usual**2)))
            self._costs = np.array(found)
        return self._costs

    def _possible(self) -> list[float]:
        """Seconds of the slowest stage of a round, not all where there are many."""
        slowest, all_s = _over(self._stage_s, self.num_ranks), float(self._stage_s[0, -1])
        longest = all_s / self.num_ranks + float(self._stage_s.diagonal(1).max())
        limits = np.unique(slowest[slowest <= longest])
        return [float(each) for each in limits[:: -math.ceil(len(limits) / MOST_LIMITS)]]

    def _spread(self, limit: float) -> tuple[Array, list[Index]]:
        """[start, end]: of stages that fit, the least sum of squares of what their ranks hold, in layers; and see
        `_lengths`."""
        size, fits = len(self._stage_s), self._stage_s <= limit
        longest = max(length for length in range(1, size) if fits.diagonal(length).any())
        reach, lengths = np.where(np.eye(size, dtype=bool), 0.0, np.inf), []
        for rank in range(self.num_ranks):
            held = 1 + (self.num_ranks - rank) / self.num_ranks  # as if of three stages
            best, taken = np.full((size, size), np.inf), np.zeros((size, size), np.int64)
            for length in range(1, longest + 1):
                one = np.where(fits.diagonal(length), (held * length) ** 2, np.inf)
                total = reach[:, :-length] + one[None, :]
                better = total < best[:, length:]
                best[:, length:] = np.where(better, total, best[:, length:])
                taken[:, length:] = np.where(better, length, taken[:, length:])
            reach = best
            lengths.append(taken)
        return reach, lengths


def fit_rounds(
    layers: Sequence[Layer], counts: Sequence[int], num_ranks: int, microbatches: int, capacity: float
) -> RoundCut:
    """The points of some layers that are cut, so that each rank has the memory.

    The rank that lacks most comes first: where it makes a round longer, the others have time to spare in that."""
    held = fullest(num_ranks, microbatches, len(counts) // num_ranks)
    fitting = _Fitting(layers, counts, num_ranks, spare_seconds(layers, counts, num_ranks), [0] * len(layers))
    fit = []
    for rank in sorted(range(num_ranks), key=lambda rank: -max(fitting.used(rank, held[rank]))):
        fit.append(fitting.fit(rank, held[rank], capacity))
        fitting.spare_s = spare_seconds(layers, counts, num_ranks, fitting.points)
    seconds = step_s(layers, counts, fitting.points, num_ranks, microbatches)
    return RoundCut(tuple(fitting.points), seconds if all(fit) else math.inf)


def spare_seconds(
    layers: Sequence[Layer], counts: Sequence[int], num_ranks: int, points: Sequence[int] = ()
) -> list[float]:
    """What each stage may take longer than at some points, by default its fastest, and not be the slowest of its
    round."""
    stage_s = _stage_seconds(layers, counts, points or [0] * len(layers))
    rounds = (stage_s[at : at + num_ranks] for at in range(0, len(counts), num_ranks))
    return [max(own) - each for own in rounds for each in own]


def step_s(
    layers: Sequence[Layer], counts: Sequence[int], points: Sequence[int], num_ranks: int, microbatches: int
) -> float:
    """Seconds of a step."""
    stage_s = _stage_seconds(layers, counts, points)
    virtual = len(counts) // num_ranks
    spans = itertools.pairwise((0, *itertools.accumulate(counts)))
    once_s = [math.fsum(layer.once_seconds for layer in layers[start:end]) for start, end in spans]
    rounds, update = (
        math.fsum(max(own[at : at + num_ranks]) for at in range(0, len(counts), num_ranks)) for own in (stage_s, once_s)
    )
    return (microbatches - 1 / virtual) * rounds + math.fsum(stage_s) / virtual + update


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
    num_ranks: int
    spare_s: list[float]
    points: list[int]

    def fit(self, rank: int, moments: Sequence[Held], capacity: float) -> bool:
        """Takes leaner points on the stages of a rank, the cheapest bytes first, until it fits at each of some moments;
        whether it does."""
        place = self._places(rank)
        while True:
            used = self.used(rank, moments)
            most = max(used)
            if most <= capacity:
                return True
            if not self._lean(rank, place, moments[used.index(most)], most - capacity):
                return False

    def used(self, rank: int, moments: Sequence[Held]) -> list[float]:
        """Bytes of a rank at each of some moments."""
        place = self._places(rank)
        return [math.fsum(self._bytes(i, self.points[i], at, held) for i, at in place.items()) for held in moments]

    def _places(self, rank: int) -> dict[int, int]:
        """The layers of a rank, and which of its stages each is on."""
        ends = list(itertools.accumulate(self.counts))
        own = enumerate(range(rank, len(self.counts), self.num_ranks))
        return {i: at for at, stage in own for i in range(ends[stage] - self.counts[stage], ends[stage])}

    def _lean(self, rank: int, place: Mapping[int, int], held: Held, excess: float) -> bool:
        """Saves so many bytes at a moment; `place`: the number on its rank of each layer's stage."""
        leaner = [price for i in place if (price := self._price(i, rank, place[i], held)) is not None]
        heapq.heapify(leaner)
        while excess > 0 and leaner:
            _, i = heapq.heappop(leaner)
            price = self._price(i, rank, place[i], held)
            if price is not None and leaner and price > leaner[0]:  # what was spare is taken by now
                heapq.heappush(leaner, price)
                continue
            excess -= self._take_next(i, rank, place[i], held)
            if (price := self._price(i, rank, place[i], held)) is not None:
                heapq.heappush(leaner, price)
        return excess <= 0

    def _take_next(self, i: int, rank: int, at: int, held: Held) -> float:
        """The bytes that it saves."""
        point, stage = self.points[i], rank + at * self.num_ranks
        self.points[i] += 1
        self.spare_s[stage] = max(0.0, self.spare_s[stage] - self._more_s(i, point))
        return self._bytes(i, point, at, held) - self._bytes(i, point + 1, at, held)

    def _price(self, i: int, rank: int, at: int, held: Held) -> tuple[float, int] | None:
        """Seconds a byte of a layer's next point, and the layer; what is spare costs next to nothing."""
        point = self.points[i]
        if point + 1 >= len(self.layers[i].points):
            return None
        saved = self._bytes(i, point, at, held) - self._bytes(i, point + 1, at, held)
        more_s, spare_s = self._more_s(i, point), self.spare_s[rank + at * self.num_ranks]
        return (max(EVEN * more_s, more_s - spare_s) / saved, i) if saved > 0 else None

    def _more_s(self, i: int, point: int) -> float:
        points = self.layers[i].points
        return points[point + 1].seconds - points[point].seconds

    def _bytes(self, i: int, point: int, at: int, held: Held) -> float:
        own = self.layers[i].points[point]
        beside = own.beside_bytes if held.kept[at] else 0.0
        return own.static_bytes + held.summed[at] * own.gradient_bytes + held.kept[at] * own.saved_bytes + beside


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
