"""What the best plan of a pipeline may take: units' costs in layouts of the whole model, put together on stages.

    cuts = Cuts(units, mesh, microbatches, capacity, counts)
    guess = cuts.best_with(laid)                # … and again with leaner layouts, where memory binds

How many stages a rank has is settled here: more of them fill the pipeline sooner and send more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.layers import Cut
from autopar.mesh import Mesh
from autopar.solve.ranks import in_flight_of
from autopar.solve.rounds import fit_rounds, spare_seconds
from autopar.solve.stages import CutProblem, cut_layers
from autopar.unit_points import Laid

MIX_GAIN = 2e-3
"""What stages in unlike layouts must save, in parts of the step: they can't stand for each other."""

SPARE = 0.02
"""Of a usual stage's time, what one must be faster than the slowest of its round to be unlike those: it computes again
for nothing."""


@dataclass(frozen=True, slots=True)
class Guess:
    """What units cost and hold in some layouts, put together: the cut, seconds of a step (infinite where it
    doesn't fit), and whether it fits with nothing computed again."""

    mesh: Mesh
    """With as many stages a rank as is best."""
    cut: Cut
    seconds: float
    keeps_all: bool
    layouts: tuple[Laid, ...]
    """Those of each stage."""
    is_unlimited: bool = False
    """Whether it is for a memory that never binds."""


@dataclass(slots=True)
class Cuts:
    """The cuts of a mesh's pipeline, in the layouts that are known of it by now."""

    units: tuple[str, ...]
    mesh: Mesh
    microbatches: int
    capacity: float
    counts: Mapping[int, Sequence[int]]
    """Units of each stage, by the number of stages that each rank may have; none with one, where any cut may be."""
    pinned: tuple[int | None, ...] = ()
    """See `CutProblem`."""
    known: list[Laid] = field(default_factory=list)
    in_rounds: Guess | None = None
    """The best with several stages a rank."""

    def best_with(self, laid: Laid) -> Guess:
        """The best cut where stages may have these layouts, too."""
        self.known.append(laid)
        found = [] if self.in_rounds is None else [self.in_rounds]
        found += self._cut_in_rounds(laid)
        if found:
            self.in_rounds = min(found, key=lambda guess: guess.seconds)
        if 1 not in self.counts:
            assert self.in_rounds is not None
            return self.in_rounds
        once = self._cut_once()
        return once if self.in_rounds is None or once.seconds <= self.in_rounds.seconds else self.in_rounds

    def _cut_in_rounds(self, laid: Laid) -> Iterator[Guess]:
        """The best cuts into several stages a rank, all in the same layouts."""
        ranks, layers = self.mesh.num_stages, laid.layers
        whole_s = sum(layer.points[0].seconds for layer in layers)
        for virtual, counts in self.counts.items():
            if virtual == 1:
                continue
            found = fit_rounds(layers, counts, ranks, self.microbatches, self.capacity)
            firsts = [sum(counts[:stage]) for stage in range(len(counts))]
            usual_s = whole_s / len(counts)
            spare = tuple(int(each > SPARE * usual_s) for each in spare_seconds(layers, counts, ranks))
            yield Guess(
                mesh=replace(self.mesh, virtual=virtual),
                cut=Cut.from_boundaries(self.units, firsts, spare),
                seconds=found.objective,
                keeps_all=math.isfinite(found.objective) and not any(found.points),
                layouts=(laid,) * len(firsts),
            )

    def _cut_once(self) -> Guess:
        """The best cut into one stage a rank, each stage in one of the layouts that are known."""
        stages, count = self.mesh.num_stages, self.microbatches
        first, *others = (laid.layers for laid in self.known)
        problem = CutProblem(
            first,
            stages,
            count,
            self.capacity,
            in_flight_of(stages, count),
            pinned=self.pinned,
            others=tuple(others),
            once_seconds=tuple(laid.once_s / stages for laid in self.known),
            mix_gain=MIX_GAIN,
        )
        # where these layouts need too much memory, the full problem decides whether others fit
        fitting = cut_layers(problem)
        found = fitting or cut_layers(replace(problem, capacity=math.inf))
        assert found is not None
        cut = Cut.from_boundaries(self.units, [sum(found.counts[:s]) for s in range(stages)], found.sets)
        layouts = tuple(self.known[which] for which in found.sets)
        if fitting is None:
            return Guess(self.mesh, cut, math.inf, False, layouts)
        return Guess(self.mesh, cut, found.objective, not any(found.points), layouts)
