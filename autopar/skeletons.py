"""The step graphs of a folded step: each run of equal layers by a few layers a stage, which stand for the others.

    skeletons = Skeletons(folded, microbatches, rules)
    step = skeletons.graph(cut)                     # cut: over all units of the model
    skeletons.everywhere(step, {"h.1/add/forward#0": choice})       # …, and for h.2, h.3, …
    for growth in skeletons.growths(cut): ...       # the same with one layer more, to count by

Of the layers of a run on one stage these are there: the first two and the last two, which may differ from the rest or
be lowered differently for what is next to them, and one between, which stands for all that are left out (of many
stages, the first, the last, and one between).

Of many stages few are there, too: the first, the last, and of those between the first of each kind (by how many layers
they have, and by the cut's kinds), which stands for all of its kind, and as many more as it takes to have layers
enough. So it is where values pass from neighbour to neighbour only; otherwise all stages are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor
from torch.fx import Node

from autopar.capture.folding import Folded
from autopar.capture.runs import Numbers, Repeats, Run
from autopar.compiling import annotated
from autopar.gradients import LAST_BLOCKS
from autopar.joint import StepGraph
from autopar.layers import Cut, units_of
from autopar.solve.build import homes_and_keys
from autopar.solve.held import is_parameter

Value = TypeVar("Value")

FEW_STAGES = 4
"""Up to which two layers stand on either side of one that stands for others; beyond, one does, for speed: then figures
are exact but for what a layer's neighbours change of it."""


@dataclass(frozen=True, slots=True)
class Enlarged:
    """A step graph with one more period of some run on each of its stages that has some left out."""

    step: StepGraph
    follower: Mapping[str, str]
    times: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Likeness:
    """Which stages of a pipeline are there, in order, and for each stage the position among them of its like."""

    kept: tuple[int, ...]
    like: tuple[int, ...]

    @classmethod
    def none(cls, num_stages: int) -> Likeness:
        """All are there."""
        return cls(tuple(range(num_stages)), tuple(range(num_stages)))

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The stages for which each of those stands."""
        stages = range(len(self.kept))
        return tuple(tuple(s for s, like in enumerate(self.like) if like == stage) for stage in stages)

    @property
    def times(self) -> tuple[int, ...]:
        """How many those are."""
        return tuple(map(len, self.members))


@dataclass(slots=True)
class Skeletons:
    """A folded step, and the step graphs made of it by now."""

    folded: Folded
    microbatches: int
    rules: Mapping[str, str]
    made: dict[tuple[Cut, Likeness, tuple[Numbers, ...]], StepGraph] = field(default_factory=dict)
    likenesses: dict[Cut, Likeness] = field(default_factory=dict)

    @property
    def units(self) -> tuple[str, ...]:
        """All units of the model, in the order in which they run."""
        traced, repeats = units_of(self.folded.captured.gradient.graph)[0], self.folded.repeats
        return tuple(unit for unit, _ in repeats.spread(traced))

    def graph(self, cut: Cut) -> StepGraph:
        """The step graph of a cut of all units."""
        return self._made(cut, self._numbers(cut))

    def likeness(self, cut: Cut) -> Likeness:
        """Which stages of a cut are in its graph."""
        if cut not in self.likenesses:
            self.likenesses[cut] = _alike(self.folded.runs, cut)
            found = self.likenesses[cut]
            if len(found.kept) < cut.num_stages and not _is_chain(self.graph(cut), found.times):
                self.likenesses[cut] = Likeness.none(cut.num_stages)
        return self.likenesses[cut]

    def growths(self, cut: Cut) -> Iterator[Enlarged]:
        """Enlarged step graphs: one for each run that leaves out layers."""
        all_numbers, likeness = self._numbers(cut), self.likeness(cut)
        for which, (run, numbers) in enumerate(zip(self.folded.runs, all_numbers, strict=True)):
            times, more = [0] * len(likeness.kept), set(numbers)
            follower: dict[str, str] = {}
            for number, count in zip(numbers, _counts(run, numbers, cut), strict=True):
                if count > 1:
                    times[likeness.like[_stages(run, number, cut)[0]]] = count - 1
                    more.add(number + 1)
                    follower |= {run.block(number, i): run.block(number + 1, i) for i in range(run.period)}
            if follower:
                grown = tuple(tuple(sorted(more)) if i == which else own for i, own in enumerate(all_numbers))
                yield Enlarged(self._made(cut, grown), follower, tuple(times))

    def everywhere(self, step: StepGraph, values: Mapping[str, Value]) -> dict[str, Value]:
        """Values by node key, for the layers and stages that are left out as for those that stand for them."""
        homes, nodes = homes_and_keys(step.graph)
        found: dict[str, Value] = {}
        for key, value in values.items():
            home = homes[nodes[key]]
            if home and "@" not in key:
                found |= {key.replace(home, block, 1): value for block in step.repeats.blocks(home)}
            else:
                found |= dict.fromkeys(_keys_on_stages(key, nodes[key].meta["stage"], step.repeats), value)
        return found

    def keys(self, step: StepGraph, nodes: list[Node]) -> list[str]:
        """The keys of nodes, and of those in the layers for which theirs stand."""
        return list(self.everywhere(step, {node.meta["key"]: None for node in nodes}))

    def _numbers(self, cut: Cut) -> tuple[Numbers, ...]:
        likeness = self.likeness(cut)
        front = 1 + LAST_BLOCKS if self.microbatches == 1 else 0
        return tuple(_chosen(run, cut, likeness, front) for run in self.folded.runs)

    def _made(self, cut: Cut, numbers: tuple[Numbers, ...]) -> StepGraph:
        likeness, runs = self.likeness(cut), self.folded.runs
        if (cut, likeness, numbers) not in self.made:
            captured = self.folded.at(numbers)
            counts = (_counts(run, own, cut) for run, own in zip(runs, numbers, strict=True))
            repeats = Repeats(runs, numbers, tuple(counts), _twins(cut, likeness), likeness.members)
            place_of = {unit: likeness.like[stage] for unit, stage in zip(cut.units, cut.stages, strict=True)}
            units = units_of(captured.gradient.graph)[0]
            own = Cut(units, tuple(place_of[unit] for unit in units))
            self.made[cut, likeness, numbers] = annotated(captured, self.microbatches, own, self.rules, repeats)
        return self.made[cut, likeness, numbers]


def _keys_on_stages(key: str, stage: int, repeats: Repeats) -> Iterator[str]:
    """The keys of a node outside of layers on all the stages for which its own stands, see `joint`."""
    base, _, named = key.partition("@")
    for number, real in enumerate(repeats.stages[stage] if repeats.stages else ()):
        yield base if not named and number == 0 else f"{base}@{real}"
    if not repeats.stages:
        yield key


# -- layers of a stage -----------------------------------------------------------------------------------------------
def _chosen(run: Run, cut: Cut, likeness: Likeness, front: int) -> Numbers:
    """The periods of a run that stand for all of them: on each stage the first two (on the first stage `front`, if that
    is more), the last two, and one between."""
    near = 2 if cut.num_stages <= FEW_STAGES else 1
    kept: set[int] = set()
    for first, end in _spans(run, cut):
        if set(_stages(run, first, cut)) <= set(likeness.kept):
            begin = max(near, front) if first == 0 else near
            kept |= {min(first + i, end - 1) for i in range(begin + 1)}
            kept |= {max(end - 1 - i, first) for i in range(near)}
    there = (n for n in range(run.count) if n not in kept and set(_stages(run, n, cut)) <= set(likeness.kept))
    while len(kept) < len(run.kept):  # fewer can't be had
        kept.add(next(there))
    return tuple(sorted(kept))


def _spans(run: Run, cut: Cut) -> Iterator[tuple[int, int]]:
    """First and end of the periods of a run that are on the same stages."""
    start = 0
    for number in range(1, run.count + 1):
        if number == run.count or _stages(run, number, cut) != _stages(run, start, cut):
            yield start, number
            start = number


def _counts(run: Run, numbers: Numbers, cut: Cut) -> Numbers:
    """For how many periods of its stage each stands."""
    ends = dict(_spans(run, cut))
    counts = []
    for number, following in zip(numbers, (*numbers[1:], run.count), strict=True):
        end = next(end for first, end in ends.items() if first <= number < end)
        counts.append(min(following, end) - number)
    return tuple(counts)


def _stages(run: Run, number: int, cut: Cut) -> tuple[int, ...]:
    """The stages of the blocks of a period."""
    where = [cut.units.index(run.block(number, offset)) for offset in range(run.period)]
    return tuple(cut.stages[i] for i in where)


# -- stages of a pipeline --------------------------------------------------------------------------------------------
def _alike(runs: tuple[Run, ...], cut: Cut) -> Likeness:
    """The first, the last, and between them the first of each kind, where no period has blocks on two stages."""
    whole = all(len(set(_stages(run, number, cut))) == 1 for run in runs for number in range(run.count))
    if not runs or not whole:
        return Likeness.none(cut.num_stages)
    chosen = cut.kinds or (0,) * cut.num_stages
    kinds = [(kind, *(_kind(runs, u) for u in units)) for kind, units in zip(chosen, _units_by_stage(cut), strict=True)]
    last = cut.num_stages - 1
    firsts = {kinds[stage]: stage for stage in reversed(range(1, last))}
    there = {0, *firsts.values(), last}
    for run in runs:  # so few periods can't be had: some stages more stand for themselves
        homes = [set(_stages(run, number, cut)) for number in range(run.count)]
        others = (home for home in homes if not home <= there)
        while sum(home <= there for home in homes) < len(run.kept):
            there |= next(others)
    kept = sorted(there)
    return Likeness(tuple(kept), tuple(kept.index(s if s in there else firsts[kind]) for s, kind in enumerate(kinds)))


def _kind(runs: tuple[Run, ...], unit: str) -> tuple[str, int]:
    """Equal for the blocks of a run that are alike: not for those of the first and the last period."""
    for run in runs:
        place = run.place(unit)
        if place is not None and 0 < place[0] < run.count - 1:
            return run.path, place[1]
    return unit, -1


def _twins(cut: Cut, likeness: Likeness) -> dict[str, tuple[str, ...]]:
    """Each unit of a stage that is there, and those in its place on the stages that it stands for."""
    units = _units_by_stage(cut)
    found: dict[str, tuple[str, ...]] = {}
    for position, stage in enumerate(likeness.kept):
        members = [units[other] for other in likeness.members[position]]
        found |= dict(zip(units[stage], zip(*members, strict=True), strict=True))
    return found


def _units_by_stage(cut: Cut) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in range(cut.num_stages)]
    for unit, stage in zip(cut.units, cut.stages, strict=True):
        found[stage].append(unit)
    return found


def _is_chain(step: StepGraph, times: Sequence[int]) -> bool:
    """Whether what crosses stages, but for parameters and scalars, goes to one other: the next or the one before, or
    between two that stand for themselves (the gradient of a tied parameter)."""
    for node in step.graph.nodes:
        value, here = node.meta.get("val"), node.meta.get("stage")
        if node.op != "call_function" or not isinstance(value, Tensor) or value.numel() < 2 or is_parameter(node):
            continue
        there = {user.meta["stage"] for user in node.users if user.op == "call_function"} - {here}
        if len(there) > 1 or any(abs(here - stage) > 1 and max(times[here], times[stage]) > 1 for stage in there):
            return False
    return True
