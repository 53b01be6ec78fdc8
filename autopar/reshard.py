"""Resharding: the cheapest sequence of moves from one layout of a value to another.

A move changes one axis: gather (all-gather), narrow (keep a part), reduce (all-reduce), reduce_scatter, exchange
(all-to-all). Moves start from a layout's minor-most axes, so each is one collective on one dim of the value viewed
into its factors. The cheapest path is found by Dijkstra over layouts, so sequences over several axes come out by price.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.layout import Layout, Position, is_worth_splitting
from autopar.mesh import Mesh

Price = Callable[[str, str, float], float]
"""(collective kind, axis, bytes of the whole tensor over that axis) → seconds."""

Prices = np.ndarray[tuple[int, int], np.dtype[np.float64]]
"""Seconds by source and target layout."""

TIE_S = 1e-9
"""Breaks ties towards fewer moves."""


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a reshard; `kind` is the name of a function of `autopar.markers`."""

    kind: str
    axis: str
    op: str = "sum"
    source: Position | None = None
    target: Position | None = None

    @property
    def arguments(self) -> tuple[str | int, ...]:
        """The arguments of the marker after the tensor."""
        op = (self.op,) if self.kind in ("reduce", "reduce_scatter") else ()
        return (self.axis, *op, *(self.source or ()), *(self.target or ()))

    @property
    def collective(self) -> str | None:
        return _COLLECTIVES[self.kind]


_COLLECTIVES: dict[str, str | None] = {
    "gather": "all_gather",
    "narrow": None,
    "reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "exchange": "all_to_all",
}


def moves_from(layout: Layout, mesh: Mesh) -> Iterator[tuple[Move, Layout]]:
    """Every move that is one collective, with the layout it leads to."""
    spots = list(layout.positions())

    def room(axis: str) -> Iterator[Position]:
        for where, factor in spots:
            if is_worth_splitting(factor.size, (mesh.size(a) for a in (*factor.axes, axis))):
                yield where

    for where, factor in spots:
        if not factor.axes:
            continue
        axis = factor.axes[-1]
        base = layout.drop(axis)
        yield Move("gather", axis, source=where), base
        for target in room(axis):
            if target != where:
                yield Move("exchange", axis, source=where, target=target), base.split(axis, target)
    for axis, op in layout.partial:
        base = layout.drop(axis)
        yield Move("reduce", axis, op), base
        for target in room(axis):
            yield Move("reduce_scatter", axis, op, target=target), base.split(axis, target)
    used = {*layout.split_axes, *(axis for axis, _ in layout.partial)}
    for axis in mesh.spmd.names:
        if axis not in used and mesh.size(axis) > 1:
            for target in room(axis):
                yield Move("narrow", axis, target=target), layout.split(axis, target)


def moved_bytes(move: Move, before: Layout, mesh: Mesh, item_bytes: float) -> float:
    """Bytes of the collective's whole tensor, the axis in question not splitting it (`cluster.collectives`)."""
    local = math.prod(before.local_shape(mesh)) * item_bytes
    return local * mesh.size(move.axis) if move.kind in ("gather", "exchange") else local


@dataclass(frozen=True, slots=True)
class _Closure:
    """The price of every pair of layouts of values with the same factors."""

    index: dict[Layout, int]
    edges: list[tuple[int, int, float]]
    """Moves: from, to, seconds."""
    cost_s: Prices


class Resharder:
    """Finds and remembers paths between layouts on one mesh at one price list."""

    def __init__(self, mesh: Mesh, price: Price) -> None:
        self.mesh = mesh.spmd
        self._price = price
        self._trees: dict[tuple[Layout, float], dict[Layout, tuple[float, Layout | None, Move | None]]] = {}
        self._closures: dict[tuple[Layout, float], _Closure] = {}
        self._moves: dict[Layout, list[tuple[Move, Layout]]] = {}

    def cost_s(self, source: Layout, target: Layout, item_bytes: float) -> float:
        """Seconds of the cheapest path; infinite where there is none (a partial value can't be made)."""
        if source == target:
            return 0.0
        found = self._tree(source, item_bytes).get(target)
        return math.inf if found is None else found[0]

    def matrix_s(self, sources: Sequence[Layout], targets: Sequence[Layout], item_bytes: float) -> Prices:
        """`cost_s` of every source to every target, all layouts of one value."""
        if not sources or not targets:
            return np.zeros((len(sources), len(targets)))
        closure = self._closure(Layout.whole(sources[0].factor_sizes), sources, item_bytes)
        rows = [closure.index[layout] for layout in sources]
        unreachable = len(closure.index)
        columns = [closure.index.get(layout, unreachable) for layout in targets]
        return closure.cost_s[np.ix_(rows, columns)]

    def _closure(self, whole: Layout, sources: Sequence[Layout], item_bytes: float) -> _Closure:
        """All shortest paths (Floyd-Warshall) among what can be reached from the sources seen so far."""
        known = self._closures.get((whole, item_bytes))
        if known is None or any(layout not in known.index for layout in sources):
            known = self._closures[whole, item_bytes] = self._extended(known, sources, item_bytes)
        return known

    def _extended(self, known: _Closure | None, sources: Sequence[Layout], item_bytes: float) -> _Closure:
        index, edges = (known.index, known.edges) if known is not None else ({}, [])
        waiting = [layout for layout in dict.fromkeys(sources) if layout not in index]
        index |= {layout: len(index) + i for i, layout in enumerate(waiting)}
        while waiting:
            layout = waiting.pop()
            for move, after in self._moves_from(layout):
                if after not in index:
                    index[after] = len(index)
                    waiting.append(after)
                edges.append((index[layout], index[after], self._move_s(move, layout, item_bytes) + TIE_S))
        cost = np.full((len(index) + 1, len(index) + 1), np.inf)
        for i, j, seconds in edges:
            cost[i, j] = min(cost[i, j], seconds)
        np.fill_diagonal(cost, 0.0)
        for k in range(len(index)):
            np.minimum(cost, cost[:, k : k + 1] + cost[k : k + 1, :], out=cost)
        return _Closure(index, edges, cost)

    def _moves_from(self, layout: Layout) -> list[tuple[Move, Layout]]:
        if layout not in self._moves:
            self._moves[layout] = list(moves_from(layout, self.mesh))
        return self._moves[layout]

    def path(self, source: Layout, target: Layout, item_bytes: float) -> list[tuple[Move, Layout]]:
        """The moves of the cheapest path, each with the layout that it leads to."""
        tree = self._tree(source, item_bytes)
        assert target in tree, f"no path from {source} to {target}"
        steps: list[tuple[Move, Layout]] = []
        layout: Layout | None = target
        while layout is not None and layout != source:
            _, previous, move = tree[layout]
            assert move is not None
            steps.append((move, layout))
            layout = previous
        return steps[::-1]

    def parts_s(self, source: Layout, target: Layout, item_bytes: float) -> list[tuple[str, str, float]]:
        """(axis, collective, seconds) of the cheapest path; they sum to `cost_s` but for what breaks ties."""
        parts, layout = [], source
        for move, after in self.path(source, target, item_bytes):
            if move.collective is not None:
                parts.append((move.axis, move.collective, self._move_s(move, layout, item_bytes)))
            layout = after
        return parts

    def _tree(self, source: Layout, item_bytes: float) -> dict[Layout, tuple[float, Layout | None, Move | None]]:
        key = (source, item_bytes)
        if key not in self._trees:
            self._trees[key] = self._dijkstra(source, item_bytes)
        return self._trees[key]

    def _dijkstra(self, source: Layout, item_bytes: float) -> dict[Layout, tuple[float, Layout | None, Move | None]]:
        best: dict[Layout, tuple[float, Layout | None, Move | None]] = {source: (0.0, None, None)}
        order = itertools.count()
        queue = [(0.0, next(order), source)]
        done: set[Layout] = set()
        while queue:
            cost, _, layout = heapq.heappop(queue)
            if layout in done:
                continue
            done.add(layout)
            for move, after in self._moves_from(layout):
                total = cost + self._move_s(move, layout, item_bytes) + TIE_S
                if after not in best or total < best[after][0]:
                    best[after] = (total, layout, move)
                    heapq.heappush(queue, (total, next(order), after))
        return best

    def _move_s(self, move: Move, before: Layout, item_bytes: float) -> float:
        if move.collective is None:
            return 0.0
        return self._price(move.collective, move.axis, moved_bytes(move, before, self.mesh, item_bytes))
