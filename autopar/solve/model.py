"""The problem as the solver works on it: a graph that shrinks, and the trail that leads a choice back.

    model = Model.of(problem)
    reduce(model)                       # exact: fewer nodes, fewer strategies
    choice = recover(model, {node: strategy for what is left})

Invariants:
- at most one link joins two nodes; it holds one matrix per cost row, seen from both of its ends (`.T` of each other);
- all rows that only ever appear alone in a term are one row, `LINEAR`, with the weights multiplied in;
- `FREE` is the row of matrices that only forbid: zeros and infinities;
- node costs and memory are finite, and those that are all zero are left out; arrays are replaced, never written to;
- the objective is sum over rows of linear[row] * total[row], plus sum over peaks of weight * max of totals.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from autopar.solve.problem import Array, Index, Mask, Problem, Term

FREE = -1
LINEAR = 0


class NoChoiceError(Exception):
    """No choice is allowed by what forbids, or by the limits."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """An eliminated node: its best strategy minimises own + sum over parents of matrix[:, parent's strategy]."""

    node: int
    alive: Index
    own: Array
    parents: tuple[tuple[int, Index, Array], ...]


@dataclass(slots=True, eq=False)
class Model:
    """What is left to choose; every dict is keyed by the nodes that are left."""

    cost: dict[int, dict[int, Array]] = field(default_factory=dict)
    memory: dict[int, dict[int, Array]] = field(default_factory=dict)
    alive: dict[int, Index] = field(default_factory=dict)
    links: dict[int, dict[int, dict[int, Array]]] = field(default_factory=dict)
    linear: dict[int, float] = field(default_factory=dict)
    peaks: tuple[Term, ...] = ()
    constant: dict[int, float] = field(default_factory=dict)
    room: dict[int, float] = field(default_factory=dict)
    trail: list[Step] = field(default_factory=list)
    loss: float = 0.0
    asked: frozenset[int] = frozenset()
    """Nodes of which every strategy that is allowed stays: neither eliminated nor without what is never best."""
    touched: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, problem: Problem) -> Model:
        """The whole problem; raises `NoChoiceError` when a node has no allowed strategy."""
        rows, linear, peaks = merge_rows(problem)
        model = cls(linear=linear, peaks=peaks, constant=dict.fromkeys(linear, 0.0))
        model.room = {index: limit.threshold - limit.constant for index, limit in enumerate(problem.limits)}
        for index, node in enumerate(problem.nodes):
            row, weight = rows.get(node.row, (FREE, 0.0))
            model.add_node(index, {row: scaled(node.cost, weight)}, node.memory)
        for edge in problem.edges:
            row, weight = rows.get(edge.row, (FREE, 0.0))
            source, target = edge.source, edge.target
            matrix = scaled(edge.cost, weight)[np.ix_(model.alive[source], model.alive[target])]
            model.add_link(source, target, row, matrix)
        return model

    def add_node(self, node: int, cost: Mapping[int, Array], memory: Mapping[int, Array]) -> None:
        """A node that is not linked yet, without its forbidden strategies."""
        allowed = np.flatnonzero(np.all([np.isfinite(part) for part in cost.values()], axis=0))
        if not len(allowed):
            raise NoChoiceError
        self.alive[node] = allowed
        self.cost[node] = {row: part[allowed] for row, part in cost.items() if row != FREE and part[allowed].any()}
        self.memory[node] = {limit: part[allowed] for limit, part in memory.items() if part[allowed].any()}
        self.links[node] = {}
        self.touched.add(node)

    def add_cost(self, node: int, row: int, cost: Array) -> None:
        """Adds to a node's own cost; what is infinite is forbidden."""
        allowed = np.isfinite(cost)
        if not allowed.all():
            self.restrict(node, allowed)
            cost = cost[allowed]
        if row != FREE and cost.any():
            own = self.cost[node]
            own[row] = own[row] + cost if row in own else cost

    def add_link(self, source: int, target: int, row: int, matrix: Array) -> None:
        """Adds a matrix [source strategy, target strategy], merged with what links the two already."""
        if source == target:
            self.add_cost(source, row, np.ascontiguousarray(np.diagonal(matrix)))
            return
        link = self.links[source].get(target, {})
        if row in link:
            matrix = link[row] + matrix
        self.set_link(source, target, {**link, row: matrix})

    def set_link(self, source: int, target: int, link: Mapping[int, Array]) -> None:
        """Replaces what links two nodes; rows of zeros go, and rows that only forbid are one row."""
        kept: dict[int, Array] = {}
        for row, matrix in link.items():
            finite = np.isfinite(matrix)
            only_forbids = not matrix[finite].any()
            if only_forbids and finite.all():
                continue
            place = FREE if only_forbids else row
            kept[place] = kept[place] + matrix if place in kept else matrix
        if kept:
            self.links[source][target] = kept
            self.links[target][source] = {row: matrix.T for row, matrix in kept.items()}
        else:
            self.links[source].pop(target, None)
            self.links[target].pop(source, None)
        self.touched |= {source, target}

    def restrict(self, node: int, keep: Mask) -> None:
        """Drops strategies; raises `NoChoiceError` when none is left."""
        if not keep.any():
            raise NoChoiceError
        self.alive[node] = self.alive[node][keep]
        self.cost[node] = {row: part[keep] for row, part in self.cost[node].items()}
        self.memory[node] = {limit: part[keep] for limit, part in self.memory[node].items()}
        for other, link in list(self.links[node].items()):
            self.set_link(node, other, {row: matrix[keep] for row, matrix in link.items()})
        self.touched.add(node)

    def remove(self, node: int, own: Array, parents: tuple[int, ...]) -> None:
        """Takes an eliminated node out and notes how to choose for it once `parents` are chosen."""
        seen = tuple((other, self.alive[other], total(self.links[node][other])) for other in parents)
        self.trail.append(Step(node, self.alive[node], own, seen))
        for other in self.links[node]:
            del self.links[other][node]
            self.touched.add(other)
        for table in (self.cost, self.memory, self.alive, self.links):
            del table[node]
        self.touched.discard(node)

    def copy(self) -> Model:
        """A copy whose tables can be changed; the arrays are shared."""
        twin = copy.copy(self)
        twin.cost = {node: dict(own) for node, own in self.cost.items()}
        twin.memory = {node: dict(own) for node, own in self.memory.items()}
        twin.links = {node: dict(links) for node, links in self.links.items()}
        twin.alive, twin.constant, twin.room = dict(self.alive), dict(self.constant), dict(self.room)
        twin.trail, twin.touched = list(self.trail), set(self.touched)
        return twin

    @property
    def num_variables(self) -> int:
        """Strategies of what is left to choose."""
        return sum(len(alive) for alive in self.alive.values())


def merge_rows(problem: Problem) -> tuple[dict[int, tuple[int, float]], dict[int, float], tuple[Term, ...]]:
    """Row -> (model's row, factor); the linear weight of each of the model's rows; the terms that take a maximum."""
    alone: dict[int, float] = {}
    peaks = []
    for term in problem.objective:
        members = tuple(sorted(set(term.rows)))
        if len(members) == 1:
            alone[members[0]] = alone.get(members[0], 0.0) + term.weight
        elif term.weight > 0:
            peaks.append(Term(term.weight, members))
    peaked = sorted({row for term in peaks for row in term.rows})
    place = {row: LINEAR + 1 + position for position, row in enumerate(peaked)}
    linear = {LINEAR: 1.0} | {place[row]: alone.get(row, 0.0) for row in peaked}
    merged = {row: (LINEAR, weight) for row, weight in alone.items() if row not in place and weight > 0}
    merged |= {row: (position, 1.0) for row, position in place.items()}
    return merged, linear, tuple(Term(term.weight, tuple(place[row] for row in term.rows)) for term in peaks)


def scaled(cost: Array, weight: float) -> Array:
    """`weight * cost`, with what is forbidden still forbidden at weight 0."""
    if weight == 1.0:
        return cost
    return np.where(np.isinf(cost), np.inf, np.where(np.isinf(cost), 0.0, cost) * weight)


def total(link: Mapping[int, Array]) -> Array:
    """The sum of a link's rows."""
    matrices = list(link.values())
    result = matrices[0]
    for matrix in matrices[1:]:
        result = result + matrix
    return result


def objective(model: Model, rows: Mapping[int, float]) -> float:
    """The objective from row totals (constants included by the caller)."""
    linear = math.fsum(weight * rows[row] for row, weight in model.linear.items())
    return linear + math.fsum(term.weight * max(rows[row] for row in term.rows) for term in model.peaks)


def recover(model: Model, chosen: Mapping[int, int], num_nodes: int) -> tuple[int, ...]:
    """The whole choice, from a strategy (as the problem numbers it) for each node that is left."""
    choice = dict(chosen)
    for step in reversed(model.trail):
        cost = step.own
        for other, alive, matrix in step.parents:
            cost = cost + matrix[:, int(np.searchsorted(alive, choice[other]))]
        choice[step.node] = int(step.alive[int(np.argmin(cost))])
    return tuple(choice[node] for node in range(num_nodes))
