"""What a plan holds and sends, counted on few of its equal layers.

    counts = count(pipeline, [(grown, growth), …])
    counts.profiles[stage].peak, counts.traffic

A plan is lowered with few layers of each run, and once more with one layer more of those that stand for several. What
is held within one layer, or between two, at one call of the step, rises by the same number of bytes with each layer
that is added elsewhere: whatever is kept of a layer is there all that while, or isn't. So two sizes tell every size,
exactly; and so for what is sent.

Limits on what is in flight at once may bind in the whole and not with few layers: then the figure is on the safe side.

Invariant: with nothing to grow, these are the accountant's figures of the pipeline itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.program.allocations import CLASSES
from autopar.program.memory import MemoryProfile, Region, greatest, stage_peaks
from autopar.program.parts import Pipeline
from autopar.program.traffic import Traffic, traffic


@dataclass(frozen=True, slots=True)
class Growth:
    """The pipeline with one more layer (or period of layers) on each stage that has some to grow."""

    pipeline: Pipeline
    follower: Mapping[str, str]
    """Layer that stands for several → the one that was added after it."""
    times: tuple[int, ...]
    """How many more there really are, per stage."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Per stage the profile at its peak; the traffic of a step."""

    profiles: tuple[MemoryProfile, ...]
    traffic: tuple[Traffic, ...]

    @property
    def peaks(self) -> list[int]:
        """Bytes, per stage."""
        return [profile.peak for profile in self.profiles]


def count(pipeline: Pipeline, growths: Sequence[Growth] = ()) -> Counts:
    """The figures of the plan that `pipeline` and its growths stand for."""
    stages = range(pipeline.mesh.num_stages)
    return Counts(tuple(_profile(pipeline, growths, stage) for stage in stages), tuple(_traffic(pipeline, growths)))


def _profile(pipeline: Pipeline, growths: Sequence[Growth], stage: int) -> MemoryProfile:
    few = stage_peaks(pipeline, stage)
    more = [(stage_peaks(growth.pipeline, stage), growth) for growth in growths if growth.times[stage]]
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
