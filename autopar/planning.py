"""plan: a step and a cluster → the best plan found, its bound, and what else was looked at.

The search: every mesh that the cluster's levels allow (`pp`, `dp`, `tp`), and where the number of microbatches is left
to it, powers of two of them. For each a bound of the step's time is known before its problem is solved in full: by what
its ops take at least, by a relaxed problem (one stage, no memory limit), or by that of fewer microbatches. What isn't
better than the best plan by its bound is cut. First come plans without recompute where they fit; then, for the rest,
the full problem under the memory limit; where the accountant finds the resulting program too large, the limit is
tightened by the excess.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Graph

from autopar.capture.batches import batch_size
from autopar.capture.folding import Folded
from autopar.capture.step import ForwardStep
from autopar.cluster import candidate_meshes, distinct_meshes, parse_cluster
from autopar.cluster.cluster import Cluster
from autopar.compiling import valid_for
from autopar.errors import InfeasibleError, PlanError
from autopar.garbage import collected_seldom
from autopar.mesh import Mesh
from autopar.pins import Pins, matches_module, parse_pins
from autopar.plans import Candidate, Plan
from autopar.relaxed import Relaxed, fill
from autopar.report import estimate, spans
from autopar.rules.found import FoundRules, find_rules
from autopar.rules.table import check_rules
from autopar.skeletons import Skeletons
from autopar.solve.build import require_wanted
from autopar.trials import Found, Trials
from autopar.units import format_bytes, parse_bytes

CUT_GAP = 1e-2
"""A mesh whose bound is within this part of the best plan isn't solved: so much the search leaves open."""

MOST_TIMES = 8
"""How many times the least number of microbatches are looked at."""

MARGIN = 0.05
"""Share of a device's memory left to the allocator and the libraries."""

Progress = Callable[[str], None]


@collected_seldom()
def plan(
    step: ForwardStep,
    cluster: str | Cluster,
    *,
    pin: str | Sequence[str] | Pins | None = None,
    memory: str | float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The cheapest plan of `step` on `cluster` within `pin` and `memory` (bytes of one device, or text: "60GiB").

    Raises `PlanError` for pins or sizes that don't fit together, `InfeasibleError` when no plan fits the memory.
    """
    cluster = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    capacity = parse_bytes(memory) if memory is not None else cluster.device.memory_bytes * (1 - MARGIN)
    started = time.perf_counter()
    search = _Search(step, cluster, parse_pins(pin), float(capacity), progress or (lambda _: None))
    found = search.run()
    return _as_plan(search, found, time.perf_counter() - started - search.captured_s)


def _as_pinned(folded: Folded, pins: Pins) -> Folded:
    """The step with all of its layers where a pin tells some apart that are folded."""
    globs = [pin.glob for pin in pins.modules]
    globs += [pins.recompute] if pins.recompute not in (None, "none", "full") else []
    paths = {node.meta.get("path", "") for node in folded.captured.gradient.graph.nodes}
    for run in folded.runs:
        blocks = [run.block(number, offset) for number in range(run.count) for offset in range(run.period)]
        inside = {p.removeprefix(b) for p in paths for b in blocks if p == b or p.startswith(f"{b}.")}
        for glob, rest, offset in itertools.product(globs, inside, range(run.period)):
            if len({matches_module(glob, block + rest) for block in blocks[offset :: run.period]}) > 1:
                return Folded(folded.whole)
    return folded


def _paths(graph: Graph) -> Iterator[str]:
    yield from (node.meta.get("path", "") for node in graph.nodes)


def _modules(paths: Iterable[str]) -> set[str]:
    """Module paths, and those of the modules around them."""
    parts = (path.split(".") for path in set(paths))
    return {".".join(names[:count]) for names in parts for count in range(1, len(names) + 1)}


@dataclass(slots=True)
class _Open:
    """A mesh at a number of microbatches that isn't solved yet."""

    bound: float
    mesh: Mesh
    trials: Trials
    relaxed: Relaxed | None = None
    """Of a mesh whose bound was good enough when it was looked at."""
    guess: float = math.inf
    """What its best plan may take (`Trials.guess_s`)."""

    def order(self) -> tuple[bool, float, float]:
        """Sorts those first that promise most."""
        return self.relaxed is None, self.guess, self.bound

    def solved(self) -> Relaxed:
        """The relaxed problem's solution."""
        return self.relaxed or self.trials.relaxed(self.mesh)


@dataclass(slots=True)
class _Search:
    step: ForwardStep
    cluster: Cluster
    pins: Pins
    capacity: float
    progress: Progress
    rules: FoundRules = field(default_factory=FoundRules)
    trials: dict[int, Trials] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    captured_s: float = 0.0
    best: Found | None = None
    candidates: list[Candidate] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    least: dict[Mesh, tuple[float, int]] = field(default_factory=dict)
    """Mesh → the best bound at fewer microbatches, and how many those were."""

    def run(self) -> Found:
        """First what fits without recompute, for one number of microbatches after another; then all that is left."""
        self.counts = self._counts()
        first, *others = self.counts
        trials = self._trials(first)
        graph = trials.skeletons.folded.captured.gradient.graph
        require_wanted(graph, self.pins.recompute)
        self.pins.check(("pp", "dp", "tp"), _modules((*_paths(graph), *trials.step.parameter_names)))
        meshes = self._meshes(trials)
        waiting: list[_Open] = list(self._unfitting(trials, meshes))
        for count in others:
            left = [mesh for mesh in meshes if self._inherited(mesh, count) < self._cutoff]
            for mesh in set(meshes) - set(left):
                self._cut(mesh, count, self._inherited(mesh, count))
            if left:
                waiting += self._unfitting(self._trials(count), left)
        for each in sorted(waiting, key=_Open.order):
            if each.bound >= self._cutoff:
                self._cut(each.mesh, each.trials.microbatches, each.bound)
                continue
            self.progress(f"solving {each.mesh} within memory, {each.trials.microbatches} microbatches")
            relaxed = each.solved()
            self._offer(each.trials.fitted(each.mesh, relaxed), each.mesh, relaxed, each.trials)
        if self.best is None:
            raise InfeasibleError(self._shortage())
        return self.best

    # -- what is searched --------------------------------------------------------------------------------------
    def _counts(self) -> list[int]:
        """Numbers of microbatches: the given one, or powers of two from where activations may fit."""
        given = self.pins.microbatches or (None if self.step.microbatches_are_free else self.step.microbatches)
        if given is not None:
            return [given]
        size = batch_size(self.step.batch_tensors())
        powers = [1 << i for i in range(size.bit_length()) if size % (1 << i) == 0]
        # half of the memory for activations, of which each device has an equal part: without that, only recompute helps
        held = self._trials(powers[0]).kept_bytes() / self.cluster.num_devices
        least = next((count for count in powers if held / count <= self.capacity / 2), powers[-1])
        return [count for count in powers if least <= count <= MOST_TIMES * least]

    def _trials(self, count: int) -> Trials:
        if count not in self.trials:
            started = time.perf_counter()
            step = self.step.with_microbatches(count)
            folded = _as_pinned(step.fold(), self.pins)
            for graph in folded.captured.graphs:
                check_rules(graph)
            self.rules = find_rules(folded.captured.graphs, self.progress)
            skeletons = Skeletons(folded, count, self.rules.all)
            self.trials[count] = Trials(step, skeletons, self.cluster, self.pins, self.capacity)
            self.captured_s += time.perf_counter() - started
        return self.trials[count]

    def _meshes(self, trials: Trials) -> list[Mesh]:
        units = trials.skeletons.units
        meshes = candidate_meshes(self.cluster, self.pins.axes)
        fitting = []
        for mesh in distinct_meshes(self.cluster, meshes, self.pins.named_axes):
            if mesh.num_stages <= len(units):
                fitting.append(mesh)
                continue
            reason = f"{mesh.num_stages} stages, but {len(units)} units to cut between"
            self._note(mesh, trials.microbatches, None, None, "infeasible", reason)
        if not fitting:
            raise PlanError(f"no mesh of {self.cluster} has at most {len(units)} stages; the model has as many units")
        return fitting

    # -- bounds ------------------------------------------------------------------------------------------------
    @property
    def _cutoff(self) -> float:
        """What a bound must be below to matter."""
        return self.best.solution.objective * (1 - CUT_GAP) if self.best is not None else math.inf

    def _inherited(self, mesh: Mesh, count: int) -> float:
        """A bound at `count` microbatches from one at fewer: no op or collective takes less for a part of its sizes
        than that part of its time, so the work of all microbatches only grows; what shrinks is the wait for the
        pipeline to fill."""
        bound, fewer = self.least.get(mesh, (0.0, 1))
        return bound * (fill(mesh, count) / count) / (fill(mesh, fewer) / fewer)

    def _opened(self, trials: Trials, meshes: Sequence[Mesh]) -> Iterator[_Open]:
        """A bound of each mesh, and its relaxed problem's solution unless another mesh promises to be as good."""
        known, bounds = math.inf, self._quick_bounds(trials, meshes)
        for mesh in sorted(meshes, key=bounds.__getitem__):
            cutoff = min(self._cutoff, known * (1 - CUT_GAP))
            useful = cutoff * self._gain(mesh, trials.microbatches)
            self.least[mesh] = (bounds[mesh], trials.microbatches)
            if bounds[mesh] >= useful:
                yield _Open(bounds[mesh], mesh, trials)
                continue
            self.progress(f"relaxing {mesh}, {trials.microbatches} microbatches")
            relaxed = trials.relaxed(mesh, useful)
            bound = max(relaxed.bound, bounds[mesh])
            self.least[mesh] = (bound, trials.microbatches)
            if bound >= useful:
                yield _Open(bound, mesh, trials)
                continue
            guess = trials.guess_s(mesh, relaxed)
            known = min(known, guess)
            yield _Open(bound, mesh, trials, relaxed, guess)

    def _quick_bounds(self, trials: Trials, meshes: Sequence[Mesh]) -> dict[Mesh, float]:
        """Bounds that are known without the whole problem."""
        self.progress(f"bounding {len(meshes)} meshes, {trials.microbatches} microbatches")
        bounds = {mesh: max(trials.least_s(mesh), self._inherited(mesh, trials.microbatches)) for mesh in meshes}
        return {
            mesh: bound if bound >= self._cutoff else max(bound, trials.layer_s(mesh)) for mesh, bound in bounds.items()
        }

    def _gain(self, mesh: Mesh, count: int) -> float:
        """How many times faster a mesh may be with more microbatches, at most."""
        return max(fill(mesh, count) / count / (fill(mesh, other) / other) for other in self.counts if other >= count)

    # -- plans -------------------------------------------------------------------------------------------------
    def _unfitting(self, trials: Trials, meshes: Sequence[Mesh]) -> Iterator[_Open]:
        """Offers what fits without recompute; what doesn't is left, and what isn't worth a look while nothing fits."""
        for each in sorted(self._opened(trials, meshes), key=_Open.order):
            if each.bound >= self._cutoff:
                self._cut(each.mesh, trials.microbatches, each.bound)
                continue
            if each.relaxed is None and self.best is None:
                yield each
                continue
            self.progress(f"solving {each.mesh}, {trials.microbatches} microbatches")
            each.relaxed = each.solved()
            found = trials.free(each.mesh, each.relaxed)
            if found is None:
                yield each
            else:
                self._offer(found, each.mesh, each.relaxed, trials)

    def _offer(self, found: Found | None, mesh: Mesh, relaxed: Relaxed, trials: Trials) -> None:
        """Keeps a plan that is better than the best one by now."""
        count = trials.microbatches
        if found is None:
            reason = f"doesn't fit {format_bytes(self.capacity)} a device" + ", with recompute" * trials.may_recompute
            self._note(mesh, count, None, None, "infeasible", reason)
            return
        step_s, peak = found.solution.objective, max(found.peaks)
        is_cut = mesh.num_stages > 1  # by the units' costs, so that only the relaxed bound holds for other cuts
        self.bounds.append(relaxed.bound if is_cut else found.solution.bound)
        if self.best is not None and self.best.solution.objective <= step_s:
            slower = f"{step_s / self.best.solution.objective:.3f} times the best plan{found.again_text}"
            self._note(mesh, count, step_s, peak, "slower", slower)
            return
        beaten = [replace(c, status="slower", reason="beaten") if c.status == "chosen" else c for c in self.candidates]
        self.best, self.candidates = found, beaten
        self._note(found.mesh, count, step_s, peak, "chosen", f"the fastest that fits{found.again_text}")

    # -- what is told ------------------------------------------------------------------------------------------
    def _cut(self, mesh: Mesh, count: int, bound: float) -> None:
        self._note(mesh, count, bound, None, "cut", "its bound is no better than the best plan")
        self.bounds.append(bound)

    def _note(self, mesh: Mesh, count: int, step_s: float | None, peak: int | None, status: str, reason: str) -> None:
        self.candidates.append(Candidate(mesh, count, mesh.num_stages, step_s, peak, status, reason))

    def _shortage(self) -> str:
        have = format_bytes(self.capacity)
        shortages = [entry for trials in self.trials.values() for entry in trials.shortages]
        if not shortages:
            return f"no plan fits {have} a device on {self.cluster}; use more devices, more microbatches or more memory"
        _, mesh, smallest = min(shortages, key=lambda entry: entry[0])
        least = max(smallest().peaks)
        return (
            f"no plan fits {have} a device on {self.cluster}: the smallest found (mesh {mesh}) needs "
            f"{format_bytes(least)}; use --memory {format_bytes(least * 1.1).replace(' ', '')}, more devices, or more "
            "microbatches"
        )


def _as_plan(search: _Search, found: Found, solved_s: float) -> Plan:
    bound = min([found.solution.objective, *search.bounds])
    trials = search.trials[found.microbatches]
    return Plan(
        valid_for=replace(
            valid_for(trials.step, trials.skeletons.folded.whole),
            cluster=search.cluster.name,
            num_devices=search.cluster.num_devices,
        ),
        cluster=search.cluster,
        mesh=found.mesh,
        microbatches=found.microbatches,
        schedule=found.schedule,
        stages=spans(found.cut),
        node_stage=dict(zip(found.cut.units, found.cut.stages, strict=True)),
        choices=found.texts,
        recomputed=found.recomputed,
        pins=tuple(part.strip() for part in str(search.pins).split(",") if part.strip()),
        estimate=estimate(found, bound, search.cluster, search.capacity, search.captured_s, solved_s),
        candidates=tuple(search.candidates),
        found_rules=search.rules.by_experiment,
        registered_rules=search.rules.registered,
    )
