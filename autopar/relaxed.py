"""The relaxed problem of a mesh: one stage, no memory limit. Its bound holds for every pipeline cut of that mesh.

relaxed.bound                   # seconds of a step
relaxed.solution.choice         # the fastest layouts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from autopar.capture.runs import Repeats
from autopar.layers import blocks_of, homes_of
from autopar.markers import IDENTITIES
from autopar.mesh import PIPELINE_AXIS, Mesh
from autopar.solve.build import BuiltProblem, Setting
from autopar.solve.problem import Solution


@dataclass(frozen=True, slots=True)
class Relaxed:
    """A solved one; the solution is that of one stage, the bound that of a step of the whole pipeline."""

    bound: float
    setting: Setting
    units: tuple[str, ...]
    repeats: Repeats
    built: BuiltProblem
    solution: Solution


def fill(mesh: Mesh, microbatches: int, virtual: int = 1) -> float:
    """How often the step waits for all of the mesh's work on a microbatch, its stages being equal and run as 1F1B,
    `virtual` of them on a rank."""
    return 1 / virtual + (microbatches - 1 / virtual) / mesh.size(PIPELINE_AXIS)


def units_of_nodes(nodes: Sequence[Node], units: tuple[str, ...]) -> dict[Node, int]:
    """The unit of each node: that of its layer, or of its module; what runs before the first layer, or after the last,
    is of the first unit, or the last, and so is what else is of these modules (the sum of a gradient comes late); other
    nodes of no unit belong with the node before them."""
    if not nodes:
        return {}
    where, homes, between = (
        {unit: i for i, unit in enumerate(units)},
        homes_of(nodes[0].graph),
        blocks_of(nodes[0].graph),
    )
    edges = {"before": 0, "after": len(units) - 1}
    for node in nodes:
        is_edge = node.meta["phase"] == "forward" and between.get(node) in edges and node.target not in IDENTITIES
        if is_edge and (path := node.meta.get("path")):
            where.setdefault(path, edges[between[node]])
    found: dict[Node, int] = {}
    unit = 0
    for node in nodes:
        own = where.get(homes[node], _by_path(node, where))
        unit = edges.get(between.get(node, ""), unit) if own is None else own
        found[node] = unit
    return found


def _by_path(node: Node, where: dict[str, int]) -> int | None:
    """The unit of a node's module, or of one around it."""
    path = node.meta.get("path", "")
    while path:
        if path in where:
            return where[path]
        path = path.rpartition(".")[0]
    return None
