"""Cuts the local step graph into the parts of each pipeline stage.

Before: every node has `stage`, `phase` and `level` and runs on local tensors. After: a `Pipeline` of parts whose
graphs hold each node once; what one part makes and another needs goes through a slot, between stages through a
transfer. Numbers stay bit-equal.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from autopar import markers
from autopar.capture.graphs import Uncompiled
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.program.parts import Part, Pipeline, Slot, StageProgram, Transfer, Value
from autopar.rules.nodes import copy_node, node_argument
from passes.context import Context

PARTS = ("prologue", "forward", "backward", "norm", "update")

_Key = tuple[int, str]
"""(stage, part)"""


def split_stages(graph: Graph, context: Context) -> Pipeline:
    """The parts, slots and transfers of every stage; the schedule is added later."""
    mesh = context.mesh
    splitter = _Splitter(graph, mesh)
    splitter.assign()
    splitter.connect()
    stages = tuple(splitter.stage(index) for index in range(mesh.num_stages))
    return Pipeline(mesh, context.microbatches, stages, tuple(splitter.transfers))


@dataclass(slots=True)
class _Splitter:
    graph: Graph
    mesh: Mesh
    part_of: dict[Node, _Key] = field(default_factory=dict)
    nodes: dict[_Key, list[Node]] = field(default_factory=lambda: defaultdict(list))
    """Those of each part."""
    slots: dict[Node, Slot] = field(default_factory=dict)
    """The slot that holds a node's value where it was made (or comes in)."""
    inputs: dict[_Key, dict[Node, Slot]] = field(default_factory=dict)
    outputs: dict[_Key, dict[Slot, Node]] = field(default_factory=dict)
    values: dict[int, dict[Slot, Value]] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)

    # -- which part a node runs in -----------------------------------------------------------------------------
    def assign(self) -> None:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                role = node.meta["role"]
                self.slots[node] = Slot(role.kind, role.name)
            elif node.op == "call_function":
                self.part_of[node] = (node.meta["stage"], node.meta["phase"])
                self.nodes[self.part_of[node]].append(node)
        for stage in range(self.mesh.num_stages):
            self.values[stage] = {}
            for part in PARTS:
                self.inputs[stage, part] = {}
                self.outputs[stage, part] = {}

    # -- slots and transfers -----------------------------------------------------------------------------------
    def connect(self) -> None:
        for node in self.graph.nodes:
            if node.op == "call_function":
                for source in node.all_input_nodes:
                    self._need(source, self.part_of[node])
                if node.target is markers.accumulate:
                    slot = self._slot(node)
                    self._value(node, node.meta["stage"], slot)
            elif node.op == "output":
                self._return(node)

    def _need(self, source: Node, key: _Key) -> None:
        """Makes `source` an input of part `key` unless it is made there."""
        if self.part_of.get(source) == key or source in self.inputs[key]:
            return
        if isinstance(source.meta.get("local_val"), int):
            return  # a coordinate: computed anew in each part
        stage, _ = key
        slot = self._slot(source)
        made_at, made_in = self.part_of[source] if source in self.part_of else (self._home(source, stage), "prologue")
        if source in self.part_of:
            self.outputs[made_at, made_in].setdefault(slot, source)
        self._value(source, made_at, slot)
        if made_at != stage:
            received = Slot("received", slot.name)
            transfer = Transfer(slot, made_at, stage, made_in)
            if transfer not in self.transfers:
                self.transfers.append(transfer)
            self._value(source, stage, received)
            slot = received
        self.inputs[key][source] = slot

    def _home(self, source: Node, stage: int) -> int:
        """Where an input of the step lives: state on its own stage, the rest on every stage that wants it."""
        return int(source.meta["stage"]) if source.meta["role"].kind in ("param", "state") else stage

    def _slot(self, source: Node) -> Slot:
        if source not in self.slots:
            gradient_of = source.meta.get("gradient_of")
            kind = "gathered" if source.meta["phase"] == "prologue" else "saved"
            self.slots[source] = Slot("accumulator", gradient_of) if gradient_of else Slot(kind, source.name)
        return self.slots[source]

    def _value(self, source: Node, stage: int, slot: Slot) -> None:
        local = source.meta["local_val"]
        layout = source.meta.get("layout") or Layout.whole(tuple((n,) if n != 1 else () for n in local.shape))
        self.values[stage][slot] = Value(local.dtype, layout)

    def _return(self, output: Node) -> None:
        for role, node in zip(output.meta["roles"], output.args[0], strict=True):  # type: ignore[arg-type]
            is_output = role.kind in ("loss", "output")
            slot = Slot("output", role.name or role.kind) if is_output else Slot(role.kind, role.name)
            stage, part = self.part_of.get(node, (0, "update"))
            self.outputs[stage, part][slot] = node
            self._value(node, stage, slot)
            if node.op == "placeholder":
                self.inputs[stage, part][node] = self.slots[node]

    # -- graphs ------------------------------------------------------------------------------------------------
    def stage(self, index: int) -> StageProgram:
        phases = {phase for _, phase in self.nodes}
        always = {"forward", "backward"} & phases  # the schedule has an action for each, though it may do nothing
        parts = {}
        for name in PARTS:
            nodes = self.nodes.get((index, name), [])
            if nodes or self.outputs[index, name] or name in always:
                parts[name] = self._part(index, name, nodes)
        return StageProgram(index, parts, self.values[index])

    def _part(self, stage: int, name: str, nodes: list[Node]) -> Part:
        graph = Graph()
        env: dict[Node, Node] = {}
        slots: list[Slot] = []
        for source, slot in self.inputs[stage, name].items():
            env[source] = _placeholder(graph, source, slot, slots)
        for node in nodes:
            env[node] = self._copy(graph, node, env, slots)
        outputs = self.outputs[stage, name]
        graph.output(tuple(env[node] for node in outputs.values()))
        return Part(name, tuple(slots), tuple(outputs), Uncompiled(torch.nn.Module(), graph))

    def _copy(self, graph: Graph, node: Node, env: dict[Node, Node], slots: list[Slot]) -> Node:
        for source in node.all_input_nodes:
            if source not in env:
                env[source] = self._copy(graph, source, env, slots)  # a coordinate from another part
        if node.target is not markers.accumulate:
            return copy_node(graph, node, env.__getitem__)
        with graph.inserting_before(_first_call(graph)):
            total = _placeholder(graph, node, self.slots[node], slots)
        new = graph.call_function(torch.ops.aten.add.Tensor, (total, env[node_argument(node, 0)]))
        new.meta.update(node.meta)
        return new


def _first_call(graph: Graph) -> Node:
    return next((n for n in graph.nodes if n.op != "placeholder"), graph._root)


def _placeholder(graph: Graph, source: Node, slot: Slot, slots: list[Slot]) -> Node:
    node = graph.placeholder(str(slot).replace(":", "_").replace(".", "_"))
    node.meta.update(source.meta, slot=slot)
    slots.append(slot)
    return node
