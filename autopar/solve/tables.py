"""Exact minimisation by tables: nodes are eliminated one after another, whatever the number of their neighbours.

    order = elimination_order(model)        # None where the tables would be too large
    chosen = minimise(model, order)         # node → strategy, as the problem numbers it; None when nothing is allowed

Eliminating a node replaces what it takes part in by one table over its neighbours: for each of their strategies the
least that the node can cost (bucket elimination: Dechter 1999, section 4). The graphs of transformers are nearly trees
once chains are gone, so that on one mesh axis the tables are small, and neither a relaxation nor a search is needed.

Only for models without limits and peaks: all costs are in one row.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solve.model import LINEAR, Model, total
from autopar.solve.problem import Array

LARGEST = 2e7
"""Entries of one table."""
MOST = 2e8
"""Entries of all tables."""
SMALL = 3e5
"""Entries of all tables that take no longer than looking for another order."""
TRIES = 8
"""Orders that are drawn near the greedy one; the cheapest is taken."""
SPREAD = 0.7
"""By how much (in the logarithm of a table's size) a drawn order may differ from the greedy one at each step."""


def elimination_order(model: Model) -> list[int] | None:
    """The nodes in the order of elimination, the smallest table first; None where limits, peaks or sizes forbid it."""
    if model.room or model.peaks or not model.alive:
        return None
    chance = random.Random(0)
    work, order = _order(model, chance, 0.0)
    for _ in range(TRIES if work > SMALL else 0):
        work, order = min((work, order), _order(model, chance, SPREAD), key=lambda pair: pair[0])
    return order if work <= MOST else None


def _order(model: Model, chance: random.Random, spread: float) -> tuple[float, list[int]]:
    """A greedy order, and how many entries its tables have; infinite where one would be too large."""
    size = {node: math.log(len(alive)) for node, alive in model.alive.items()}
    near = {node: set(links) for node, links in model.links.items()}
    table = {node: size[node] + sum(size[other] for other in near[node]) for node in near}
    work, order = 0.0, []
    while near:
        node = min(near, key=lambda n: table[n] + chance.uniform(0, spread))
        if table[node] > math.log(LARGEST):
            return math.inf, []
        work += math.exp(table[node])
        order.append(node)
        others = near.pop(node)
        for other in others:
            near[other] = (near[other] | others) - {node, other}
        for other in others:
            table[other] = size[other] + sum(size[third] for third in near[other])
    return work, order


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Costs over the strategies of some nodes: one dim per node, in their order."""

    nodes: tuple[int, ...]
    costs: Array

    def over(self, nodes: Sequence[int]) -> Array:
        """The costs with a dim for each of `nodes`, which hold the table's own in any order."""
        own = [node for node in nodes if node in self.nodes]
        turned = self.costs.transpose([self.nodes.index(node) for node in own])
        sizes = dict(zip(own, turned.shape, strict=True))
        return turned.reshape([sizes.get(node, 1) for node in nodes])

    def at(self, node: int, picked: dict[int, int]) -> Array:
        """The costs of `node`'s strategies, the other nodes having those picked."""
        costs: Array = self.costs[tuple(slice(None) if other == node else picked[other] for other in self.nodes)]
        return costs


def minimise(model: Model, order: Iterable[int]) -> dict[int, int] | None:
    """The cheapest choice of a model for which there is an order."""
    tables = _tables(model)
    eliminated: list[tuple[int, list[_Table]]] = []
    for node in order:
        mine = tables.pop(node)
        eliminated.append((node, mine))
        others = tuple(sorted({other for table in mine for other in table.nodes} - {node}))
        least = _least(node, others, mine)
        if np.isinf(least).all():
            return None
        for other in others:
            tables[other] = [table for table in tables[other] if node not in table.nodes]
        if others:
            result = _Table(others, least)
            for other in others:
                tables[other].append(result)
    picked: dict[int, int] = {}
    for node, mine in reversed(eliminated):
        picked[node] = int(np.argmin(sum(table.at(node, picked) for table in mine)))
    return {node: int(model.alive[node][position]) for node, position in picked.items()}


def _tables(model: Model) -> dict[int, list[_Table]]:
    """Node → the tables that it takes part in."""
    tables: dict[int, list[_Table]] = {}
    for node, alive in model.alive.items():
        tables[node] = [_Table((node,), model.cost[node].get(LINEAR, np.zeros(len(alive))))]
    for node, links in model.links.items():
        for other, link in links.items():
            if node < other:
                table = _Table((node, other), total(link))
                tables[node].append(table)
                tables[other].append(table)
    return tables


def _least(node: int, others: tuple[int, ...], tables: list[_Table]) -> Array:
    """The least cost of `node` for the strategies of the others; its own dim comes first, which numpy reduces fast."""
    scope = (node, *others)
    sizes = {each: size for table in tables for each, size in zip(table.nodes, table.costs.shape, strict=True)}
    costs = np.zeros([sizes[each] for each in scope])
    for table in sorted(tables, key=lambda table: table.costs.size):
        costs += table.over(scope)
    least: Array = costs.min(axis=0)
    return least
