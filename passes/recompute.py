"""Runs chosen forward ops again in the backward instead of keeping their values.

    h = gelu(u); …; dw = linear_dw(h, dy)    ->    h = gelu(u); …; h_1 = gelu(u); dw = linear_dw(h_1, dy)

Before: a local step graph. After: no backward node reads a forward value of its own stage whose key is in
`context.recomputed`: it reads a copy that the backward makes right before its first reader, from what is kept. Numbers
stay bit-equal.

Invariants:
- what has no key belongs to the node that reads it (moves, masks, casts) and is copied with it, collectives included;
- a block of layers has copies of its own, so that they live no longer than the backward of that block;
- random ops are never run again; what comes from another stage is kept where it was received.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from autopar.layers import blocks_of
from autopar.rules.nodes import copy_node, is_random, node_argument
from passes.context import Context


def recompute(graph: Graph, context: Context) -> Graph:
    """Rewrites `graph` in place; see the module's docstring."""
    if not context.recomputed:
        return graph
    blocks = blocks_of(graph)
    copier = _Copier(graph, context.recomputed)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.meta["phase"] == "backward":
            for source in node.all_input_nodes:
                with graph.inserting_before(node):
                    node.replace_input_with(source, copier.value(source, node.meta["stage"], blocks[node]))
    return graph


@dataclass(slots=True)
class _Copier:
    graph: Graph
    keys: frozenset[str]
    copies: dict[tuple[Node, int, str], Node] = field(default_factory=dict)
    """By node, and the stage and block of the backward that reads it."""

    def value(self, source: Node, stage: int, block: str) -> Node:
        """What the backward of a stage and a block reads for `source`: itself where it is kept."""
        return self._copy(source, stage, block) if self._runs_again(source, stage) else source

    def _runs_again(self, source: Node, stage: int) -> bool:
        if source.op != "call_function" or source.meta["phase"] != "forward" or source.meta["stage"] != stage:
            return False
        if source.target is operator.getitem:
            return self._runs_again(node_argument(source, 0), stage)
        return source.meta.get("key") in self.keys and not is_random(source)

    def _copy(self, source: Node, stage: int, block: str) -> Node:
        if (source, stage, block) not in self.copies:
            new = copy_node(self.graph, source, lambda operand: self._operand(operand, stage, block))
            new.meta.update(phase="backward", recomputed=True)
            self.copies[source, stage, block] = new
        return self.copies[source, stage, block]

    def _operand(self, operand: Node, stage: int, block: str) -> Node:
        is_keyless = operand.op == "call_function" and operand.meta["phase"] == "forward" and "key" not in operand.meta
        if is_keyless and operand.meta["stage"] == stage:
            return self._copy(operand, stage, block)
        return self.value(operand, stage, block)
