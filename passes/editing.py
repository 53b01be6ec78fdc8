"""What passes share: editing a copy of a graph, and which nodes may be moved or merged.

    def fold(part, context): return edit(part, lambda graph: ...)

Invariants:
- a pass never changes the graph that it was given;
- `meta` is copied per node (the dict, not its values), so annotations of a copy don't leak back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx

from autopar.program.parts import Part


class Uncompiled(fx.GraphModule):
    """A graph with its constants between two passes: nobody calls it, so no Python is generated for it."""

    def recompile(self) -> Any:
        """Nothing; `fx.GraphModule` calls this whenever it is given a graph."""


Graphlike = TypeVar("Graphlike", Part, fx.GraphModule)


def edit(owner: Graphlike, change: Callable[[fx.Graph], None]) -> Graphlike:
    """A `Part` or `GraphModule` with a changed copy of its graph."""
    if isinstance(owner, Part):
        return replace(owner, graph=_edited(owner.graph, change))
    return _edited(owner, change)


def _edited(module: fx.GraphModule, change: Callable[[fx.Graph], None]) -> fx.GraphModule:
    graph = copy_graph(module.graph)
    change(graph)
    graph.lint()
    return Uncompiled(module, graph)


def copy_graph(graph: fx.Graph, order: list[fx.Node] | None = None) -> fx.Graph:
    """A copy with the same names, its nodes in `order` (the graph's own by default)."""
    copy, known = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in order or list(graph.nodes):
        known[node] = copy.node_copy(node, known.__getitem__)
        known[node].meta = dict(node.meta)
    return copy


def is_random(node: fx.Node) -> bool:
    """Whether two equal calls may give different values."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def is_mutating(node: fx.Node) -> bool:
    """Whether the node writes into an operand."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)
