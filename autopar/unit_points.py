"""What each unit of a model costs and holds in some layouts, all kept or some of it computed again.

    points = UnitPoints(built, units, repeats, weights, cuts_s, in_flight, worth_s)
    laid = points.laid(picked)          # the strategies of a one-stage solution: its layers, each with its points
    lean = points.leaner(bytes_s=1e-10) # layouts and modes chosen together where each byte has a price

By that pipelines are cut. The problem is that of one stage, built for `held.KINDS`. In given layouts the modes alone
are a small problem; solved at rising prices of memory, it gives each unit's points that are worth having.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.capture.runs import Repeats
from autopar.relaxed import units_of_nodes
from autopar.solve.beside import Beside, beside
from autopar.solve.build import BuiltProblem, Strategy
from autopar.solve.held import by_kind
from autopar.solve.layers_apart import of_layouts, restricted
from autopar.solve.modes import is_forward
from autopar.solve.problem import Array, Edge, Node, Problem
from autopar.solve.search import solve
from autopar.solve.share import solve_repeated_first
from autopar.solve.stages import Layer, Point

LAYOUT_GAP, LAYOUT_TIME_S = 5e-3, 1.0
"""Effort for the layouts of pipelines, whose stages can't be cut as evenly as a bound assumes."""

MODE_GAP, MODE_TIME_S = 1e-3, 1.0
"""Effort for what is computed again in given layouts."""

WORTH = (0.0, 0.03, 0.075, 0.19, 0.47, 1.2, 3.0)
"""Prices of memory: what as much as a device has is worth, kept for one microbatch, in parts of the step."""


@dataclass(frozen=True, slots=True)
class Laid:
    """A model in some layouts."""

    picked: tuple[Strategy, ...]
    """Of each node of the one-stage problem."""
    layers: tuple[Layer, ...]
    """Of each unit; the fastest point first."""

    @property
    def once_s(self) -> float:
        """Seconds of what runs once a step, on one stage."""
        return sum(layer.once_seconds for layer in self.layers)


@dataclass(frozen=True)
class UnitPoints:
    """Of a one-stage problem on a mesh."""

    built: BuiltProblem
    units: tuple[str, ...]
    """Those traced, of which each stands for some."""
    repeats: Repeats
    weights: tuple[float, float]
    """How often a second of each microbatch, and one of what is done once a step, counts in a step."""
    cuts_s: Sequence[tuple[float, float]]
    """What a cut after each unit of the model but the last costs, see `Bounds.cuts_s`."""
    in_flight: float
    """Microbatches whose activations a stage holds, about."""
    worth_s: float
    """Seconds for each byte of a device by which `WORTH` goes."""

    def laid(self, picked: Sequence[Strategy], with_leaner: bool = True) -> Laid:
        """The model in the layouts of some strategies; without leaner points everything is kept."""
        alike = [of_layouts(options, own) for options, own in zip(self.built.strategies, picked, strict=True)]
        kept = [
            own if len(own) else np.arange(len(options))
            for own, options in zip(alike, self.built.strategies, strict=True)
        ]
        small = restricted(self.built.problem, kept)
        modes, tallies = _Modes.of(self._weighed(small)), list[_Tally]()
        rest, saved = zip(*(_kinds_of_price(node) for node in small.nodes), strict=True)
        for worth in WORTH if self.built.has_modes and with_leaner else WORTH[:1]:
            bytes_s = worth * self.worth_s
            choice = modes.solved(
                [r * (bytes_s / self.in_flight) + k * bytes_s for r, k in zip(rest, saved, strict=True)]
            )
            tallies.append(_Tally.of(self, [int(own[pick]) for own, pick in zip(kept, choice, strict=True)]))
        return Laid(tuple(picked), self._layers(tallies))

    def leaner(self, bytes_s: float) -> Laid:
        """The model in the layouts that are best where each byte of a stage is worth `bytes_s` seconds."""
        weighed = self._weighed(self.built.problem)
        prices = ((r + k * self.in_flight) * bytes_s for r, k in map(_kinds_of_price, self.built.problem.nodes))
        nodes = (replace(node, cost=node.cost + more) for node, more in zip(weighed.nodes, prices, strict=True))
        priced = replace(weighed, nodes=tuple(nodes))
        solution = solve_repeated_first(self.built, priced, gap=LAYOUT_GAP, time_limit_s=LAYOUT_TIME_S, floor=0.0)
        return self.laid(self.built.picked(solution.choice))

    def _weighed(self, problem: Problem) -> Problem:
        """The problem without limits, each second counting as often as it does in a step."""
        nodes = (Node(node.name, node.cost * self.weights[node.row]) for node in problem.nodes)
        edges = (replace(edge, cost=edge.cost * self.weights[edge.row], row=0) for edge in problem.edges)
        return Problem(tuple(nodes), tuple(edges))

    @functools.cached_property
    def units_of_nodes(self) -> list[int]:
        """Of each node of the problem, which of `units` it is of."""
        unit_of = units_of_nodes(self.built.nodes, self.units)
        return [unit_of[node] for node in self.built.nodes]

    def _layers(self, tallies: Sequence[_Tally]) -> tuple[Layer, ...]:
        columns = zip(*(each.points for each in tallies), strict=True)
        points = [tuple(_worth_having(column, self.in_flight)) for column in columns]
        where = {unit: i for i, unit in enumerate(self.units)}
        own = [where[like] for _, like in self.repeats.spread(self.units)]
        once_s, first_s, last_s = tallies[0].once_s, tallies[0].first_s, tallies[0].last_s
        begin_s = (0.0, *(after + first_s[unit] for (after, _), unit in zip(self.cuts_s, own[1:], strict=True)))
        end_s = (*(before + last_s[unit] for (_, before), unit in zip(self.cuts_s, own[:-1], strict=True)), 0.0)
        return tuple(
            Layer(points[unit], end, begin, once_s[unit]) for unit, end, begin in zip(own, end_s, begin_s, strict=True)
        )


@dataclass(frozen=True, slots=True)
class _Tally:
    """A choice, by unit."""

    points: tuple[Point, ...]
    once_s: tuple[float, ...]
    first_s: tuple[float, ...]
    """What hides of a unit's communication, but wouldn't if it were the first of its stage: the first window of a part
    gathers before it begins, and the reductions of the last are waited for."""
    last_s: tuple[float, ...]
    """The same if it were the last."""

    @staticmethod
    def of(points: UnitPoints, choice: Sequence[int]) -> _Tally:
        units, problem = points.units_of_nodes, points.built.problem
        times = [points.repeats.times(points.units[unit]) for unit in units]
        found = np.zeros((6, len(points.units)))  # seconds of each row, bytes of each kind
        for node, unit, count, pick in zip(problem.nodes, units, times, choice, strict=True):
            found[node.row, unit] += node.cost[pick] / count
            if node.memory:
                found[2:, unit] += [float(each[pick]) / count for each in by_kind(node)]
        for edge in problem.edges:
            moved = float(edge.cost[choice[edge.source], choice[edge.target]])
            found[edge.row, units[edge.target]] += moved / times[edge.target]
        runs = beside(points.built, choice)
        found[0] += _late_s(points, runs)
        seconds, once_s, rest, gradients, kept, widest = found.tolist()
        own = zip(seconds, rest, kept, gradients, widest, strict=True)
        return _Tally(tuple(Point(*each) for each in own), tuple(once_s), *_hidden_s(points, runs, choice))


def _late_s(points: UnitPoints, runs: Beside) -> Array:
    """What computation is too short to hide, in the units in whose windows it is."""
    found, built = np.zeros(len(points.units)), points.built
    unit_of = dict(zip(built.nodes, points.units_of_nodes, strict=True))
    of_window = {window: unit_of[node] for node, window in built.windows.of.items()}
    for window, seconds in enumerate(runs.late_s(built.setting.contention)):
        unit = of_window[window]
        found[unit] += seconds / points.repeats.times(points.units[unit])
    return found


def _hidden_s(points: UnitPoints, runs: Beside, choice: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """`first_s` and `last_s` of a choice."""
    built, (first, last) = points.built, np.zeros((2, len(points.units)))
    parts = runs.hidden_parts(built.setting.contention)
    for edge, moved in zip(built.problem.edges, built.moves, strict=True):
        if moved.hideable is None:
            continue
        unit, may_hide = points.units_of_nodes[edge.target], moved.hideable[choice[edge.source], choice[edge.target]]
        hidden = may_hide * sum(part * parts[window] for window, part in moved.hiding.shares)
        is_last = moved.hiding.is_gather and not is_forward(built.nodes[edge.target])
        (last if is_last else first)[unit] += hidden / points.repeats.times(points.units[unit])
    return tuple(first.tolist()), tuple(last.tolist())


@dataclass(frozen=True, slots=True)
class _Modes:
    """A problem of which most nodes have one strategy: the others, with what these cost beside them."""

    size: int
    free: list[int]
    problem: Problem

    @staticmethod
    def of(problem: Problem) -> _Modes:
        free = [i for i, node in enumerate(problem.nodes) if node.num_strategies > 1]
        place = {i: at for at, i in enumerate(free)}
        costs, edges = [problem.nodes[i].cost for i in free], list[Edge]()
        for edge in problem.edges:
            source, target = place.get(edge.source), place.get(edge.target)
            if source is not None and target is not None:
                edges.append(Edge(source, target, edge.cost))
            elif source is not None:
                costs[source] = costs[source] + edge.cost[:, 0]
            elif target is not None:
                costs[target] = costs[target] + edge.cost[0]
        nodes = (Node(problem.nodes[i].name, cost) for i, cost in zip(free, costs, strict=True))
        return _Modes(len(problem.nodes), free, Problem(tuple(nodes), tuple(edges)))

    def solved(self, prices: Sequence[Array]) -> tuple[int, ...]:
        """The best choice where each strategy costs so much more."""
        pairs = zip(self.free, self.problem.nodes, strict=True)
        nodes = tuple(replace(node, cost=node.cost + prices[i]) for i, node in pairs)
        solution = solve(replace(self.problem, nodes=nodes), gap=MODE_GAP, time_limit_s=MODE_TIME_S)
        choice = [0] * self.size
        for i, pick in zip(self.free, solution.choice, strict=True):
            choice[i] = pick
        return tuple(choice)


def _kinds_of_price(node: Node) -> tuple[Array, Array]:
    """Bytes of each strategy that are there whatever is in flight, and kept of a microbatch."""
    rest, gradients, kept, widest = by_kind(node)
    return rest + gradients + widest, kept


def _worth_having(points: Sequence[Point], in_flight: float) -> list[Point]:
    """The first, and each that holds less than those before it, for more time."""
    found = [points[0]]
    for point in points[1:]:
        if point.seconds > found[-1].seconds and _bytes(point, in_flight) < _bytes(found[-1], in_flight):
            found.append(point)
    return found


def _bytes(point: Point, in_flight: float) -> float:
    return point.static_bytes + point.gradient_bytes + point.beside_bytes + in_flight * point.saved_bytes
