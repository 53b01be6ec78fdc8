"""Re-derives every layout from the rules, after any pass that keeps layouts.

Raises `AssertionError` naming the pass and printing the five nodes around the fault.
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from autopar import markers
from autopar.mesh import Mesh
from autopar.reshard import moves_from
from autopar.rules.choices import result_layouts
from autopar.rules.nodes import node_argument, op_name, tensor_operands
from passes.lay_out import needed_layouts


def check_layouts(graph: Graph, mesh: Mesh, after: str) -> None:
    """Checks a laid-out graph of global values whose moves have been inserted."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        fault = _fault_of_move(node, mesh) if node.target in markers.MOVES else _fault_of_op(node)
        assert fault is None, f"after {after}: {node.name} ({node.meta.get('key')}): {fault}\n{_around(graph, node)}"


def _fault_of_op(node: Node) -> str | None:
    for i, (operand, needed) in enumerate(zip(tensor_operands(node), needed_layouts(node), strict=True)):
        if operand.meta["layout"] != needed:
            return f"operand {i} has layout {operand.meta['layout']}, the op needs {needed}"
    derived = result_layouts(node.meta["rule"], node.meta["choice"])
    stated = node.meta["layout"]
    stated = tuple(s for s in stated if s is not None) if isinstance(stated, tuple) else (stated,)
    return None if derived == stated else f"stated layouts {stated}, derived {derived}"


def _fault_of_move(node: Node, mesh: Mesh) -> str | None:
    before = node_argument(node, 0).meta["layout"]
    for move, after in moves_from(before, mesh):
        if move.kind == op_name(node) and move.arguments == node.args[1:]:
            return None if after == node.meta["layout"] else f"leads to {after}, stated {node.meta['layout']}"
    return f"no such move from {before}"


def _around(graph: Graph, node: Node) -> str:
    nodes = list(graph.nodes)
    at = nodes.index(node)
    return "\n".join(f"  {n.format_node()}  # {n.meta.get('layout')}" for n in nodes[max(0, at - 2) : at + 3])
