"""The second level: which layers form which pipeline stage.

    layers = [Layer((Point(seconds=1.0, static_bytes=4.0, saved_bytes=1.0),))] * 8
    cut = cut_layers(CutProblem(tuple(layers), num_stages=2, microbatches=4, capacity=30.0, in_flight=(2, 1)))
    cut.counts          # (4, 4): the first four layers, then the rest

A step of 1F1B with M microbatches takes (M - 1) * (slowest stage) + sum over stages (fill and drain), so the cut
minimises that, under each stage's memory: the sum over its layers of static + microbatches in flight * saved.

Invariants:
- stages are contiguous, in order, and none is empty; a layer that is pinned is on its stage;
- a layer has one point or several (for instance with and without recompute), and the cheapest points that fit together
  are chosen per stage; where the layers come in several sets (of layouts), a stage takes all of its layers from one;
- exact, except that a stage's front of more than `MAX_FRONT` points has its memory rounded up by capacity / 2^14 per
  layer: then the cut still fits, and may miss one that fits by less than that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solve.problem import TOLERANCE, Array, Index

MAX_FRONT = 2048
MEMORY_STEPS = 2.0**14


@dataclass(frozen=True, slots=True)
class Point:
    """One way to run a layer: seconds per microbatch (forward and backward), bytes at rest, bytes kept in flight, and
    those of gradients, which aren't there yet where all microbatches are in flight; and those that the widest op of its
    backward reads, where that may be more than what was kept of the microbatch."""

    seconds: float
    static_bytes: float = 0.0
    saved_bytes: float = 0.0
    gradient_bytes: float = 0.0
    widest_bytes: float = 0.0

    def held(self, in_flight: int, microbatches: int) -> float:
        """Bytes with so many of the microbatches in flight; where that is all of them, gradients come to be as
        activations go."""
        kept = in_flight * self.saved_bytes + self.beside_bytes
        both = kept + self.gradient_bytes if in_flight < microbatches else max(kept, self.gradient_bytes)
        return self.static_bytes + both

    @property
    def beside_bytes(self) -> float:
        """What its widest op needs beside what is kept."""
        return max(0.0, self.widest_bytes - self.saved_bytes)


@dataclass(frozen=True, slots=True)
class Layer:
    """The ways to run one unit; what a cut right after it costs the stage that it ends, and what one right before it
    costs the stage that it begins; and what it does once a step."""

    points: tuple[Point, ...]
    cut_seconds: float = 0.0
    begin_seconds: float = 0.0
    once_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CutProblem:
    """Layers to cut, and the microbatches in flight on each stage."""

    layers: tuple[Layer, ...]
    num_stages: int
    microbatches: int
    capacity: float
    in_flight: tuple[int, ...]
    pinned: tuple[int | None, ...] = ()
    """The stage of each layer that has to be on one; empty where none has to."""
    others: tuple[tuple[Layer, ...], ...] = ()
    """Other sets of the same layers."""
    once_seconds: tuple[float, ...] = ()
    """Of each set, what a stage that takes it does once a step: the longest of all stages adds to the step."""
    mix_gain: float = 0.0
    """What a cut whose stages take different sets must save beside those of one, in parts of the objective."""

    @property
    def sets(self) -> tuple[tuple[Layer, ...], ...]:
        return self.layers, *self.others


@dataclass(frozen=True, slots=True)
class Cut:
    """Layers per stage, the point of each layer, seconds and bytes per stage, the step's seconds, each stage's set."""

    counts: tuple[int, ...]
    points: tuple[int, ...]
    seconds: tuple[float, ...]
    bytes: tuple[float, ...]
    objective: float
    sets: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Front:
    """The points of a segment that are worth having: bytes rising, seconds falling; the layer's point and the index
    into the front without its last layer."""

    used: Array
    seconds: Array
    point: Index
    before: Index


def cut_layers(problem: CutProblem) -> Cut | None:
    """The best cut; None when no cut fits.

    For each bound on the slowest stage, from the least feasible one up, the cheapest sum under that bound by dynamic
    programming over (stage, layer); stops when the bound alone costs more than the best cut.
    """
    stages, kinds = range(problem.num_stages), [replace(problem, layers=own, others=()) for own in problem.sets]
    by_set = np.array([[_segment_seconds(p, stage) + _pinned_away(p, stage) for stage in stages] for p in kinds])
    once = np.array(problem.once_seconds or (0.0,) * len(kinds))
    best, best_counts, taken = math.inf, None, by_set
    alone = np.eye(len(kinds), dtype=bool)
    mixed = [once <= longest for longest in np.unique(once)] if len(kinds) > 1 else []
    for number, which in enumerate([*alone, *mixed]):
        allowed, longest = np.where(which[:, None, None, None], by_set, np.inf), float(once[which].max())
        part = 1.0 if number < len(kinds) or math.isinf(best) else 1.0 - problem.mix_gain
        value, counts = _cheapest(problem, allowed.min(axis=0), part * best - longest)
        if counts is not None:
            best, best_counts, taken = value + longest, counts, allowed
    if best_counts is None:
        return None
    ends = list(itertools.accumulate(best_counts))
    places = ((stage, end - count, end) for stage, (count, end) in enumerate(zip(best_counts, ends, strict=True)))
    sets = tuple(int(taken[:, stage, start, end].argmin()) for stage, start, end in places)
    return evaluate_cut(problem, best_counts, _points(problem, best_counts, sets), sets)


def _cheapest(problem: CutProblem, times: Array, under: float) -> tuple[float, tuple[int, ...] | None]:
    """The least objective for times[stage, start, end], and the layers per stage; none where it isn't less than
    `under`."""
    least, _ = _cheapest_sum(times)
    best, best_counts = under, None
    candidates = np.unique(times[np.isfinite(times)]) if math.isfinite(least) else np.zeros(0)
    first = _first_feasible(times, candidates) if len(candidates) else 0
    for bound in candidates[first:]:
        if (problem.microbatches - 1) * bound + least >= best:
            break
        total, counts = _cheapest_sum(np.where(times <= bound, times, np.inf))
        value = total + (problem.microbatches - 1) * _slowest(times, counts)
        if value < best:
            best, best_counts = value, counts
    return best, best_counts


def _first_feasible(times: Array, candidates: Array) -> int:
    """The index of the least bound on the slowest stage under which some cut exists."""
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if math.isfinite(_cheapest_sum(np.where(times <= candidates[middle], times, np.inf))[0]):
            high = middle
        else:
            low = middle + 1
    return low


def _cheapest_sum(times: Array) -> tuple[float, tuple[int, ...]]:
    """The least sum of segments times[stage, start, end] from layer 0 to the last, and the layers per stage."""
    num_stages, size = times.shape[0], times.shape[1]
    reach = np.full(size, np.inf)
    reach[0] = 0.0
    starts = []
    for stage in range(num_stages):
        total = reach[:, None] + times[stage]
        starts.append(total.argmin(axis=0))
        reach = total.min(axis=0)
    if not math.isfinite(reach[-1]):
        return math.inf, ()
    counts, end = [], size - 1
    for stage_starts in reversed(starts):
        counts.append(end - int(stage_starts[end]))
        end = int(stage_starts[end])
    return float(reach[-1]), tuple(reversed(counts))


def _slowest(times: Array, counts: Sequence[int]) -> float:
    ends = np.cumsum(counts)
    stages = enumerate(zip(counts, ends, strict=True))
    return max(float(times[stage, end - count, end]) for stage, (count, end) in stages)


def _segment_seconds(problem: CutProblem, stage: int) -> Array:
    """[start, end]: seconds of the stage with layers start..end-1; infinite where they don't fit."""
    size = len(problem.layers)
    if math.isinf(problem.capacity):  # everybody takes the fastest point
        return fastest_seconds(problem.layers)
    result, ends = np.full((size + 1, size + 1), np.inf), _ends_seconds(problem.layers)
    known: dict[tuple[int, int], _Front] = {}
    for start in range(size):
        for end, front in enumerate(_fronts(problem, stage, start, known), start + 1):
            if not len(front.used):
                break
            result[start, end] = front.seconds[-1] + ends[start, end]
    return result


def fastest_seconds(layers: Sequence[Layer]) -> Array:
    """[start, end]: seconds of a stage with the layers start..end-1 at their fastest points; infinite where there are
    none."""
    upto = np.cumsum([0.0, *(min(point.seconds for point in layer.points) for layer in layers)])
    seconds = upto[None, :] - upto[:, None] + _ends_seconds(layers)
    return np.where(np.tri(len(upto), k=-1, dtype=bool).T, seconds, np.inf)


def _ends_seconds(layers: Sequence[Layer]) -> Array:
    """[start, end]: what the cuts at both ends of a stage cost it; the model's own ends cost nothing."""
    begin = np.array([0.0, *(layer.begin_seconds for layer in layers[1:]), 0.0])
    end = np.array([0.0, *(layer.cut_seconds for layer in layers[:-1]), 0.0])
    both: Array = begin[:, None] + end[None, :]
    return both


def _pinned_away(problem: CutProblem, stage: int) -> Array:
    """[start, end]: infinite where one of the layers start..end-1 has to be on another stage, otherwise 0."""
    if not problem.pinned:
        return np.zeros((1, 1))
    away = np.cumsum([0, *(pin not in (None, stage) for pin in problem.pinned)])
    return np.where(away[None, :] == away[:, None], 0.0, np.inf)


_NOTHING = _Front(np.zeros(1), np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64))
"""The front of no layers."""


def _fronts(
    problem: CutProblem, stage: int, start: int, known: dict[tuple[int, int], _Front] | None = None
) -> Iterator[_Front]:
    """The fronts of the segments that begin at `start`, one layer longer each time.

    `known` keeps those of a stage, by the front without its last layer and that layer's points: segments of layers
    that have the same points share theirs.
    """
    known = {} if known is None else known
    room, front = problem.capacity * (1 + TOLERANCE), _NOTHING
    for layer in problem.layers[start:]:
        key = (id(front), id(layer.points))
        if key not in known:
            known[key] = _extended(front, layer, problem.in_flight[stage], problem.microbatches, room)
        front = known[key]
        yield front


def _extended(front: _Front, layer: Layer, in_flight: int, microbatches: int, room: float) -> _Front:
    used = np.array([point.held(in_flight, microbatches) for point in layer.points])
    return _extend(front, used, np.array([point.seconds for point in layer.points]), room)


def _extend(front: _Front, used: Array, seconds: Array, room: float) -> _Front:
    """Every point of `front` with every point of one more layer, without those that don't fit or aren't worth it."""
    num_points = len(used)
    all_used = (front.used[:, None] + used).reshape(-1)
    all_seconds = (front.seconds[:, None] + seconds).reshape(-1)
    if len(all_used) > MAX_FRONT * num_points and math.isfinite(room):
        all_used = np.ceil(all_used * (MEMORY_STEPS / room)) * (room / MEMORY_STEPS)
    order = np.lexsort((all_seconds, all_used))
    order = order[all_used[order] <= room]
    fastest = np.minimum.accumulate(all_seconds[order])
    worth = np.diff(fastest, prepend=np.inf) < 0
    order = order[worth]
    return _Front(all_used[order], all_seconds[order], order % num_points, order // num_points)


def _points(problem: CutProblem, counts: Sequence[int], sets: Sequence[int]) -> tuple[int, ...]:
    """The fastest points that fit, per stage."""
    chosen: list[int] = []
    for stage, (count, which) in enumerate(zip(counts, sets, strict=True)):
        own = replace(problem, layers=problem.sets[which])
        fronts = [front for front, _ in zip(_fronts(own, stage, len(chosen)), range(count), strict=False)]
        index, points = len(fronts[-1].used) - 1, []
        for front in reversed(fronts):
            points.append(int(front.point[index]))
            index = int(front.before[index])
        chosen += reversed(points)
    return tuple(chosen)


def evaluate_cut(
    problem: CutProblem, counts: Sequence[int], points: Sequence[int], sets: Sequence[int] | None = None
) -> Cut:
    """What a cut costs and holds, from the problem alone; each stage's layers are of the first set by default."""
    seconds, held, start = [], [], 0
    taken = tuple(sets or (0,) * len(counts))
    for stage, (count, which) in enumerate(zip(counts, taken, strict=True)):
        layers, in_flight = problem.sets[which], problem.in_flight[stage]
        picked = [layers[start + k].points[points[start + k]] for k in range(count)]
        ends_s = float(_ends_seconds(layers)[start, start + count])
        start += count
        seconds.append(math.fsum(point.seconds for point in picked) + ends_s)
        held.append(math.fsum(point.held(in_flight, problem.microbatches) for point in picked))
    once_s = max(problem.once_seconds[which] for which in taken) if problem.once_seconds else 0.0
    objective = (problem.microbatches - 1) * max(seconds) + math.fsum(seconds) + once_s
    return Cut(tuple(counts), tuple(points), tuple(seconds), tuple(held), objective, taken)


def cut_lower_bound(problem: CutProblem) -> float:
    """A quick bound of every cut: an even split of the least total, or one layer that no cut divides; infinite when all
    devices together lack the memory, or there are fewer layers than stages."""
    if len(problem.layers) < problem.num_stages:
        return math.inf
    in_flight = min(problem.in_flight)
    held = 0.0
    for layer in problem.layers:
        held += min(point.held(in_flight, problem.microbatches) for point in layer.points)
    if held > problem.num_stages * problem.capacity * (1 + TOLERANCE):
        return math.inf
    least = [min(point.seconds for point in layer.points) for layer in problem.layers]
    pairs = itertools.pairwise(problem.layers)
    cuts = sorted(layer.cut_seconds + after.begin_seconds for layer, after in pairs)[: problem.num_stages - 1]
    total = math.fsum(least) + math.fsum(cuts)
    return (problem.microbatches - 1) * max(total / problem.num_stages, max(least)) + total
