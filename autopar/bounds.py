"""What a step takes at least on a mesh, before the mesh's problem is built; no plan of the mesh beats it.

    bounds.least_s(mesh)            # seconds, by the least share of each op that falls to a rank
    bounds.layer_s(mesh, PHASES)    # by what a layer takes in its best layouts, communication included

A pipeline can't be cut within a unit, so what units take at least is put on stages in the best way: the slowest stage
sets the pace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from autopar import markers
from autopar.capture.runs import Run
from autopar.joint import StepGraph
from autopar.mesh import Mesh
from autopar.pipeline_bounds import stages_s
from autopar.program.storages import nbytes
from autopar.relaxed import units_of_nodes
from autopar.rules.nodes import is_view
from autopar.solve.build import Setting, build_part, homes_and_keys
from autopar.solve.costs import Compute, Work, work_of
from autopar.solve.modes import is_forward
from autopar.solve.problem import Term
from autopar.solve.rounds import least_s
from autopar.solve.search import solve
from autopar.unit_bounds import Least

PHASES = ("forward", "backward")

BOUND_GAP, BOUND_TIME_S = 1e-2, 2.0
"""Effort for a bound."""

ONE_MICROBATCH = (Term(1.0, (0,)),)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of a step whose microbatches are settled."""

    whole: StepGraph
    """Of one stage, with few layers that stand for the others."""
    units: tuple[str, ...]
    """All units of the model."""
    runs: tuple[Run, ...]
    microbatches: int
    compute: Compute
    alone: Callable[[Mesh], Setting]
    """What a stage of a mesh is priced for, without the pipeline around it."""
    virtuals: Callable[[Mesh], Sequence[int]]
    """How many stages each rank of a mesh may have, rising."""
    times: dict[Node, int] = field(default_factory=dict)
    works: dict[Node, Work] = field(default_factory=dict)
    units_of: dict[Node, int] = field(default_factory=dict)
    least: dict[tuple[int, ...], float] = field(default_factory=dict)
    """By the number of stages, and the sizes of the axes of one."""
    shares: dict[tuple[int, ...], dict[str, float]] = field(default_factory=dict)
    """By the sizes of the axes of a stage, as `once`."""
    once: dict[tuple[int, ...], float] = field(default_factory=dict)
    layers: dict[tuple[Mesh, str, str], float] = field(default_factory=dict)
    """Seconds of a phase of the layers of a run: (mesh, the unit that stands for them, phase)."""

    def least_s(self, mesh: Mesh) -> float:
        """What the ops alone take in a mesh's pipeline, the ranks of a stage sharing each as far as they can."""
        key = (mesh.num_stages, *_sizes(mesh))
        if key not in self.least:
            self.least[key] = self._cut_bound(mesh, self._shares_of(mesh))
        return self.least[key]

    def layer_s(self, mesh: Mesh, phases: Sequence[str]) -> float:
        """The same where the layers of a run take what one's forward, and its backward, each by itself, take at least
        in their best layouts, communication included; `phases`: those looked at, of the others it is the ops' share."""
        return self._cut_bound(mesh, self.phases_s(mesh, phases))

    def phases_s(self, mesh: Mesh, phases: Sequence[str]) -> dict[str, float]:
        """Seconds of a microbatch that each unit takes at least so."""
        least = dict(self._shares_of(mesh))
        for units, parts in self._layers():
            shares = self._phase_shares(mesh, parts)
            seconds = sum(self._phase_s(mesh, p, nodes) if p in phases else shares[p] for p, nodes in parts.items())
            least |= {unit: max(least[unit], seconds) for unit in units}
        return least

    def _phase_s(self, mesh: Mesh, phase: str, part: list[Node]) -> float:
        """What a phase of one layer takes at least, nothing else being there."""
        key = (mesh, self._homes()[part[0]], phase)
        if key not in self.layers:
            problem = replace(build_part(self.whole, self.alone(mesh), part), objective=ONE_MICROBATCH)
            bound = solve(problem, gap=BOUND_GAP, time_limit_s=BOUND_TIME_S).bound
            self.layers[key] = bound / self._times()[part[0]]
        return self.layers[key]

    def _phase_shares(self, mesh: Mesh, parts: Mapping[str, list[Node]]) -> dict[str, float]:
        """What the ops of each phase of a layer take, the ranks sharing each as far as they can."""
        return {phase: self._least_s(dict.fromkeys(nodes, 1), mesh) for phase, nodes in parts.items()}

    def cuts_s(self, mesh: Mesh) -> list[tuple[float, float]]:
        """For a cut after each unit but the last: seconds of a microbatch that the stage after it takes at least to get
        its values, and the one before it to get gradients, all ranks of a stage sharing what crosses the cut."""
        if mesh.num_stages == 1:
            return [(0.0, 0.0)] * (len(self.units) - 1)
        ranks, transfer, traced = math.prod(_sizes(mesh)), self.alone(mesh).transfer, self.whole.cut.units
        phases = [[sum(transfer(size / ranks) for size in sent) for sent in self._crossing(phase)] for phase in PHASES]
        after = dict(zip(traced, zip(*phases, strict=True), strict=False))
        return [after[like] for _, like in [*self.whole.repeats.spread(traced)][:-1]]

    def _crossing(self, phase: str) -> list[list[int]]:
        """Bytes of each value that a unit makes for later ones, or in the backward gets from them, unit by unit."""
        found: list[list[int]] = [[] for _ in self.whole.cut.units[:-1]]
        units = self._units()
        for node, made in units.items():
            if node.meta["phase"] != phase or not isinstance(node.meta["val"], torch.Tensor):
                continue
            read = {units[user] for user in node.users if user in units and user.meta["phase"] == phase}
            ahead = [made] if phase == "forward" and max(read, default=made) > made else []
            for unit in ahead or [unit for unit in read if phase == "backward" and unit < made]:
                found[unit].append(nbytes(node.meta["val"]))
        return found

    def _cut_bound(self, mesh: Mesh, unit_s: Mapping[str, float]) -> float:
        """The same if each unit takes so many seconds of a microbatch, with what the ops that run once a step take."""
        least, cuts_s = Least(tuple(unit_s[unit] for unit in self.units)), self.cuts_s(mesh)
        cut_s = min(map(sum, cuts_s), default=0.0)
        in_cuts = least_s(
            stages_s(least, cuts_s), least.whole, cut_s, mesh.num_stages, self.virtuals(mesh), self.microbatches
        )
        return in_cuts + self.once_s(mesh) / mesh.num_stages

    def _shares_of(self, mesh: Mesh) -> dict[str, float]:
        """Seconds of a microbatch for each unit, the ranks sharing each op as far as they can."""
        sizes = _sizes(mesh)
        if sizes not in self.shares:
            traced = self.whole.cut.units
            own = dict.fromkeys(traced, 0.0)
            for node, unit in self._units().items():
                own[traced[unit]] += self._work(node).least_seconds(mesh.spmd, self.compute)
            self.shares[sizes] = {unit: own[like] for unit, like in self.whole.repeats.spread(traced)}
        return self.shares[sizes]

    def once_s(self, mesh: Mesh) -> float:
        """Seconds of what runs once a step, on all stages together."""
        sizes = _sizes(mesh)
        if sizes not in self.once:
            times = self._times()
            self.once[sizes] = self._least_s({node: times[node] for node in self._ops("step")}, mesh)
        return self.once[sizes]

    def _least_s(self, nodes: Mapping[Node, int], mesh: Mesh) -> float:
        """What nodes, each run some times, take at least."""
        return sum(times * self._work(node).least_seconds(mesh.spmd, self.compute) for node, times in nodes.items())

    def _work(self, node: Node) -> Work:
        if node not in self.works:
            self.works[node] = work_of(node)
        return self.works[node]

    def _units(self) -> dict[Node, int]:
        """The unit of each node that runs in every microbatch."""
        if not self.units_of:
            self.units_of.update(units_of_nodes(self._ops("microbatch"), self.whole.cut.units))
        return self.units_of

    def _ops(self, level: str) -> list[Node]:
        return [node for node in self.whole.graph.nodes if node.op == "call_function" and node.meta["level"] == level]

    def _layers(self) -> Iterator[tuple[set[str], dict[str, list[Node]]]]:
        """Of each layer that stands for several: the units that are like it, and the nodes of its phases."""
        times = self._times()
        for run in self.runs:
            for offset in range(run.period):
                units = {run.block(number, offset) for number in range(1, run.count - 1)}
                nodes = [n for n in self._ops("microbatch") if times[n] > 1 and self._homes()[n] in units]
                parts = {phase: [n for n in nodes if n.meta["phase"] == phase] for phase in PHASES}
                if nodes:
                    yield units, {phase: part for phase, part in parts.items() if part}

    def _times(self) -> dict[Node, int]:
        """In how many layers each node of the one-stage graph runs."""
        if not self.times:
            repeats = self.whole.repeats
            self.times.update((node, repeats.times(home)) for node, home in self._homes().items())
        return self.times

    def _homes(self) -> dict[Node, str]:
        return homes_and_keys(self.whole.graph)[0]

    def kept_bytes(self) -> float:
        """What the forward of one microbatch leaves to its backward, on all devices together."""
        return float(
            sum(
                nbytes(node.meta["val"]) * times
                for node, times in self._times().items()
                if is_forward(node) and not is_view(node) and node.target is not markers.relay
                if any(user.meta.get("phase") == "backward" for user in node.users)
            )
        )


def _sizes(mesh: Mesh) -> tuple[int, ...]:
    """The sizes of the axes of a stage: what no op depends on the order of."""
    return tuple(sorted(size for _, size in mesh.spmd.axes))
