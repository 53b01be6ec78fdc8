"""The best choice for a problem, with a proof: reduce, relax, fix by reduced cost, and search what is left.

    solution = solve(problem)               # objective, bound, status; gap <= 1e-3 unless the limit came first
    min_limit_usage(problem)                # what it would take, where nothing fits

The bound holds for the problem as given: it comes from Lagrangian duality (`flow.price`) and from integer models that
are rounded down (`integer`), never from a solver's tolerance. The objective is what `evaluate` says of the choice.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solve.ascent import ascend
from autopar.solve.flow import Flow, Priced, UnfinishedError, greatest, marginals, price, relax, restricted
from autopar.solve.integer import Effort, search_integers
from autopar.solve.model import Model, NoChoiceError, objective, recover
from autopar.solve.problem import Array, Edge, Node, Problem, Solution, Term, check, evaluate
from autopar.solve.reduce import reduce
from autopar.solve.tables import elimination_order, minimise

EXACT = 1e-8
ROUNDING = 1e-11
FIRST_STEP = 1e-3
WIDEN = 2.0
SHRINK = 0.7
TIME_LIMIT_S = 30.0
PATIENCE_S = 60.0
"""Wall time that any search may take."""
LARGEST_LINEAR_PROGRAM = 50_000
SIMPLEX_STEPS = 12_000
"""After these a linear program is left to messages, which prove less in less time."""
INTEGERS_PER_S = 5_000
"""Variables for each second of CP-SAT that is left: in a larger program it finds nothing."""


@dataclass(slots=True)
class State:
    """What a search knows so far."""

    problem: Problem
    gap: float
    seed: int
    deterministic_s: float
    deadline: float
    cutoff: float = math.inf
    """Only choices below this matter: a bound that reaches it is enough."""
    floor: float = -math.inf
    """A bound that is known from elsewhere."""
    choice: tuple[int, ...] | None = None
    objective: float = math.inf
    is_too_large: bool = False
    """Whether what is left under some reach was too large for CP-SAT: under a farther one more is left."""

    def offer(self, choice: Sequence[int]) -> float:
        """Keeps `choice` when it is the best so far and fits; returns its true objective (infinite if it breaks)."""
        found = evaluate(self.problem, choice)
        value = found.objective if found.feasible else math.inf
        if value < self.objective:
            self.choice, self.objective = tuple(choice), value
        return value

    def is_closed(self, bound: float) -> bool:
        missing = self.objective - max(bound, self.floor)
        return self.choice is not None and missing <= max(self.gap, EXACT) * abs(self.objective)

    def is_enough(self, bound: float) -> bool:
        """Whether no better bound is needed, or can be waited for."""
        is_over = self.is_spent or (self.is_too_large and self.choice is not None)
        return self.is_closed(bound) or bound >= self.cutoff or is_over

    @property
    def wanted(self) -> float:
        """What the next choice must cost less than."""
        return min(self.objective, self.cutoff)

    @property
    def is_spent(self) -> bool:
        return self.deterministic_s <= 0 or time.monotonic() > self.deadline

    @property
    def num_nodes(self) -> int:
        return len(self.problem.nodes)


def solve(
    problem: Problem,
    *,
    gap: float = 1e-3,
    time_limit_s: float = TIME_LIMIT_S,
    hint: Sequence[int] | None = None,
    cutoff: float = math.inf,
    floor: float = -math.inf,
    seed: int = 0,
) -> Solution:
    """The cheapest choice to within `gap` of the proven bound.

    `time_limit_s` bounds CP-SAT's deterministic time (about a second each), so that the answer doesn't depend on the
    machine's load; much more wall time (`PATIENCE_S`) is a safety net. `hint` is a choice to start from; `cutoff` ends
    the search once nothing can cost less; `floor` is a bound that is known already. The status is "optimal" when the
    gap is met, "feasible" when the limit (or the cutoff) came first, "infeasible" when nothing fits (proven), and
    "unknown" when that came before any choice.
    """
    check(problem)
    begin = time.monotonic()
    state = State(problem, gap, seed, time_limit_s, begin + max(PATIENCE_S, 4 * time_limit_s), cutoff, floor)
    if hint is not None:
        state.offer(hint)
    bound = max(_bound(state), floor)
    return solution_of(state, bound, time.monotonic() - begin)


def solution_of(state: State, bound: float, seconds: float) -> Solution:
    """The best choice offered so far, with the bound that was proven."""
    if state.choice is None:
        status = "infeasible" if math.isinf(bound) and bound > 0 else "unknown"
        return Solution((), math.inf, bound, status, seconds)
    status = "optimal" if state.is_closed(bound) else "feasible"
    return Solution(state.choice, state.objective, min(bound, state.objective), status, seconds)


def _bound(state: State) -> float:
    """Searches the whole problem; returns a bound of its objective (infinite when nothing fits)."""
    try:
        model = Model.of(state.problem)
        reduce(model)
    except NoChoiceError:
        return math.inf
    bound = search(state, model)
    if state.choice is None and bound < state.cutoff and state.problem.limits:
        _fall_back(state)
    return bound


def search(state: State, model: Model) -> float:
    """Offers choices of a reduced model; returns a bound of the model's objective.

    Looks for choices just above the bound first: the less there is to gain, the more variables reduced costs fix.
    """
    settled = _settled(state, model)
    if settled is not None:
        return settled
    flow = Flow.of(model)
    priced = _relaxed(state, flow)
    if priced is None:
        return math.inf
    bound, most = _safe(priced.bound - model.loss), greatest(flow)
    step = max(max(state.gap, FIRST_STEP) * abs(bound), 1e-6 * abs(most - bound))
    while not state.is_enough(bound):
        known, reach = state.wanted, priced.bound + step
        reach = min(known, reach if reach < most else math.inf)
        bound = max(bound, _search_under(state, flow, priced, reach))
        if reach >= state.wanted >= known:
            break
        step *= WIDEN
    return bound


def _relaxed(state: State, flow: Flow) -> Priced | None:
    """The relaxation's prices, the choices that come up offered on the way; None when it has no solution."""

    def offer(chosen: Mapping[int, int]) -> float:
        state.offer(recover(flow.model, chosen, state.num_nodes))
        return state.objective

    if flow.size <= LARGEST_LINEAR_PROGRAM:
        with contextlib.suppress(UnfinishedError):
            relaxed = relax(flow, SIMPLEX_STEPS)
            if relaxed is None:
                return None
            offer(flow.choice(relaxed.values))
            priced = price(flow, relaxed.prices)
            if not state.is_enough(_safe(priced.bound - flow.model.loss)):
                _offer_mixed(state, flow, relaxed.values)
            return priced
    priced = ascend(flow, offer, lambda bound: state.is_enough(_safe(bound - flow.model.loss)))
    return None if _safe(priced.bound) > greatest(flow) * (1 + EXACT) else priced


def _offer_mixed(state: State, flow: Flow, values: Array) -> None:
    """Offers the best choice among those that the relaxation mixes: few, as a rule, and one of them often fits."""
    try:
        model = restricted(flow, values > EXACT)
        reduce(model)
    except NoChoiceError:
        return
    if _settled(state, model) is not None:
        return
    mixed = Flow.of(model)
    relaxed = relax(mixed)
    if relaxed is not None:
        _integers(state, mixed, price(mixed, relaxed.prices), state.wanted)


def _settled(state: State, model: Model) -> float | None:
    """The bound of a model that needs no search, its best choice offered: all of it was eliminated, or tables do."""
    order = elimination_order(model) if model.alive else []
    if order is None:
        return None
    chosen = minimise(model, order)
    if chosen is None:
        return math.inf
    choice = recover(model, chosen, state.num_nodes)
    value = state.offer(choice)
    if model.alive:
        return _safe(value - model.loss)
    own = objective(model, model.constant)
    assert math.isinf(value) or abs(own - value) <= 1e-6 * max(abs(own), abs(value)) + model.loss, (own, value)
    return _safe(own - model.loss)


def _safe(bound: float) -> float:
    """`bound`, less what the rounding of its sum might have added."""
    return bound - ROUNDING * abs(bound)


def _search_under(state: State, flow: Flow, priced: Priced, reach: float) -> float:
    """Fixes what can't be part of a choice under `reach` for as long as that helps, and searches what is left;
    returns a bound of the flow's model, at most `reach`."""
    size = flow.size
    while True:
        slack = reach - priced.bound + EXACT * abs(priced.bound)
        try:
            model = restricted(flow, marginals(flow, priced.reduced) <= slack)
            reduce(model)
        except NoChoiceError:
            return reach
        settled = _settled(state, model)
        if settled is not None:
            return min(reach, settled)
        flow = Flow.of(model)
        found = _relaxed(state, flow)
        if found is None or _safe(found.bound - model.loss) >= reach:
            return reach
        priced, reach = found, min(reach, state.wanted)
        if state.is_enough(_safe(priced.bound - model.loss)):
            return min(reach, _safe(priced.bound - model.loss))
        if flow.size >= SHRINK * size and flow.size > INTEGERS_PER_S * state.deterministic_s:
            state.is_too_large = True
            return min(reach, _safe(priced.bound - model.loss))
        if flow.size >= SHRINK * size:
            return min(reach, _integers(state, flow, priced, reach))
        size = flow.size


def _integers(state: State, flow: Flow, priced: Priced, reach: float) -> float:
    """CP-SAT on the whole flow; where rounded memory let through what doesn't fit, again with less room."""
    model = flow.model
    bound, room = _safe(priced.bound - model.loss), dict(model.room)
    top = reach if math.isfinite(reach) else max(greatest(flow), bound) + abs(bound)
    proven = bound
    for attempt in range(4):
        effort = _effort(state, top)
        outcome = search_integers(flow, priced.prices, bound, top, effort, room, _hint(state, flow))
        state.deterministic_s -= outcome.deterministic_s
        if attempt == 0:
            proven = reach if outcome.bound >= top else _safe(outcome.bound - model.loss)
        if outcome.chosen is None:
            break
        choice = recover(model, outcome.chosen, state.num_nodes)
        if math.isfinite(state.offer(choice)) or state.is_spent:
            break
        room = _tighter(state, choice, room)
    return max(bound, proven)


def _effort(state: State, top: float) -> Effort:
    gap = max(state.gap, EXACT) * abs(top) / 2
    return Effort(gap, state.deterministic_s, state.deadline - time.monotonic(), state.seed)


def _hint(state: State, flow: Flow) -> dict[int, int] | None:
    """The best choice so far, if the flow still holds it."""
    if state.choice is None:
        return None
    held = {node: state.choice[node] for node in flow.first}
    return held if all(held[node] in flow.model.alive[node] for node in held) else None


def _tighter(state: State, choice: Sequence[int], room: dict[int, float]) -> dict[int, float]:
    """Less room where `choice` broke a limit by what rounding hid."""
    usage = evaluate(state.problem, choice).usage
    over = {limit: usage[limit] - state.problem.limits[limit].threshold for limit in room}
    return {limit: left - 2 * max(0.0, over[limit]) for limit, left in room.items()}


def _fall_back(state: State) -> None:
    """No choice was found in time: the one with the least overflow fits, if any does."""
    overflow = _overflow_problem(state.problem)
    found = solve(overflow, gap=0.05, time_limit_s=30.0, seed=state.seed)
    if found.choice:
        state.offer(found.choice[: state.num_nodes])


def min_limit_usage(problem: Problem, *, time_limit_s: float = 30.0) -> dict[str, float]:
    """The least bytes that each limit alone can be brought down to (a proven bound); infinite if nothing is allowed."""
    found = [solve(_usage_problem(problem, index), gap=EXACT, time_limit_s=time_limit_s) for index in _limits(problem)]
    return {limit.name: limit.constant + _proven(least) for limit, least in zip(problem.limits, found, strict=True)}


def least_overflow(problem: Problem, *, time_limit_s: float = 30.0) -> tuple[int, ...]:
    """A choice whose greatest usage beyond a limit is least; empty when nothing is allowed."""
    found = solve(_overflow_problem(problem), gap=1e-3, time_limit_s=time_limit_s)
    return found.choice[: len(problem.nodes)]


def min_overflow(problem: Problem, *, time_limit_s: float = 30.0) -> float:
    """The least t such that some choice needs at most capacity + t of every limit (negative: how much is to spare)."""
    return _proven(solve(_overflow_problem(problem), gap=EXACT, time_limit_s=time_limit_s))


def _limits(problem: Problem) -> range:
    return range(len(problem.limits))


def _proven(solution: Solution) -> float:
    """The objective where it is proven best, otherwise the bound."""
    return solution.objective if solution.status == "optimal" else solution.bound


def _usage_problem(problem: Problem, limit: int) -> Problem:
    """The same choices; the objective is the usage of one limit."""
    nodes = [
        replace(node, cost=_only_forbids(node.cost) + node.memory.get(limit, 0.0), row=0, memory={})
        for node in problem.nodes
    ]
    edges = [replace(edge, cost=_only_forbids(edge.cost), row=0) for edge in problem.edges]
    return Problem(tuple(nodes), tuple(edges))


def _overflow_problem(problem: Problem) -> Problem:
    """The same choices; the objective is the greatest usage - capacity. A node that uses several limits gets a twin
    (bound to the same strategy) for each but the first."""
    nodes = [replace(node, cost=_only_forbids(node.cost), row=0, memory={}) for node in problem.nodes]
    edges = [replace(edge, cost=_only_forbids(edge.cost), row=0) for edge in problem.edges]
    for index, node in enumerate(problem.nodes):
        for position, (limit, used) in enumerate(sorted(node.memory.items())):
            if position == 0:
                nodes[index] = replace(nodes[index], cost=nodes[index].cost + used, row=limit)
                continue
            same = np.where(np.eye(node.num_strategies, dtype=bool), 0.0, np.inf)
            edges.append(Edge(index, len(nodes), same, limit))
            nodes.append(Node(f"{node.name}/{limit}", used, limit))
    for limit, bound in enumerate(problem.limits):
        nodes.append(Node(bound.name, np.array([bound.constant - bound.capacity]), limit))
    return Problem(tuple(nodes), tuple(edges), (), (Term(1.0, tuple(range(len(problem.limits)))),))


def _only_forbids(cost: Array) -> Array:
    return np.where(np.isinf(cost), np.inf, 0.0)
