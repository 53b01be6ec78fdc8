"""Puts the cheapest moves on every edge whose ends have different layouts.

Before: every value has its layout. After: every operand is in the layout that its op needs, every output of the step
in the layout of its input (state), or replicated (loss). Equal moves of one value within one phase are shared, and the
backward reads what a relay of the forward moved, unless the plan has it moved again. No global value changes.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from autopar import markers
from autopar.joint import forward_twin
from autopar.layout import Layout
from autopar.reshard import Move, Resharder
from autopar.rules.nodes import replace_operands, tensor_operands
from passes.context import Context
from passes.lay_out import needed_layouts

_Place = tuple[str, str, int]
"""(phase, level, stage)"""


def insert_moves(graph: Graph, context: Context) -> Graph:
    """Reshards operands and outputs; see the module's docstring."""
    inserter = _Inserter(graph, context.resharder)
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    for node in nodes:
        _reuse(node, context)
    for node in nodes:
        inserter.reshard_operands(node)
    inserter.reshard_outputs(context.state_pairs)
    return graph


def _reuse(node: Node, context: Context) -> None:
    """The backward reads what the forward's relay left, where that is what it needs and isn't to be moved again."""
    twin = forward_twin(node)
    if twin is not None and twin.meta["layout"] == node.meta["layout"] and twin.meta["key"] not in context.recomputed:
        node.args = (twin,)


@dataclass(slots=True)
class _Inserter:
    graph: Graph
    resharder: Resharder
    moved: dict[tuple[Node, _Place, Layout], Node] = field(default_factory=dict)

    def reshard_operands(self, node: Node) -> None:
        place = (node.meta["phase"], node.meta["level"], node.meta["stage"])
        operands, needed, path = tensor_operands(node), needed_layouts(node), node.meta["path"]
        pairs = zip(operands, needed, strict=True)
        with self.graph.inserting_before(node):
            resharded = [self.reshard(operand, layout, place, path) for operand, layout in pairs]
        if resharded != operands:
            replace_operands(node, resharded)

    def reshard_outputs(self, state_pairs: tuple[tuple[Node, Node], ...]) -> None:
        output = next(n for n in self.graph.nodes if n.op == "output")
        wanted = {value: source.meta["layout"] for source, value in state_pairs}
        values = []
        for role, value in zip(output.meta["roles"], output.args[0], strict=True):
            needed = wanted.get(value, Layout.whole(value.meta["layout"].factor_sizes))
            place = ("update" if value in wanted else value.meta["phase"], value.meta["level"], value.meta["stage"])
            with self.graph.inserting_before(output):
                values.append(self.reshard(value, needed, place, role.name))
        output.args = (tuple(values),)

    def reshard(self, value: Node, needed: Layout, place: _Place, path: str) -> Node:
        layout = value.meta["layout"]
        if layout == needed:
            return value
        node = value
        for move, after in self.resharder.path(layout, needed, value.meta["val"].element_size()):
            key = (value, place, after)
            if key not in self.moved:
                self.moved[key] = self._reduced_before(key, move) or self._move(node, move, after, place, path)
            node = self.moved[key]
        return node

    def _reduced_before(self, key: tuple[Node, _Place, Layout], move: Move) -> Node | None:
        """The forward's reduction of the same value: it takes no more memory to keep than what it is made of."""
        value, (phase, level, stage), after = key
        is_reduction = phase == "backward" and move.kind in ("reduce", "reduce_scatter")
        return self.moved.get((value, ("forward", level, stage), after)) if is_reduction else None

    def _move(self, value: Node, move: Move, after: Layout, place: _Place, path: str) -> Node:
        node = self.graph.call_function(getattr(markers, move.kind), (value, *move.arguments))
        phase, level, stage = place
        node.meta.update(val=value.meta["val"], layout=after, path=path, phase=phase, level=level, stage=stage)
        node.meta["source"] = ""
        return node
