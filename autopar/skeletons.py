"""The step graphs of a folded step: each run of equal layers by a few layers a stage, which stand for the others.

    skeletons = Skeletons(folded, microbatches, rules)
    step = skeletons.graph(cut)                     # cut: over all units of the model
    skeletons.everywhere(step, {"h.1/add/forward#0": choice})       # …, and for h.2, h.3, …
    for growth in skeletons.growths(cut): ...       # the same with one layer more, to count by

Of the layers of a run on one stage these are there: the first two and the last two, which may differ from the rest or
be lowered differently for what is next to them, and one between, which stands for all that are left out (of many
stages, the first, the last, and one between).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch.fx import Node

from autopar.capture.folding import Folded
from autopar.capture.runs import Numbers, Repeats, Run
from autopar.compiling import annotated
from autopar.joint import StepGraph
from autopar.layers import Cut, homes_of, units_of

Value = TypeVar("Value")

FEW_STAGES = 4
"""Up to which two layers stand on either side of one that stands for others; beyond, one does, for speed: then figures
are exact but for what a layer's neighbours change of it."""


@dataclass(frozen=True, slots=True)
class Enlarged:
    """A step graph with one more period of some run on each stage that has some left out."""

    step: StepGraph
    follower: Mapping[str, str]
    times: tuple[int, ...]


@dataclass(slots=True)
class Skeletons:
    """A folded step, and the step graphs made of it by now."""

    folded: Folded
    microbatches: int
    rules: Mapping[str, str]
    made: dict[tuple[Cut, tuple[Numbers, ...]], StepGraph] = field(default_factory=dict)

    @property
    def units(self) -> tuple[str, ...]:
        """All units of the model, in the order in which they run."""
        traced, repeats = units_of(self.folded.captured.gradient.graph)[0], self.folded.repeats
        return tuple(unit for unit, _ in repeats.spread(traced))

    def graph(self, cut: Cut) -> StepGraph:
        """The step graph of a cut of all units."""
        return self._made(cut, tuple(_chosen(run, cut) for run in self.folded.runs))

    def growths(self, cut: Cut) -> Iterator[Enlarged]:
        """Enlarged step graphs: one for each run that leaves out layers."""
        numbers = tuple(_chosen(run, cut) for run in self.folded.runs)
        for which, run in enumerate(self.folded.runs):
            times, more = [0] * cut.num_stages, set(numbers[which])
            follower: dict[str, str] = {}
            for number, following in zip(numbers[which], (*numbers[which][1:], run.count), strict=True):
                if following - number > 1:
                    times[_stages(run, number, cut)[0]] = following - number - 1
                    more.add(number + 1)
                    follower |= {run.block(number, i): run.block(number + 1, i) for i in range(run.period)}
            if follower:
                grown = tuple(tuple(sorted(more)) if i == which else own for i, own in enumerate(numbers))
                yield Enlarged(self._made(cut, grown), follower, tuple(times))

    def everywhere(self, step: StepGraph, values: Mapping[str, Value]) -> dict[str, Value]:
        """Values by node key, for the layers that are left out as for those that stand for them."""
        homes = {node.meta["key"]: home for node, home in homes_of(step.graph).items() if "key" in node.meta}
        found: dict[str, Value] = {}
        for key, value in values.items():
            home = homes[key]
            for block in step.repeats.blocks(home) if home else ():
                found[key.replace(home, block, 1)] = value
            if not home:
                found[key] = value
        return found

    def keys(self, step: StepGraph, nodes: list[Node]) -> list[str]:
        """The keys of nodes, and of those in the layers for which theirs stand."""
        return list(self.everywhere(step, {node.meta["key"]: None for node in nodes}))

    def _made(self, cut: Cut, numbers: tuple[Numbers, ...]) -> StepGraph:
        if (cut, numbers) not in self.made:
            captured, repeats = self.folded.at(numbers), Repeats(self.folded.runs, numbers)
            stage_of = dict(zip(cut.units, cut.stages, strict=True))
            units = units_of(captured.gradient.graph)[0]
            own = Cut(units, tuple(stage_of[unit] for unit in units))
            self.made[cut, numbers] = annotated(captured, self.microbatches, own, self.rules, repeats)
        return self.made[cut, numbers]


def _chosen(run: Run, cut: Cut) -> Numbers:
    """The periods of a run that stand for all of them: on each stage the first two, the last two, and one between."""
    kept: set[int] = set(run.kept)
    start = 0
    for number in range(1, run.count + 1):
        if number == run.count or _stages(run, number, cut) != _stages(run, start, cut):
            near = 2 if cut.num_stages <= FEW_STAGES else 1
            kept |= {min(start + i, number - 1) for i in range(near + 1)}
            kept |= {max(number - 1 - i, start) for i in range(near)}
            start = number
    return tuple(sorted(kept))


def _stages(run: Run, number: int, cut: Cut) -> tuple[int, ...]:
    """The stages of the blocks of a period."""
    where = [cut.units.index(run.block(number, offset)) for offset in range(run.period)]
    return tuple(cut.stages[i] for i in where)
