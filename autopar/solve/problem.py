"""The solver's abstract problem: one strategy per node, costs on nodes and edges, limits on memory.

    plan = Problem(
        nodes=(Node("x", np.array([1.0, 3.0])), Node("y", np.array([2.0, 0.0]))),
        edges=(Edge(0, 1, np.array([[0.0, 5.0], [1.0, 0.0]])),),
    )
    brute_force(plan).choice        # (0, 0): 1 + 2 + 0

Invariants:
- costs are seconds, memory is bytes; an infinite cost forbids a strategy or a pair of strategies;
- each node cost and each edge cost adds to one *cost row*; the objective is a sum of terms, each a weight (never
  negative) times the greatest of some row totals: with M microbatches and one stage `[Term(M, (0,)), Term(1, (1,))]`;
- each limit holds: constant + sum of the chosen strategies' memory in it <= capacity (`TOLERANCE` for rounding).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """An op (or parameter) with one cost per strategy; `memory` maps a limit's index to bytes per strategy."""

    name: str
    cost: Array
    row: int = 0
    memory: dict[int, Array] = field(default_factory=dict)

    @property
    def num_strategies(self) -> int:
        return len(self.cost)


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """What it costs to bring `source` under its strategy to `target` under its: [source strategy, target strategy]."""

    source: int
    target: int
    cost: Array
    row: int = 0


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound on bytes, of which `constant` are used whatever is chosen."""

    name: str
    capacity: float
    constant: float = 0.0

    def holds(self, usage: float) -> bool:
        return usage <= self.threshold

    @property
    def threshold(self) -> float:
        """The capacity, with room for the rounding of a sum."""
        return self.capacity + TOLERANCE * max(1.0, abs(self.capacity))


@dataclass(frozen=True, slots=True)
class Term:
    """`weight` times the greatest total among `rows`."""

    weight: float
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A pairwise choice problem with limits; without terms, the objective is the total of row 0."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    limits: tuple[Limit, ...] = ()
    objective: tuple[Term, ...] = (Term(1.0, (0,)),)

    @property
    def num_rows(self) -> int:
        rows = [node.row for node in self.nodes] + [edge.row for edge in self.edges]
        return 1 + max(rows + [row for term in self.objective for row in term.rows], default=0)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a choice costs: `objective` and `rows` in seconds, `usage` per limit in bytes, constants included."""

    objective: float
    rows: tuple[float, ...]
    usage: tuple[float, ...]
    feasible: bool


@dataclass(frozen=True, slots=True)
class Solution:
    """The best choice found (empty when infeasible) and a proven lower bound; `seconds` is wall time."""

    choice: tuple[int, ...]
    objective: float
    bound: float
    status: str
    seconds: float = 0.0

    @property
    def gap(self) -> float:
        """(objective - bound) / objective, at least 0."""
        if self.objective <= self.bound or not self.choice:
            return 0.0
        return (self.objective - self.bound) / max(abs(self.objective), 1e-300)


def check(problem: Problem) -> None:
    """Asserts that shapes, indices and weights fit together."""
    for node in problem.nodes:
        assert node.cost.ndim == 1 and len(node.cost) > 0, f"{node.name}: cost of shape {node.cost.shape}"
        for limit, used in node.memory.items():
            assert 0 <= limit < len(problem.limits), f"{node.name}: limit {limit} of {len(problem.limits)}"
            assert used.shape == node.cost.shape and np.isfinite(used).all(), f"{node.name}: memory {used}"
        assert node.row >= 0 and (node.cost > -np.inf).all(), f"{node.name}: row {node.row}, cost {node.cost}"
    for edge in problem.edges:
        ends = problem.nodes[edge.source], problem.nodes[edge.target]
        shape = tuple(end.num_strategies for end in ends)
        assert edge.cost.shape == shape, f"{ends[0].name} -> {ends[1].name}: {edge.cost.shape}, expected {shape}"
        assert edge.row >= 0 and (edge.cost > -np.inf).all(), f"{ends[0].name} -> {ends[1].name}: {edge.cost}"
    for term in problem.objective:
        assert term.weight >= 0 and term.rows, f"{term}: a weight that is not negative and at least one row"


def objective_of(terms: Sequence[Term], rows: Sequence[float]) -> float:
    """The objective, from the row totals."""
    return math.fsum(term.weight * max(rows[row] for row in term.rows) for term in terms if term.weight > 0)


def evaluate(problem: Problem, choice: Sequence[int]) -> Evaluation:
    """Recomputes what `choice` costs and uses, from the problem alone; forbidden choices cost infinity."""
    assert len(choice) == len(problem.nodes), f"{len(choice)} choices for {len(problem.nodes)} nodes"
    parts: list[list[float]] = [[] for _ in range(problem.num_rows)]
    used: list[list[float]] = [[limit.constant] for limit in problem.limits]
    for node, strategy in zip(problem.nodes, choice, strict=True):
        parts[node.row].append(float(node.cost[strategy]))
        for limit, memory in node.memory.items():
            used[limit].append(float(memory[strategy]))
    for edge in problem.edges:
        parts[edge.row].append(float(edge.cost[choice[edge.source], choice[edge.target]]))
    rows = tuple(math.fsum(part) for part in parts)
    usage = tuple(math.fsum(part) for part in used)
    allowed = not any(math.isinf(total) for total in rows)
    fits = all(limit.holds(total) for limit, total in zip(problem.limits, usage, strict=True))
    return Evaluation(objective_of(problem.objective, rows) if allowed else math.inf, rows, usage, allowed and fits)


def unlimited(problem: Problem) -> Problem:
    """The problem regardless of memory."""
    return replace(problem, limits=(), nodes=tuple(replace(node, memory={}) for node in problem.nodes))


def brute_force(problem: Problem) -> Solution:
    """Tries every choice at once (a check for small problems: at most two million choices)."""
    sizes = [node.num_strategies for node in problem.nodes]
    assert math.prod(sizes) <= 2_000_000, f"{math.prod(sizes)} choices are too many to try"
    rows = [np.zeros(sizes) for _ in range(problem.num_rows)]
    usage = [np.full(sizes, limit.constant) for limit in problem.limits]
    for index, node in enumerate(problem.nodes):
        rows[node.row] = rows[node.row] + _spread(node.cost, (index,), sizes)
        for limit, memory in node.memory.items():
            usage[limit] = usage[limit] + _spread(memory, (index,), sizes)
    for edge in problem.edges:
        rows[edge.row] = rows[edge.row] + _spread(edge.cost, (edge.source, edge.target), sizes)
    total = np.zeros(sizes)
    for term in problem.objective:
        if term.weight > 0:
            total = total + term.weight * np.max([rows[row] for row in term.rows], axis=0)
    forbidden = ~np.all([np.isfinite(row) for row in rows], axis=0)
    for limit_, used in zip(problem.limits, usage, strict=True):
        forbidden = forbidden | (used > limit_.threshold)
    total = np.where(forbidden, np.inf, total)
    best = np.unravel_index(int(np.argmin(total)), total.shape)
    value = float(total[best])
    if math.isinf(value):
        return Solution((), math.inf, math.inf, "infeasible")
    return Solution(tuple(int(index) for index in best), value, value, "optimal")


def _spread(values: Array, dims: tuple[int, ...], sizes: Sequence[int]) -> Array:
    """`values` with the dims `dims` of the full grid, size 1 elsewhere."""
    if len(dims) == 2 and dims[0] == dims[1]:
        values, dims = np.diagonal(values), dims[:1]
    if len(dims) == 2 and dims[0] > dims[1]:
        values, dims = values.T, (dims[1], dims[0])
    shape = [sizes[dim] if dim in dims else 1 for dim in range(len(sizes))]
    return values.reshape(shape)
