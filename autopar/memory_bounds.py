"""What a step of a pipeline takes at least within the memory of its ranks, from what its units take and hold at least.

    bounds = MemoryBounds(num_ranks, microbatches, capacity, cuts_s, counts)
    bounds.seconds(units, enough=14.9)      # no plan takes less; only until it is that much

For each number of stages a rank, a linear program puts the units on stages: what a stage takes and holds costs at least
what its units do at each of the prices, a step takes what `solve.ranks` says, and a rank's stages together hold no more
than there is, when it may hold most. Equal layers are in the same layouts, so what they do once a step is the same, and
what they hold whatever is in flight; what is computed again each decides for itself.

The bound needs no trust in the linear solver: it is what the program's dual prices prove, made to add up exactly.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ortools.math_opt.python import mathopt

from autopar.solve.in_flight import Held, fullest, held_at
from autopar.solve.linear import Rows, program
from autopar.solve.problem import Array
from autopar.unit_bounds import Least, Prices, UnitBounds

EXCESS = 100.0
"""What more memory than there is costs in the linear programs, so that they have solutions: steps for all of it."""

SCARCE = 0.006
"""Of a microbatch's time, what all of a rank's memory is worth at the first prices that are looked at."""

MOST_PRICES, TELLS = 4, 1e-3
"""How many prices of memory are looked at, and by which part a further look must raise the bound."""

CLOSE = 0.02
"""By which part prices of memory differ that tell the same."""

Known = Sequence[tuple[Prices, Least]]
"""What units take at least at some prices."""

SIZE = len(Prices())

ALIKE = [1, 2, 3]
"""Those of `Prices` that hang on layouts alone: once a step, at rest, gradients."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """Seconds of a step, and the prices of what its stages take and hold, all together."""

    seconds: float
    prices: Prices


@dataclass(frozen=True, slots=True)
class MemoryBounds:
    """Of one mesh."""

    num_ranks: int
    microbatches: int
    capacity: float
    """Bytes of a rank."""
    cuts_s: Sequence[tuple[float, float]]
    """See `Bounds.cuts_s`."""
    counts: Mapping[int, Sequence[int]]
    """Units of each stage, by the number of stages a rank."""

    def seconds(self, units: UnitBounds, enough: float, with_across: bool = True) -> float:
        """What a step takes at least; what units take is asked for at more and more prices, for as long as that tells
        more and `enough` seconds aren't proven; `with_across`: see `UnitBounds.least`."""
        least = functools.partial(units.least, with_across=with_across)
        time_alone = Prices(once=1 / self.microbatches)
        known = [(prices, least(prices)) for prices in (time_alone, Prices())]
        groups = units.groups()
        found = self._least(known, groups)
        if found.seconds >= enough:
            return found.seconds
        prices, is_halved = self._scarce(SCARCE * known[0][1].whole / self.capacity), False
        for number in range(MOST_PRICES):
            known.append((prices, least(prices)))
            before, found = found, self._least(known, groups)
            tells_less = number > 0 and found.seconds < before.seconds * (1 + TELLS)
            is_close = abs(found.prices.rest - prices.rest) <= CLOSE * prices.rest
            if found.seconds >= enough or not found.prices.rest or (tells_less and (is_halved or not is_close)):
                break
            is_halved = is_close and number > 0
            prices = _half_way(found.prices, known) if is_halved else found.prices
        if found.seconds < enough:
            rest = found.prices.rest
            nearest = min(range(len(known)), key=lambda number: abs(known[number][0].rest - rest))
            at, without = known[nearest]
            known[nearest] = at, units.with_ends(without, at)
            found = self._least(known, groups)
        return found.seconds

    def _scarce(self, byte_s: float) -> Prices:
        """Where each byte of a rank is worth so many seconds of a microbatch."""
        has_gradients = self.microbatches > self.num_ranks  # beside all activations, on all ranks
        return Prices(1.0, 1 / self.microbatches, byte_s, byte_s * has_gradients, byte_s * self.num_ranks, byte_s)

    def _least(self, known: Known, groups: Sequence[int]) -> Bounded:
        """The least of all numbers of stages."""
        found = (_Cut(self, counts, known, groups).bounded() for counts in self.counts.values())
        return min(found, key=lambda each: each.seconds)


def _half_way(prices: Prices, known: Known) -> Prices:
    """Between `prices`, which are known, and the next lower ones: the program's solution mixes what is best at
    both, which at prices between them may cost more."""
    lower = max((each.rest for each, _ in known if each.rest < (1 - CLOSE) * prices.rest), default=0.0)
    part = (1 + lower / prices.rest) / 2 if prices.rest else 1.0
    return Prices(*prices[:2], *(part * each for each in prices[2:]))


def _of_stages(counts: Sequence[int], known: Known) -> Array:
    """[known, stage]: what a stage costs at least at its prices."""
    ends = list(itertools.accumulate(counts))
    return np.array([[least.alike(end - n, end) for n, end in zip(counts, ends, strict=True)] for _, least in known])


class _Cut:
    """One cut: variables are what each stage takes and holds (`Prices`), without what the units of a group have alike;
    that, by group; the slowest stages of each round (each microbatch, once a step); and what each rank holds in excess;
    in units of their own, so that all are near 1."""

    def __init__(self, of: MemoryBounds, counts: Sequence[int], known: Known, groups: Sequence[int]) -> None:
        self.of, self.prices, self.least = of, np.array([prices for prices, _ in known]), _of_stages(counts, known)
        self.stages, self.virtual = len(counts), len(counts) // of.num_ranks
        self.moments = list(self._moments())
        self.cuts_s = self._cuts_s(counts)
        ends = list(itertools.accumulate(counts))
        own = [groups[end - count : end] for count, end in zip(counts, ends, strict=True)]
        self.alike = np.array([[each.count(group) for group in range(max(groups) + 1)] for each in own])
        """[stage, group]: units."""
        self.has_others = [-1 in each for each in own]
        self.step_s = float(self.least[0].sum()) * of.microbatches / of.num_ranks
        second, byte = float(self.least[0].sum()) / self.stages, of.capacity / self.virtual
        self.unit = np.array([second, second * of.microbatches, byte, byte, byte / of.num_ranks, byte])
        self.byte_s = EXCESS * self.step_s / of.capacity

    def _cuts_s(self, counts: Sequence[int]) -> Array:
        """What its cuts cost each stage."""
        ends = list(itertools.accumulate(counts))
        begin_s = [0.0, *(self.of.cuts_s[end - 1][0] for end in ends[:-1])]
        end_s = [*(self.of.cuts_s[end - 1][1] for end in ends[:-1]), 0.0]
        return np.add(begin_s, end_s)

    def _moments(self) -> Iterator[tuple[int, Array]]:
        """Each rank, and how often what each of its stages holds (`Prices`) is there, when that may be most; and at the
        widest op after the blocks, when what it kept of the microbatch may be gone."""
        size = self.of.num_ranks, self.of.microbatches, self.virtual
        for rank, moments in enumerate(fullest(*size)):
            yield from ((rank, _holds(held)) for held in moments)
        last = self.virtual - 1
        for held in held_at(*size)[-1]:
            if held.at == last:
                holds = _holds(held)
                holds[last, 4:] = holds[last, 4] - 1, 1.0
                yield self.of.num_ranks - 1, holds

    def bounded(self) -> Bounded:
        rounds, ranks, steady = self.virtual, self.of.num_ranks, self.of.microbatches - 1 / self.virtual
        slowest = SIZE * (self.stages + self.alike.shape[1])
        excess = slowest + 2 * rounds
        rows, unit, each = Rows(), self.unit, np.eye(SIZE)
        for stage in range(self.stages):
            its_round = slowest + 2 * (stage // ranks)
            rows.add_least([(its_round, 1.0), *self._of_stage(stage, -each[0])], self.cuts_s[stage] / unit[0])
            rows.add_least([(its_round + 1, 1.0), *self._of_stage(stage, -each[1])], 0.0)
            for prices, least in zip(self._prices_of(stage), self.least[:, stage], strict=True):
                rows.add_least([*self._of_stage(stage, prices * unit / unit[0])], least / unit[0])
        for rank, holds in self.moments:
            used = dict[int, float]()
            for at, own in enumerate(holds):
                for column, value in self._of_stage(rank + ranks * at, own * unit / unit[2]):
                    used[column] = used.get(column, 0.0) - value
            rows.add_least([*used.items(), (excess + rank, 1.0)], -self.of.capacity / unit[2])
        objective = np.zeros(excess + ranks)
        objective[0 : SIZE * self.stages : SIZE] = 1 / self.virtual
        objective[slowest:excess:2] = steady
        objective[slowest + 1 : excess : 2] = unit[1] / unit[0]
        objective[excess:] = self.byte_s * unit[2] / unit[0]
        result = mathopt.solve(
            mathopt.Model.from_model_proto(program(rows, objective, [0.0] * len(objective))), mathopt.SolverType.GLOP
        )
        duals = np.fromiter(result.dual_values().values(), float) if result.has_dual_feasible_solution() else None
        return self._proven(np.zeros(len(rows.lower)) if duals is None else np.maximum(duals, 0.0))

    def _of_stage(self, stage: int, factors: Array) -> Iterator[tuple[int, float]]:
        """The variables of what a stage takes and holds, each `factors` times."""
        for kind in np.flatnonzero(factors):
            if kind not in ALIKE or self.has_others[stage]:
                yield SIZE * stage + int(kind), float(factors[kind])
            if kind in ALIKE:
                for group in np.flatnonzero(self.alike[stage]):
                    yield SIZE * (self.stages + int(group)) + int(kind), float(factors[kind] * self.alike[stage, group])

    def _proven(self, duals: Array) -> Bounded:
        """The bound that follows from dual prices: of what each stage takes and holds by these, as much as the known
        costs account for."""
        of, known = self.of, len(self.least)
        by_stage = duals[: (2 + known) * self.stages].reshape(self.stages, 2 + known)
        per_byte = duals[(2 + known) * self.stages :] * self.unit[0] / self.unit[2]
        worths = np.zeros((self.stages, SIZE))
        worths[:, 0] = _shares(by_stage[:, 0], of.num_ranks) * (of.microbatches - 1 / self.virtual) + 1 / self.virtual
        worths[:, 1] = _shares(by_stage[:, 1], of.num_ranks)
        for (rank, holds), byte_s in zip(self.moments, per_byte, strict=True):
            worths[rank :: of.num_ranks] += byte_s * holds
        total = float(self.cuts_s @ worths[:, 0]) - float(per_byte.sum()) * of.capacity
        total += self._accounted(worths, by_stage[:, 2:])
        return Bounded(total, _usual(worths))

    def _accounted(self, worths: Array, parts: Array) -> float:
        """What stages cost at least at their worths: the known prices, in about such parts, add up to no more; of what
        the units of a group have alike on all stages together."""
        left, shared, total = worths.copy(), self.alike.T @ worths, 0.0
        for stage in range(self.stages):
            own = [kind for kind in range(SIZE) if kind not in ALIKE or self.has_others[stage]]
            counts, prices = self.alike[stage], self._prices_of(stage)
            for number in np.argsort(-parts[stage] * self.least[:, stage]):
                price, common = prices[number], np.outer(counts, prices[number])[:, ALIKE]
                limits = [left[stage, kind] / price[kind] for kind in own if price[kind] > 0]
                limits += (shared[:, ALIKE][common > 0] / common[common > 0]).tolist()
                part = max(0.0, min(float(parts[stage, number]), *limits))
                left[stage, own] -= part * price[own]
                shared[:, ALIKE] -= part * common
                total += part * float(self.least[number, stage])
        return total

    def _prices_of(self, stage: int) -> Array:
        """The known prices; what is after the blocks is on the last stage alone."""
        is_last = stage == self.stages - 1
        prices: Array = self.prices * np.array([1.0] * (SIZE - 1) + [float(is_last)])
        return prices


def _usual(worths: Array) -> Prices:
    """Prices like those of many stages; gradients only where they count on all stages that lack memory."""
    whole, scarce = worths.sum(axis=0), worths[worths[:, 2] > 0]
    byte = whole[2] / whole[0]
    if not len(scarce):
        return Prices(1.0, float(whole[1] / whole[0]))
    gradients, kept, widest = (scarce[:, kind] / scarce[:, 2] for kind in (3, 4, 5))
    each = (1.0, whole[1] / whole[0], byte, byte * gradients.min(), byte * np.median(kept), byte * widest.max())
    return Prices(*map(float, each))


def _holds(held: Held) -> Array:
    """[number of the stage on its rank, `Prices`]: how often each is there at a moment."""
    pairs = zip(held.summed, held.kept, strict=True)
    return np.array([[0.0, 0.0, 1.0, summed, kept, 0.0] for summed, kept in pairs])


def _shares(duals: Array, num_ranks: int) -> Array:
    """Those of the stages of each round, made to add up to 1."""
    rounds = duals.reshape(-1, num_ranks) + 1e-300
    shares: Array = (rounds / rounds.sum(axis=1, keepdims=True)).reshape(-1)
    return shares
