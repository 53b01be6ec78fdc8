"""The relaxed problem of a mesh: one stage, no memory limit. Its bound holds for every pipeline cut of that mesh.

relaxed.bound                   # seconds of a step
relaxed.layers(units, 2)        # what each unit costs and holds, to cut the pipeline by
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.fx import Node

from autopar.capture.runs import Repeats
from autopar.mesh import Mesh
from autopar.solve.build import BuiltProblem, Setting
from autopar.solve.problem import Solution, evaluate
from autopar.solve.stages import Layer, Point


@dataclass(frozen=True, slots=True)
class Relaxed:
    """A solved one; the solution is that of one stage, the bound that of a step of the whole pipeline."""

    bound: float
    setting: Setting
    units: tuple[str, ...]
    repeats: Repeats
    built: BuiltProblem
    solution: Solution

    def step_s(self, stages: int) -> float:
        """Of the solution, where the solver's limits find room for it on as many stages together; else infinite.

        For one stage it is a plan's; for several it tells what plans of this mesh may be like.
        """
        if not self.solution.choice:
            return math.inf
        found = evaluate(self.built.problem, self.solution.choice)
        fits = all(
            used <= stages * limit.threshold for used, limit in zip(found.usage, self.built.problem.limits, strict=True)
        )
        return self.solution.objective if fits else math.inf

    def layers(self, units: tuple[str, ...], in_flight: int) -> tuple[Layer, ...]:
        """What each unit costs and holds under the relaxed choices; `units`: all of the model, see `Repeats.spread`."""
        own = tuple(self.repeats.spread(self.units))
        assert tuple(unit for unit, _ in own) == units, (units, own)
        where = {unit: i for i, unit in enumerate(self.units)}
        seconds, static, saved = ([0.0] * len(self.units) for _ in range(3))
        unit = 0
        for node, priced, pick in zip(self.built.nodes, self.built.plain, self.solution.choice, strict=True):
            unit = _unit_index(node, where, unit)
            held = max((float(used[pick]) for used in priced.memory.values()), default=0.0)
            if node.meta["level"] == "microbatch":
                seconds[unit] += float(priced.cost[pick])
            if node.meta["phase"] == "forward":
                saved[unit] += held / in_flight
            else:
                static[unit] += held
        points = [Point(*point) for point in zip(seconds, static, saved, strict=True)]
        return tuple(Layer((points[where[like]],)) for _, like in own)


def fill(mesh: Mesh, microbatches: int) -> float:
    """How often the step waits for all of the mesh's work on a microbatch, its stages being equal and run as 1F1B."""
    return 1 + (microbatches - 1) / mesh.num_stages


def _unit_index(node: Node, where: dict[str, int], before: int) -> int:
    """The unit of a node's module; nodes of no unit belong with the node before them."""
    path = node.meta.get("path", "")
    while path:
        if path in where:
            return where[path]
        path = path.rpartition(".")[0]
    return len(where) - 1 if node.meta["phase"] == "backward" and before == 0 else before
