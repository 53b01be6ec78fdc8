"""Layers: the units into which a model's forward pass is cut into pipeline stages.

A unit is a block of a module list (`model.layers.3`), found from the module paths of the nodes in the order in which
they run; what runs before the first block and after the last are units of their own.

    units_of(graph) -> ("model.embed_tokens", "model.layers.0", …, "lm_head"), {node: unit}
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from autopar.errors import PlanError
from autopar.markers import IDENTITIES


@dataclass(frozen=True, slots=True)
class Cut:
    """Which stage each unit belongs to; contiguous, starting at 0."""

    units: tuple[str, ...]
    stages: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return max(self.stages) + 1

    @classmethod
    def single(cls, units: tuple[str, ...]) -> Cut:
        return cls(units, (0,) * len(units))

    @classmethod
    def from_boundaries(cls, units: tuple[str, ...], firsts: list[int]) -> Cut:
        """Stage s starts at unit `firsts[s]`; `firsts[0]` is 0."""
        if len(firsts) > len(units):
            raise PlanError(f"{len(firsts)} stages asked for, but the model has {len(units)} units to cut between")
        stages = [sum(1 for first in firsts if first <= i) - 1 for i in range(len(units))]
        return cls(units, tuple(stages))


def block_of(path: str) -> str | None:
    """`model.layers.3.mlp.up_proj` → `model.layers.3`; None outside any module list."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return None


def blocks_of(graph: Graph) -> dict[Node, str]:
    """The block of each forward and backward node of a step graph.

    Nodes outside any block belong to the block that runs before them in their phase; what runs before the first block
    of the forward is "before", what follows the last one "after", and their backward likewise.
    """
    found: dict[Node, str] = {}
    for phase, first, last in (("forward", "before", "after"), ("backward", "after", "before")):
        nodes = [n for n in graph.nodes if n.op == "call_function" and n.meta["phase"] == phase]
        named = [None if n.target in IDENTITIES else block_of(n.meta.get("path", "")) for n in nodes]
        end = max((i for i, block in enumerate(named) if block), default=-1)
        current = first
        for i, (node, block) in enumerate(zip(nodes, named, strict=True)):
            current = block or (last if i > end else current)
            found[node] = current
    return found


def units_of(graph: Graph) -> tuple[tuple[str, ...], dict[Node, int]]:
    """Unit names in the order in which they run, and the unit of each forward node."""
    names: list[str] = []
    index: dict[str, int] = {}
    unit: dict[Node, int] = {}
    forward = [n for n in graph.nodes if n.op == "call_function" and n.meta.get("phase", "forward") == "forward"]
    last_block = max((i for i, n in enumerate(forward) if block_of(n.meta.get("path", ""))), default=-1)
    for i, node in enumerate(forward):
        path = node.meta.get("path", "")
        block = block_of(path)
        name = block or ("" if names and i <= last_block else _edge_name(path, after=i > last_block))
        if not name or (not block and names and i <= last_block):
            unit[node] = len(names) - 1
            continue
        if not block and names and block_of(names[-1]) is None:
            unit[node] = len(names) - 1  # what runs before or after the blocks is one unit
            continue
        if name not in index:
            index[name] = len(names)
            names.append(name)
        unit[node] = index[name]
    return tuple(names) or ("",), unit


def _edge_name(path: str, after: bool) -> str:
    return path or ("output" if after else "input")
