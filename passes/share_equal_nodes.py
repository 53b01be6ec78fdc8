"""Compute equal things once: nodes with the same target and arguments are merged, collectives included.

    a = all_gather(w, "dp", 0); b = all_gather(w, "dp", 0); c = a + b    ->    a = all_gather(w, "dp", 0); c = a + a

Before: a functional graph (no in-place ops). After: no two nodes of one phase with equal target and arguments, except
random ones. Numbers stay bit-equal.

Nodes of different phases (`meta["phase"]`) are merged only if they are views: a backward that gathers or recomputes
anew what the forward had does so to save memory, and merging would undo that choice.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from autopar.program.storages import is_view
from autopar.rules.nodes import is_random
from passes.editing import edit, is_mutating


def share_equal_nodes(part: Any, context: Any = None) -> Any:
    """`part` (a `Part` or `GraphModule`) with equal nodes merged into the first."""
    return edit(part, _share)


def _share(graph: fx.Graph) -> None:
    first: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op not in ("call_function", "get_attr") or is_random(node):
            continue
        assert not is_mutating(node), f"share_equal_nodes needs a functional graph, got {node.format_node()}"
        twin = first.setdefault(_key(node), node)
        if twin is not node:
            node.replace_all_uses_with(twin)
            graph.erase_node(node)


def _key(node: fx.Node) -> Hashable:
    phase = None if is_view(node) or node.op == "get_attr" else node.meta.get("phase")
    return (node.op, node.target, phase, _frozen(node.args), _frozen(node.kwargs))


def _frozen(value: Any) -> Hashable:
    """A hashable stand-in: equal only for equal arguments of equal types (`1`, `1.0` and `True` differ)."""
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in sorted(value.items()))
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    return (type(value).__name__, repr(value))
