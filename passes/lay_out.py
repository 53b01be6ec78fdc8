"""Gives every value its layout: the rules at the chosen splits.

Before: nodes have `rule` and `key`; the context has a choice for every node that isn't a getitem or an output.
After: nodes have `choice` and `layout` (a tuple for several results). No value changes.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, Node

from autopar.layout import Layout
from autopar.rules.choices import operand_layouts, result_layouts
from autopar.rules.nodes import result_values
from passes.context import Context


def lay_out(graph: Graph, context: Context) -> Graph:
    """Writes `choice` and `layout` on every node."""
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.target is operator.getitem:
            node.meta["layout"] = node.args[0].meta["layout"][node.args[1]]
            continue
        choice = context.choices[node.meta["key"]]
        node.meta["choice"] = choice
        node.meta["layout"] = _spread(node, result_layouts(node.meta["rule"], choice))
    return graph


def needed_layouts(node: Node) -> tuple[Layout, ...]:
    """The layouts in which a laid-out call node needs its tensor operands."""
    return operand_layouts(node.meta["rule"], node.meta["choice"])


def _spread(node: Node, layouts: tuple[Layout, ...]) -> Any:
    if not isinstance(node.meta["val"], (tuple, list)):
        return layouts[0]
    remaining = iter(layouts)
    return tuple(None if value is None else next(remaining) for value in result_values(node))
