"""What is tried at one number of microbatches: a mesh's bound, the fastest plan regardless of memory, one that fits.

    trials = Trials(step, skeletons, cluster, pins, capacity)
    relaxed = trials.relaxed(mesh)              # seconds that no plan of this mesh beats
    found = trials.free(mesh, relaxed) or trials.fitted(mesh, relaxed)

A mesh's relaxed problem (one stage, no memory limit) gives the bound, the layouts, and the cost of each unit of the
model, by which the pipeline is cut. Each stage takes over the layouts; what is computed again it decides for itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from torch.fx import Node

from autopar import markers
from autopar.capture.batches import batch_size
from autopar.capture.step import ForwardStep, TrainStep
from autopar.cluster import compute_s
from autopar.cluster.cluster import Cluster
from autopar.compiling import lower, prices
from autopar.counting import Counts, Growth, count, places
from autopar.fitting import GAP, Fitting
from autopar.joint import StepGraph
from autopar.key_globs import forward_globs
from autopar.layers import Cut, homes_of
from autopar.mesh import Mesh
from autopar.pins import Pins
from autopar.program.parts import Pipeline
from autopar.program.storages import nbytes
from autopar.relaxed import Relaxed, fill
from autopar.reshard import Resharder
from autopar.rules.choices import Choice, choice_text
from autopar.rules.nodes import is_view, tensor_operands
from autopar.skeletons import Likeness, Skeletons
from autopar.solve.allowed import PinRules, bind_pins, require_all_matched
from autopar.solve.build import BuiltProblem, Setting, Strategy, build_problem
from autopar.solve.costs import flops, least_seconds
from autopar.solve.modes import is_forward
from autopar.solve.problem import Problem, Solution, Term, evaluate, unlimited
from autopar.solve.search import TIME_LIMIT_S
from autopar.solve.share import solve_shared
from autopar.solve.stages import CutProblem, cut_layers
from autopar.staging import Staged

BOUND_GAP, BOUND_TIME_S = 1e-2, 2.0
"""Effort for the bound of a pipelined mesh."""


@dataclass(slots=True)
class Found:
    """A solved candidate."""

    mesh: Mesh
    microbatches: int
    cut: Cut
    likeness: Likeness
    schedule: str
    texts: dict[str, str]
    recomputed: tuple[str, ...]
    num_recomputed: int
    solution: Solution
    built: BuiltProblem
    pipeline: Pipeline
    """Of the stages that are there."""
    growths: list[Growth]
    counts: Counts
    """At the first stage that each of those stands for, which holds most."""

    @property
    def peaks(self) -> list[int]:
        return self.counts.peaks

    def counted(self) -> Counts:
        """Of all stages."""
        at = places(self.schedule, self.mesh.num_stages, self.microbatches, self.likeness)
        return count(self.pipeline, self.growths, at)

    @property
    def again_text(self) -> str:
        return f", running {self.num_recomputed} forward ops again in the backward" if self.num_recomputed else ""


@dataclass(slots=True)
class Trials:
    """The trials of a step, whose microbatches are settled."""

    step: ForwardStep
    skeletons: Skeletons
    cluster: Cluster
    pins: Pins
    capacity: float
    shortages: list[tuple[float, Mesh, Callable[[], Found]]] = field(default_factory=list)
    """Of what didn't fit: the bytes that the solver counts of the smallest plan, its mesh, and how to lower it."""

    @property
    def microbatches(self) -> int:
        return self.step.microbatches

    def kept_bytes(self) -> float:
        """What the forward of one microbatch leaves to its backward, on all devices together."""
        return float(
            sum(
                nbytes(node.meta["val"]) * times
                for node, times in self._times().items()
                if is_forward(node) and not is_view(node) and node.target is not markers.relay
                if any(user.meta.get("phase") == "backward" for user in node.users)
            )
        )

    def _times(self) -> dict[Node, int]:
        """In how many layers each node of the one-stage graph runs."""
        whole = self.whole
        return {node: whole.repeats.times(home) for node, home in homes_of(whole.graph).items()}

    # -- bounds ------------------------------------------------------------------------------------------------
    def least_s(self, meshes: Iterable[Mesh]) -> dict[Mesh, float]:
        """What the ops alone take in each mesh's pipeline, the ranks of a stage sharing each of them equally."""
        levels: dict[str, dict[Node, int]] = {"microbatch": {}, "step": {}}
        for node, times in self._times().items():
            if "level" in node.meta:
                levels[node.meta["level"]][node] = times

        @functools.cache
        def seconds(level: str, ranks: int) -> float:
            return least_seconds(levels[level], ranks, self._compute_s)

        found = {}
        for mesh in meshes:
            ranks = math.prod(size for _, size in mesh.spmd.axes)
            once = seconds("step", ranks) / mesh.num_stages
            found[mesh] = fill(mesh, self.microbatches) * seconds("microbatch", ranks) + once
        return found

    def order(self, mesh: Mesh) -> float:
        """Seconds to move, at each matmul, its smallest tensor over `dp` and its results over `tp`: tells meshes that
        promise something from others, no more. Where `dp` has more ranks than there are samples, it moves results."""
        price = prices(self.cluster, mesh)
        dp, tp = mesh.size("dp"), mesh.size("tp")
        samples = max(1, batch_size(self.step.batch_tensors()) // self.microbatches)
        moved = 0.0
        for node, times in self._times().items():
            if "rule" in node.meta and node.meta["level"] == "microbatch" and flops(node):
                results = nbytes(node.meta["val"])
                weight = min(results, *(nbytes(operand.meta["val"]) for operand in tensor_operands(node)))
                seconds = price("all_gather", "dp", weight / tp) + price("reduce_scatter", "tp", results / dp)
                seconds += price("reduce_scatter", "dp", results / samples) if dp > samples else 0.0
                moved += times * seconds
        return moved

    def relaxed(self, mesh: Mesh, cutoff: float = math.inf) -> Relaxed:
        """The one-stage problem without memory limits, weighed as S equal stages would be: a bound for every cut."""
        step = self.whole
        setting = replace(self.setting(Cut.single(self.skeletons.units), mesh), mesh=mesh.spmd)
        built = build_problem(step, setting)
        stages, count = mesh.num_stages, self.microbatches
        terms = (Term(fill(mesh, count), (0,)), Term(1 / stages, (1,)))
        free = replace(unlimited(built.problem), objective=terms)
        is_only_a_bound = stages > 1  # of one stage it is the answer too, where memory doesn't bind
        gap, time_limit_s = (BOUND_GAP, BOUND_TIME_S) if is_only_a_bound else (GAP, TIME_LIMIT_S)
        solution = solve_shared(built, free, gap=gap, time_limit_s=time_limit_s, cutoff=cutoff)
        return Relaxed(solution.bound, setting, step.cut.units, step.repeats, built, solution)

    @property
    def whole(self) -> StepGraph:
        """The step graph of one stage."""
        return self.skeletons.graph(Cut.single(self.skeletons.units))

    # -- plans -------------------------------------------------------------------------------------------------
    def free(self, mesh: Mesh, relaxed: Relaxed) -> Found | None:
        """The fastest regardless of memory, where it fits: without recompute, since computing again saves no time."""
        cut, built = self._built(mesh, relaxed)
        solution = self._unlimited(built, mesh, relaxed)
        if not solution.choice or not evaluate(built.problem, solution.choice).feasible:
            return None
        found = self._lowered(mesh, cut, built, solution)
        return found if max(found.peaks) <= self.capacity else None

    def fitted(self, mesh: Mesh, relaxed: Relaxed) -> Found | None:
        """The fastest within the memory; where there is none, the smallest is noted in `shortages`."""
        cut, built = self._built(mesh, relaxed)
        solution = self._unlimited(built, mesh, relaxed)
        near = built.picked(solution.choice) if solution.choice else ()
        if self.pins.recompute is None and self.may_recompute:
            step = self.skeletons.graph(cut)
            built = build_problem(step, replace(self.setting(cut, mesh), recompute="auto"))
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

    def _built(self, mesh: Mesh, relaxed: Relaxed) -> tuple[Cut, BuiltProblem]:
        """The cut of a mesh, and its problem with the recompute that pins ask for."""
        cut = self._cut(mesh, relaxed)
        step = self.skeletons.graph(cut)
        is_built = mesh.num_stages == 1 and self.pins.recompute is None
        setting = relaxed.setting if is_built else self.setting(cut, mesh)
        assert isinstance(setting.allowed, PinRules)
        built = relaxed.built if is_built else build_problem(step, setting)
        require_all_matched(setting.allowed)
        return cut, built

    def _staged(self, mesh: Mesh, relaxed: Relaxed, built: BuiltProblem) -> Staged:
        """The problem of a cut model, with the layouts that are fastest within all stages' memory together, too."""
        staged = Staged(built)
        staged.add(self._layouts(relaxed.built, relaxed.solution))
        return staged

    def _layouts(self, built: BuiltProblem, solution: Solution) -> dict[str, Strategy]:
        """A solution of the one-stage problem, by node key."""
        picked = zip(built.nodes, built.picked(solution.choice), strict=True)
        return self.skeletons.everywhere(self.whole, {node.meta["key"]: strategy for node, strategy in picked})

    @property
    def may_recompute(self) -> bool:
        return self.pins.recompute != "none" and isinstance(self.step, TrainStep)

    def _unlimited(self, built: BuiltProblem, mesh: Mesh, relaxed: Relaxed) -> Solution:
        """The best solution regardless of memory."""
        if mesh.num_stages > 1:
            return self._staged(mesh, relaxed, built).solve(unlimited(built.problem))
        return relaxed.solution if relaxed.solution.choice else solve_shared(built, unlimited(built.problem), gap=GAP)

    def _lowered(self, mesh: Mesh, cut: Cut, built: BuiltProblem, solution: Solution) -> Found:
        step, likeness = self.skeletons.graph(cut), self.skeletons.likeness(cut)
        mesh, choices = self._named_by_role(mesh, step, built.choices(solution.choice))
        rules = {node.meta["key"]: node.meta["rule"] for node in built.nodes}
        everywhere = self.skeletons.everywhere(step, choices)
        texts = self.skeletons.everywhere(
            step, {key: text for key, choice in choices.items() if (text := choice_text(rules[key], choice))}
        )
        ops = self.skeletons.keys(step, built.recomputed(solution.choice))
        again = (*ops, *self.skeletons.keys(step, built.moved_again(solution.choice)))
        recomputed = forward_globs(again, keep_out=set(self.skeletons.keys(step, built.kept(solution.choice))))
        schedule, price, there = self._schedule(), prices(self.cluster, mesh), mesh.with_stages(len(likeness.kept))

        def made(graph: StepGraph) -> Pipeline:
            count, capacity = self.microbatches, int(self.capacity)
            return lower(graph.copied(), everywhere, there, count, price, schedule, recomputed, capacity)

        growths = [Growth(made(each.step), each.follower, each.times) for each in self.skeletons.growths(cut)]
        pipeline = made(step)
        at = [*places(schedule, mesh.num_stages, self.microbatches, likeness)]
        return Found(
            mesh=mesh,
            microbatches=self.microbatches,
            cut=cut,
            likeness=likeness,
            schedule=schedule,
            texts=texts,
            recomputed=recomputed,
            num_recomputed=len(ops),
            solution=solution,
            built=built,
            pipeline=pipeline,
            growths=growths,
            counts=count(pipeline, growths, [at[stage] for stage in likeness.kept]),
        )

    def _named_by_role(self, mesh: Mesh, step: StepGraph, choices: dict[str, Choice]) -> tuple[Mesh, dict[str, Choice]]:
        """Axes that no pin names are called by what they do: `dp` is the one that splits more of the batch."""
        if self.pins.named_axes & {"dp", "tp"}:
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
        stages, count = mesh.num_stages, self.microbatches
        if stages == 1:
            return Cut.single(units)
        in_flight = _in_flight(stages, count)
        problem = CutProblem(relaxed.layers(units, in_flight[0]), stages, count, self.capacity, in_flight)
        # where the relaxed layouts need too much memory, the full problem decides whether others fit
        found = cut_layers(problem) or cut_layers(replace(problem, capacity=math.inf))
        assert found is not None
        return Cut.from_boundaries(units, [sum(found.counts[:s]) for s in range(stages)])

    def setting(self, cut: Cut, mesh: Mesh) -> Setting:
        """What the graph of a cut is priced for, on the mesh of its own stages."""
        step, likeness = self.skeletons.graph(cut), self.skeletons.likeness(cut)
        price, allowed = prices(self.cluster, mesh), bind_pins(self.pins, step.graph, mesh)
        stages, count = mesh.num_stages, self.microbatches
        in_flight = _in_flight(stages, count)
        return Setting(
            mesh=mesh.with_stages(len(likeness.kept)),
            microbatches=count,
            in_flight=tuple(in_flight[stage] for stage in likeness.kept),
            stage_times=likeness.times,
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


def _in_flight(stages: int, microbatches: int) -> tuple[int, ...]:
    """Microbatches whose activations each stage holds at once under 1F1B."""
    return tuple(min(stages - stage, microbatches) for stage in range(stages))
