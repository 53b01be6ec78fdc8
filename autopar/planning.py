"""plan: a step and a cluster → the best plan found, its bound, and what else was looked at.

The search: every mesh that the cluster's levels allow (`pp`, `dp`, `tp`). For each, the relaxed problem (one stage, no
memory limit) gives a lower bound of the step time and the cost of each unit of the model; meshes whose bound is no
better than the best plan are cut. The rest get their pipeline cut from the units' costs, then the full problem under
the memory limit; where the accountant finds the resulting program too large, the limit is tightened by the excess.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Node

from autopar.capture.folding import Folded
from autopar.capture.step import ForwardStep, TrainStep
from autopar.cluster import candidate_meshes, compute_s, distinct_meshes, parse_cluster
from autopar.cluster.cluster import Cluster
from autopar.compiling import lower, prices, valid_for
from autopar.counting import Counts, Growth, count
from autopar.errors import InfeasibleError, PlanError
from autopar.fitting import GAP, Fitting
from autopar.garbage import collected_seldom
from autopar.joint import StepGraph
from autopar.key_globs import forward_globs
from autopar.layers import Cut, homes_of
from autopar.mesh import Mesh
from autopar.pins import Pins, matches_module, parse_pins
from autopar.plans import Candidate, Plan
from autopar.program.parts import Pipeline
from autopar.program.storages import nbytes
from autopar.relaxed import Relaxed, fill
from autopar.report import estimate, spans
from autopar.reshard import Resharder
from autopar.rules.choices import Choice, choice_text
from autopar.rules.found import FoundRules, find_rules
from autopar.rules.nodes import tensor_operands
from autopar.rules.table import check_rules
from autopar.skeletons import Skeletons
from autopar.solve.allowed import PinRules, bind_pins, require_all_matched
from autopar.solve.build import BuiltProblem, Setting, Strategy, build_problem, require_wanted
from autopar.solve.costs import flops, least_seconds
from autopar.solve.problem import Problem, Solution, Term, evaluate, unlimited
from autopar.solve.search import TIME_LIMIT_S
from autopar.solve.share import solve_shared
from autopar.solve.stages import CutProblem, cut_layers
from autopar.staging import Staged
from autopar.units import format_bytes, parse_bytes

MARGIN = 0.05
"""Share of a device's memory left to the allocator and the libraries."""

BOUND_GAP, BOUND_TIME_S = 1e-2, 2.0
"""Effort for the bound of a pipelined mesh."""

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
    pins = parse_pins(pin)
    step = step.with_microbatches(pins.microbatches or step.microbatches)
    started = time.perf_counter()
    folded = _as_pinned(step.fold(), pins)
    captured = folded.captured
    for graph in captured.graphs:
        check_rules(graph)
    rules = find_rules(captured.graphs, progress or (lambda _: None))
    captured_s = time.perf_counter() - started
    require_wanted(captured.gradient.graph, pins.recompute)
    capacity = parse_bytes(memory) if memory is not None else cluster.device.memory_bytes * (1 - MARGIN)
    skeletons = Skeletons(folded, step.microbatches, rules.all)
    search = _Search(step, skeletons, rules, cluster, pins, float(capacity), progress or (lambda _: None))
    found = search.run()
    solved_s = time.perf_counter() - started - captured_s
    return _as_plan(search, found, captured_s, solved_s)


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


@dataclass(slots=True)
class _Found:
    """A solved candidate."""

    mesh: Mesh
    cut: Cut
    schedule: str
    texts: dict[str, str]
    recomputed: tuple[str, ...]
    num_recomputed: int
    solution: Solution
    built: BuiltProblem
    pipeline: Pipeline
    counts: Counts

    @property
    def peaks(self) -> list[int]:
        return self.counts.peaks

    @property
    def again_text(self) -> str:
        return f", running {self.num_recomputed} forward ops again in the backward" if self.num_recomputed else ""


@dataclass(slots=True)
class _Search:
    step: ForwardStep
    skeletons: Skeletons
    rules: FoundRules
    cluster: Cluster
    pins: Pins
    capacity: float
    progress: Progress
    candidates: list[Candidate] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    shortages: list[tuple[float, Mesh, Callable[[], _Found]]] = field(default_factory=list)
    """Of what didn't fit: the bytes that the solver counts of the smallest plan, its mesh, and how to lower it."""

    def run(self) -> _Found:
        """Solves candidates in the order of their bounds, until the next bound is no better than the best."""
        units = self.skeletons.units
        meshes = candidate_meshes(self.cluster, self.pins.axes)
        meshes = [m for m in distinct_meshes(self.cluster, meshes, self._named_axes()) if self._can_cut(m, units)]
        if not meshes:
            raise PlanError(f"no mesh of {self.cluster} has at most {len(units)} stages; the model has as many units")
        best: _Found | None = None
        for bound, mesh, relaxed in sorted(self._bounds(meshes), key=lambda entry: entry[0]):
            if best is not None and bound >= best.solution.objective * (1 - GAP):
                self._note(mesh, bound, None, "cut", "its bound is no better than the best plan")
                self.bounds.append(bound)
                continue
            self.progress(f"solving {mesh}")
            best = self._better(best, mesh, relaxed or self._relaxed(mesh))
        if best is None:
            raise InfeasibleError(self._shortage())
        return best

    def _named_axes(self) -> set[str]:
        zero = {"dp"} if self.pins.zero is not None else set()
        return {*self.pins.axes, *zero, *(pin.axis for pin in self.pins.modules)}

    def _can_cut(self, mesh: Mesh, units: tuple[str, ...]) -> bool:
        if mesh.num_stages <= len(units):
            return True
        self._note(mesh, None, None, "infeasible", f"{mesh.num_stages} stages, but {len(units)} units to cut between")
        return False

    # -- bounds ------------------------------------------------------------------------------------------------
    def _bounds(self, meshes: Sequence[Mesh]) -> Iterator[tuple[float, Mesh, Relaxed | None]]:
        """A bound of each mesh, and its relaxed problem's solution unless another mesh is known to be as good."""
        known, least_s = math.inf, self._least_s(meshes)
        for mesh in sorted(meshes, key=lambda mesh: (least_s[mesh], self._order(mesh))):
            cutoff = known * (1 - GAP)
            if least_s[mesh] >= cutoff:
                yield least_s[mesh], mesh, None
                continue
            relaxed = self._relaxed(mesh, cutoff)
            known = min(known, relaxed.step_s if mesh.num_stages == 1 else math.inf)
            yield relaxed.bound, mesh, None if relaxed.bound >= cutoff else relaxed

    def _least_s(self, meshes: Sequence[Mesh]) -> dict[Mesh, float]:
        """What the ops alone take in each mesh's pipeline, the ranks of a stage sharing each of them equally."""
        homes, times = homes_of(self._whole.graph), self._whole.repeats.times
        levels: dict[str, dict[Node, int]] = {"microbatch": {}, "step": {}}
        for node in self._whole.graph.nodes:
            if "level" in node.meta:
                levels[node.meta["level"]][node] = times(homes[node])

        @functools.cache
        def seconds(level: str, ranks: int) -> float:
            return least_seconds(levels[level], ranks, self._compute_s)

        found = {}
        for mesh in meshes:
            ranks = math.prod(size for _, size in mesh.spmd.axes)
            once = seconds("step", ranks) / mesh.num_stages
            found[mesh] = fill(mesh, self.step.microbatches) * seconds("microbatch", ranks) + once
        return found

    def _order(self, mesh: Mesh) -> float:
        """Seconds to move, at each matmul, its smallest tensor over `dp` and its results over `tp`: tells meshes that
        promise something from others, no more."""
        price, homes, times = prices(self.cluster, mesh), homes_of(self._whole.graph), self._whole.repeats.times
        moved = 0.0
        for node in self._whole.graph.nodes:
            if "rule" in node.meta and node.meta["level"] == "microbatch" and flops(node):
                results = nbytes(node.meta["val"])
                weight = min(results, *(nbytes(operand.meta["val"]) for operand in tensor_operands(node)))
                over_dp = price("all_gather", "dp", weight / mesh.size("tp"))
                over_tp = price("reduce_scatter", "tp", results / mesh.size("dp"))
                moved += times(homes[node]) * (over_dp + over_tp)
        return moved

    def _relaxed(self, mesh: Mesh, cutoff: float = math.inf) -> Relaxed:
        """The one-stage problem without memory limits, weighed as S equal stages would be: a bound for every cut."""
        step = self._whole
        setting = replace(self._setting(step, mesh), mesh=mesh.spmd)
        built = build_problem(step, setting)
        stages, count = mesh.num_stages, self.step.microbatches
        terms = (Term(fill(mesh, count), (0,)), Term(1 / stages, (1,)))
        free = replace(unlimited(built.problem), objective=terms)
        is_only_a_bound = stages > 1  # of one stage it is the answer too, where memory doesn't bind
        gap, time_limit_s = (BOUND_GAP, BOUND_TIME_S) if is_only_a_bound else (GAP, TIME_LIMIT_S)
        solution = solve_shared(built, free, gap=gap, time_limit_s=time_limit_s, cutoff=cutoff)
        return Relaxed(solution.bound, setting, step.cut.units, step.repeats, built, solution)

    @property
    def _whole(self) -> StepGraph:
        """The step graph of one stage."""
        return self.skeletons.graph(Cut.single(self.skeletons.units))

    # -- one candidate -----------------------------------------------------------------------------------------
    def _better(self, best: _Found | None, mesh: Mesh, relaxed: Relaxed) -> _Found | None:
        found = self._solve(mesh, relaxed)
        if found is None:
            reason = f"doesn't fit {format_bytes(self.capacity)} a device" + ", with recompute" * self._may_recompute
            self._note(mesh, None, None, "infeasible", reason)
            return best
        step_s, peak = found.solution.objective, max(found.peaks)
        is_cut = mesh.num_stages > 1  # by the units' costs, so that only the relaxed bound holds for other cuts
        self.bounds.append(relaxed.bound if is_cut else found.solution.bound)
        if best is not None and best.solution.objective <= step_s:
            slower = f"{step_s / best.solution.objective:.3f} times the best plan{found.again_text}"
            self._note(mesh, step_s, peak, "slower", slower)
            return best
        beaten = [replace(c, status="slower", reason="beaten") if c.status == "chosen" else c for c in self.candidates]
        self.candidates = beaten
        self._note(found.mesh, step_s, peak, "chosen", f"the fastest that fits{found.again_text}")
        return found

    def _solve(self, mesh: Mesh, relaxed: Relaxed) -> _Found | None:
        """The fastest that fits: without recompute where memory doesn't bind, since computing again saves no time."""
        cut = self._cut(mesh, relaxed)
        step = self.skeletons.graph(cut)
        is_built = mesh.num_stages == 1 and self.pins.recompute is None
        setting = relaxed.setting if is_built else self._setting(step, mesh)
        built = relaxed.built if is_built else build_problem(step, setting)
        assert isinstance(setting.allowed, PinRules)
        require_all_matched(setting.allowed)
        free = self._unlimited(built, mesh, relaxed)
        if free.choice and evaluate(built.problem, free.choice).feasible:
            fastest = self._lowered(mesh, cut, built, free)
            if max(fastest.peaks) <= self.capacity:
                return fastest
        near = built.picked(free.choice) if free.choice else ()
        if self.pins.recompute is None and self._may_recompute:
            built = build_problem(step, replace(setting, recompute="auto"))
        solve: Callable[[Problem], Solution] = functools.partial(solve_shared, built, gap=GAP, near=near)
        if mesh.num_stages > 1:
            solve = self._staged(mesh, relaxed, built).solve
        lowered = functools.partial(self._lowered, mesh, cut, built)
        fitting = Fitting(built, self.capacity, lowered, solve)
        found = fitting.fastest(relaxed.bound)
        if found is None and fitting.smallest is not None:
            smallest = functools.partial(lowered, fitting.smallest)
            self.shortages.append((fitting.held(fitting.smallest), mesh, smallest))
        return found

    def _staged(self, mesh: Mesh, relaxed: Relaxed, built: BuiltProblem) -> Staged:
        """The problem of a cut model, with the layouts that are fastest within all stages' memory together, too."""
        staged = Staged(built)
        staged.add(self._layouts(relaxed.built, relaxed.solution))
        return staged

    def _layouts(self, built: BuiltProblem, solution: Solution) -> dict[str, Strategy]:
        """A solution of the one-stage problem, by node key."""
        picked = zip(built.nodes, built.picked(solution.choice), strict=True)
        return self.skeletons.everywhere(self._whole, {node.meta["key"]: strategy for node, strategy in picked})

    @property
    def _may_recompute(self) -> bool:
        return self.pins.recompute != "none" and isinstance(self.step, TrainStep)

    def _unlimited(self, built: BuiltProblem, mesh: Mesh, relaxed: Relaxed) -> Solution:
        """The best solution regardless of memory."""
        if mesh.num_stages > 1:
            return self._staged(mesh, relaxed, built).solve(unlimited(built.problem))
        return relaxed.solution if relaxed.solution.choice else solve_shared(built, unlimited(built.problem), gap=GAP)

    def _lowered(self, mesh: Mesh, cut: Cut, built: BuiltProblem, solution: Solution) -> _Found:
        step = self.skeletons.graph(cut)
        mesh, choices = self._named_by_role(mesh, step, built.choices(solution.choice))
        rules = {node.meta["key"]: node.meta["rule"] for node in built.nodes}
        everywhere = self.skeletons.everywhere(step, choices)
        texts = self.skeletons.everywhere(
            step, {key: text for key, choice in choices.items() if (text := choice_text(rules[key], choice))}
        )
        ops = self.skeletons.keys(step, built.recomputed(solution.choice))
        again = (*ops, *self.skeletons.keys(step, built.moved_again(solution.choice)))
        recomputed = forward_globs(again, keep_out=set(self.skeletons.keys(step, built.kept(solution.choice))))
        schedule, price = self._schedule(), prices(self.cluster, mesh)

        def made(graph: StepGraph) -> Pipeline:
            count, capacity = self.step.microbatches, int(self.capacity)
            return lower(graph.copied(), everywhere, mesh, count, price, schedule, recomputed, capacity)

        growths = [Growth(made(each.step), each.follower, each.times) for each in self.skeletons.growths(cut)]
        pipeline = made(step)
        counts = count(pipeline, growths)
        return _Found(mesh, cut, schedule, texts, recomputed, len(ops), solution, built, pipeline, counts)

    def _named_by_role(self, mesh: Mesh, step: StepGraph, choices: dict[str, Choice]) -> tuple[Mesh, dict[str, Choice]]:
        """Axes that no pin names are called by what they do: `dp` is the one that splits more of the batch."""
        if self._named_axes() & {"dp", "tp"}:
            return mesh, choices
        batch = bind_pins(self.pins, step.graph, mesh).batch
        share = dict.fromkeys(mesh.names, 0)
        for node in step.graph.nodes:
            for split in choices.get(node.meta.get("key", ""), ()):
                share[split.axis] += split.factor >= 0 and node.meta["rule"].factors[split.factor].atom in batch
        if share["dp"] >= share["tp"]:
            return mesh, choices
        swap = {"dp": "tp", "tp": "dp"}
        renamed = Mesh(tuple((swap.get(name, name), size) for name, size in mesh.axes))
        return renamed, {
            key: tuple(replace(split, axis=swap.get(split.axis, split.axis)) for split in choice)
            for key, choice in choices.items()
        }

    def _schedule(self) -> str:
        return "1f1b" if isinstance(self.step, TrainStep) else "forward"

    def _cut(self, mesh: Mesh, relaxed: Relaxed) -> Cut:
        units = self.skeletons.units
        stages, count = mesh.num_stages, self.step.microbatches
        if stages == 1:
            return Cut.single(units)
        in_flight = _in_flight(stages, count)
        problem = CutProblem(relaxed.layers(units, in_flight[0]), stages, count, self.capacity, in_flight)
        # where the relaxed layouts need too much memory, the full problem decides whether others fit
        found = cut_layers(problem) or cut_layers(replace(problem, capacity=math.inf))
        assert found is not None
        return Cut.from_boundaries(units, [sum(found.counts[:s]) for s in range(stages)])

    def _setting(self, step: StepGraph, mesh: Mesh) -> Setting:
        price, allowed = prices(self.cluster, mesh), bind_pins(self.pins, step.graph, mesh)
        stages, count = mesh.num_stages, self.step.microbatches
        return Setting(
            mesh=mesh,
            microbatches=count,
            in_flight=_in_flight(stages, count),
            capacity=self.capacity,
            compute=self._compute_s,
            resharder=Resharder(mesh, price),
            transfer=lambda num_bytes: price("p2p", "pp", num_bytes) if stages > 1 else 0.0,
            allowed=allowed,
            alike=allowed.alike,
            recompute=self.pins.recompute or "none",
        )

    def _compute_s(self, flops: float, num_bytes: float, dtype: str) -> float:
        return compute_s(self.cluster.device, flops, num_bytes, dtype)

    # -- what is told ------------------------------------------------------------------------------------------
    def _note(self, mesh: Mesh, step_s: float | None, peak: int | None, status: str, reason: str) -> None:
        self.candidates.append(Candidate(mesh, self.step.microbatches, mesh.num_stages, step_s, peak, status, reason))

    def _shortage(self) -> str:
        have = format_bytes(self.capacity)
        if not self.shortages:
            return f"no plan fits {have} a device on {self.cluster}; use more devices, more microbatches or more memory"
        _, mesh, smallest = min(self.shortages, key=lambda entry: entry[0])
        least = max(smallest().peaks)
        return (
            f"no plan fits {have} a device on {self.cluster}: the smallest found (mesh {mesh}) needs "
            f"{format_bytes(least)}; use --memory {format_bytes(least * 1.1).replace(' ', '')}, more devices, or more "
            "microbatches"
        )


def _in_flight(stages: int, microbatches: int) -> tuple[int, ...]:
    """Microbatches whose activations each stage holds at once under 1F1B."""
    return tuple(min(stages - stage, microbatches) for stage in range(stages))


def _as_plan(search: _Search, found: _Found, captured_s: float, solved_s: float) -> Plan:
    bound = min([found.solution.objective, *search.bounds])
    return Plan(
        valid_for=replace(
            valid_for(search.step, search.skeletons.folded.whole),
            cluster=search.cluster.name,
            num_devices=search.cluster.num_devices,
        ),
        cluster=search.cluster,
        mesh=found.mesh,
        microbatches=search.step.microbatches,
        schedule=found.schedule,
        stages=spans(found.cut),
        node_stage=dict(zip(found.cut.units, found.cut.stages, strict=True)),
        choices=found.texts,
        recomputed=found.recomputed,
        pins=tuple(part.strip() for part in str(search.pins).split(",") if part.strip()),
        estimate=estimate(
            found.pipeline,
            found.counts,
            found.built,
            found.solution,
            bound,
            search.cluster,
            search.capacity,
            captured_s,
            solved_s,
        ),
        candidates=tuple(search.candidates),
        found_rules=search.rules.by_experiment,
        registered_rules=search.rules.registered,
    )
