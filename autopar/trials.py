"""What is tried at one number of microbatches: a mesh's bound, the fastest plan regardless of memory, one that fits.

    trials = Trials(step, skeletons, cluster, pins, capacity)
    relaxed = trials.relaxed(mesh)              # seconds that no plan of this mesh beats
    found = trials.planned(mesh, relaxed)

A mesh's relaxed problem (one stage, no memory limit) gives the bound, the layouts, and the cost of each unit of the
model, by which the pipeline is cut. Each stage takes over the layouts; what is computed again it decides for itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autopar.bounds import PHASES, Bounds
from autopar.capture.step import ForwardStep, TrainStep
from autopar.cluster import compute_s
from autopar.cluster.cluster import Cluster
from autopar.compiling import lower, prices
from autopar.counting import Counting, Counts, Growth
from autopar.fitting import GAP, Fitting
from autopar.guessing import Cuts, Guess
from autopar.joint import StepGraph
from autopar.key_globs import forward_globs
from autopar.layers import Cut
from autopar.memory_bounds import MemoryBounds
from autopar.mesh import PIPELINE_AXIS, Mesh
from autopar.pins import Pins
from autopar.pipeline_bounds import PipelineBounds, as_layers
from autopar.program.generators import INTERLEAVED
from autopar.program.parts import Pipeline
from autopar.relaxed import Relaxed, fill
from autopar.reshard import Resharder
from autopar.rules.choices import Choice, choice_text
from autopar.skeletons import Likeness, Skeletons
from autopar.solve.allowed import PinRules, bind_pins, require_all_matched
from autopar.solve.beside import solve_beside, step_s
from autopar.solve.build import BuiltProblem, Setting, Strategy, build_problem
from autopar.solve.priced import Within
from autopar.solve.problem import Problem, Solution, Term, evaluate, unlimited
from autopar.solve.ranks import may_interleave, ranks_of
from autopar.solve.rounds import RoundCuts
from autopar.solve.search import TIME_LIMIT_S
from autopar.solve.share import solve_repeated_first, solve_shared
from autopar.stage_pins import cannot_cut, pinned_stages
from autopar.staging import Staged
from autopar.unit_bounds import Least, Prices, UnitBounds
from autopar.unit_points import LAYOUT_GAP, LAYOUT_TIME_S, Laid, UnitPoints

BESIDE_GAP = 5e-3
"""Part of a step by which what computation is too short to hide may make it longer before other layouts are tried."""

PRICES = (0.05, 0.15, 0.4, 1.6)
"""Of memory, where it binds: what all of a device's memory is worth, in parts of the step; tried one by one for as long
as that helps."""

TIGHTER = (0.85, 0.7)
"""Parts of the memory for which a pipeline is guessed again where no plan comes of the guess before."""

UNSEEN = 0.015
"""Share of the memory that the working set of the moment takes, by which pipelines' first limits are tighter."""

KEPT_BUILT = 4
"""One-stage problems that are kept from when a pipeline's units are bounded to when it is relaxed."""

MOST_VIRTUAL = 16
"""Stages of a pipeline rank that are looked at."""


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
    counting: Counting
    counts: Counts
    """Of a rank of each kind, the one that holds most."""

    @property
    def peaks(self) -> list[int]:
        return self.counts.peaks

    def counted(self) -> Counts:
        """Of all ranks."""
        return self.counting.of(range(self.mesh.size(PIPELINE_AXIS)))

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
    guesses: dict[Mesh, Guess] = field(default_factory=dict)
    """Of the meshes that were relaxed."""
    shortages: list[tuple[float, Mesh, Callable[[], Found]]] = field(default_factory=list)
    """Of what didn't fit: the bytes that the solver counts of the smallest plan, its mesh, and how to lower it."""
    _bounds: Bounds | None = None
    _least: dict[Mesh, Least] = field(default_factory=dict)
    """Of pipelines whose units are bounded: the least seconds of each."""
    _resharders: dict[Mesh, Resharder] = field(default_factory=dict)
    _cut_counts: dict[Mesh, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    _alone_built: dict[Mesh, BuiltProblem] = field(default_factory=dict)
    """The one-stage problems of the last of these that aren't relaxed yet."""

    @property
    def microbatches(self) -> int:
        return self.step.microbatches

    @property
    def bounds(self) -> Bounds:
        """What no plan beats, before a mesh's problem is built."""
        if self._bounds is None:
            units, runs = self.skeletons.units, self.skeletons.folded.runs
            alone, virtuals = self._alone, self.virtuals
            self._bounds = Bounds(self.whole, units, runs, self.microbatches, self._compute_s, alone, virtuals)
        return self._bounds

    def virtuals(self, mesh: Mesh) -> tuple[int, ...]:
        """How many stages each rank of a mesh may have, rising."""
        ranks = mesh.num_stages
        if self.pins.virtual is not None:
            return (self.pins.virtual,)
        is_free = isinstance(self.step, TrainStep) and not self.pins.stages and may_interleave(ranks, self.microbatches)
        most = min(MOST_VIRTUAL, len(self.skeletons.units) // ranks) if is_free and ranks > 1 else 1
        return tuple(range(1, most + 1))

    def can_run(self, mesh: Mesh, microbatches: int) -> bool:
        """Whether as many stages a rank as are pinned can run so many microbatches."""
        return self.pins.virtual in (None, 1) or may_interleave(mesh.num_stages, microbatches)

    def cannot_cut(self, mesh: Mesh) -> str:
        """Why a model can't be cut into a mesh's stages; "" where it can."""
        virtual = self.pins.virtual or 1
        if virtual > 1 and (reason := self._cannot_interleave(mesh)):
            return f"a pin asks for {virtual} stages a rank, {reason}"
        return cannot_cut(self.pins, self.skeletons, mesh.num_stages * virtual)

    def _cannot_interleave(self, mesh: Mesh) -> str:
        if not isinstance(self.step, TrainStep):
            return "which are for training"
        if self.pins.stages:
            return "and another puts modules on stages, which goes with one a rank"
        if mesh.num_stages == 1:
            return "but the mesh has no pipeline"
        if not may_interleave(mesh.num_stages, self.microbatches):
            count, ranks = self.microbatches, mesh.num_stages
            return f"but {count} microbatches can't go through {ranks} ranks in equal rounds; use a multiple of {ranks}"
        return ""

    def units_s(self, mesh: Mesh) -> float:
        """What no plan of a pipeline beats, each unit of the model taking what it takes at least by itself."""
        if mesh not in self._least:
            built = self._alone_built[mesh] = build_problem(self.whole, self._alone(mesh))
            if len(self._alone_built) > KEPT_BUILT:
                self._alone_built.pop(next(iter(self._alone_built)))
            prices = Prices(once=1 / self.microbatches)
            self._least[mesh] = UnitBounds(built, self.whole.cut.units, self.whole.repeats).least(prices)
        return self._pipeline(mesh).least_s(self._least[mesh])

    def within_s(self, mesh: Mesh, enough: float) -> float:
        """What no plan of a pipeline beats within the memory; only until `enough` seconds are proven.

        Of one stage a rank, where any cut may be, it is without a limit."""
        in_rounds = {virtual: counts for virtual, counts in self._counts(mesh).items() if virtual > 1}
        once = [replace(self._pipeline(mesh), counts={1: ()}).least_s(self._least[mesh])] * (1 in self._counts(mesh))
        if not in_rounds:
            return min(once)
        units = UnitBounds(self._kinds_built(mesh), self.whole.cut.units, self.whole.repeats)
        cuts_s = self.bounds.cuts_s(mesh)
        bounds = MemoryBounds(mesh.num_stages, self.microbatches, self.capacity, cuts_s, in_rounds)
        return min([bounds.seconds(units, enough, with_across=any(self._least[mesh].joined)), *once])

    def _pipeline(self, mesh: Mesh) -> PipelineBounds:
        ranks, cuts_s = mesh.num_stages, self.bounds.cuts_s(mesh)
        through_s = sum(self.bounds.phases_s(mesh, PHASES).values())
        return PipelineBounds(ranks, self.microbatches, cuts_s, through_s, self._counts(mesh))

    def _counts(self, mesh: Mesh) -> dict[int, tuple[int, ...]]:
        """Units of each stage, by the number of stages a rank: by what units take at least; none where it is one."""
        if mesh.num_stages == 1:
            return {1: ()}
        if mesh not in self._cut_counts:
            rounds = RoundCuts(as_layers(self._least[mesh], self.bounds.cuts_s(mesh)), mesh.num_stages)
            found = {v: rounds.counts(v, self.microbatches) for v in self.virtuals(mesh) if v > 1}
            honest = {v: each.counts for v, each in found.items() if each.is_honest or len(self.virtuals(mesh)) == 1}
            self._cut_counts[mesh] = {v: () for v in self.virtuals(mesh) if v == 1} | honest
        return self._cut_counts[mesh]

    def relaxed(self, mesh: Mesh, cutoff: float = math.inf) -> Relaxed:
        """The one-stage problem without memory limits, weighed as equal stages would be: a bound for every cut.

        That of a pipeline is also bounded unit by unit, since no unit can be cut in two."""
        step, is_cut = self.whole, mesh.num_stages > 1  # of one stage it is the answer too, where memory doesn't bind
        least = self.units_s(mesh) if is_cut else 0.0
        built = self._alone_built.pop(mesh, None) or build_problem(step, self._alone(mesh))
        free = replace(unlimited(built.problem), objective=self._relaxed_objective(mesh))
        if is_cut:
            floor = self._relaxed_floor(mesh)
            solve = functools.partial(
                solve_repeated_first, built, gap=LAYOUT_GAP, time_limit_s=LAYOUT_TIME_S, floor=floor
            )
        else:
            solve = functools.partial(solve_shared, built, gap=GAP, time_limit_s=TIME_LIMIT_S, cutoff=cutoff)
        solution = solve_beside(built, free, solve, gap=BESIDE_GAP, cutoff=cutoff, is_cut=is_cut)
        return Relaxed(max(least, solution.bound), built.setting, step.cut.units, step.repeats, built, solution)

    def _relaxed_floor(self, mesh: Mesh) -> float:
        """What the relaxed problem costs at least by its units: what they take is concave in how much of what is done
        once a step counts, which is less here than in `units_s`."""
        weight, units_s = self._fill(mesh), self._least[mesh].whole
        through_s = min(units_s, self._pipeline(mesh).through_s)
        part = min(1.0, self.microbatches / (mesh.num_stages * weight))
        return weight * (part * units_s + (1 - part) * through_s)

    def _relaxed_objective(self, mesh: Mesh) -> tuple[Term, Term]:
        return Term(self._fill(mesh), (0,)), Term(1 / mesh.num_stages, (1,))

    def _fill(self, mesh: Mesh) -> float:
        return fill(mesh, self.microbatches, self.virtuals(mesh)[-1])

    def _alone(self, mesh: Mesh) -> Setting:
        """The setting of one stage without its pipeline."""
        return replace(self.setting(Cut.single(self.skeletons.units), mesh), mesh=mesh.spmd)

    def guess_s(self, mesh: Mesh, relaxed: Relaxed, cutoff: float = math.inf) -> float:
        """What the best plan of a mesh may take, by its units' costs, kept or computed again as memory asks for;
        infinite where no cut fits so. No bound: layouts are the relaxed ones, or leaner. Of a pipeline that takes no
        less than `cutoff` it may be what it takes if memory doesn't bind; then it isn't among `guesses`."""
        if mesh not in self.guesses:
            guess = self._guessed(mesh, relaxed, self.capacity, cutoff)
            if guess.is_unlimited:
                return guess.seconds
            self.guesses[mesh] = guess
        return self.guesses[mesh].seconds

    @property
    def whole(self) -> StepGraph:
        """The step graph of one stage."""
        return self.skeletons.graph(Cut.single(self.skeletons.units))

    # -- plans -------------------------------------------------------------------------------------------------
    def planned(self, mesh: Mesh, relaxed: Relaxed) -> Found | None:
        """The fastest plan of a mesh that fits, as far as one is found.

        A pipeline whose guess turns out not to fit is guessed again for less memory."""
        found = self.free(mesh, relaxed) or self.fitted(mesh, relaxed)
        for part in TIGHTER:
            if found is not None or mesh.num_stages == 1 or math.isinf(self._guess(mesh, relaxed).seconds):
                break
            self.guesses[mesh] = self._guessed(mesh, relaxed, part * self.capacity)
            found = self.fitted(mesh, relaxed)
        return found

    def free(self, mesh: Mesh, relaxed: Relaxed) -> Found | None:
        """The fastest regardless of memory, where it fits: without recompute, since computing again saves no time."""
        if mesh.num_stages > 1 and not self._guess(mesh, relaxed).keeps_all:
            return None
        guess, built = self._built(mesh, relaxed)
        solution = self._unlimited(built, mesh, relaxed)
        if not solution.choice or not evaluate(built.problem, solution.choice).feasible:
            return None
        found = self._lowered(guess.mesh, guess.cut, built, solution)
        return found if max(found.peaks) <= self.capacity else None

    def fitted(self, mesh: Mesh, relaxed: Relaxed) -> Found | None:
        """The fastest within the memory; where there is none, the smallest is noted in `shortages`."""
        guess, recompute = self._guess(mesh, relaxed), self._free_recompute
        solve: Callable[[Problem], Solution]
        if mesh.num_stages > 1:
            _, built = self._built(mesh, relaxed, recompute)
            solve = self._staged(mesh, relaxed, built).solve
        else:
            _, built = self._built(mesh, relaxed)
            solution = self._unlimited(built, mesh, relaxed)
            near = built.picked(solution.choice) if solution.choice else ()
            if recompute in ("auto", "kept"):
                _, built = self._built(mesh, relaxed, recompute)
            solve = Within(built, relaxed.bound, near).solve
        lowered = functools.partial(self._lowered, guess.mesh, guess.cut, built)
        room = UNSEEN * self.capacity if mesh.num_stages > 1 else 0.0  # of one stage the solver's bound counts
        fitting = Fitting(built, self.capacity, lowered, solve, room)
        found = fitting.fastest(relaxed.bound)
        if found is None and fitting.smallest is not None:
            smallest = functools.partial(lowered, fitting.smallest)
            self.shortages.append((fitting.held(fitting.smallest), guess.mesh, smallest))
        return found

    def _built(self, mesh: Mesh, relaxed: Relaxed, recompute: str | None = None) -> tuple[Guess, BuiltProblem]:
        """The guess for a mesh, and its problem with `recompute`, by default what pins ask for."""
        guess = self._guess(mesh, relaxed)
        is_built = mesh.num_stages == 1 and self.pins.recompute is None and recompute is None
        setting = relaxed.setting if is_built else self.setting(guess.cut, guess.mesh)
        assert isinstance(setting.allowed, PinRules)
        asked = setting if recompute is None else replace(setting, recompute=recompute)
        built = relaxed.built if is_built else build_problem(self.skeletons.graph(guess.cut), asked)
        require_all_matched(setting.allowed)
        return guess, built

    def _staged(self, mesh: Mesh, relaxed: Relaxed, built: BuiltProblem) -> Staged:
        """The problem of a cut model, whose stages take over the one-stage layouts that promise most."""
        guess = self._guess(mesh, relaxed)
        known = {id(own): self._layouts(relaxed, own) for own in guess.layouts}
        there = self.skeletons.likeness(guess.cut).kept
        return Staged(built, [known[id(guess.layouts[stage])] for stage in there])

    def _layouts(self, relaxed: Relaxed, laid: Laid) -> dict[str, Strategy]:
        """The layouts of the one-stage problem, by node key."""
        picked = zip(relaxed.built.nodes, laid.picked, strict=True)
        return self.skeletons.everywhere(self.whole, {node.meta["key"]: strategy for node, strategy in picked})

    @property
    def _free_recompute(self) -> str | None:
        """What pins ask for, or all that they leave open (see `Setting.recompute`)."""
        asked = self.pins.recompute
        return {None: "auto", "none": "kept"}.get(asked, asked) if isinstance(self.step, TrainStep) else asked

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
        solution = replace(solution, objective=step_s(built, solution.choice))
        mesh, choices = self._named_by_role(mesh, step, built.choices(solution.choice))
        rules = {node.meta["key"]: node.meta["rule"] for node in built.nodes}
        everywhere = self.skeletons.everywhere(step, choices)
        texts = self.skeletons.everywhere(
            step, {key: text for key, choice in choices.items() if (text := choice_text(rules[key], choice))}
        )
        ops = self.skeletons.keys(step, built.recomputed(solution.choice))
        again = (*ops, *self.skeletons.keys(step, built.moved_again(solution.choice)))
        recomputed = forward_globs(again, keep_out=set(self.skeletons.keys(step, built.kept(solution.choice))))
        price, there = prices(self.cluster, mesh), mesh.with_stages(len(likeness.kept))

        def made(graph: StepGraph) -> Pipeline:
            count, capacity = self.microbatches, int(self.capacity)
            return lower(graph.copied(), everywhere, there, count, price, self._schedule(1), recomputed, capacity)

        growths = [Growth(made(each.step), each.follower, each.times) for each in self.skeletons.growths(cut)]
        schedule = self._schedule(mesh.virtual)
        counting = Counting(made(step), growths, schedule, mesh, self.microbatches, likeness)
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
            counting=counting,
            counts=counting.of([kind.rank for kind in built.setting.ranks.kinds]),
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
        renamed = replace(mesh, axes=tuple((swap.get(name, name), size) for name, size in mesh.axes))
        return renamed, {
            key: tuple(replace(split, axis=swap.get(split.axis, split.axis)) for split in choice)
            for key, choice in choices.items()
        }

    def _schedule(self, virtual: int) -> str:
        if virtual > 1:
            return INTERLEAVED
        return "1f1b" if isinstance(self.step, TrainStep) else "forward"

    def _guess(self, mesh: Mesh, relaxed: Relaxed) -> Guess:
        if mesh not in self.guesses:
            self.guesses[mesh] = self._guessed(mesh, relaxed, self.capacity)
        return self.guesses[mesh]

    def _guessed(self, mesh: Mesh, relaxed: Relaxed, capacity: float, cutoff: float = math.inf) -> Guess:
        """Of the fastest layouts; where memory binds, each stage may have leaner ones, memory having some price.

        The higher that is, the longer layouts take even if memory doesn't bind: none are put together that then take
        no less than the best guess, or than `cutoff`."""
        if not relaxed.solution.choice:
            return Guess(mesh, Cut.single(self.skeletons.units), math.inf, False, ())
        points, is_cut = self._points(mesh, relaxed), mesh.num_stages > 1
        fastest = relaxed.built.picked(relaxed.solution.choice)
        if is_cut and math.isfinite(cutoff):
            free = self._unlimited_guess(mesh, points.laid(fastest, with_leaner=False))
            if free.seconds >= cutoff:
                return free
        cuts = self._cuts(mesh, capacity)
        best = cuts.best_with(points.laid(fastest))
        if best.keeps_all or (not is_cut and math.isfinite(best.seconds)):
            return best  # of one stage `solve.priced` finds others: it is only guessed what some that fits may take
        for part in PRICES:
            laid = points.leaner(part * points.worth_s / mesh.num_stages)
            free = self._unlimited_guess(mesh, laid)
            if is_cut and free.seconds >= min(best.seconds, cutoff):
                return best if best.seconds <= free.seconds else free
            without, best = best, cuts.best_with(laid)
            if math.isfinite(best.seconds) and best.seconds >= without.seconds:
                break
        return best

    def _unlimited_guess(self, mesh: Mesh, laid: Laid) -> Guess:
        """What some layouts take if memory doesn't bind."""
        return replace(self._cuts(mesh, math.inf).best_with(laid), is_unlimited=True)

    def _cuts(self, mesh: Mesh, capacity: float) -> Cuts:
        pinned = pinned_stages(self.pins, self.skeletons)
        return Cuts(self.skeletons.units, mesh, self.microbatches, capacity, self._counts(mesh), pinned)

    def _points(self, mesh: Mesh, relaxed: Relaxed) -> UnitPoints:
        """What units cost and hold on a mesh, in any layouts."""
        fill, update = (term.weight for term in self._relaxed_objective(mesh))
        in_flight = float(min(mesh.num_stages, self.microbatches))
        return UnitPoints(
            self._kinds_built(mesh),
            self.whole.cut.units,
            self.whole.repeats,
            (fill, update),
            self.bounds.cuts_s(mesh),
            in_flight,
            relaxed.solution.objective / self.capacity,
        )

    def _kinds_built(self, mesh: Mesh) -> BuiltProblem:
        """The one-stage problem with all that may be computed again, and bytes by kind."""
        setting = replace(self._alone(mesh), recompute=self._free_recompute or "none", by_kind=True)
        return build_problem(self.whole, setting)

    def setting(self, cut: Cut, mesh: Mesh) -> Setting:
        """What the graph of a cut is priced for, on the mesh of its own stages."""
        step, likeness = self.skeletons.graph(cut), self.skeletons.likeness(cut)
        price, allowed = prices(self.cluster, mesh), bind_pins(self.pins, step.graph, mesh)
        stages = mesh.num_stages
        return Setting(
            mesh=mesh.with_stages(len(likeness.kept)),
            microbatches=self.microbatches,
            ranks=ranks_of(mesh, self.microbatches, likeness.like),
            capacity=self.capacity,
            compute=self._compute_s,
            resharder=self._resharder(mesh),
            transfer=lambda num_bytes: price("p2p", "pp", num_bytes) if stages > 1 else 0.0,
            allowed=allowed,
            alike=allowed.alike,
            recompute=self.pins.recompute or "none",
            contention=self.cluster.device.contention,
            is_pipelined=stages > 1,
        )

    def _resharder(self, mesh: Mesh) -> Resharder:
        """One for all problems of a mesh: much of their time goes into its paths."""
        once = replace(mesh, virtual=1)
        if once not in self._resharders:
            self._resharders[once] = Resharder(mesh, prices(self.cluster, mesh))
        return self._resharders[once]

    def _compute_s(self, flops: float, num_bytes: float, dtype: str) -> float:
        return compute_s(self.cluster.device, flops, num_bytes, dtype)
