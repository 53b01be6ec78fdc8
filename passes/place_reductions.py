"""Puts reductions into the part of the step in which there is something to hide them behind.

    forward:  loss = all_reduce(part, "dp")       ->   forward:  part
    backward: dw = …                                   backward: loss = all_reduce(part, "dp"); …
    update:   sum = reduce_scatter(dw, "dp", 0)                  dw = …; sum = reduce_scatter(dw, "dp", 0)
                                                       update:   … sum …

Before: a local step graph. After: the same nodes in other parts.
- With one microbatch, the way from a gradient to its reduced value, where it consists of collectives and views alone,
  is in the backward, and what crosses to the update is the reduced value. (With several, the sum is reduced once.) The
  blocks that the backward reaches last keep theirs in the update: the backward would have nothing left to hide them
  behind, and the update has other parameters to go on with.
- Scalars that lead to nothing but the step's outputs, and that a collective makes, are made by the backward: the
  forward would end by waiting for them.
Numbers stay bit-equal.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import Graph, Node

from autopar import collectives
from autopar.gradients import reduced_by_backward
from autopar.program.storages import is_view, local_value
from passes.context import Context


def place_reductions(graph: Graph, context: Context) -> Graph:
    """Rewrites `graph` in place; see the module's docstring."""
    _postpone_outputs(graph)
    if context.microbatches == 1:
        for gradient in reduced_by_backward(graph):
            _advance(gradient, _way_to_reduced(gradient))
    return graph


# -- outputs -----------------------------------------------------------------------------------------------------
def _postpone_outputs(graph: Graph) -> None:
    with_backward = {node.meta["stage"] for node in graph.nodes if node.meta.get("phase") == "backward"}
    tail: set[Node] = set()
    for node in reversed(graph.nodes):
        is_last = all(user in tail or user.op == "output" for user in node.users)
        if node.op == "call_function" and is_last and _is_scalar(node) and node.meta["phase"] == "forward":
            tail.add(node)
    behind: set[Node] = set()
    for node in graph.nodes:
        is_behind = node.target in collectives.STARTED or any(operand in behind for operand in node.all_input_nodes)
        if node in tail and is_behind and node.meta["stage"] in with_backward:
            behind.add(node)
            node.meta["phase"] = "backward"


def _is_scalar(node: Node) -> bool:
    value = local_value(node)
    return isinstance(value, Tensor) and value.numel() == 1


# -- gradients ---------------------------------------------------------------------------------------------------
def _way_to_reduced(gradient: Node) -> list[Node]:
    """The nodes between a gradient and its reduced value, that value included; empty where there is no such way."""
    way: list[Node] = []
    length, is_reduced = 0, False
    node = gradient
    while len(node.users) == 1:
        (node,) = node.users
        is_collective = node.target in collectives.STARTED
        is_free = is_view(node) or node.target is collectives.pad
        if not (is_collective or is_free) or node.meta["stage"] != gradient.meta["stage"]:
            break
        way.append(node)
        is_reduced = is_reduced or is_collective
        if is_reduced and "layout" in node.meta:  # a collective on factors has none: the view behind gives it its dims
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
