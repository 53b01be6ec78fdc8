"""The relaxed problem of a mesh: one stage, no memory limit. Its bound holds for every pipeline cut of that mesh.

relaxed.bound                   # seconds of a step
relaxed.layers(units)           # what each unit costs and holds, kept or computed again, to cut the pipeline by
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node

from autopar.capture.runs import Repeats
from autopar.layers import blocks_of, homes_of
from autopar.mesh import PIPELINE_AXIS, Mesh
from autopar.rules.nodes import is_view, node_argument, op_name
from autopar.solve.build import BuiltProblem, Setting, Strategy, left_layout
from autopar.solve.costs import HEAVY, local_bytes
from autopar.solve.held import is_parameter, is_step_relay
from autopar.solve.modes import is_forward, producer
from autopar.solve.problem import Solution, evaluate
from autopar.solve.stages import Layer, Point

POINTS = 6
"""Between all kept and all computed again, roughly."""


@dataclass(frozen=True, slots=True)
class Relaxed:
    """A solved one; the solution is that of one stage, the bound that of a step of the whole pipeline."""

    bound: float
    setting: Setting
    units: tuple[str, ...]
    repeats: Repeats
    built: BuiltProblem
    solution: Solution

    @property
    def once_s(self) -> float:
        """Seconds of what runs once a step, on one stage."""
        return evaluate(self.built.problem, self.solution.choice).rows[1]

    def layers(
        self, units: tuple[str, ...], may_recompute: bool, cuts_s: Sequence[tuple[float, float]]
    ) -> tuple[Layer, ...]:
        """What each unit costs and holds under the relaxed choices; `units`: all of the model, see `Repeats.spread`;
        `cuts_s`: what a cut after each but the last costs the stages after it and before it.

        Where it may be computed again, there are points more: some in which those ops run again that hold most for
        their time, their operands being there, and one that holds only what other units bring to it.
        """
        own = tuple(self.repeats.spread(self.units))
        assert tuple(unit for unit, _ in own) == units, (units, own)
        tally = _Tally(self)
        points = [tally.points(unit, may_recompute) for unit in range(len(self.units))]
        where = {unit: i for i, unit in enumerate(self.units)}
        begin, end = ((0.0, *(after for after, _ in cuts_s)), (*(before for _, before in cuts_s), 0.0))
        return tuple(Layer(points[where[own[i][1]]], end[i], begin[i]) for i in range(len(own)))


class _Tally:
    """Seconds and bytes of each unit, as one layer has them."""

    def __init__(self, relaxed: Relaxed) -> None:
        built, choice = relaxed.built, relaxed.solution.choice
        size = len(relaxed.units)
        self.forward_s, self.backward_s, self.static, self.brought = ([0.0] * size for _ in range(4))
        self.again_s, self.held = dict[Node, float](), dict[Node, float]()
        self.unit = units_of_nodes(built.nodes, relaxed.units)
        self.relaxed, in_flight = relaxed, relaxed.setting.ranks.kinds[0].stages[0].held
        picked = dict(zip(built.nodes, built.picked(choice), strict=True))
        for node, priced, pick in zip(built.nodes, built.plain, choice, strict=True):
            self._add_seconds(node, float(priced.cost[pick]))
            held = max((float(used[pick]) for used in priced.memory.values()), default=0.0)
            if is_forward(node):
                self.held[node] = held / in_flight
            else:
                self.static[self.unit[node]] += held
        for edge in built.problem.edges:
            reader = built.nodes[edge.target]
            moved = float(edge.cost[choice[edge.source], choice[edge.target]])
            self._add_seconds(reader, moved / self._times(reader))
        self.shared = set[Node]()
        for source, unit in _brought(built.nodes, self.unit):
            self.brought[unit] += self._left_bytes(source, picked)
            self.shared.add(source)

    def points(self, unit: int, may_recompute: bool) -> tuple[Point, ...]:
        seconds, static = self.forward_s[unit] + self.backward_s[unit], self.static[unit]
        own = [node for node in self.held if self.unit[node] == unit]
        saved = sum(self.held[node] for node in own)
        found = [Point(seconds, static, saved)]
        if not may_recompute:
            return tuple(found)
        for more_s, freed in self._front(own):
            found.append(Point(seconds + more_s, static, saved - freed))
        last = Point(seconds + self.forward_s[unit], static, self.brought[unit])
        is_leaner = last.saved_bytes < found[-1].saved_bytes and last.seconds > found[-1].seconds
        return (*found, last) if is_leaner else tuple(found)

    def _front(self, own: Sequence[Node]) -> Iterator[tuple[float, float]]:
        """Seconds more, and bytes fewer, where what holds most for its time is computed again: what other units read is
        kept. Ops between such ones, which hold nothing, take their part of the time."""
        light = [node for node in own if op_name(node) not in HEAVY]
        between_s = sum(self.again_s[node] for node in light if not self.held[node])
        light_bytes = sum(self.held[node] for node in light) or 1.0

        def more_s(node: Node) -> float:
            is_light = op_name(node) not in HEAVY
            return self.again_s[node] + is_light * between_s * self.held[node] / light_bytes

        ops = sorted(
            (more_s(n) / self.held[n], i, n) for i, n in enumerate(own) if self.held[n] and n not in self.shared
        )
        all_bytes, seconds, freed, told = sum(self.held[node] for *_, node in ops), 0.0, 0.0, 0.0
        for *_, node in ops:
            seconds, freed = seconds + more_s(node), freed + self.held[node]
            if freed >= told + all_bytes / POINTS or node is ops[-1][-1]:
                told = freed
                yield seconds, freed

    def _left_bytes(self, value: Node, picked: dict[Node, Strategy]) -> float:
        return local_bytes(left_layout(value, picked), value.meta["val"].element_size(), self.relaxed.setting.mesh)

    def _add_seconds(self, node: Node, seconds: float) -> None:
        if node.meta["level"] == "microbatch":
            (self.forward_s if is_forward(node) else self.backward_s)[self.unit[node]] += seconds
            self.again_s[node] = self.again_s.get(node, 0.0) + seconds

    def _times(self, node: Node) -> int:
        return self.relaxed.repeats.times(self.relaxed.units[self.unit[node]])


def fill(mesh: Mesh, microbatches: int, virtual: int = 1) -> float:
    """How often the step waits for all of the mesh's work on a microbatch, its stages being equal and run as 1F1B,
    `virtual` of them on a rank."""
    return 1 / virtual + (microbatches - 1 / virtual) / mesh.size(PIPELINE_AXIS)


def units_of_nodes(nodes: Sequence[Node], units: tuple[str, ...]) -> dict[Node, int]:
    """The unit of each node: that of its layer, or of its module; what runs before the first layer, or after the last,
    is of the first unit, or the last; other nodes of no unit belong with the node before them."""
    if not nodes:
        return {}
    where, homes, between = (
        {unit: i for i, unit in enumerate(units)},
        homes_of(nodes[0].graph),
        blocks_of(nodes[0].graph),
    )
    edges = {"before": 0, "after": len(units) - 1}
    found: dict[Node, int] = {}
    unit = 0
    for node in nodes:
        own = where.get(homes[node], _unit_by_path(node, where))
        unit = edges.get(between.get(node, ""), unit) if own is None else own
        found[node] = unit
    return found


def _unit_by_path(node: Node, where: dict[str, int]) -> int | None:
    path = node.meta.get("path", "")
    while path:
        if path in where:
            return where[path]
        path = path.rpartition(".")[0]
    return None


def _brought(nodes: list[Node], unit: dict[Node, int]) -> Iterator[tuple[Node, int]]:
    """Each forward value, and a unit other than its own whose forward reads it, through views and relays too."""
    found: dict[tuple[Node, int], None] = {}
    for node in nodes:
        if not is_forward(node) or is_step_relay(node) or is_parameter(node):
            continue
        value = node
        while value.op == "call_function" and value.target is not operator.getitem and is_view(value):
            value = node_argument(value, 0)
        if value.op == "call_function":
            readers = {unit[user] for user in node.users if user in unit and is_forward(user)}
            found |= dict.fromkeys((value, reader) for reader in sorted(readers - {unit[producer(value)[0]]}))
    yield from found
