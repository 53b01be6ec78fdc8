"""What a plan holds and sends, counted on few of its equal layers.

    counts = Counting(pipeline, [Growth(…)], "1f1b", mesh, microbatches, likeness).of(ranks=[0, 1])
    counts.profiles[rank].peak, counts.traffic

A plan is lowered with few layers of each run, and once more with one layer more of those that stand for several. What
is held within one layer, or between two, at one call of the step, rises by the same number of bytes with each layer
that is added elsewhere: whatever is kept of a layer is there all that while, or isn't. So two sizes tell every size,
exactly; and so for what is sent.

Of a pipeline of many stages, the few that are there stand for the others (`skeletons.Likeness`): what a stage holds
follows from its own actions in the whole schedule, and those of its neighbours. Where ranks have several stages, these
are put together again first (`unfolding`).

Limits on what is in flight at once may bind in the whole and not with few layers: then the figure is on the safe side.

Invariant: with nothing to grow, these are the accountant's figures of the pipeline itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.mesh import PIPELINE_AXIS, Mesh
from autopar.program.actions import Action, Schedule
from autopar.program.allocations import CLASSES
from autopar.program.generators import make_schedule, steady_after
from autopar.program.memory import MemoryProfile, Region, greatest, peaks_in, stage_peaks
from autopar.program.parts import Pipeline
from autopar.program.steps import plan_steps
from autopar.program.traffic import Traffic, traffic
from autopar.skeletons import Likeness
from autopar.solve.ranks import ranks_of
from autopar.unfolding import unfolded


@dataclass(frozen=True, slots=True)
class Growth:
    """The pipeline with one more layer (or period of layers) on each stage that has some to grow."""

    pipeline: Pipeline
    follower: Mapping[str, str]
    """Layer that stands for several → the one that was added after it."""
    times: tuple[int, ...]
    """How many more there really are, per stage."""


@dataclass(frozen=True, slots=True)
class Place:
    """A stage that is there, and the actions of all that are there, when it stands for some stage of the pipeline."""

    stage: int
    schedule: Schedule


def places(name: str, num_stages: int, microbatches: int, likeness: Likeness) -> Iterator[Place]:
    """For each stage of a pipeline that runs the schedule `name`: its like, with the actions of it and its neighbours.

    They go on for as long as something new may come of it (`steady_after`).
    """
    whole = make_schedule(name, num_stages, steady_after(name, num_stages, microbatches))
    for stage, like in enumerate(likeness.like):
        near = (min(max(stage + other - like, 0), num_stages - 1) for other in range(len(likeness.kept)))
        yield Place(like, tuple(_numbered(whole[there], number) for number, there in enumerate(near)))


def _numbered(row: Sequence[str], stage: int) -> tuple[str, ...]:
    """The actions of a row as those of `stage`."""
    return tuple(str(replace(Action.parse(text), stage=stage)) for text in row)


@dataclass(frozen=True, slots=True)
class Counts:
    """Per rank the profile at its peak; the traffic of a step, by the stages that are there, or the kinds of ranks."""

    profiles: tuple[MemoryProfile, ...]
    traffic: tuple[Traffic, ...]

    @property
    def peaks(self) -> list[int]:
        """Bytes, per rank."""
        return [profile.peak for profile in self.profiles]


@dataclass(frozen=True, slots=True)
class Counting:
    """A plan to be counted: `pipeline` and its growths stand for that of `mesh`, under the schedule of that name."""

    pipeline: Pipeline
    growths: Sequence[Growth]
    schedule: str
    mesh: Mesh
    microbatches: int
    likeness: Likeness

    def of(self, ranks: Sequence[int]) -> Counts:
        """What some of the pipeline's ranks hold at their peaks."""
        at = self._stages_at if self.mesh.virtual == 1 else self._interleaved_at
        rows = [*_traffic(self.pipeline, self.growths)]
        return Counts(tuple(at(ranks)), tuple(rows if self.mesh.virtual == 1 else self._by_rank(rows)))

    def _stages_at(self, ranks: Sequence[int]) -> Iterator[MemoryProfile]:
        all_places = [*places(self.schedule, self.mesh.num_stages, self.microbatches, self.likeness)]
        for place in (all_places[rank] for rank in ranks):
            stage, actions = place.stage, place.schedule
            few = stage_peaks(replace(self.pipeline, schedule=actions), stage)
            grown = [growth for growth in self.growths if growth.times[stage]]
            more = [stage_peaks(replace(growth.pipeline, schedule=actions), stage) for growth in grown]
            larger = [_Larger(p, g.follower, g.times[stage]) for p, g in zip(more, grown, strict=True)]
            yield _profile(few, larger)

    def _interleaved_at(self, ranks: Sequence[int]) -> Iterator[MemoryProfile]:
        """Kinds of stages that grow by unlike numbers of layers grow one after another, since a rank has several."""
        few = self._peaks([self.pipeline] * len(self.likeness.kept), ranks)
        grown = [(growth, times) for growth in self.growths for times in sorted(set(growth.times) - {0})]
        more = []
        for growth, times in grown:
            of_kind = [growth.pipeline if own == times else self.pipeline for own in growth.times]
            more.append(self._peaks(of_kind, ranks))
        for number, own in enumerate(few):
            pairs = zip(more, grown, strict=True)
            yield _profile(own, [_Larger(p[number], g.follower, times) for p, (g, times) in pairs])

    def _peaks(self, of_kind: Sequence[Pipeline], ranks: Sequence[int]) -> list[Peaks]:
        size, virtual = self.mesh.size(PIPELINE_AXIS), self.mesh.virtual
        microbatches = steady_after(self.schedule, size, self.microbatches)
        actions = make_schedule(self.schedule, size, microbatches, virtual)
        pipeline = unfolded(of_kind, self.likeness, self.mesh, microbatches, actions)
        plans = plan_steps(pipeline)
        return [peaks_in(pipeline, plans[rank]) for rank in ranks]

    def _by_rank(self, rows: Sequence[Traffic]) -> Iterator[Traffic]:
        """What ranks send that have several stages, all of these together; one for each kind of ranks."""
        for kind in ranks_of(self.mesh, self.microbatches, self.likeness.like).kinds:
            totals: dict[tuple[str, str], tuple[int, int, int]] = {}
            for row in (row for row in rows if row.stage in kind.stages):
                times, before = kind.stages[row.stage], totals.get((row.axis, row.kind), (0, 0, 0))
                more = (row.count, row.bytes_sent, row.whole_bytes)
                totals[row.axis, row.kind] = _sum(before, more, times)
            yield from (Traffic(kind.rank, *key, *total) for key, total in sorted(totals.items()))


def _sum(before: tuple[int, int, int], more: tuple[int, int, int], times: int) -> tuple[int, int, int]:
    a, b, c = (total + times * extra for total, extra in zip(before, more, strict=True))
    return a, b, c


Peaks = Mapping[Region, MemoryProfile]


@dataclass(frozen=True, slots=True)
class _Larger:
    """The peaks with one layer more, how that is called, and how many more there really are."""

    peaks: Peaks
    follower: Mapping[str, str]
    times: int

    def moved(self, region: Region) -> Region | None:
        """Where the last of the layers is that a region's stands for."""
        call, layer = region
        after = (call, self.follower.get(layer, layer))
        return after if after != region and after in self.peaks else None


def _profile(few: Peaks, more: Sequence[_Larger]) -> MemoryProfile:
    found = {}
    for region in few:
        for number, moved in enumerate(_places(region, more)):
            found[region[0], f"{region[1]} {number}"] = _grown(few[region], more, moved)
    return greatest(found)


def _places(region: Region, more: Sequence[_Larger]) -> Iterator[list[Region]]:
    """Where the layers that a region stands for are in each growth: the first of them, and the last."""
    yield [region] * len(more)
    for growth in more:
        after = growth.moved(region)
        if after is not None:
            yield [after if other is growth else region for other in more]


def _grown(here: MemoryProfile, more: Sequence[_Larger], moved: Sequence[Region]) -> MemoryProfile:
    sizes = {name: getattr(here, name) for name in CLASSES}
    for growth, there in zip(more, moved, strict=True):
        for name in CLASSES:
            sizes[name] += growth.times * (getattr(growth.peaks[there], name) - getattr(here, name))
    return MemoryProfile(**sizes, where=here.where)


def _traffic(pipeline: Pipeline, growths: Sequence[Growth]) -> Iterator[Traffic]:
    few, more = _rows(pipeline), [_rows(growth.pipeline) for growth in growths]
    for key in sorted(set(few).union(*more)):
        totals = list(few.get(key, (0, 0, 0)))
        for rows, growth in zip(more, growths, strict=True):
            extra = zip(rows.get(key, (0, 0, 0)), few.get(key, (0, 0, 0)), strict=True)
            totals = [total + growth.times[key[0]] * (a - b) for total, (a, b) in zip(totals, extra, strict=True)]
        yield Traffic(*key, *totals)


def _rows(pipeline: Pipeline) -> dict[tuple[int, str, str], tuple[int, int, int]]:
    return {(r.stage, r.axis, r.kind): (r.count, r.bytes_sent, r.whole_bytes) for r in traffic(pipeline)}
