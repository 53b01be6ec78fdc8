"""The step graph: a whole optimizer step as one FX graph, from the captured gradient and update graphs.

    placeholders: param, buffer, batch, whole batch, random key, state, scalar
    prologue   relay(param), counts of the batch    once a step
    forward    relay(relay(param)), …, loss         each microbatch
    backward   …, accumulate(gradient)              each microbatch
    update     relay(accumulated), the optimizer    once a step
    output: loss, new buffers, gradient norm, new parameters, new optimizer state

Where gradients are clipped on several stages, `norm` stands before the update: see `clipping`.

Metadata of every node: `key` (unique, stable), `path`, `phase`, `level` ("step" or "microbatch"), `stage`, `val`,
`source`; placeholders also `role`, gradients (accumulated where there are several microbatches) `gradient_of`, what a
stage computes anew `is_anew`. The output node has `roles`, one per returned value.

Invariants:
- a parameter reaches the forward (backward) of a stage through one relay per step and one per microbatch;
- a value with several consumers in one phase of one stage reaches them through one relay;
- so does one that a stage's forward takes to a matmul, say, and its backward reads too: where the forward moves it, the
  backward's relay may read what was moved (`forward_twin`);
- what depends on no parameter is computed anew by each stage that needs it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.capture.graphs import Captured, Role
from autopar.capture.runs import Repeats
from autopar.clipping import clip_by_norm
from autopar.layers import Cut, block_of, homes_of, units_of
from autopar.markers import accumulate, relay
from autopar.rules.nodes import copy_graph, copy_node, is_pointwise, is_view, node_argument, op_name

_Place = tuple[str, str, int]
"""(phase, level, stage)"""


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The step graph with the pairs of (input, output) that must come back in one layout."""

    graph: Graph
    cut: Cut
    state_pairs: tuple[tuple[Node, Node], ...]
    repeats: Repeats = field(default_factory=Repeats)
    """Which layers stand for several."""

    def copied(self) -> StepGraph:
        """The same with a graph of its own, its nodes' metadata included."""
        graph, known = copy_graph(self.graph)
        pairs = tuple((known[a], known[b]) for a, b in self.state_pairs)
        return StepGraph(graph, self.cut, pairs, self.repeats)


def join(captured: Captured, microbatches: int, cut: Cut | None = None, repeats: Repeats | None = None) -> StepGraph:
    """Builds the step graph; without `cut` there is one stage, without `repeats` each layer stands for itself."""
    cut = cut or Cut.single(units_of(captured.gradient.graph)[0])
    return _Joiner(captured, microbatches, cut, repeats or Repeats()).build()


@dataclass(slots=True)
class _Joiner:
    captured: Captured
    microbatches: int
    cut: Cut
    repeats: Repeats
    graph: Graph = field(default_factory=Graph)
    env: dict[tuple[Node, int], Node] = field(default_factory=dict)
    inputs: dict[Role, Node] = field(default_factory=dict)
    relays: dict[tuple[Node, str, int], Node] = field(default_factory=dict)
    stage: dict[Node, int] = field(default_factory=dict)
    free: set[Node] = field(default_factory=set)
    last_input: Node | None = None

    def build(self) -> StepGraph:
        self._add_inputs()
        self._place()
        for node in self.captured.gradient.graph.nodes:
            if node.op == "call_function" and node not in self.free:
                self._copy(node, self.stage[node], node.meta["phase"])
        outputs, gradients = self._outputs()
        if self.captured.clip_norm is not None:
            gradients, norm = clip_by_norm(self.graph, gradients, self.captured.clip_norm)
            outputs.append((Role("output", "grad_norm"), norm))
        updated = self._update(gradients)
        pairs = tuple((self.inputs[role], value) for role, value in updated)
        outputs += updated
        final = self.graph.output(tuple(value for _, value in outputs))
        final.meta["roles"] = tuple(role for role, _ in outputs)
        self.graph.eliminate_dead_code()  # the sum of a tied gradient that is summed over stages once a step instead
        self._share_through_relays()
        _write_keys(self.graph, self.cut, self.repeats)
        return StepGraph(self.graph, self.cut, pairs, self.repeats)

    # -- inputs ------------------------------------------------------------------------------------------------
    def _add_inputs(self) -> None:
        for node in self.captured.gradient.graph.nodes:
            if node.op == "placeholder" and node.meta["role"].kind != "total":
                self._input(node.meta["role"], node)
        for node in self.captured.whole.graph.nodes if self.captured.whole is not None else ():
            if node.op == "placeholder" and node.meta["role"].kind == "batch":
                self._input(Role("whole", node.meta["role"].name), node)
        for name, index in self.captured.update_of.items():
            for node in self.captured.updates[index].graph.graph.nodes:
                role = node.meta.get("role") if node.op == "placeholder" else None
                if role is not None and role.kind == "state":
                    self._input(Role("state", f"{name}.{role.name}"), node)
                elif role is not None and role.kind == "scalar" and role not in self.inputs:
                    self._input(role, node)

    def _input(self, role: Role, like: Node) -> None:
        name = f"{role.kind}_{role.name}".replace(".", "_")
        node = self.graph.placeholder(name)
        level = "microbatch" if role.kind in ("batch", "random") else "step"
        node.meta.update(val=like.meta["val"], role=role, path=role.name, source="", phase="prologue", level=level)
        node.meta["stage"] = 0
        self.inputs[role] = self.last_input = node

    # -- stages ------------------------------------------------------------------------------------------------
    def _place(self) -> None:
        """Stages: forward nodes by unit, never before their inputs; backward nodes by unit, never after theirs."""
        graph = self.captured.gradient.graph
        _, unit = units_of(graph)
        paths = _unit_paths(self.cut)
        needs_parameter: set[Node] = set()
        for node in graph.nodes:
            if node.op == "placeholder" and node.meta["role"].kind == "param":
                needs_parameter.add(node)
            elif node.op == "call_function":
                sources = [n for n in node.all_input_nodes if n in needs_parameter]
                if sources or node.meta["phase"] == "backward":
                    needs_parameter.add(node)
                    self.stage[node] = self._stage_of(node, unit, paths)
                    if node.meta["phase"] == "forward" and node.meta.get("path"):
                        paths.setdefault(node.meta["path"], self.stage[node])
                elif self.cut.num_stages > 1:
                    self.free.add(node)
                else:
                    self.stage[node] = 0

    def _stage_of(self, node: Node, unit: dict[Node, int], paths: dict[str, int]) -> int:
        if self.cut.num_stages == 1:
            return 0
        if node.target is operator.getitem:
            return self.stage[node_argument(node, 0)]
        placed = [n for n in node.all_input_nodes if n in self.stage]
        if node.meta["phase"] == "forward":
            return max([self.cut.stages[unit[node]], *(self.stage[n] for n in placed)])
        gradients = [self.stage[n] for n in placed if n.meta["phase"] == "backward"]
        limit = min(gradients, default=self.cut.num_stages - 1)
        own = _stage_by_path(node.meta.get("path", ""), paths)
        if own is None:
            own = max((self.stage[n] for n in placed if n.meta["phase"] == "forward"), default=limit)
        return min(limit, own)

    # -- copying -----------------------------------------------------------------------------------------------
    def _copy(self, node: Node, stage: int, phase: str) -> Node:
        new = copy_node(self.graph, node, lambda n: self._resolve(n, stage, phase))
        new.meta.update(stage=stage, phase=phase, level="microbatch")
        self.env[node, stage] = new
        return new

    def _resolve(self, node: Node, stage: int, phase: str) -> Node:
        """What stands for `node` in a consumer of this stage and phase."""
        if node.op == "placeholder" and node.meta["role"].kind == "total":
            return self._total(node, stage)
        if node.op == "placeholder":
            value = self.inputs[node.meta["role"]]
            return self._parameter(value, stage, phase) if node.meta["role"].kind == "param" else value
        if node in self.free:
            if (node, stage) not in self.env:
                self._copy(node, stage, phase).meta["is_anew"] = True
            return self.env[node, stage]
        return self.env[node, self.stage[node]]

    def _total(self, total: Node, stage: int) -> Node:
        """What is made of the whole batch once a step, by each stage that needs it."""
        whole = self.captured.whole
        assert whole is not None
        env: dict[Node, Node] = {}
        for node in whole.graph.nodes:
            if node.op == "placeholder":
                role = node.meta["role"]
                env[node] = self.inputs[Role("whole", role.name) if role.kind == "batch" else role]
            elif node.op == "call_function":
                if (node, stage) not in self.env:
                    self.env[node, stage] = copy_node(self.graph, node, env.__getitem__)
                    self.env[node, stage].meta.update(stage=stage, phase="prologue", level="step")
                env[node] = self.env[node, stage]
        (made,) = (n.args[0] for n in whole.graph.nodes if n.op == "output")
        return env[made[int(total.meta["role"].name.removeprefix("total"))]]

    def _parameter(self, value: Node, stage: int, phase: str) -> Node:
        owner = min([stage, *(s for p, _, s in self.relays if p is value)])
        value.meta["stage"] = owner
        step = self.relays.get((value, "prologue", stage))
        if step is None:
            with self.graph.inserting_after(self.last_input):
                step = self._relay(value, "prologue", stage, "step")
            self.relays[value, "prologue", stage] = step
        if (value, phase, stage) not in self.relays:
            self.relays[value, phase, stage] = self._relay(step, phase, stage, "microbatch")
        return self.relays[value, phase, stage]

    def _relay(self, value: Node, phase: str, stage: int, level: str) -> Node:
        return self._call(relay, (value,), value, phase, stage, level)

    def _call(self, target: Any, args: tuple[Node, ...], like: Node, phase: str, stage: int, level: str) -> Node:
        node = self.graph.call_function(target, args)
        node.meta.update(val=like.meta["val"], path=like.meta["path"], source=like.meta.get("source", ""))
        node.meta.update(phase=phase, level=level, stage=stage, is_anew=like.meta.get("is_anew", False))
        return node

    # -- outputs and update ------------------------------------------------------------------------------------
    def _outputs(self) -> tuple[list[tuple[Role, Node]], dict[str, Node]]:
        outputs: list[tuple[Role, Node]] = []
        gradients: dict[str, Node] = {}
        (returned,) = next(n for n in self.captured.gradient.graph.nodes if n.op == "output").args
        for role, node in zip(self.captured.gradient_outputs, returned, strict=True):
            if role.kind == "grad":
                gradients[role.name] = self._gradient(role.name, node)
            else:
                outputs.append((role, self._resolve(node, self.stage.get(node, 0), "forward")))
        return outputs, gradients

    def _gradient(self, name: str, node: Node) -> Node:
        """The step's gradient: accumulated where it is made, and summed over stages once a step."""
        parameter = self.inputs[Role("param", name)]
        owner = parameter.meta["stage"]
        phase = "norm" if self.captured.clip_norm is not None and self.cut.num_stages > 1 else "update"
        parts = [self._accumulated(n, parameter) for n in self._summands(node)]
        total = parts[0]
        for part in parts[1:]:
            total = self._call(torch.ops.aten.add.Tensor, (total, part), total, phase, owner, "step")
        total = self._cast(total, self._gradient_dtype(parameter), phase, owner, "step")
        return self._relay(total, phase, owner, "step")

    def _gradient_dtype(self, parameter: Node) -> torch.dtype:
        """What the optimizer's template takes gradients in: fp32 for bf16 parameters with fp32 masters."""
        template = self.captured.updates[self.captured.update_of[parameter.meta["role"].name]]
        grad = next(n for n in template.graph.graph.nodes if n.op == "placeholder" and n.meta["role"].kind == "grad")
        dtype: torch.dtype = grad.meta["val"].dtype
        return dtype

    def _cast(self, value: Node, dtype: torch.dtype, phase: str, stage: int, level: str) -> Node:
        if value.meta["val"].dtype == dtype:
            return value
        cast = self._call(torch.ops.aten._to_copy.default, (value,), value, phase, stage, level)
        cast.kwargs = {"dtype": dtype}
        with value.meta["val"].fake_mode:
            cast.meta["val"] = value.meta["val"].to(dtype)
        return cast

    def _accumulated(self, node: Node, parameter: Node) -> Node:
        value = self.env[node, self.stage[node]]
        if self.microbatches > 1:
            if not self.captured.narrow_sums:
                dtype = self._gradient_dtype(parameter)
                value = self._cast(value, dtype, "backward", value.meta["stage"], "microbatch")
            value = self._call(accumulate, (value,), value, "backward", value.meta["stage"], "microbatch")
            value.meta["path"] = parameter.meta["path"]
        value.meta["gradient_of"] = parameter.meta["role"].name
        return value

    def _summands(self, node: Node) -> list[Node]:
        """A gradient that several stages add to (tied weights) as one summand per stage."""
        is_sum = node.target is torch.ops.aten.add.Tensor and not node.kwargs and len(node.users) == 1
        inputs = node.all_input_nodes
        if is_sum and len(inputs) == 2 and len({self.stage.get(n) for n in inputs}) > 1:
            return [leaf for n in inputs for leaf in self._summands(n)]
        return [node]

    def _update(self, gradients: dict[str, Node]) -> list[tuple[Role, Node]]:
        outputs: list[tuple[Role, Node]] = []
        for name, index in self.captured.update_of.items():
            template = self.captured.updates[index]
            parameter = self.inputs[Role("param", name)]
            env: dict[Node, Node] = {}
            for node in template.graph.graph.nodes:
                if node.op == "placeholder":
                    env[node] = self._update_input(node.meta["role"], name, gradients)
                elif node.op == "call_function":
                    env[node] = copy_node(self.graph, node, env.__getitem__)
                    env[node].meta.update(path=name, phase="update", level="step", stage=parameter.meta["stage"])
                elif node.op == "output":
                    for role, value in zip(template.output_roles, node.args[0], strict=True):
                        full = Role("param", name) if role.kind == "param" else Role("state", f"{name}.{role.name}")
                        outputs.append((full, env[value]))
        for role, _ in outputs:
            self.inputs[role].meta["stage"] = self.inputs[Role("param", _parameter_name(role))].meta["stage"]
        return outputs

    def _update_input(self, role: Role, parameter: str, gradients: dict[str, Node]) -> Node:
        if role.kind == "grad":
            return gradients[parameter]
        if role.kind == "scalar":
            return self.inputs[role]
        name = parameter if role.kind == "param" else f"{parameter}.{role.name}"
        return self.inputs[Role(role.kind, name)]

    # -- relays ------------------------------------------------------------------------------------------------
    def _share_through_relays(self) -> None:
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        for node in list(self.graph.nodes):
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or value.numel() < 2 or node.target is relay or _is_count(node):
                continue
            groups: dict[_Place, list[Node]] = {}
            for user in sorted(node.users, key=order.__getitem__):
                if user.op == "call_function" and not (user.target is relay and user.meta["phase"] == "prologue"):
                    groups.setdefault(tuple(user.meta[k] for k in ("phase", "level", "stage")), []).append(user)
            for (phase, level, stage), users in groups.items():
                if len(users) > 1 or (node.op == "call_function" and _is_read_again(groups, (phase, level, stage))):
                    with self.graph.inserting_before(users[0]):
                        shared = self._relay(node, phase, stage, level)
                    for user in users:
                        user.replace_input_with(node, shared)


def forward_twin(node: Node) -> Node | None:
    """The relay that brings what the backward relay `node` passes on to the forward of the same stage."""
    if node.target is not relay or node.meta["phase"] != "backward":
        return None
    value = node_argument(node, 0)
    if value.op != "call_function" or value.meta["level"] != "microbatch":
        return None
    return relay_to("forward", node.meta["stage"], value)


def relay_to(phase: str, stage: int, value: Node) -> Node | None:
    """The relay that brings a value to a phase of a stage."""
    users = (user for user in value.users if user.target is relay)
    return next((user for user in users if (user.meta["phase"], user.meta["stage"]) == (phase, stage)), None)


def _is_count(node: Node) -> bool:
    """Whether a value is the whole batch, or on the way from it to a total: too little to be moved."""
    is_whole = node.op == "placeholder" and node.meta["role"].kind == "whole"
    return is_whole or (node.op == "call_function" and node.meta["phase"] == "prologue")


def _is_read_again(groups: Mapping[_Place, Sequence[Node]], place: _Place) -> bool:
    """Whether a stage's forward may move a value before it uses it, and its backward reads that value, too."""
    phase, level, stage = place
    forward, backward = (groups.get((p, "microbatch", stage), ()) for p in ("forward", "backward"))
    return level == "microbatch" and phase != "update" and bool(backward) and not all(map(_follows, forward))


def _follows(node: Node) -> bool:
    """Whether an op takes its operand in whatever layout that has."""
    return is_pointwise(node.target) or is_view(node)


def _parameter_name(role: Role) -> str:
    return role.name if role.kind == "param" else role.name.rpartition(".")[0]


def _unit_paths(cut: Cut) -> dict[str, int]:
    return dict(zip(cut.units, cut.stages, strict=True))


def _stage_by_path(path: str, paths: dict[str, int]) -> int | None:
    """The stage of the longest unit that is a prefix of the module path."""
    while path:
        if path in paths:
            return paths[path]
        path = path.rpartition(".")[0]
    return None


def _write_keys(graph: Graph, cut: Cut, repeats: Repeats) -> None:
    """Nodes that run between layers are numbered anew in each: a layer's keys don't depend on what precedes it. What
    several stages compute, each for itself, is numbered anew on each that isn't its layer's: `cos/forward#0`, then
    `#0@1`."""
    counts: Counter[tuple[str, int]] = Counter()
    first: dict[str, int] = {}
    homes, stages = homes_of(graph), _unit_paths(cut)
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["key"] = f"{node.meta['role'].kind}:{node.meta['role'].name}"
        elif node.op == "call_function":
            path, home, stage = node.meta.get("path", ""), homes[node], node.meta["stage"]
            where = path if block_of(path) or not home else f"{home}:{path}"
            if node.meta.get("is_anew") and stages.get(home, stage) != stage:
                first.setdefault(f"{where}/{op_name(node)}/{node.meta['phase']}", -1)
                home = ""
            base = f"{where}/{op_name(node)}/{node.meta['phase']}"
            stage = -1 if home else stage
            on_stage = "" if first.setdefault(base, stage) == stage else f"@{repeats.first_stage(stage)}"
            node.meta["key"] = f"{base}#{counts[base, stage]}{on_stage}"
            counts[base, stage] += 1
