"""With one microbatch, gradients are reduced by the backward, as they are made, not by the update after it.

    backward: dw = …                              ->   backward: dw = …; sum = reduce_scatter(dw, "dp", 0)
    update:   sum = reduce_scatter(dw, "dp", 0)        update:   … sum …

Before: a local step graph. After: the same nodes; the way from a gradient to its reduced value, where it consists of
collectives and views alone, is in the backward, and what crosses to the update is the reduced value. With several
microbatches nothing changes (the sum is reduced once a step), nor for the gradients of the blocks that the backward
reaches last: nothing would be left there to hide them behind, and the update has other parameters to go on with.
Numbers stay bit-equal.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from autopar import collectives
from autopar.program.storages import is_view
from passes.context import Context
from passes.schedule_collectives import block_of

LAST_BLOCKS = 2
"""Blocks at the end of the backward whose gradients the update reduces."""


def advance_reductions(graph: Graph, context: Context) -> Graph:
    """Rewrites `graph` in place; see the module's docstring."""
    if context.microbatches > 1:
        return graph
    gradients = [node for node in graph.nodes if node.meta.get("gradient_of") and node.meta["phase"] == "backward"]
    blocks = list(dict.fromkeys(block_of(node.meta.get("path", "")) for node in reversed(gradients)))
    last = set(blocks[:LAST_BLOCKS]) if len(blocks) > LAST_BLOCKS else set()
    for gradient in gradients:
        if block_of(gradient.meta.get("path", "")) not in last:
            _advance(gradient, _way_to_reduced(gradient))
    return graph


def _way_to_reduced(gradient: Node) -> list[Node]:
    """The nodes between a gradient and its reduced value, that value included; empty where there is no such way."""
    way: list[Node] = []
    length, is_reduced = 0, False
    node = gradient
    while len(node.users) == 1:
        (node,) = node.users
        is_collective = node.target in collectives.STARTED
        if not (is_collective or is_view(node)) or node.meta["stage"] != gradient.meta["stage"]:
            break
        way.append(node)
        is_reduced = is_reduced or is_collective
        if is_reduced and "layout" in node.meta:  # views behind a collective give the value its dims back
            length = len(way)
    return way[:length]


def _advance(gradient: Node, way: list[Node]) -> None:
    if not way:
        return
    last = gradient
    for node in way:
        last.append(node)
        node.meta.update(phase=gradient.meta["phase"], level=gradient.meta["level"])
        last = node
    last.meta["gradient_of"] = gradient.meta.pop("gradient_of")
