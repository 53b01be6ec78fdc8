"""plan: a step and a cluster → the best plan found, its bound, and what else was looked at.

The search: every mesh that the cluster's levels allow (`pp`, `dp`, `tp`), and where the number of microbatches is left
to it, powers of two of them. What promises most is looked at more closely, again and again: what its ops take at least;
what one layer takes by itself; a relaxed problem (one stage, no memory limit) and what its layers, put together on
stages, take within the memory; then a plan. What isn't better than the best plan by its bound is cut. A plan is first
looked for without recompute; where that doesn't fit, by the full problem under the memory limit; where the accountant
finds the resulting program too large, the limit is tightened by the excess. What leaves the gap then is bounded within
the memory, until the gap is small.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Graph

from autopar.bounds import PHASES
from autopar.capture.batches import batch_size
from autopar.capture.folding import Folded
from autopar.capture.step import ForwardStep
from autopar.cluster import candidate_meshes, distinct_meshes, parse_cluster
from autopar.cluster.cluster import Cluster
from autopar.compiling import valid_for
from autopar.errors import PlanError
from autopar.garbage import collected_seldom
from autopar.mesh import PIPELINE_AXIS, Mesh
from autopar.pins import Pins, matches_module, parse_pins
from autopar.plans import Candidate, Plan
from autopar.relaxed import Relaxed, fill
from autopar.report import estimate, spans
from autopar.rules.found import FoundRules, find_rules
from autopar.rules.table import check_rules
from autopar.skeletons import Skeletons
from autopar.solve.build import require_wanted
from autopar.solve.ranks import may_interleave
from autopar.trials import Found, Trials
from autopar.units import format_bytes, format_seconds, parse_bytes

CUT_GAP = 1e-2
"""A mesh whose bound is within this part of the best plan isn't solved: so much the search leaves open."""

GUESS_GAP = 5e-3
"""A pipeline whose layers, put together in the best layouts known, aren't faster than the best plan by more than this
part isn't planned: the search leaves open what its bound says."""

LOOKS = (*PHASES, "whole units")
"""What a mesh's bound is made of, from cheap to dear, the last for pipelines."""

MOST_TIMES = 8
"""How many times the least number of microbatches are looked at."""

MARGIN = 0.05
"""Share of a device's memory left to the allocator and the libraries."""

Progress = Callable[[str], None]


def plan(
    step: ForwardStep,
    cluster: str | Cluster,
    *,
    pin: str | Sequence[str] | Pins | None = None,
    memory: str | float | None = None,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The cheapest plan of `step` on `cluster` within `pin` and `memory` (bytes of one device, or text: "60GiB").

    After `time_limit_s` seconds of wall time nothing more is looked at: the plan is the best by then, its gap says what
    that leaves open, and the same call may give another plan. Where none is found by then, it is the first one found.

    Raises `PlanError` for pins or sizes that don't fit together, `InfeasibleError` when no plan fits the memory.
    """
    found = best_plans(step, cluster, 1, pin=pin, memory=memory, time_limit_s=time_limit_s, progress=progress)
    return found[0]


@collected_seldom()
def best_plans(
    step: ForwardStep,
    cluster: str | Cluster,
    count: int,
    *,
    pin: str | Sequence[str] | Pins | None = None,
    memory: str | float | None = None,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> list[Plan]:
    """The cheapest plans of the `count` best pairs of a mesh and a number of microbatches, the best first.

    Fewer where no more fit. Each plan's gap is measured from what no plan of the search beats. Raises what `plan` does.
    """
    if count < 1:
        raise PlanError(f"best_plans: count is {count}; expected at least 1")
    if time_limit_s is not None and not time_limit_s > 0:
        raise PlanError(f"time limit {time_limit_s}: expected seconds, more than 0")
    cluster = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    capacity = parse_bytes(memory) if memory is not None else cluster.device.memory_bytes * (1 - MARGIN)
    started = time.perf_counter()
    deadline = math.inf if time_limit_s is None else started + time_limit_s
    search = _Search(step, cluster, parse_pins(pin), float(capacity), progress or (lambda _: None), count, deadline)
    found = search.run()
    solved_s = time.perf_counter() - started - search.captured_s
    return [_as_plan(search, each, solved_s) for each in found]


def as_pinned(folded: Folded, pins: Pins) -> Folded:
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
    """A mesh at a number of microbatches that isn't settled yet: what is known of it, from cheap to dear."""

    mesh: Mesh
    count: int
    bound: float
    looks: int = 0
    """How many of `LOOKS` have gone into `bound`."""
    relaxed: Relaxed | None = None
    guess: float = 0.0
    """What its best plan may take (`Trials.guess_s`)."""
    is_within: bool = True
    """Whether that is within the memory."""

    @property
    def promise(self) -> tuple[bool, float]:
        """By what it is compared with others: what doesn't fit in its fastest layouts comes after what does. If a guess
        holds, it cuts what isn't better by `CUT_GAP`; what isn't within the memory promises too much."""
        guess = self.guess * (1 - CUT_GAP * self.is_within) if math.isfinite(self.guess) else 0.0
        return math.isinf(self.guess), max(self.bound, guess)

    def is_no_better(self, step_s: float) -> bool:
        """Whether a pipeline's guess promises no more than a little; layouts of one stage are searched in full."""
        return self.mesh.num_stages > 1 and math.isfinite(self.guess) and self.guess >= step_s * (1 - GUESS_GAP)

    @property
    def is_bounded(self) -> bool:
        """Whether no look is left that is cheaper than to relax it."""
        return self.looks >= (len(LOOKS) if self.mesh.num_stages > 1 else len(PHASES))


@dataclass(slots=True)
class _Settled:
    """A mesh that is planned or cut, and what no plan of it beats."""

    mesh: Mesh
    count: int
    bound: float
    may_rise: bool
    """Whether the memory may still tell more."""


@dataclass(slots=True)
class _Search:
    step: ForwardStep
    cluster: Cluster
    pins: Pins
    capacity: float
    progress: Progress
    wanted: int = 1
    """How many plans, each of another mesh or number of microbatches."""
    deadline: float = math.inf
    """On `time.perf_counter`: after it no more is looked at than a plan takes."""
    rules: FoundRules = field(default_factory=FoundRules)
    trials: dict[int, Trials] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    captured_s: float = 0.0
    found: list[Found] = field(default_factory=list)
    """The best ones by now, as many as are wanted, the best first."""
    candidates: list[Candidate] = field(default_factory=list)
    settled: list[_Settled] = field(default_factory=list)
    queue: list[tuple[tuple[bool, float], int, _Open]] = field(default_factory=list)
    """A heap, what promises most first; numbered in the order of arrival."""
    arrivals: Iterator[int] = field(default_factory=itertools.count)

    def run(self) -> list[Found]:
        """Looks closer and closer at what promises most, until nothing can be better than the plans found."""
        self.counts = self._counts()
        trials = self._trials(self.counts[0])
        graph = trials.skeletons.folded.captured.gradient.graph
        require_wanted(graph, self.pins.recompute)
        self.pins.check(("pp", "dp", "tp"), _modules((*_paths(graph), *trials.step.parameter_names)))
        for mesh in self._meshes(trials):
            self._push(_Open(mesh, self.counts[0], trials.bounds.least_s(mesh)))
        while self.queue:
            each = self._next()
            reason = self._why_cut(each)
            if reason:
                self._cut(each, reason)
                if not each.looks:
                    self._push_next(each)
            elif not self._is_late and not each.is_bounded and (self.queue or each.count < self.counts[-1]):
                self._bound(each)
            elif each.relaxed is None:
                self._relax(each)
            else:
                self._plan(each, each.relaxed)
        if not self.found:
            from autopar.certificate import infeasible

            raise infeasible(self.trials.values(), self.progress)
        self._prove()
        return self.found

    def _prove(self) -> None:
        """Bounds within the memory what leaves the gap, until that is small."""
        enough = self._best_s * (1 - CUT_GAP)
        while not self._is_late:
            least = min(self.settled, key=lambda each: each.bound)
            if least.bound >= enough or not least.may_rise:
                return
            self._tell("proving", least)
            others = min((each.bound for each in self.settled if not each.may_rise), default=enough)
            within = self._trials(least.count).within_s(least.mesh, min(enough, others))
            least.bound, least.may_rise = max(least.bound, within), False

    def _why_cut(self, each: _Open) -> str:
        """Why it isn't looked at any closer; empty where it is."""
        if self.found and self._is_late:
            return "time ran out"
        if each.bound >= self._cutoff:
            return "its bound is no better than the best plan"
        if each.is_no_better(self._worst_s):
            return f"its layers put together take {each.guess / self._best_s:.3f} times the best plan"
        if each.relaxed is not None and each.mesh.num_stages > 1 and not each.relaxed.solution.choice:
            return "its relaxed problem wasn't solved in time"
        return ""

    @property
    def _is_late(self) -> bool:
        return time.perf_counter() > self.deadline

    def _next(self) -> _Open:
        """What promises most; once time has run out, the best guess."""
        guessed = [entry for entry in self.queue if math.isfinite(entry[2].guess) and entry[2].relaxed is not None]
        if not guessed or not self._is_late:
            return heapq.heappop(self.queue)[2]
        best = min(guessed, key=lambda entry: entry[2].guess)
        self.queue.remove(best)
        heapq.heapify(self.queue)
        return best[2]

    # -- a closer look -----------------------------------------------------------------------------------------
    def _push(self, each: _Open) -> None:
        heapq.heappush(self.queue, (each.promise, next(self.arrivals), each))

    def _bound(self, each: _Open) -> None:
        """By one more of `LOOKS`."""
        self._tell("bounding", each)
        if not each.looks:
            self._push_next(each)
        each.looks += 1
        trials, phases = self._trials(each.count), LOOKS[: each.looks]
        is_whole = phases[-1] not in PHASES
        least = trials.units_s(each.mesh) if is_whole else trials.bounds.layer_s(each.mesh, phases)
        each.bound = max(each.bound, least)
        self._push(each)

    def _push_next(self, each: _Open) -> None:
        """The same mesh at the next number of microbatches."""
        counts = (count for count in self.counts if count > each.count)
        following = next((count for count in counts if self._trials(each.count).can_run(each.mesh, count)), None)
        if following is not None:
            self._push(_Open(each.mesh, following, _inherited(each, following)))

    def _relax(self, each: _Open) -> None:
        """The relaxed problem's solution, unless its bound tells first that what was guessed of another mesh is better:
        then that comes first, and this may have to be looked at again."""
        self._tell("relaxing", each)
        trials = self._trials(each.count)
        cutoff = min([self._cutoff, *(other.guess for *_, other in self.queue if other.relaxed is not None)])
        relaxed = trials.relaxed(each.mesh, cutoff)
        each.bound, each.looks = max(each.bound, relaxed.bound), len(LOOKS)
        if each.bound < cutoff:
            each.relaxed = relaxed
            self._guess(each, relaxed, cutoff)
        self._push(each)

    def _plan(self, each: _Open, relaxed: Relaxed) -> None:
        trials = self._trials(each.count)
        if each.mesh not in trials.guesses:  # only what it takes if memory doesn't bind
            self._tell("guessing", each)
            self._guess(each, relaxed, self._worst_s)
            self._push(each)
            return
        self._tell("solving", each)
        self._offer(trials.planned(each.mesh, relaxed), each, trials)

    def _guess(self, each: _Open, relaxed: Relaxed, cutoff: float) -> None:
        """What its best plan may take, where that may be better than `cutoff` by enough."""
        trials = self._trials(each.count)
        each.guess = trials.guess_s(each.mesh, relaxed, cutoff * (1 - GUESS_GAP))
        each.is_within = each.mesh in trials.guesses

    # -- what is searched --------------------------------------------------------------------------------------
    def _counts(self) -> list[int]:
        """Numbers of microbatches: the given one, or powers of two from where activations may fit."""
        given = self.pins.microbatches or (None if self.step.microbatches_are_free else self.step.microbatches)
        if given is not None:
            return [given]
        size = batch_size(self.step.batch_tensors())
        powers = [1 << i for i in range(size.bit_length()) if size % (1 << i) == 0]
        # half of the memory for activations, of which each device has an equal part: without that, only recompute helps
        held = self._trials(powers[0]).bounds.kept_bytes() / self.cluster.num_devices
        least = next((count for count in powers if held / count <= self.capacity / 2), powers[-1])
        return [count for count in powers if least <= count <= MOST_TIMES * least]

    def _trials(self, count: int) -> Trials:
        if count not in self.trials:
            started = time.perf_counter()
            step = self.step.with_microbatches(count)
            folded = as_pinned(step.fold(), self.pins)
            for graph in folded.captured.graphs:
                check_rules(graph)
            self.rules = find_rules(folded.captured.graphs, self.progress)
            skeletons = Skeletons(folded, count, self.rules.all)
            self.trials[count] = Trials(step, skeletons, self.cluster, self.pins, self.capacity)
            self.captured_s += time.perf_counter() - started
        return self.trials[count]

    def _meshes(self, trials: Trials) -> list[Mesh]:
        meshes, fitting, reason = candidate_meshes(self.cluster, self.pins.axes), [], ""
        for mesh in distinct_meshes(self.cluster, meshes, self.pins.named_axes):
            reason = trials.cannot_cut(mesh)
            if not reason:
                fitting.append(mesh)
                continue
            self._note(mesh, trials.microbatches, None, None, "infeasible", reason)
        if not fitting:
            raise PlanError(f"no mesh of {self.cluster} has stages that the model can be cut into: {reason}")
        return fitting

    # -- plans -------------------------------------------------------------------------------------------------
    @property
    def _best_s(self) -> float:
        return self.found[0].solution.objective if self.found else math.inf

    @property
    def _worst_s(self) -> float:
        """Of the plans that are wanted."""
        return self.found[-1].solution.objective if len(self.found) == self.wanted else math.inf

    @property
    def _cutoff(self) -> float:
        """What a bound must be below to matter."""
        return self._worst_s * (1 - CUT_GAP)

    def _offer(self, found: Found | None, each: _Open, trials: Trials) -> None:
        """Keeps a plan that is better than those found by now."""
        if found is None:
            reason = f"doesn't fit {format_bytes(self.capacity)} a device" + ", with recompute" * trials.may_recompute
            self._note(each.mesh, each.count, None, None, "infeasible", reason)
            return
        step_s, peak = found.solution.objective, max(found.peaks)
        is_cut = each.mesh.num_stages > 1  # by the units' costs, so that only the relaxed bound holds for other cuts
        self._settle(each, each.bound if is_cut else found.solution.bound)
        best_s = self._best_s
        self.found = sorted([*self.found, found], key=lambda found: found.solution.objective)[: self.wanted]
        if best_s <= step_s:
            slower = f"{step_s / best_s:.3f} times the best plan{found.again_text}"
            self._note(each.mesh, each.count, step_s, peak, "slower", slower)
            return
        beaten = [replace(c, status="slower", reason="beaten") if c.status == "chosen" else c for c in self.candidates]
        self.candidates = beaten
        self._note(found.mesh, each.count, step_s, peak, "chosen", f"the fastest that fits{found.again_text}")

    # -- what is told ------------------------------------------------------------------------------------------
    def _cut(self, each: _Open, reason: str) -> None:
        self._note(each.mesh, each.count, each.bound, None, "cut", reason)
        self._settle(each, each.bound)

    def _settle(self, each: _Open, bound: float) -> None:
        is_bounded = each.mesh.num_stages > 1 and each.looks == len(LOOKS)
        self.settled.append(_Settled(each.mesh, each.count, bound, may_rise=is_bounded))

    def _tell(self, doing: str, each: _Open | _Settled) -> None:
        """What is done now, and what is known by now."""
        text = f"{doing} {each.mesh}, {each.count} microbatches"
        if self.found:
            bounds = [other.bound for other in self.settled] + [other.bound for *_, other in self.queue]
            bound = min([self._best_s, each.bound, *bounds])
            gap = 1 - bound / self._best_s
            text += f"; best by now {format_seconds(self._best_s)} ({self.found[0].mesh}), gap {gap:.1%}"
        self.progress(text)

    def _note(self, mesh: Mesh, count: int, step_s: float | None, peak: int | None, status: str, reason: str) -> None:
        self.candidates.append(Candidate(mesh, count, mesh.num_stages, step_s, peak, status, reason))


def _inherited(each: _Open, count: int) -> float:
    """A bound at `count` microbatches from one at fewer: no op or collective takes less for a part of its sizes than
    that part of its time, so the work of all microbatches only grows; what shrinks is the wait for the pipeline to
    fill, most with one stage a rank. None follows where so few couldn't go through several."""
    if may_interleave(each.mesh.num_stages, count) > may_interleave(each.mesh.num_stages, each.count):
        return 0.0
    return each.bound * (fill(each.mesh, count) / count) / (fill(each.mesh, each.count) / each.count)


def _as_plan(search: _Search, found: Found, solved_s: float) -> Plan:
    bound = min([found.solution.objective, *(each.bound for each in search.settled)])
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
        stages=spans(found.cut, found.mesh.size(PIPELINE_AXIS)),
        node_stage=dict(zip(found.cut.units, found.cut.stages, strict=True)),
        choices=found.texts,
        recomputed=found.recomputed,
        pins=tuple(part.strip() for part in str(search.pins).split(",") if part.strip()),
        estimate=estimate(found, bound, search.cluster, search.capacity, search.captured_s, solved_s),
        candidates=tuple(search.candidates),
        found_rules=search.rules.by_experiment,
        registered_rules=search.rules.registered,
    )
