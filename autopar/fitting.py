"""Plans that fit: the solver's limits, corrected by what the accountant finds when a plan is lowered.

    found = Fitting(built, capacity, lowered).fastest(bound)

The solver's rows don't see the working set of the moment. So each plan is lowered and counted, and what was unseen of
it is taken off the limits before the next solve, until a plan fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from autopar.solve.build import BuiltProblem
from autopar.solve.held import least_memory
from autopar.solve.layers_apart import solve_modes
from autopar.solve.problem import Problem, Solution, evaluate

GAP = 1e-3

TRIES = 4
"""How often a limit is tightened after the accountant found more than the solver's rows."""

ROOM = 0.02
"""Share of the memory that is left unused without a look at whether less could be computed again."""

STEP = 0.005
"""Share of the memory by which a limit is tightened beyond what was unseen, so that the next plan differs; twice as
much each time, since the peak may fall by less than what the limit counts."""


class Lowered(Protocol):
    """What is asked of a lowered plan: the solution behind it, and its peak on each stage."""

    @property
    def solution(self) -> Solution: ...
    @property
    def peaks(self) -> list[int]: ...
    @property
    def num_recomputed(self) -> int: ...


Found = TypeVar("Found", bound=Lowered)


@dataclass(slots=True)
class Fitting(Generic[Found]):
    """A built problem, the bytes of a device, and how a solution becomes a plan."""

    built: BuiltProblem
    capacity: float
    lowered: Callable[[Solution], Found]
    solve: Callable[[Problem], Solution]
    """The best solution of the built problem under other limits or weights."""
    room: float = 0.0
    """Bytes that the first limits leave to what they don't see; the solver's bound is then for so much less memory."""
    smallest: Solution | None = None
    """What holds least, once that was asked for."""
    proven: float = math.inf
    """What no plan that fits beats, by the limits themselves: tighter ones leave room to what one plan needs."""

    def fastest(self, bound: float) -> Found | None:
        """The fastest that the accountant finds to fit; None where none comes up: then see `smallest`.

        What holds least also tells how far the limits are from what a lean plan really needs. `bound` (seconds) holds
        for every plan.
        """
        stages = 1 + max(self.built.limit_ranks)
        for unseen in sorted({self.room, 0.0}, reverse=True):
            found = self._fitting([unseen] * stages)
            if found is not None:
                return found
        self.smallest = self._least(max(bound, self.proven) if math.isfinite(self.proven) else bound)
        if self.smallest is None or self.held(self.smallest) > self.capacity:
            return None
        smallest = self.lowered(self.smallest)
        if not self.fits(smallest):
            return None
        found = self._fitting(self._unseen(smallest))
        return found if found is not None else self._loosened(smallest)

    def fits(self, found: Found) -> bool:
        """Whether every stage's peak is within the memory."""
        return max(found.peaks) <= self.capacity

    def _fitting(self, unseen: list[float]) -> Found | None:
        """Solved again and again, the limits less what they didn't see (`unseen` bytes a stage) of the plan before."""
        solvable = unseen
        more = STEP * self.capacity
        for _ in range(TRIES):
            solution = self.solve(self._limited(unseen))
            if not any(unseen):
                self.proven = min(self.proven, solution.bound)
            if not solution.choice and unseen is solvable:
                return None
            if not solution.choice:
                unseen = [(a + b) / 2 for a, b in zip(solvable, unseen, strict=True)]
                continue
            solvable = unseen
            for _ in range(1 + self.built.has_modes):  # a second time with the same layouts, which is quick
                solution = solve_modes(self.built, self._limited(unseen), solution)
                if not solution.choice:
                    break
                bound = self.proven if math.isfinite(self.proven) else solution.bound
                found = self.lowered(replace(solution, bound=min(bound, solution.objective)))
                if self.fits(found):
                    return self._loosened(found)
                unseen, more = self._unseen(found, more), 2 * more
        return None

    def _loosened(self, found: Found) -> Found:
        """A plan that fits, with less computed again in the room that it leaves."""
        if not found.num_recomputed or max(found.peaks) > (1 - ROOM) * self.capacity:
            return found
        limited = self._limited(self._unseen(found, STEP * self.capacity))
        solution = solve_modes(self.built, limited, found.solution)
        if not solution.choice or solution.objective >= found.solution.objective:
            return found
        looser = self.lowered(solution)
        is_better = self.fits(looser) and looser.solution.objective < found.solution.objective
        return looser if is_better else found

    def held(self, solution: Solution) -> float:
        """Bytes that the limits count of a solution, on the stage that holds most: no plan of it needs less."""
        return max(evaluate(self.built.problem, solution.choice).usage)

    def _least(self, bound: float) -> Solution | None:
        """The solution that holds least; twice the time, at the least `bound`, weighs as a tenth of the memory."""
        bytes_per_s = 0.1 * self.capacity / max(bound, 1e-12)
        solution = self.solve(least_memory(self.built.problem, bytes_per_s))
        if not solution.choice:
            return None
        objective = evaluate(self.built.problem, solution.choice).objective
        return replace(solution, objective=objective, bound=bound)

    def _limited(self, unseen: Sequence[float]) -> Problem:
        """The problem with `unseen` bytes of each stage already used."""
        problem = self.built.problem
        pairs = zip(problem.limits, self.built.limit_ranks, strict=True)
        return replace(problem, limits=tuple(replace(limit, constant=unseen[stage]) for limit, stage in pairs))

    def _unseen(self, found: Found, more: float = 0.0) -> list[float]:
        """What the accountant counts of a plan at its peak on each stage, beyond what the limits count; and `more`."""
        counted = [0.0] * len(found.peaks)
        usage = evaluate(self.built.problem, found.solution.choice).usage
        for stage, used in zip(self.built.limit_ranks, usage, strict=True):
            counted[stage] = max(counted[stage], used)
        return [max(0.0, peak - used) + more for peak, used in zip(found.peaks, counted, strict=True)]
