"""What each unit of a model takes at least on a mesh, all that it does in a step decided together.

    least = UnitBounds(built, units, repeats).least(Prices(seconds=1.0, once=1 / microbatches))

Each unit is a problem of its own: its nodes in the built one-stage problem, and the edges among them. What joins it to
other units costs nothing, so that no plan's unit takes less. Units that are alike (the layers of a run) share what they
have in common: one problem stands for all of them.

Where a layer is followed by its like, it also brings its values onto the next, in the layouts that both have. Let v be
what a layer takes at least, and w with that. A stage with k of them, which decide as one, takes at least
k * w - (w - v): its cost is k times the least of (layer + r * onto the next) with r = 1 - 1/k, which is concave in r.
In the same way, what such a stage's first and last layer can't hide, since none of the stage runs before or after them,
is counted with `STACKED` layers: with more, it is no less in all; with fewer, no less for each.

What counts, and how much, is said by prices: a unit takes time in each microbatch, and once a step; it holds bytes all
the time, for gradients, and for the backward of each microbatch. No plan's units have less in sum than the least.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from torch import fx

from autopar import markers
from autopar.capture.runs import Repeats
from autopar.relaxed import units_of_nodes
from autopar.rules.nodes import node_argument
from autopar.solve.build import BuiltProblem
from autopar.solve.held import by_kind
from autopar.solve.modes import producer
from autopar.solve.problem import Array, Edge, Node, Problem, evaluate
from autopar.solve.search import solve
from autopar.solve.share import share

GAP, TIME_LIMIT_S = 1e-3, 2.0
"""Effort for a bound."""

MOST_JOINED = 4
"""Units of a model whose ends would be the same."""


STACKED = 3
"""Layers of a usual stage: with as many it is exact what its ends cost."""


class Prices(NamedTuple):
    """What each of these of a unit counts; bytes are known where the problem was built for `held.KINDS`."""

    seconds: float = 1.0
    """A second of each microbatch."""
    once: float = 0.0
    """A second of what is done once a step."""
    rest: float = 0.0
    """A byte that is there all the time."""
    gradients: float = 0.0
    """A byte of gradients."""
    kept: float = 0.0
    """A byte that is kept for the backward of one microbatch."""
    widest: float = 0.0
    """A byte that the widest op after the blocks reads."""


_Between = tuple[str, str, int]
"""An edge of a unit: its ends, and which of several such edges it is."""


@dataclass(slots=True)
class _Unit:
    """The part of a problem that is a unit's, by names that units alike have in common; costs of one unit."""

    nodes: dict[str, tuple[Node, Sequence[object]]] = field(default_factory=dict)
    """With the strategies of each."""
    edges: dict[_Between, Array] = field(default_factory=dict)
    at_ends: dict[_Between, Array] = field(default_factory=dict)
    """What some of `edges` cost more where the unit is the first of its stage, and the last."""
    relays: set[str] = field(default_factory=set)
    """Nodes that bring a value to several readers in one phase."""


@dataclass(frozen=True, slots=True)
class Least:
    """What no plan's stage takes less than, at some prices: what its units take, and neighbours in it."""

    seconds: tuple[float, ...]
    """Of each unit of the model."""
    joined: tuple[float, ...] = ()
    """What a unit and the next one cost beyond these where they are on one stage."""
    crossed: tuple[float, ...] = ()
    """What a unit among others that are like it costs beyond these for what the one before it, and the one after it,
    bring it from other stages in the same layouts; by which it is before."""
    ends: tuple[float, ...] = ()
    """What a stage of `STACKED` units that are like this one costs beyond `seconds` if others are before and after it;
    empty where that isn't known."""
    kinds: tuple[int, ...] = ()
    """Equal for units that are alike."""

    @property
    def whole(self) -> float:
        """Of a stage with all units."""
        return self.of(0, len(self.seconds))

    def of(self, start: int, end: int) -> float:
        """Of a stage with the units start..end-1."""
        return self._beside(start, end, crossed=0.0)

    def alike(self, start: int, end: int) -> float:
        """The same where all stages are in the same layouts."""
        is_inside = self.crossed and start > 0 and end < len(self.seconds)
        crossed = min(self.crossed[start - 1], self.crossed[end - 1]) if is_inside else 0.0
        return self._beside(start, end, crossed)

    def _beside(self, start: int, end: int, crossed: float) -> float:
        """Units, and the more of what joins them (with others, `crossed`) and what the stage's ends cost."""
        joined = sum(self.joined[start : end - 1]) + crossed
        return sum(self.seconds[start:end]) + max(joined, self.ends_s(start, end))

    def ends_s(self, start: int, end: int) -> float:
        """What the ends of a stage cost where all of it is alike."""
        if not self.ends or start == 0 or end == len(self.seconds) or len(set(self.kinds[start:end])) > 1:
            return 0.0
        return self.ends[start] * min(1.0, (end - start) / STACKED)


@dataclass(frozen=True, slots=True)
class UnitBounds:
    """Of a one-stage problem; `units`: those traced, of which each stands for some."""

    built: BuiltProblem
    units: tuple[str, ...]
    repeats: Repeats

    def least(self, prices: Prices, with_across: bool = False) -> Least:
        """Of the units of the model; `with_across`: with what they get from like ones on other stages, by which
        neighbours on one stage count, too."""
        parts, _ = self._parts(prices)
        alike: dict[tuple[str, int], list[str]] = defaultdict(list)
        for unit in parts:
            alike[self._kind(unit)].append(unit)
        found: dict[str, float] = {}
        onward: dict[str, float] = {}
        ends: dict[str, float] = {}
        for units in alike.values():
            common = _in_common([parts[unit] for unit in units])
            alone = _solved(common)
            found |= dict.fromkeys(units, alone.bound)
            if any(self.repeats.times(unit) > 1 for unit in units):
                stacked = _solved(_in_common([_stacked(parts[unit]) for unit in units]), alone)
                ends |= dict.fromkeys(units, STACKED * max(0.0, stacked.bound - alone.bound))
            for unit in filter(self._follows_itself, units):
                own = self._across(parts[unit], common) if with_across else parts[unit]
                onward[unit] = max(0.0, _solved(own, alone).bound - alone.bound)
        like = [like for _, like in self.repeats.spread(self.units)]
        joined = [onward.get(one, 0.0) if one == other else 0.0 for one, other in itertools.pairwise(like)]
        crossed = tuple(joined) if with_across else ()
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(map(self._kind, like)))}
        return Least(
            tuple(found.get(unit, 0.0) for unit in like),
            tuple(joined),
            crossed,
            tuple(ends.get(unit, 0.0) for unit in like),
            tuple(kinds[self._kind(unit)] for unit in like),
        )

    def with_ends(self, least: Least, prices: Prices) -> Least:
        """`least` of these prices, with the first and the last unit each together with its neighbour, since what is
        before the first layer, or after the last, has much to do with it."""
        like, joined = [like for _, like in self.repeats.spread(self.units)], list(least.joined)
        if len(like) <= MOST_JOINED:
            return least
        parts, between = self._parts(prices)
        for place, beside in ((0, 1), (len(joined) - 1, len(joined) - 2)):
            first, last = like[place], like[place + 1]
            both = _together(parts.get(first, _Unit()), parts.get(last, _Unit()), between.get((first, last), []))
            more = _solved(both).bound - least.seconds[place] - least.seconds[place + 1]
            if more > joined[place] + joined[beside]:
                joined[place], joined[beside] = more, 0.0
        return replace(least, joined=tuple(joined))

    def groups(self) -> list[int]:
        """Of each unit of the model the number of the group in which all are in the same layouts as far as it matters
        once a step, or in what is there whatever is in flight; -1 where a unit is in none."""
        shared, unit_of = share(self.built).group, units_of_nodes(self.built.nodes, self.units)
        matters = {end for edge in self.built.problem.edges if edge.row for end in (edge.source, edge.target)}
        decided: dict[str, set[tuple[str, int]]] = {unit: set() for unit in self.units}
        for number, (node, priced) in enumerate(zip(self.built.nodes, self.built.problem.nodes, strict=True)):
            rest, gradients, *_ = by_kind(priced)
            if priced.row or number in matters or rest.any() or gradients.any():
                unit = self.units[unit_of[node]]
                decided[unit].add((_name(node, unit), shared[number]))
        kinds = [(self._kind(like), frozenset(decided[like])) for _, like in self.repeats.spread(self.units)]
        several = [kind for kind, count in Counter(kinds).items() if count > 1]
        return [several.index(kind) if kind in several else -1 for kind in kinds]

    @staticmethod
    def _across(unit: _Unit, common: _Unit) -> _Unit:
        """A unit with what it gets from one that is like it, on another stage. A value is brought there once for all
        that read it: by the relay that it has already, if nothing else reads that; else one of them counts, that which
        costs most to bring it to."""
        read_within = {source for source, *_ in common.edges}
        dearest: dict[object, tuple[float, _Between]] = {}
        for between, cost in unit.edges.items():
            if between not in common.edges:
                source = between[0]
                usual = float(cost[np.isfinite(cost)].mean()) if np.isfinite(cost).any() else 0.0
                which = between if source in unit.relays - read_within else source
                dearest[which] = max(dearest.get(which, (0.0, between)), (usual, between))
        edges = common.edges | {between: unit.edges[between] for _, between in dearest.values()}
        return _Unit(unit.nodes, edges)

    def _follows_itself(self, unit: str) -> bool:
        """Whether a unit stands for several, one after another."""
        run = next((run for run in self.repeats.runs if run.place(unit) is not None), None)
        return run is not None and run.period == 1 and self.repeats.times(unit) > 1

    def _kind(self, unit: str) -> tuple[str, int]:
        """Equal for the blocks of a run at the same place of its period."""
        for run in self.repeats.runs:
            place = run.place(unit)
            if place is not None:
                return run.path, place[1]
        return unit, -1

    def _parts(self, prices: Prices) -> tuple[dict[str, _Unit], dict[tuple[str, str], list[tuple[str, str, Array]]]]:
        """The nodes and inner edges of each unit, as one of those for which it stands has them; and the edges between
        two units that each stand for themselves."""
        built = self.built
        unit_of = units_of_nodes(built.nodes, self.units)
        names: list[tuple[str, str]] = []
        parts: dict[str, _Unit] = defaultdict(_Unit)
        between: dict[tuple[str, str], list[tuple[str, str, Array]]] = defaultdict(list)
        windows = Counter((block, window.phase) for window in built.windows.windows for block in window.blocks)
        with_one_window = {unit for unit in self.units if windows[unit, "forward"] == windows[unit, "backward"] == 1}
        for node, priced, options in zip(built.nodes, built.problem.nodes, built.strategies, strict=True):
            unit = self.units[unit_of[node]]
            name = _name(node, unit)
            names.append((unit, name))
            own = Node(name, _cost(priced, prices) / self.repeats.times(unit))
            assert name not in parts[unit].nodes, name
            parts[unit].nodes[name] = own, options
            if node.target is markers.relay:
                parts[unit].relays.add(name)
        for edge, moved in zip(built.problem.edges, built.moves, strict=True):
            (unit, source), (other, target) = names[edge.source], names[edge.target]
            price = prices.once if edge.row else prices.seconds
            cost = _weighed(edge.cost, price)
            if unit == other:
                part, times = parts[unit], self.repeats.times(unit)
                number = next(n for n in range(len(part.edges) + 1) if (source, target, n) not in part.edges)
                part.edges[source, target, number] = cost / times
                if moved.hideable is not None and unit in with_one_window:
                    hidden = price * (1 - built.setting.contention) * moved.hiding.part * moved.hideable
                    part.at_ends[source, target, number] = hidden / times
            elif self.repeats.times(unit) == self.repeats.times(other) == 1:
                between[unit, other].append((source, target, cost))
                between[other, unit].append((target, source, cost.T))
        return dict(parts), dict(between)


def _weighed(cost: Array, price: float) -> Array:
    """What is forbidden stays so at any price."""
    return price * cost if price else np.where(np.isinf(cost), cost, 0.0)


def _cost(node: Node, prices: Prices) -> Array:
    """Of each strategy, bytes included."""
    cost = _weighed(node.cost, prices.once if node.row else prices.seconds)
    if not node.memory or not any(prices[2:]):
        return cost
    priced: Array = cost + sum(price * held for price, held in zip(prices[2:], by_kind(node), strict=True))
    return priced


@dataclass(frozen=True, slots=True)
class _Solved:
    """A unit's problem: what no choice costs less than, and a strategy of each node."""

    bound: float
    choice: dict[str, int]


def _solved(unit: _Unit, cheaper: _Solved | None = None) -> _Solved:
    """`cheaper`: of a problem that costs no more; that bound is enough where its choice costs about as much here."""
    place = {name: index for index, name in enumerate(unit.nodes)}
    nodes = tuple(node for node, _ in unit.nodes.values())
    edges = tuple(Edge(place[s], place[t], cost) for (s, t, _), cost in unit.edges.items())
    problem, hint = Problem(nodes, edges), None
    if cheaper is not None and cheaper.choice.keys() == unit.nodes.keys():
        hint = [cheaper.choice[name] for name in unit.nodes]
        if evaluate(problem, hint).objective <= cheaper.bound * (1 + GAP):
            return cheaper
    found = solve(problem, gap=GAP, time_limit_s=TIME_LIMIT_S, hint=hint)
    return _Solved(max(0.0, found.bound), dict(zip(unit.nodes, found.choice, strict=False)))


def _stacked(unit: _Unit) -> _Unit:
    """A unit with its part of what the ends of a stage of `STACKED` cost."""
    ends = {between: unit.edges[between] + more / STACKED for between, more in unit.at_ends.items()}
    return _Unit(unit.nodes, unit.edges | ends)


def _together(first: _Unit, last: _Unit, between: Sequence[tuple[str, str, Array]]) -> _Unit:
    """Two units as one."""
    both = _Unit()
    for at, part in enumerate((first, last)):
        both.nodes.update((f"{at} {name}", own) for name, own in part.nodes.items())
        both.edges.update(((f"{at} {s}", f"{at} {t}", n), cost) for (s, t, n), cost in part.edges.items())
    for number, (source, target, cost) in enumerate(between):
        both.edges[f"0 {source}", f"1 {target}", number] = cost
    return both


def _name(node: fx.Node, unit: str) -> str:
    """What a node is called in each unit that is alike: a relay by what it brings, since their numbers may differ."""
    if node.target is markers.relay:
        source, item = producer(node_argument(node, 0))
        return f"{_name(source, unit)}[{item}] to the {node.meta['phase']}"
    key: str = node.meta["key"]
    return key.replace(unit, "*", 1) if unit else key


def _in_common(parts: Sequence[_Unit]) -> _Unit:
    """What all have, at the least that it costs in any: it costs no more than each of them."""
    first, *others = parts
    nodes = {name: pair for name, pair in first.nodes.items() if all(_has(other, name, pair[1]) for other in others)}
    found = _Unit()
    for name, (node, options) in nodes.items():
        cost = _least_of([part.nodes[name][0].cost for part in parts])
        found.nodes[name] = Node(name, cost, node.row), options
    for between in first.edges:
        if all(between in part.edges for part in others) and nodes.keys() >= set(between[:2]):
            found.edges[between] = _least_of([part.edges[between] for part in parts])
    return found


def _has(part: _Unit, name: str, options: Sequence[object]) -> bool:
    """Whether a unit has a node of that name, with the same strategies."""
    own = part.nodes.get(name)
    return own is not None and (own[1] is options or list(own[1]) == list(options))


def _least_of(costs: list[Array]) -> Array:
    least: Array = np.minimum.reduce(costs) if len(costs) > 1 else costs[0]
    return least
