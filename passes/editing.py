"""What passes share: editing a copy of a graph, and which nodes may be moved or merged.

    def fold(part, context): return edit(part, lambda graph: ...)

Invariants:
- a pass never changes the graph that it was given, but `in_place`, where a pipeline of passes owns it;
- `meta` is copied per node (the dict, not its values), so annotations of a copy don't leak back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TypeVar

import torch
from torch import fx

from autopar.capture.graphs import Uncompiled
from autopar.program.parts import Part
from autopar.rules.nodes import copy_graph

Graphlike = TypeVar("Graphlike", Part, fx.GraphModule)


_IN_PLACE: ContextVar[bool] = ContextVar("autopar_in_place", default=False)


@contextmanager
def in_place() -> Iterator[None]:
    """Within the block, passes change the graphs that they are given: nobody else has them. Who opens it has them
    checked (`lint`) once all have run."""
    token = _IN_PLACE.set(True)
    try:
        yield
    finally:
        _IN_PLACE.reset(token)


def edit(owner: Graphlike, change: Callable[[fx.Graph], None]) -> Graphlike:
    """A `Part` or `GraphModule` with a changed copy of its graph."""
    if isinstance(owner, Part):
        return replace(owner, graph=_edited(owner.graph, change))
    return _edited(owner, change)


def _edited(module: fx.GraphModule, change: Callable[[fx.Graph], None]) -> fx.GraphModule:
    if _IN_PLACE.get():
        change(module.graph)
        return module
    graph = copy_graph(module.graph)[0]
    change(graph)
    graph.lint()
    return Uncompiled(module, graph)


def is_mutating(node: fx.Node) -> bool:
    """Whether the node writes into an operand."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)
