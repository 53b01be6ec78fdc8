"""What a step of a pipeline takes at least, from what its units take at least.

    PipelineBounds(num_ranks, microbatches, cuts_s, through_s, counts).least_s(least)       # seconds

With M microbatches, v stages a rank and t' = t + (what is done once a step) / M, a step takes at least

    (M - 1/v) * (sum over rounds of the slowest stage's t') + (sum over stages of t) / v

since what is done once a step is waited for round by round, too (`solve.ranks`). With one stage a rank that bounds
every cut, with several the cuts that are looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solve.problem import Array
from autopar.solve.stages import Layer, Point, fastest_seconds
from autopar.unit_bounds import Least


@dataclass(frozen=True, slots=True)
class PipelineBounds:
    """Of one mesh."""

    num_ranks: int
    microbatches: int
    cuts_s: Sequence[tuple[float, float]]
    """See `Bounds.cuts_s`."""
    through_s: float
    """Of all units, in the microbatch that fills the pipeline."""
    counts: Mapping[int, Sequence[int]]
    """Units of each stage, by the number of stages a rank; none with one, where any cut may be."""

    def least_s(self, least: Least) -> float:
        """Seconds of a step."""
        stage_s, found = stages_s(least, self.cuts_s), []
        cut_s = min(map(sum, self.cuts_s), default=0.0)
        for virtual, counts in self.counts.items():
            rounds_s = self._rounds_s(stage_s, counts) if counts else self._slowest_s(stage_s)
            filled_s = self.through_s + (self.num_ranks * virtual - 1) * cut_s
            found.append((self.microbatches - 1 / virtual) * rounds_s + filled_s / virtual)
        return min(found)

    def _slowest_s(self, stage_s: Array) -> float:
        """The least slowest stage of all cuts into one a rank."""
        reach = np.full(len(stage_s), np.inf)
        reach[0] = -np.inf
        for _ in range(self.num_ranks):
            reach = np.maximum(reach[:, None], stage_s).min(axis=0)
        return float(reach[-1])

    def _rounds_s(self, stage_s: Array, counts: Sequence[int]) -> float:
        """The slowest stages of the rounds of a cut."""
        own = [float(stage_s[span]) for span in itertools.pairwise((0, *itertools.accumulate(counts)))]
        return sum(max(own[at : at + self.num_ranks]) for at in range(0, len(own), self.num_ranks))


def stages_s(least: Least, cuts_s: Sequence[tuple[float, float]]) -> Array:
    """[start, end]: seconds of a stage with the units start..end-1, and of its cuts; infinite where there are none."""
    found = fastest_seconds(as_layers(least, cuts_s))
    joined = np.cumsum([0.0, *least.joined])
    of_first = joined[np.minimum(np.arange(len(found)), len(joined) - 1)]
    upto_last = joined[np.clip(np.arange(len(found)) - 1, 0, len(joined) - 1)]
    more: Array = upto_last[None, :] - of_first[:, None]
    for start, end in itertools.combinations(range(len(found)), 2) if least.ends else ():
        more[start, end] = max(more[start, end], least.ends_s(start, end))
    both: Array = found + more
    return both


def as_layers(least: Least, cuts_s: Sequence[tuple[float, float]]) -> list[Layer]:
    """Units, each by itself, with what cuts after them cost."""
    begin, end = (0.0, *(after for after, _ in cuts_s)), (*(before for _, before in cuts_s), 0.0)
    units = zip(least.seconds, begin, end, strict=True)
    return [Layer((Point(seconds),), after, before) for seconds, before, after in units]
