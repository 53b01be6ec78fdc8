"""What a plan holds and sends, counted on few of its equal layers.

    counts = count(pipeline, [Growth(…)], places("1f1b", num_stages, microbatches, likeness))
    counts.profiles[stage].peak, counts.traffic

A plan is lowered with few layers of each run, and once more with one layer more of those that stand for several. What
is held within one layer, or between two, at one call of the step, rises by the same number of bytes with each layer
that is added elsewhere: whatever is kept of a layer is there all that while, or isn't. So two sizes tell every size,
exactly; and so for what is sent.

Of a pipeline of many stages, the few that are there stand for the others (`skeletons.Likeness`): what a stage holds
follows from its own actions in the whole schedule, and those of its neighbours.

Limits on what is in flight at once may bind in the whole and not with few layers: then the figure is on the safe side.

Invariant: with nothing to grow, these are the accountant's figures of the pipeline itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.program.actions import Action, Schedule
from autopar.program.allocations import CLASSES
from autopar.program.generators import make_schedule, steady_after
from autopar.program.memory import MemoryProfile, Region, greatest, stage_peaks
from autopar.program.parts import Pipeline
from autopar.program.traffic import Traffic, traffic
from autopar.skeletons import Likeness


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
    """Per place the profile at its peak; the traffic of a step, by the stages that are there."""

    profiles: tuple[MemoryProfile, ...]
    traffic: tuple[Traffic, ...]

    @property
    def peaks(self) -> list[int]:
        """Bytes, per place."""
        return [profile.peak for profile in self.profiles]


def count(pipeline: Pipeline, growths: Sequence[Growth], at: Iterable[Place]) -> Counts:
    """The figures of the plan that `pipeline` and its growths stand for, `at` some places."""
    profiles = tuple(_profile(pipeline, growths, place) for place in at)
    return Counts(profiles, tuple(_traffic(pipeline, growths)))


def _profile(pipeline: Pipeline, growths: Sequence[Growth], place: Place) -> MemoryProfile:
    stage = place.stage
    few = stage_peaks(replace(pipeline, schedule=place.schedule), stage)
    grown = [(replace(growth.pipeline, schedule=place.schedule), growth) for growth in growths if growth.times[stage]]
    more = [(stage_peaks(larger, stage), growth) for larger, growth in grown]
    found = {}
    for region in few:
        for number, moved in enumerate(_places(region, [growth for _, growth in more])):
            found[region[0], f"{region[1]} {number}"] = _grown(few, more, region, moved, stage)
    return greatest(found)


def _places(region: Region, growths: Sequence[Growth]) -> Iterator[list[Region]]:
    """Where the layers that a region stands for are in each growth: the first of them, and the last."""
    call, layer = region
    yield [region] * len(growths)
    for growth in growths:
        if layer in growth.follower:
            after = (call, growth.follower[layer])
            yield [after if other is growth else region for other in growths]


def _grown(
    few: Mapping[Region, MemoryProfile],
    more: Sequence[tuple[Mapping[Region, MemoryProfile], Growth]],
    region: Region,
    moved: Sequence[Region],
    stage: int,
) -> MemoryProfile:
    here = few[region]
    sizes = {name: getattr(here, name) for name in CLASSES}
    for (peaks, growth), there in zip(more, moved, strict=True):
        for name in CLASSES:
            sizes[name] += growth.times[stage] * (getattr(peaks[there], name) - getattr(here, name))
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
