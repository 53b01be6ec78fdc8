"""The flow form of what is left: its linear relaxation, the prices that come out, and what they prove.

    flow = Flow.of(model)
    relaxed = relax(flow)                   # None when the relaxation has no solution
    priced = price(flow, relaxed.prices)    # a proven bound, and how far each variable is above it

One 0/1 variable per strategy of a node, and per link one per pair of classes (rows of the matrix that are equal are one
class, and columns likewise); the pairs of a class add up to the strategies of that class. This relaxation is integral
in most cases without a limit; forms without the flow variables are not.

The bound needs no trust in the linear solver: for *any* prices, each group of variables of which exactly one is 1 costs
at least its cheapest member, so bound = constant + sum over groups of the least reduced cost (Lagrangian duality).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from autopar.solve.linear import Rows, program
from autopar.solve.model import FREE, Model, total
from autopar.solve.problem import Array, Index, Mask
from autopar.solve.reduce import classes


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A link's variables: pairs (source class, target class) from variable `first` on."""

    source: int
    target: int
    first: int
    source_class: Index
    target_class: Index
    pairs: tuple[Index, Index]


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Variables 0..: each node's strategies, then each link's pairs; `group` says which of them exclude each other."""

    model: Model
    first: Mapping[int, int]
    blocks: tuple[Block, ...]
    group: Index
    costs: Mapping[int, Array]
    memory: Mapping[int, Array]
    couplings: tuple[Index, Index, Array]
    num_couplings: int

    @classmethod
    def of(cls, model: Model) -> Flow:
        first, size = {}, 0
        for node in sorted(model.alive):
            first[node] = size
            size += len(model.alive[node])
        blocks = []
        for source in sorted(model.links):
            for target in sorted(other for other in model.links[source] if other > source):
                blocks.append(_block(model, source, target, size))
                size += len(blocks[-1].pairs[0])
        group = np.concatenate([np.zeros(0, np.int64), *_groups(model, first, blocks)])
        costs = {row: _costs(model, row, first, blocks, size) for row in model.linear}
        memory = {limit: _memory(model, limit, first, size) for limit in model.room}
        couplings, num_couplings = _couplings(first, blocks)
        return cls(model, first, tuple(blocks), group, costs, memory, couplings, num_couplings)

    @property
    def size(self) -> int:
        return len(self.group)

    @property
    def starts(self) -> Index:
        """The first variable of each group (groups are contiguous)."""
        return np.flatnonzero(np.diff(self.group, prepend=-1))

    def choice(self, values: Array) -> dict[int, int]:
        """Each node's strategy of the greatest value, as the problem numbers it."""
        return {
            node: int(alive[int(np.argmax(values[self.first[node] : self.first[node] + len(alive)]))])
            for node, alive in self.model.alive.items()
        }


def _block(model: Model, source: int, target: int, first: int) -> Block:
    link = model.links[source][target]
    stacked = list(link.values())
    _, by_source = classes(np.concatenate(stacked, axis=1))
    _, by_target = classes(np.concatenate([matrix.T for matrix in stacked], axis=1))
    allowed = np.zeros((int(by_source.max()) + 1, int(by_target.max()) + 1), dtype=bool)
    allowed[by_source[:, None], by_target[None, :]] = np.isfinite(total(link))
    rows, columns = np.nonzero(allowed)
    return Block(source, target, first, by_source, by_target, (rows, columns))


def _groups(model: Model, first: Mapping[int, int], blocks: Iterable[Block]) -> list[Index]:
    sizes = [len(model.alive[node]) for node in first] + [len(block.pairs[0]) for block in blocks]
    return [np.full(size, number, dtype=np.int64) for number, size in enumerate(sizes)]


def _costs(model: Model, row: int, first: Mapping[int, int], blocks: Iterable[Block], size: int) -> Array:
    """What each variable adds to a cost row; of a class's members, which differ by rounding only, the least."""
    costs = np.zeros(size)
    for node, start in first.items():
        if row in model.cost[node]:
            costs[start : start + len(model.alive[node])] = model.cost[node][row]
    for block in blocks:
        matrix = model.links[block.source][block.target].get(row)
        if matrix is None:
            continue
        least = np.full((int(block.source_class.max()) + 1, int(block.target_class.max()) + 1), np.inf)
        np.minimum.at(least, (block.source_class[:, None], block.target_class[None, :]), matrix)
        costs[block.first : block.first + len(block.pairs[0])] = least[block.pairs]
    return costs


def _memory(model: Model, limit: int, first: Mapping[int, int], size: int) -> Array:
    used = np.zeros(size)
    for node, start in first.items():
        if limit in model.memory[node]:
            used[start : start + len(model.alive[node])] = model.memory[node][limit]
    return used


def _couplings(first: Mapping[int, int], blocks: Iterable[Block]) -> tuple[tuple[Index, Index, Array], int]:
    """(rows, variables, coefficients): per link and class, sum of pairs - sum of strategies = 0."""
    rows, columns, values, count = [], [], [], 0
    for block in blocks:
        pair = block.first + np.arange(len(block.pairs[0]))
        for node, members, side in zip(
            (block.source, block.target), (block.source_class, block.target_class), block.pairs, strict=True
        ):
            rows += [count + side, count + members]
            columns += [pair, first[node] + np.arange(len(members))]
            values += [np.ones(len(pair)), -np.ones(len(members))]
            count += int(members.max()) + 1
    empty = np.zeros(0, np.int64)
    return (np.concatenate([empty, *rows]), np.concatenate([empty, *columns]), np.concatenate([[], *values])), count


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """Duals: of couplings, per limit (seconds per byte), per peak and row (they add up to the peak's weight)."""

    coupling: Array
    limit: Mapping[int, float]
    peak: tuple[Mapping[int, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Relaxed:
    """The linear relaxation's solution."""

    values: Array
    prices: Prices


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """A proven lower bound of the objective, and each variable's reduced cost (at least 0, 0 in each group)."""

    bound: float
    reduced: Array
    prices: Prices


class UnfinishedError(Exception):
    """The linear program takes more steps than it was given."""


def relax(flow: Flow, steps: int | None = None) -> Relaxed | None:
    """Solves the linear relaxation; None when it has no solution. Raises `UnfinishedError` after `steps` of simplex."""
    units = _Units.of(flow)
    model = mathopt.Model.from_model_proto(_linear_program(flow, units))
    result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=mathopt.SolveParameters(iteration_limit=steps))
    if result.termination.reason == mathopt.TerminationReason.INFEASIBLE:
        return None
    if steps is not None and result.termination.limit == mathopt.Limit.ITERATION:
        raise UnfinishedError
    if not (result.has_primal_feasible_solution() and result.has_dual_feasible_solution()):
        result = mathopt.solve(model, mathopt.SolverType.GLOP)
    assert result.has_primal_feasible_solution(), result.termination
    values = np.fromiter(result.variable_values().values(), float)
    duals = np.fromiter(result.dual_values().values(), float)
    return Relaxed(values[: flow.size], _prices(flow, duals, units))


@dataclass(frozen=True, slots=True)
class _Units:
    """What is 1 in the linear program: a linear solver's tolerances are absolute, seconds and bytes are not near 1."""

    seconds: float
    bytes: Mapping[int, float]

    @classmethod
    def of(cls, flow: Flow) -> _Units:
        costs = np.concatenate([np.zeros(0), *(cost[cost != 0] for cost in flow.costs.values())])
        seconds = float(np.abs(costs).mean()) if len(costs) else 1.0
        return cls(seconds or 1.0, {limit: float(used.max(initial=0.0)) or 1.0 for limit, used in flow.memory.items()})


def _linear_program(flow: Flow, units: _Units) -> model_pb2.ModelProto:
    """Rows: one per node, the couplings, the limits, then one per peak and member row."""
    model, num_nodes, num_peaks = flow.model, len(flow.first), len(flow.model.peaks)
    rows = Rows()
    inside = np.flatnonzero(flow.group < num_nodes)
    rows.add_equal((flow.group[inside], inside, np.ones(len(inside))), num_nodes, 1.0)
    rows.add_equal(flow.couplings, flow.num_couplings, 0.0)
    for limit, used in flow.memory.items():
        rows.add(used / units.bytes[limit], -np.inf, model.room[limit] / units.bytes[limit])
    for number, term in enumerate(model.peaks):
        for row in term.rows:
            costs = np.append(-flow.costs[row] / units.seconds, np.eye(num_peaks)[number])
            rows.add(costs, model.constant[row] / units.seconds, np.inf)
    objective = np.append(linear_costs(flow) / units.seconds, [term.weight for term in model.peaks])
    return program(rows, objective, [0.0] * flow.size + [-np.inf] * num_peaks)


def _prices(flow: Flow, duals: Array, units: _Units) -> Prices:
    """The duals by what they price, in seconds and bytes, with the signs and sums that duality asks for."""
    at = len(flow.first) + flow.num_couplings
    limits = {
        limit: max(0.0, -float(dual)) * units.seconds / units.bytes[limit]
        for limit, dual in zip(flow.memory, duals[at:], strict=False)
    }
    at_peaks = at + len(limits)
    peaks = []
    for term in flow.model.peaks:
        shares = np.maximum(duals[at_peaks : at_peaks + len(term.rows)], 0.0) + 1e-300
        peaks.append(dict(zip(term.rows, (shares * (term.weight / shares.sum())).tolist(), strict=True)))
        at_peaks += len(term.rows)
    return Prices(duals[len(flow.first) : at] * units.seconds, limits, tuple(peaks))


def linear_costs(flow: Flow) -> Array:
    """Each variable's part of the objective outside the peaks."""
    return weighted(flow, flow.model.linear)


def weighted(flow: Flow, weights: Mapping[int, float]) -> Array:
    """Each variable's cost rows, weighted."""
    result = np.zeros(flow.size)
    for row, weight in weights.items():
        result += weight * flow.costs[row]
    return result


def greatest(flow: Flow) -> float:
    """An objective that no choice exceeds."""
    weights = dict(flow.model.linear)
    for term in flow.model.peaks:
        for row in term.rows:
            weights[row] += term.weight
    most = sum(float(np.maximum.reduceat(flow.costs[row], flow.starts).sum()) * each for row, each in weights.items())
    return most + sum(abs(each * flow.model.constant[row]) for row, each in weights.items())


def price(flow: Flow, prices: Prices) -> Priced:
    """The bound that `prices` prove, and what each variable costs above it."""
    costs, constant = base_costs(flow, prices)
    reduced = costs - coupled(flow, prices.coupling)
    least = np.minimum.reduceat(reduced, flow.starts)
    return Priced(constant + float(least.sum()), reduced - least[flow.group], prices)


def base_costs(flow: Flow, prices: Prices) -> tuple[Array, float]:
    """Each variable's cost and the constant once limits and peaks are priced (couplings aside)."""
    model, weights = flow.model, dict(flow.model.linear)
    for shares in prices.peak:
        for row, share in shares.items():
            weights[row] += share
    costs = weighted(flow, weights)
    constant = sum(weight * model.constant[row] for row, weight in weights.items())
    for limit, each in prices.limit.items():
        costs = costs + each * flow.memory[limit]
        constant -= each * model.room[limit]
    return costs, constant


def coupled(flow: Flow, coupling: Array) -> Array:
    """What the couplings' prices take from each variable (zero in sum for every choice)."""
    rows, columns, values = flow.couplings
    return np.bincount(columns, values * coupling[rows], flow.size).astype(float)


def marginals(flow: Flow, reduced: Array) -> Array:
    """Per variable, how far above the bound every choice is that uses it: its own reduced cost, and of each link (or
    end) that it pins to a class the least of that class."""
    rows, columns, values = flow.couplings
    is_pair = values > 0
    pair_rows, pairs = rows[is_pair], columns[is_pair]
    strategy_rows, strategies = rows[~is_pair], columns[~is_pair]
    least_pair = np.full(flow.num_couplings, np.inf)
    np.minimum.at(least_pair, pair_rows, reduced[pairs])
    result = reduced + np.bincount(strategies, least_pair[strategy_rows], flow.size)
    least_end = np.full(flow.num_couplings, np.inf)
    with np.errstate(invalid="ignore"):
        others = np.nan_to_num(result[strategies] - least_pair[strategy_rows], nan=np.inf, posinf=np.inf)
    np.minimum.at(least_end, strategy_rows, others)
    return result + np.bincount(pairs, least_end[pair_rows], flow.size)


def restricted(flow: Flow, keep: Mask) -> Model:
    """The model with only the variables that `keep` marks; may raise `NoChoiceError`."""
    model = flow.model.copy()
    for block in flow.blocks:
        allowed = np.zeros((int(block.source_class.max()) + 1, int(block.target_class.max()) + 1), dtype=bool)
        allowed[block.pairs] = keep[block.first : block.first + len(block.pairs[0])]
        wide = allowed[block.source_class[:, None], block.target_class[None, :]]
        link = model.links[block.source][block.target]
        model.set_link(block.source, block.target, {**link, FREE: np.where(wide, link.get(FREE, 0.0), np.inf)})
    for node, first in flow.first.items():
        mask = keep[first : first + len(flow.model.alive[node])]
        if not mask.all():
            model.restrict(node, mask)
    return model
