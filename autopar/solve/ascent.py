"""Prices for flows too large for a linear solver: sequential tree-reweighted messages, and subgradient steps.

    priced = ascend(flow, offer)        # a proven bound and reduced costs; each choice on the way goes to `offer`

For fixed prices of limits and peaks, a sweep over the nodes, forward and back, moves cost along the links so that the
bound rises (TRW-S: Kolmogorov, "Convergent tree-reweighted message passing", 2006, section 4), and reads off a choice.
Every choice draws a line over the space of prices (of limits and of peaks' rows) that no bound there can be above; the
next prices lie halfway from the best so far to where the lowest line is highest (Kelley's method, damped). Nothing here
is taken on trust: bounds come from `flow.price`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from ortools.math_opt.python import mathopt

from autopar.solve.flow import Flow, Priced, Prices, base_costs, greatest, price
from autopar.solve.model import FREE
from autopar.solve.problem import Array, Index

SWEEPS = 2
ROUNDS = 60
FIRST_PRICE = 0.02
SETTLED = 1e-6
PATIENCE, SLOW = 4, 1e-3
"""Rounds in which the bound must rise by a part."""
NUDGES = (0.003, 0.03, 0.1)


@dataclass(frozen=True, slots=True, eq=False)
class _End:
    """A link as one of its ends sees it: which classes this node's strategies are in, and where its prices are."""

    block: int
    is_source: bool
    other: int
    members: Index
    order: Index
    starts: Index
    here: slice
    there: slice

    def least(self, values: Array) -> Array:
        """The least of `values` per class."""
        return np.minimum.reduceat(values[self.order], self.starts)

    def seen(self, matrices: list[Array]) -> Array:
        """The link's costs [class here, class there]."""
        return matrices[self.block] if self.is_source else matrices[self.block].T


@dataclass(frozen=True, slots=True, eq=False)
class _Network:
    """Per node, the links to earlier and to later nodes."""

    earlier: Mapping[int, list[_End]]
    later: Mapping[int, list[_End]]


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """What a choice costs at any prices: linear + sum of share * rows + sum of price * excess; no bound is above it."""

    linear: float
    rows: Mapping[int, float]
    excess: Mapping[int, float]


def ascend(flow: Flow, offer: Callable[[Mapping[int, int]], float], is_enough: Callable[[float], bool]) -> Priced:
    """The best prices of `ROUNDS` rounds; `offer` takes a choice and says what the best one so far costs, `is_enough`
    says of a bound whether the search needs no better one."""
    network, prices = _network(flow), _first_prices(flow)
    best, cuts, bounds, upper = price(flow, prices), list[_Cut](), list[float](), float("inf")
    for _ in range(ROUNDS):
        coupling, picked = _sweep(flow, network, prices, SWEEPS, {})
        upper = offer({node: int(flow.model.alive[node][strategy]) for node, strategy in picked.items()})
        found = price(flow, replace(prices, coupling=coupling))
        best = found if found.bound > best.bound else best
        cuts.append(_cut(flow, picked))
        prices, ceiling = _next_prices(flow, cuts, best, coupling)
        least = min(upper, ceiling)
        if min(least, greatest(flow)) <= best.bound + SETTLED * abs(best.bound) or is_enough(best.bound):
            break
        if len(bounds) > PATIENCE and best.bound - bounds[-PATIENCE] <= SLOW * abs(best.bound):
            break
        bounds.append(best.bound)
    for nudge in NUDGES if flow.memory else ():
        if is_enough(best.bound) or upper <= best.bound + SETTLED * abs(best.bound):
            break
        upper = _mix(flow, network, best, nudge, offer)
    return best


def _mix(
    flow: Flow, network: _Network, best: Priced, nudge: float, offer: Callable[[Mapping[int, int]], float]
) -> float:
    """Choices between those that the best prices can't tell apart; returns the best objective so far.

    At first every node pays a little more for memory, which fits as a rule. Then, limit by limit, bisection finds how
    many of the first nodes have to go on doing so while the rest pay a little less.
    """
    users = {limit: [node for node in flow.first if limit in flow.model.memory[node]] for limit in flow.memory}
    factors = {(node, limit): 1 + nudge for limit, nodes in users.items() for node in nodes}
    upper = np.inf
    for limit, nodes in users.items():
        low, high = 0, len(nodes)
        while low < high:
            middle = (low + high) // 2
            trial = factors | {(node, limit): 1 - nudge for node in nodes[middle:]}
            _, picked = _sweep(flow, network, best.prices, 1, trial)
            upper = offer({node: int(flow.model.alive[node][strategy]) for node, strategy in picked.items()})
            if _cut(flow, picked).excess[limit] > 0:
                low = middle + 1
            else:
                high = middle
        factors |= {(node, limit): 1 - nudge for node in nodes[high:]}
    return upper


def _first_prices(flow: Flow) -> Prices:
    peaks = tuple({row: term.weight / len(term.rows) for row in term.rows} for term in flow.model.peaks)
    return Prices(np.zeros(flow.num_couplings), dict.fromkeys(flow.memory, 0.0), peaks)


def _network(flow: Flow) -> _Network:
    earlier: dict[int, list[_End]] = {node: [] for node in flow.first}
    later: dict[int, list[_End]] = {node: [] for node in flow.first}
    at = 0
    for number, block in enumerate(flow.blocks):
        middle = at + int(block.source_class.max()) + 1
        end = middle + int(block.target_class.max()) + 1
        source, target = slice(at, middle), slice(middle, end)
        later[block.source].append(_end(number, True, block.target, block.source_class, source, target))
        earlier[block.target].append(_end(number, False, block.source, block.target_class, target, source))
        at = end
    return _Network(earlier, later)


def _end(block: int, is_source: bool, other: int, members: Index, here: slice, there: slice) -> _End:
    order = np.argsort(members, kind="stable")
    starts = np.flatnonzero(np.diff(members[order], prepend=-1))
    return _End(block, is_source, other, members, order, starts, here, there)


def _sweep(
    flow: Flow, network: _Network, prices: Prices, sweeps: int, factors: Mapping[tuple[int, int], float]
) -> tuple[Array, dict[int, int]]:
    """The couplings' prices after some sweeps there and back, and the choice read off (as positions in `alive`)."""
    costs, _ = base_costs(flow, prices)
    matrices = _matrices(flow, costs)
    nodes, coupling = list(flow.first), prices.coupling.copy()
    own = {node: costs[first : first + len(flow.model.alive[node])] for node, first in flow.first.items()}
    for (node, limit), factor in factors.items():
        own[node] = own[node] + (factor - 1) * prices.limit[limit] * flow.model.memory[node][limit]
    for _ in range(sweeps):
        for node in nodes:
            _push(network, node, own[node], matrices, coupling, network.later[node])
        for node in reversed(nodes):
            _push(network, node, own[node], matrices, coupling, network.earlier[node])
    return coupling, _read(network, nodes, own, matrices, coupling)


def _matrices(flow: Flow, costs: Array) -> list[Array]:
    matrices = []
    for block in flow.blocks:
        matrix = np.full((int(block.source_class.max()) + 1, int(block.target_class.max()) + 1), np.inf)
        matrix[block.pairs] = costs[block.first : block.first + len(block.pairs[0])]
        matrices.append(matrix)
    return matrices


def _push(network: _Network, node: int, own: Array, matrices: list[Array], coupling: Array, onward: list[_End]) -> None:
    """Shares what the node is sure to cost among the links that lead onward, and moves it to their far ends."""
    if not onward:
        return
    earlier, later = network.earlier[node], network.later[node]
    belief = own.copy()
    for end in earlier + later:
        belief += coupling[end.here][end.members]
    share = 1.0 / max(len(earlier), len(later))
    for end in onward:
        coupling[end.here] -= share * end.least(belief)
        coupling[end.there] = (end.seen(matrices) - coupling[end.here][:, None]).min(axis=0)


def _read(
    network: _Network, nodes: list[int], own: Mapping[int, Array], matrices: list[Array], coupling: Array
) -> dict[int, int]:
    """Node by node, the strategy that is cheapest given the earlier nodes' and the later ones' prices."""
    picked: dict[int, int] = {}
    ahead: dict[int, Array] = {}
    for node in nodes:
        cost = own[node].copy()
        for end in network.earlier[node]:
            cost += ahead.pop(end.block)[end.members]
        for end in network.later[node]:
            cost += coupling[end.here][end.members]
        picked[node] = int(np.argmin(cost))
        for end in network.later[node]:
            ahead[end.block] = matrices[end.block][end.members[picked[node]]]
    return picked


def _cut(flow: Flow, picked: Mapping[int, int]) -> _Cut:
    """The line that a choice draws over the space of prices."""
    model = flow.model
    totals = dict(model.constant)
    for node, own in model.cost.items():
        for row, cost in own.items():
            totals[row] += float(cost[picked[node]])
    for block in flow.blocks:
        for row, matrix in model.links[block.source][block.target].items():
            totals[row] = totals.get(row, 0.0) + float(matrix[picked[block.source], picked[block.target]])
    linear = sum(weight * totals[row] for row, weight in model.linear.items()) + totals.get(FREE, 0.0)
    chosen = np.array([flow.first[node] + strategy for node, strategy in picked.items()])
    excess = {limit: float(memory[chosen].sum()) - model.room[limit] for limit, memory in flow.memory.items()}
    return _Cut(linear, {row: totals[row] for term in model.peaks for row in term.rows}, excess)


def _next_prices(flow: Flow, cuts: list[_Cut], best: Priced, coupling: Array) -> tuple[Prices, float]:
    """Halfway from the best prices to where the cuts are highest within a box, and how high they are anywhere.

    The box lets each limit's price double; a price that the cuts push to the box's edge goes there at once.
    """
    usable = [cut for cut in cuts if np.isfinite([cut.linear, *cut.rows.values()]).all()]
    box = _box(flow, best)
    if not usable:
        return Prices(coupling, box, best.prices.peak), np.inf
    master, ceiling = _highest(flow, usable, best, box)
    at_edge = {limit: master.limit[limit] >= edge * (1 - SETTLED) for limit, edge in box.items()}
    limits = {
        limit: master.limit[limit] if at_edge[limit] else (each + master.limit[limit]) / 2
        for limit, each in best.prices.limit.items()
    }
    peaks = tuple(
        {row: (share + aimed[row]) / 2 for row, share in shares.items()}
        for shares, aimed in zip(best.prices.peak, master.peak, strict=True)
    )
    return Prices(coupling, limits, peaks), np.inf if any(at_edge.values()) else ceiling


def _box(flow: Flow, best: Priced) -> dict[int, float]:
    """Twice each price, at least what makes a full limit worth a little of the bound."""
    first = {limit: FIRST_PRICE * abs(best.bound) / max(flow.model.room[limit], 1.0) for limit in flow.memory}
    return {limit: max(2 * each, first[limit]) for limit, each in best.prices.limit.items()}


def _highest(flow: Flow, cuts: list[_Cut], best: Priced, box: Mapping[int, float]) -> tuple[Prices, float]:
    """The prices in the box at which the lowest cut is highest (a linear program of a few variables)."""
    program = mathopt.Model()
    height = program.add_variable()
    units = {limit: max(abs(cut.excess[limit]) for cut in cuts) or 1.0 for limit in flow.memory}
    limits = {limit: program.add_variable(lb=0.0, ub=box[limit] * units[limit]) for limit in flow.memory}
    peaks = [{row: program.add_variable(lb=0.0) for row in term.rows} for term in flow.model.peaks]
    for term, shares in zip(flow.model.peaks, peaks, strict=True):
        program.add_linear_constraint(mathopt.LinearSum(shares.values()) == term.weight)
    for cut in cuts:
        parts = [each * (cut.excess[limit] / units[limit]) for limit, each in limits.items()]
        parts += [share * cut.rows[row] for shares in peaks for row, share in shares.items()]
        program.add_linear_constraint(height - mathopt.LinearSum(parts) <= cut.linear)
    program.maximize(height)
    result = mathopt.solve(program, mathopt.SolverType.GLOP)
    if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
        return best.prices, np.inf
    values = result.variable_values()
    found = {limit: values[each] / units[limit] for limit, each in limits.items()}
    shares_found = tuple({row: values[share] for row, share in shares.items()} for shares in peaks)
    return Prices(best.prices.coupling, found, shares_found), values[height]
