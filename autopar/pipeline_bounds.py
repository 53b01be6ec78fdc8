"""What a step of a pipeline takes at least within its memory, from what its units take at least.

    bound = PipelineBounds(num_ranks, microbatches, capacity, cuts_s, through_s, counts)
    bound.least_s([Priced(least)])                                      # without memory
    bound.least_s([Priced(least), Priced(dearer, byte_s=1e-12)])

Where each byte that a unit holds costs some seconds, units take longer, and no stage takes less than its units do
without what all of the memory is worth: what fits holds no more (Lagrangian duality).

With M microbatches, v stages a rank and t' = t + (what is done once a step) / M, a step takes at least

    (M - 1/v) * (sum over rounds of the slowest stage's t') + (sum over stages of t) / v

since what is done once a step is waited for round by round, too (`solve.ranks`). The sum over rounds is no less than
what any one rank has of it. With one stage a rank that bounds every cut, with several the cuts of `solve.rounds`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ortools.math_opt.python import mathopt

from autopar.solve.problem import TOLERANCE, Array
from autopar.solve.ranks import in_flight_of
from autopar.solve.stages import Layer, Point, fastest_seconds
from autopar.unit_bounds import Least


@dataclass(frozen=True, slots=True)
class Priced:
    """What units take at least where each byte that they hold costs `byte_s` seconds of a microbatch, as many
    microbatches being in flight as on the first of all ranks with one stage each."""

    least: Least
    byte_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PipelineBounds:
    """Of one mesh."""

    num_ranks: int
    microbatches: int
    capacity: float
    cuts_s: Sequence[tuple[float, float]]
    """See `Bounds.cuts_s`."""
    through_s: float
    """Of all units, in the microbatch that fills the pipeline."""
    counts: Mapping[int, Sequence[int]]
    """Units of each stage, by the number of stages a rank; none with one, where any cut may be."""

    def least_s(self, known: Sequence[Priced]) -> float:
        """Seconds of a step; the first of `known` is without a price."""
        stages = [stages_s(priced.least, self.cuts_s) for priced in known]
        return min(
            self._with(virtual, self._once(known, stages) if virtual == 1 else self._rounds(known, stages, counts))
            for virtual, counts in self.counts.items()
        )

    def _with(self, virtual: int, rounds_s: float) -> float:
        cut_s = min(map(sum, self.cuts_s), default=0.0)
        filled_s = self.through_s + (self.num_ranks * virtual - 1) * cut_s
        return (self.microbatches - 1 / virtual) * rounds_s + filled_s / virtual

    def _once(self, known: Sequence[Priced], stages: Sequence[Array]) -> float:
        """The least slowest stage of all cuts into one a rank."""
        in_flight = in_flight_of(self.num_ranks, self.microbatches)
        reach = np.full(len(stages[0]), -np.inf)
        reach[1:] = np.inf
        for held in in_flight:
            part = held / in_flight[0]
            own = [
                self._within(stages[0], priced, stage_s, part) for priced, stage_s in zip(known, stages, strict=True)
            ]
            reach = np.maximum(reach[:, None], np.maximum.reduce(own)).min(axis=0)
        return float(reach[-1])

    def _within(self, free_s: Array, priced: Priced, stage_s: Array, part: float) -> Array:
        """Seconds of stages that hold `part` as many microbatches as are priced.

        What holds so much less is priced too high by `stage_s`: the memory is worth more there, or (what units take at
        least is concave in what they hold) a mean of both prices holds."""
        worth_s = priced.byte_s * self.capacity
        if part == 1.0:
            return stage_s - worth_s
        most: Array = np.maximum(stage_s - worth_s / part, part * stage_s + (1 - part) * free_s - worth_s)
        return most

    def _rounds(self, known: Sequence[Priced], stages: Sequence[Array], counts: Sequence[int]) -> float:
        """The least sum of the slowest stages of the rounds of a cut: a linear program of the seconds and bytes of each
        stage."""
        spans = list(itertools.pairwise((0, *itertools.accumulate(counts))))
        held = in_flight_of(self.num_ranks, self.microbatches, len(counts) // self.num_ranks)
        free_s = [float(stages[0][span]) for span in spans]
        longest = [max(free_s[at : at + self.num_ranks]) for at in range(0, len(spans), self.num_ranks)]
        if len(known) == 1:
            return sum(longest)
        program = mathopt.Model()
        rounds = [program.add_variable(lb=each) for each in longest]
        room = [mathopt.LinearSum([]) for _ in range(self.num_ranks)]
        most = in_flight_of(self.num_ranks, self.microbatches)[0]
        for stage, span in enumerate(spans):
            seconds, part = program.add_variable(lb=free_s[stage]), min(1.0, held[stage] / most)
            memory = program.add_variable(lb=0.0)  # in parts of the capacity
            program.add_linear_constraint(seconds <= rounds[stage // self.num_ranks])
            room[stage % self.num_ranks] += memory
            for priced, stage_s in zip(known[1:], stages[1:], strict=True):
                worth_s, least = priced.byte_s * self.capacity, float(stage_s[span])
                program.add_linear_constraint(seconds + worth_s / part * memory >= least)
                program.add_linear_constraint(seconds + worth_s * memory >= part * least + (1 - part) * free_s[stage])
        for held_there in room:
            program.add_linear_constraint(held_there <= 1.0)
        program.minimize(mathopt.LinearSum(rounds))
        result = mathopt.solve(program, mathopt.SolverType.GLOP)
        if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
            return sum(longest)
        return max(sum(longest), float(result.objective_value()) * (1 - TOLERANCE))


def stages_s(least: Least, cuts_s: Sequence[tuple[float, float]]) -> Array:
    """[start, end]: seconds of a stage with the units start..end-1, and of its cuts; infinite where there are none."""
    found = fastest_seconds(as_layers(least, cuts_s))
    joined = np.cumsum([0.0, *least.joined])
    of_first = joined[np.minimum(np.arange(len(found)), len(joined) - 1)]
    upto_last = joined[np.clip(np.arange(len(found)) - 1, 0, len(joined) - 1)]
    both: Array = found + (upto_last[None, :] - of_first[:, None])
    return both


def as_layers(least: Least, cuts_s: Sequence[tuple[float, float]]) -> list[Layer]:
    """Units, each by itself, with what cuts after them cost."""
    begin, end = (0.0, *(after for after, _ in cuts_s)), (*(before for _, before in cuts_s), 0.0)
    units = zip(least.seconds, begin, end, strict=True)
    return [Layer((Point(seconds),), after, before) for seconds, before, after in units]
