"""Layers: the units into which a model's forward pass is cut into pipeline stages.

A unit is a block of a module list (`model.layers.3`), found from the module paths of the nodes in the order in which
they run; what runs before the first block and after the last are units of their own. In a model without module lists
the units are the modules of the first level that has several. What runs again belongs to the unit that has come last.

    units_of(graph) -> ("model.embed_tokens", "model.layers.0", …, "lm_head"), {node: unit}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from autopar.errors import PlanError
from autopar.markers import IDENTITIES


@dataclass(frozen=True, slots=True)
class Cut:
    """Which stage each unit belongs to; contiguous, starting at 0."""

    units: tuple[str, ...]
    stages: tuple[int, ...]
    kinds: tuple[int, ...] = ()
    """Of each stage, a number for what is chosen on it: those of different numbers differ; empty where none do."""

    @property
    def num_stages(self) -> int:
        return max(self.stages) + 1

    @classmethod
    def single(cls, units: tuple[str, ...]) -> Cut:
        return cls(units, (0,) * len(units))

    @classmethod
    def from_boundaries(cls, units: tuple[str, ...], firsts: list[int], kinds: tuple[int, ...] = ()) -> Cut:
        """Stage s starts at unit `firsts[s]`; `firsts[0]` is 0. `kinds`: of each stage, or none."""
        if len(firsts) > len(units):
            raise PlanError(f"{len(firsts)} stages asked for, but the model has {len(units)} units to cut between")
        stages = [sum(1 for first in firsts if first <= i) - 1 for i in range(len(units))]
        return cls(units, tuple(stages), kinds if len(set(kinds)) > 1 else ())


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


def homes_of(graph: Graph) -> dict[Node, str]:
    """The block of a module list to which each node of a captured or step graph belongs; "" where to none.

    By module path; a node that has no block in it runs between blocks (`blocks_of`), and a relay brings a value from
    where it is made.
    """
    between = blocks_of(graph)
    found: dict[Node, str] = {}
    for node in graph.nodes:
        own = block_of(node.meta.get("path", ""))
        if own is None and node.target in IDENTITIES:
            own = found[node.all_input_nodes[0]]
        elif own is None:
            own = between.get(node, "")
        found[node] = own if block_of(own) else ""
    return found


def units_of(graph: Graph) -> tuple[tuple[str, ...], dict[Node, int]]:
    """Unit names in the order in which they run, and the unit of each forward node."""
    forward = [n for n in graph.nodes if n.op == "call_function" and n.meta.get("phase", "forward") == "forward"]
    paths = [node.meta.get("path", "") for node in forward]
    blocks = _blocks(paths)
    last_block = max((i for i, block in enumerate(blocks) if block), default=-1)
    names: list[str] = []
    edges: set[str] = set()
    unit: dict[Node, int] = {}
    for i, (node, path, block) in enumerate(zip(forward, paths, blocks, strict=True)):
        name = block or _edge_name(path, after=i > last_block)
        is_inside = not block and names and (i <= last_block or names[-1] in edges)
        if not is_inside and name not in names:
            names.append(name)
            edges.update([] if block else [name])
        unit[node] = len(names) - 1
    return tuple(names) or ("",), unit


def _blocks(paths: Sequence[str]) -> list[str | None]:
    """The block of each path; without module lists, its part down to the first level that tells modules apart."""
    if any(block_of(path) for path in paths):
        return [block_of(path) for path in paths]
    for depth in range(1, 1 + max((path.count(".") + 1 for path in paths), default=0)):
        parts = [".".join(path.split(".")[:depth]) for path in paths]
        if len({part for part in parts if part}) > 1:
            return [part or None for part in parts]
    return [None] * len(paths)


def _edge_name(path: str, after: bool) -> str:
    return path or ("output" if after else "input")
