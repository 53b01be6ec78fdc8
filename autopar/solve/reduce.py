"""Exact reductions: what can be decided, merged or eliminated without search.

    reduce(model)           # chains, trees and everything of treewidth two without memory disappear

Each step keeps an optimum (up to rounding, which `model.loss` adds up):
- a strategy that no partner allows, or that breaks a limit by itself, goes; a limit that nothing can break goes;
- a node with one strategy folds into its neighbours;
- a node with at most two neighbours, no memory, and all costs in one cost row is eliminated: the objective never falls
  when a row total rises, so the cheapest strategy for each pair of the neighbours' strategies is best (min-plus);
- the part of a link that depends on one end only moves to that end; a link that is left empty goes;
- a strategy goes when another costs no more whatever the neighbours choose, and needs no more memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

from autopar.solve.model import FREE, Model, NoChoiceError, total
from autopar.solve.problem import Array, Index, Mask

ROUNDING = 1e-13
BLOCK = 1 << 20
FAR, FARTHER = 1e200, 2e200
SMALL = 1 << 11
"""Entries of a matrix whose differences are kept."""


def reduce(model: Model) -> None:
    """Reduces `model` in place until nothing changes; raises `NoChoiceError`."""
    while model.touched:
        drop_dead_ends(model, sorted(model.touched & model.alive.keys()))
        drop_slack(model)
        eliminate(model)
        drop_dead_ends(model, sorted(model.touched & model.alive.keys()))
        changed = sorted(model.touched & model.alive.keys())
        model.touched = set()
        normalise(model, changed)
        drop_dominated(model, changed)
    if any(room < 0 for room in model.room.values()):
        raise NoChoiceError


def drop_dead_ends(model: Model, nodes: list[int]) -> None:
    """Drops strategies of `nodes` that no strategy of some neighbour allows, and what follows from that."""
    waiting = set(nodes)
    while waiting:
        node = waiting.pop()
        for other in list(model.links[node]):
            link = model.links[node].get(other)
            if link is None:
                continue
            keep: Mask = np.isfinite(total(link)).max(axis=1)
            if not keep.all():
                model.restrict(node, keep)
                waiting |= model.links[node].keys() | {node}


def drop_slack(model: Model) -> None:
    """Makes memory relative to each node's least, drops what can't fit, and limits that can't be broken."""
    for limit in sorted(model.room):
        users = _drop_misfits(model, limit)
        if sum(float(model.memory[node][limit].max()) for node in users) <= model.room[limit]:
            _drop_limit(model, limit, users)


def _drop_misfits(model: Model, limit: int) -> list[int]:
    """Drops strategies that break a limit whatever the other nodes do; returns the nodes that still use it."""
    while True:
        for node in [node for node in sorted(model.memory) if limit in model.memory[node]]:
            _relative_memory(model, node, limit)
        if model.room[limit] < 0:
            raise NoChoiceError
        users = [node for node in sorted(model.memory) if limit in model.memory[node]]
        fitting = {node: model.memory[node][limit] <= model.room[limit] for node in users}
        misfits = {node: keep for node, keep in fitting.items() if not keep.all()}
        if not misfits:
            return users
        for node, keep in misfits.items():
            model.restrict(node, keep)


def _relative_memory(model: Model, node: int, limit: int) -> None:
    used = model.memory[node][limit]
    least = float(used.min())
    model.room[limit] -= least
    model.memory[node] = {**model.memory[node], limit: used - least}
    if not (used > least).any():
        del model.memory[node][limit]
        model.touched.add(node)


def _drop_limit(model: Model, limit: int, users: Iterable[int]) -> None:
    del model.room[limit]
    for node in users:
        del model.memory[node][limit]
        model.touched.add(node)


def eliminate(model: Model) -> None:
    """Eliminates nodes for as long as one qualifies, those with the fewest neighbours first."""
    waiting = set(model.alive)
    for degree in (1, 2):
        _eliminate_up_to(model, degree, waiting)


def _eliminate_up_to(model: Model, degree: int, waiting: set[int]) -> None:
    """Eliminates at `degree` neighbours or fewer; `waiting` holds the nodes that might qualify."""
    queue = sorted(waiting)
    while queue:
        node = queue.pop()
        if node not in model.alive:
            waiting.discard(node)
            continue
        if not _is_eliminable(model, node, degree):
            continue
        neighbours = list(model.links[node])
        model.touched.discard(node)
        (_fold if len(model.alive[node]) == 1 else _min_plus)(model, node)
        waiting.discard(node)
        queue += neighbours
        waiting |= set(neighbours)


def _is_eliminable(model: Model, node: int, degree: int) -> bool:
    if node in model.asked:
        return False
    if len(model.alive[node]) == 1:
        return True
    links = model.links[node]
    if len(links) > degree or model.memory[node]:
        return False
    rows = set(model.cost[node]).union(*links.values())
    return len(rows - {FREE}) <= 1


def _fold(model: Model, node: int) -> None:
    """A node whose strategy is settled: its costs are constants, its links are its neighbours' costs."""
    for row, cost in model.cost[node].items():
        model.constant[row] += float(cost[0])
    for limit, used in model.memory[node].items():
        model.room[limit] -= float(used[0])
    for other, link in list(model.links[node].items()):
        model.set_link(node, other, {})
        _charge(model, other, {row: matrix[0] for row, matrix in link.items()})
    model.remove(node, np.zeros(1), ())


def _charge(model: Model, node: int, costs: dict[int, Array]) -> None:
    """Adds costs of several rows to a node; the strategies that one of them forbids go."""
    allowed = np.all([np.isfinite(cost) for cost in costs.values()], axis=0)
    if not allowed.all():
        model.restrict(node, allowed)
    for row, cost in costs.items():
        model.add_cost(node, row, cost[allowed])


def _min_plus(model: Model, node: int) -> None:
    """Eliminates a node with at most two neighbours, all of it in one cost row."""
    parents = tuple(model.links[node])
    rows = set(model.cost[node]).union(*model.links[node].values()) - {FREE}
    row = rows.pop() if rows else FREE
    own = model.cost[node].get(row, np.zeros(len(model.alive[node])))
    sides = [total(model.links[node][other]) for other in parents]
    model.remove(node, own, parents)
    if not parents:
        model.constant[row] = model.constant.get(row, 0.0) + float(own.min())
    elif len(parents) == 1:
        model.add_cost(parents[0], row, (sides[0] + own[:, None]).min(axis=0))
    else:
        first, second = parents
        model.add_link(first, second, row, min_plus(sides[0].T + own, sides[1]))


def min_plus(left: Array, right: Array) -> Array:
    """[a, b] = min over v of left[a, v] + right[v, b], in blocks that fit the cache."""
    step = max(1, BLOCK // (8 * max(1, right.size)))
    result = np.empty((len(left), right.shape[1]))
    turned = np.ascontiguousarray(right.T)
    for start in range(0, len(left), step):
        part = left[start : start + step]
        result[start : start + step] = (part[:, None, :] + turned[None]).min(axis=2)
    return result


def normalise(model: Model, nodes: Iterable[int]) -> None:
    """Moves each link's least per row, then per column, to the ends; links that are left empty go."""
    for node in nodes:
        for other, link in list(model.links[node].items()):
            if any(_has_potential(matrix) for row, matrix in link.items() if row != FREE):
                model.set_link(node, other, {row: _shift(model, node, other, row, part) for row, part in link.items()})


def _has_potential(matrix: Array) -> bool:
    return bool((matrix.min(axis=1) != 0).any() or (matrix.min(axis=0) != 0).any())


def _shift(model: Model, node: int, other: int, row: int, matrix: Array) -> Array:
    """`matrix` without what depends on one end; that part is added to the end's own cost."""
    if row == FREE:
        return matrix
    tiny = ROUNDING * float(np.abs(matrix[np.isfinite(matrix)]).max())
    by_row = matrix.min(axis=1)
    matrix = matrix - by_row[:, None]
    by_column = matrix.min(axis=0)
    matrix = matrix - by_column[None, :]
    model.loss += tiny
    model.add_cost(node, row, by_row)
    model.add_cost(other, row, by_column)
    return np.where(matrix <= tiny, 0.0, matrix)


def drop_dominated(model: Model, nodes: Iterable[int]) -> None:
    """Drops strategies that another one replaces at no cost, whatever the neighbours choose."""
    for node in nodes:
        if len(model.alive[node]) < 2 or node in model.asked:
            continue
        replaces, loss = _replacements(model, node)
        keep = _undominated(replaces)
        if not keep.all():
            model.loss += loss * int((~keep).sum())
            model.restrict(node, keep)


def _undominated(replaces: Mask) -> Mask:
    """Which to keep when `replaces[k, j]` says that j can stand for k: each one dropped has a stand-in that is left."""
    keep = np.ones(len(replaces), dtype=bool)
    for strategy in np.flatnonzero(replaces.any(axis=1))[::-1]:
        keep[strategy] = False
        keep[strategy] = not (replaces[strategy] & keep).any()
    return keep


def _replacements(model: Model, node: int) -> tuple[Mask, float]:
    """[k, j]: j costs no more than k in every row, for every choice of the neighbours, and needs no more memory."""
    least: dict[int, Array] = {row: cost[:, None] - cost[None, :] for row, cost in model.cost[node].items()}
    for link in model.links[node].values():
        for row, matrix in link.items():
            saved = _least_difference(matrix)
            least[row] = least[row] + saved if row in least else saved
    scale = max((float(np.abs(cost).max()) for cost in model.cost[node].values()), default=0.0)
    replaces = ~np.eye(len(model.alive[node]), dtype=bool)
    for difference in least.values():
        replaces &= difference >= -ROUNDING * scale
    for used in model.memory[node].values():
        replaces &= used[:, None] >= used[None, :]
    return replaces, ROUNDING * scale


def _least_difference(matrix: Array) -> Array:
    """[k, j] = min over columns of matrix[k] - matrix[j]; columns that k forbids don't count, those that only j
    forbids count as minus infinity."""
    return _known_difference(matrix.shape, matrix.tobytes()) if matrix.size <= SMALL else _difference(matrix)


@functools.lru_cache(maxsize=4096)
def _known_difference(shape: tuple[int, ...], data: bytes) -> Array:
    """Links that are alike, as those of layers are, are looked at once."""
    return _difference(np.frombuffer(data).reshape(shape))


def _difference(matrix: Array) -> Array:
    columns = matrix[:, classes(matrix.T)[0]]
    allowed = np.isfinite(columns)
    upper, lower = np.where(allowed, columns, FARTHER), np.where(allowed, columns, FAR)
    result = np.empty((len(matrix), len(matrix)))
    step = max(1, BLOCK // (8 * max(1, lower.size)))
    for start in range(0, len(matrix), step):
        result[start : start + step] = (upper[start : start + step, None] - lower).min(axis=2)
    return result


def classes(matrix: Array) -> tuple[Index, Index]:
    """Groups of rows that are equal (to 1e-12 of the largest value): first row of each group, group of each row."""
    finite = np.isfinite(matrix)
    values = np.where(finite, matrix, 0.0)
    unit = 1e-12 * float(np.abs(values).max(initial=0.0)) or 1.0
    rounded = np.where(finite, np.rint(values / unit), 2.0**60).astype(np.int64)
    first, group = _equal(rounded @ _factors(rounded.shape[1]))
    if not np.array_equal(rounded, rounded[first[group]]):
        _, first, group = np.unique(rounded, axis=0, return_index=True, return_inverse=True)
    return first.astype(np.int64), group.reshape(-1).astype(np.int64)


@functools.lru_cache(maxsize=4096)
def _factors(count: int) -> Index:
    """Odd numbers by which a row becomes one number, the same at every call (sums wrap around)."""
    return np.random.default_rng(0).integers(1, 2**62, count) | 1


def _equal(keys: Index) -> tuple[Index, Index]:
    """Groups of equal keys, ascending: first of each, group of each key."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.empty(len(keys), dtype=bool)
    starts[:1], starts[1:] = True, ordered[1:] != ordered[:-1]
    group = np.empty(len(keys), dtype=np.int64)
    group[order] = np.cumsum(starts) - 1
    return order[starts], group
