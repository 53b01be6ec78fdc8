"""Where nothing fits: what overflows, by how much, and the smallest relaxation of each kind that would fit.

    error = infeasible(trials)              # of a search without a plan
    error.certificate.overflow.kind         # "activations"
    [(each.what, each.fits) for each in error.certificate.relaxations]

Each relaxation was planned: it says that it fits because a plan was found, lowered and counted.

Invariants:
- the classes of the overflow sum to its peak, and the peak less the limit is `over_bytes`;
- kinds are looked at in one order, cheap ones first; what time didn't allow is told as not decided.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from autopar.capture.batches import batch_size
from autopar.cluster import candidate_meshes, distinct_meshes
from autopar.cluster.cluster import Cluster
from autopar.cluster.presets import known_kinds, preset_cluster
from autopar.errors import InfeasibleError, PlanError
from autopar.mesh import Mesh
from autopar.planning import as_pinned
from autopar.program.allocations import CLASSES
from autopar.rules.found import find_rules
from autopar.skeletons import Skeletons
from autopar.trials import Found, Trials
from autopar.units import format_bytes, format_seconds, parse_bytes

TIME_S = 10.0
"""Wall time for each kind of relaxation, after which nothing more is begun."""
MOST_DEVICES = 8
"""How many times the devices are looked at."""
HALVINGS = 3
"""Of the memory between what there is and what the smallest plan needs."""
ROUND_UP = 1.02
"""A budget is told with three digits, and must fit as it is told."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """The smallest plan that was found, at its peak."""

    mesh: Mesh
    microbatches: int
    stage: int
    moment: str
    """The call of the step, and the node that it has come to."""
    kind: str
    """The class of memory that no longer fits, counting parameters, gradients and optimizer state first, then
    activations, then buffers."""
    over_bytes: int
    peak_bytes: int
    limit_bytes: int
    classes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Something to ask for instead."""

    kind: str
    """`memory`, `recompute`, `microbatches` or `devices`."""
    what: str
    fits: bool | None
    """None where time ran out before a plan was found."""
    told: str

    def __str__(self) -> str:
        verdict = {True: "fits", False: "doesn't fit", None: "not decided"}[self.fits]
        return f"{self.what}: {verdict}" + (f" ({self.told})" if self.told else "")


@dataclass(frozen=True, slots=True)
class Certificate:
    """Why nothing fits, and what would."""

    cluster: str
    overflow: Overflow
    relaxations: tuple[Relaxation, ...]

    def __str__(self) -> str:
        over = self.overflow
        classes = ", ".join(f"{name} {format_bytes(size)}" for name, size in over.classes.items() if size)
        lines = [
            f"no plan fits {format_bytes(over.limit_bytes)} a device on {self.cluster}: the smallest found (mesh "
            f"{over.mesh}) needs {format_bytes(over.peak_bytes)}",
            f"stage {over.stage} is {format_bytes(over.over_bytes)} over at {over.moment}, by its {over.kind}: "
            f"{classes}",
            *map(str, self.relaxations),
        ]
        return "\n  ".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the mesh as axis → size."""
        found = dataclasses.asdict(self)
        found["overflow"]["mesh"] = dict(self.overflow.mesh.axes)
        return found


def infeasible(trials: Collection[Trials], progress: Callable[[str], None] = lambda _: None) -> InfeasibleError:
    """The error for a search in which no trial found a plan."""
    shortages = [(*entry, each) for each in trials for entry in each.shortages]
    if not shortages:
        first = next(iter(trials))
        have = format_bytes(first.capacity)
        return InfeasibleError(
            f"no plan fits {have} a device on {first.cluster}; use more devices, more microbatches or more memory"
        )
    _, mesh, smallest, own = min(shortages, key=lambda entry: entry[0])
    found = smallest()
    most = max(each.microbatches for each in trials)
    relaxing = _Relaxing(own, mesh, found, most, progress)
    certificate = Certificate(own.cluster.name, _overflow(found, own.capacity), tuple(relaxing.run()))
    return InfeasibleError(str(certificate), certificate)


def _overflow(found: Found, capacity: float) -> Overflow:
    profiles = found.counts.profiles
    there = max(range(len(profiles)), key=lambda there: profiles[there].peak)
    stage, profile = found.built.setting.ranks.kinds[there].rank, profiles[there]
    total, kind = 0, CLASSES[-1]
    for kind in CLASSES:
        total += getattr(profile, kind)
        if total > capacity:
            break
    classes = {name: getattr(profile, name) for name in CLASSES}
    limit, peak = int(capacity), profile.peak
    return Overflow(found.mesh, found.microbatches, stage, profile.where, kind, peak - limit, peak, limit, classes)


def _told_budget(num_bytes: float) -> str:
    return format_bytes(num_bytes * ROUND_UP).replace(" ", "")


@dataclass(slots=True)
class _Relaxing:
    trials: Trials
    mesh: Mesh
    smallest: Found
    most: int
    """Microbatches that the search has looked at."""
    progress: Callable[[str], None]
    deadline: float = 0.0

    def run(self) -> Iterator[Relaxation]:
        """The smallest of each kind."""
        for kind in (self._memory, self._recompute, self._microbatches, self._devices):
            self.deadline = time.monotonic() + TIME_S
            yield from kind()

    # -- kinds -------------------------------------------------------------------------------------------------
    def _memory(self) -> Iterator[Relaxation]:
        """The least budget, by halving, in which this mesh has a plan."""
        low, told = self.trials.capacity, _told_budget(max(self.smallest.peaks))
        best = self._on(self.mesh, self._with(capacity=float(parse_bytes(told))))
        for _ in range(HALVINGS if best is not None else 0):
            middle = _told_budget((low + parse_bytes(told)) / 2)
            if self._is_late or parse_bytes(middle) >= parse_bytes(told):
                break
            self.progress(f"relaxing: {middle} a device")
            found = self._on(self.mesh, self._with(capacity=float(parse_bytes(middle))))
            if found is None:
                low = parse_bytes(middle)
            else:
                best, told = found, middle
        yield self._told("memory", f"--memory {told}", best)

    def _recompute(self) -> Iterator[Relaxation]:
        pinned = self.trials.pins.recompute
        if pinned is not None:
            free = self._with(pins=replace(self.trials.pins, recompute=None))
            yield self._tried(
                "recompute", f"without the pin recompute={pinned}", functools.partial(self._anywhere, free)
            )

    def _microbatches(self) -> Iterator[Relaxation]:
        size, count = batch_size(self.trials.step.batch_tensors()), self.most
        tried = Relaxation("microbatches", "more microbatches", False, f"a batch of {size} has no smaller ones")
        while size % (count * 2) == 0:
            count *= 2
            tried = self._tried("microbatches", f"{count} microbatches", functools.partial(self._with_count, count))
            if tried.fits is not False or tried.told:
                break  # it fits, time ran out, or a pin can't be had of so few samples
        yield tried

    def _devices(self) -> Iterator[Relaxation]:
        times, tried = 1, Relaxation("devices", "", False, "")
        while tried.fits is False and not tried.told and times < MOST_DEVICES:
            times *= 2
            larger = enlarged(self.trials.cluster, times)
            tried = self._tried("devices", larger.name, functools.partial(self._anywhere, self._with(cluster=larger)))
        yield tried

    # -- plans -------------------------------------------------------------------------------------------------
    def _tried(self, kind: str, what: str, search: Callable[[], Found | None]) -> Relaxation:
        if self._is_late:
            return Relaxation(kind, what, None, "time ran out")
        self.progress(f"relaxing: {what}")
        try:
            return self._told(kind, what, search())
        except PlanError as error:
            return Relaxation(kind, what, False, str(error))

    def _told(self, kind: str, what: str, found: Found | None) -> Relaxation:
        if found is None:
            return Relaxation(kind, what, None, "time ran out") if self._is_late else Relaxation(kind, what, False, "")
        step, peak = format_seconds(found.solution.objective), format_bytes(max(found.peaks))
        return Relaxation(kind, what, True, f"mesh {found.mesh}, {peak} a device, step {step} or less")

    def _anywhere(self, trials: Trials) -> Found | None:
        """The first plan on any mesh, those like the smallest one's first."""
        meshes = distinct_meshes(
            trials.cluster, candidate_meshes(trials.cluster, trials.pins.axes), trials.pins.named_axes
        )
        near = [mesh for mesh in meshes if not trials.cannot_cut(mesh)]
        for mesh in sorted(near, key=lambda mesh: (mesh.num_stages != self.mesh.num_stages, mesh.num_stages)):
            found = None if self._is_late else self._on(mesh, trials)
            if found is not None:
                return found
        return None

    def _on(self, mesh: Mesh, trials: Trials) -> Found | None:
        return trials.planned(mesh, trials.relaxed(mesh))

    def _with(self, **changes: Any) -> Trials:
        names = ("step", "skeletons", "cluster", "pins", "capacity")
        return Trials(**{**{name: getattr(self.trials, name) for name in names}, **changes})

    def _with_count(self, count: int) -> Found | None:
        step = self.trials.step.with_microbatches(count)
        folded = as_pinned(step.fold(), self.trials.pins)
        rules = find_rules(folded.captured.graphs, self.progress)
        return self._anywhere(self._with(step=step, skeletons=Skeletons(folded, count, rules.all)))

    @property
    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline


def enlarged(cluster: Cluster, times: int) -> Cluster:
    """The same with `times` as many devices: more nodes, or where there is one, more in it if that is usual."""
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x(\w+)", cluster.name)
    if match and match[3] in known_kinds():
        nodes, devices = int(match[1] or 1), int(match[2])
        if nodes == 1:
            try:
                return preset_cluster(1, devices * times, match[3])
            except PlanError:
                pass
        return preset_cluster(nodes * times, devices, match[3])
    outer, *inner = cluster.levels
    levels = (replace(outer, size=outer.size * times), *inner)
    return replace(cluster, name=f"{cluster.name} with {times} times the devices", levels=levels)
