"""Runs chosen forward ops again in the backward instead of keeping their values.

Before: a local step graph. After: no backward node reads the forward value of a node in `context.recomputed`; it
reads a copy that the backward makes, as late as its first use, from what is kept. Numbers stay bit-equal.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from passes.context import Context


def recompute(graph: Graph, context: Context) -> Graph:
    """Rewrites `graph` in place; collectives inside the recomputed region are repeated too."""
    if not context.recomputed:
        return graph
    chosen = _with_views_and_moves(graph, context.recomputed)
    copies: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.meta["phase"] == "backward":
            for source in node.all_input_nodes:
                if source in chosen:
                    with graph.inserting_before(node):
                        node.replace_input_with(source, _copy(graph, source, node, chosen, copies))
    return graph


def _with_views_and_moves(graph: Graph, keys: frozenset[str]) -> set[Node]:
    """The chosen nodes, and the keyless ones (moves, masks) that were made from them alone."""
    chosen: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node.meta["phase"] != "forward":
            continue
        key = node.meta.get("key")
        if key in keys or (key is None and any(n in chosen for n in node.all_input_nodes)):
            chosen.add(node)
    return chosen


def _copy(graph: Graph, source: Node, reader: Node, chosen: set[Node], copies: dict[Node, Node]) -> Node:
    if source not in chosen:
        return source
    if source not in copies:
        new = graph.node_copy(source, lambda n: _copy(graph, n, reader, chosen, copies))
        new.meta = {**source.meta, "phase": "backward", "recomputed": True}
        copies[source] = new
    return copies[source]
