"""A whole pipeline in one process: all stages and all ranks in lock-step, collectives as plain tensor operations.

    virtual = VirtualMesh(pipeline)
    virtual.load({Slot("param", "w"): w})                  # global tensors
    outputs = virtual.step({"tokens": tokens}, {"group0.lr": 1e-3})
    new_w = virtual.gather(Slot("param", "w"))             # checks that replicas are equal, too

A part's graph is interpreted node by node, each node for all ranks of the stage before the next: a *wide* value is the
list of its local tensors, by rank. This is what `verify` runs.

Invariants:
- padding holds NaN, or indices out of every range: no value may depend on it;
- the same plan (`plan_steps`) as on real ranks, the same order of the sum in every reduction;
- a `…_start` gives a value that only `wait` can read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from autopar import collectives
from autopar.errors import PlanError, VerificationError
from autopar.layout import Layout, padded, window
from autopar.mesh import Mesh
from autopar.program.executor import join_outputs, split_microbatches
from autopar.program.parts import Part, Pipeline, Slot, StageProgram, Value
from autopar.program.steps import ACROSS_STEPS, Call, Message, plan_steps, run_order
from autopar.randomness import random_keys

Wide = list[Any]
"""One value on all ranks of a stage."""

Observer = Callable[[int, str, int | None, Node, Wide], None]
"""`observe(stage, part, microbatch, node, wide)`: called with every value as it is made."""


class VirtualMesh:
    """All ranks of `pipeline`, in this process."""

    def __init__(self, pipeline: Pipeline, observe: Observer | None = None) -> None:
        self.pipeline, self.observe = pipeline, observe
        self.mesh = pipeline.mesh.spmd
        self.plans = plan_steps(pipeline)
        self._slots = [plan.slots for plan in self.plans]
        self._order = run_order(pipeline, self.plans)
        self._stores: list[dict[int, Wide]] = [{} for _ in pipeline.stages]
        self._spare: list[dict[Slot, Wide]] = [{} for _ in pipeline.stages]
        self._lockstep = Lockstep(self.mesh)

    # -- state ---------------------------------------------------------------------------------------------------
    def load(self, values: Mapping[Slot, Tensor]) -> None:
        """Shards global `param`, `buffer` and `state` tensors onto the ranks of each stage that has the slot."""
        for slot, value in values.items():
            stages = [stage for stage in self.pipeline.stages if slot in stage.values]
            if not stages:
                raise PlanError(f"{slot} is in no stage of the program")
            for stage in stages:
                self._put(stage.index, slot, self._shard(value, slot, stage.values[slot]))

    def gather(self, slot: Slot, rtol: float = 0.0, atol: float = 0.0) -> Tensor:
        """The global value of `slot`, of the first stage that has it.

        Replicas must be equal, bit for bit where no tolerance is given; `VerificationError` says where they aren't.
        """
        stage = next((stage for stage in self.pipeline.stages if slot in stage.values), None)
        wide = None if stage is None else self._get(stage.index, slot)
        if stage is None or wide is None:
            raise PlanError(f"{slot} has no value on the virtual mesh")
        return whole_value(wide, stage.values[slot].layout, self.mesh, str(slot), rtol, atol)

    def local(self, slot: Slot, stage: int) -> Wide:
        """The local tensors of `slot` on the ranks of `stage`."""
        wide = self._get(stage, slot)
        if wide is None:
            raise PlanError(f"{slot} has no value on stage {stage} of the virtual mesh")
        return wide

    def _shard(self, value: Tensor, slot: Slot, described: Value) -> Wide:
        layout = described.layout
        if tuple(value.shape) != layout.global_shape:
            raise PlanError(f"{slot}: got shape {tuple(value.shape)}, expected {layout.global_shape}")
        whole = value.detach().to(described.dtype)
        return [
            poisoned_shard(whole, layout, self.mesh, self.mesh.coordinates(rank)).clone()
            for rank in range(self.mesh.num_ranks)
        ]

    def _put(self, stage: int, slot: Slot, wide: Wide) -> None:
        cell = self.plans[stage].cells.get((slot, None))
        if cell is None:
            self._spare[stage][slot] = wide
        else:
            self._stores[stage][cell] = wide

    def _get(self, stage: int, slot: Slot) -> Wide | None:
        cell = self.plans[stage].cells.get((slot, None))
        return self._spare[stage].get(slot) if cell is None else self._stores[stage].get(cell)

    # -- a step --------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def step(
        self,
        batch: Mapping[str, Tensor],
        scalars: Mapping[str, float | Tensor] | None = None,
        keys: Sequence[Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """One optimizer step on the global batch of all microbatches; returns the global outputs by name.

        `keys`: what each microbatch's random ops draw from; by default those of step 0 with seed 0.
        """
        self._begin(batch, scalars or {}, keys or random_keys(0, 0, self.pipeline.microbatches))
        messages: dict[Message, Wide] = {}
        for stage, index in self._order:
            self._run(stage, self.plans[stage].calls[index], messages)
        outputs: dict[str, Tensor] = {}
        for program in self.pipeline.stages:
            outputs.update(self._outputs(program))
        return outputs

    def _begin(
        self, batch: Mapping[str, Tensor], scalars: Mapping[str, float | Tensor], keys: Sequence[Tensor]
    ) -> None:
        for stage, plan, store in zip(self.pipeline.stages, self.plans, self._stores, strict=True):
            pieces: dict[str, list[Tensor]] = {}
            for (slot, microbatch), cell in plan.cells.items():
                value = stage.values[slot]
                if slot.kind in ACROSS_STEPS and cell not in store:
                    raise PlanError(f"{slot} of stage {stage.index} has no value; load it before the first step")
                if slot.kind == "batch":
                    shape, count = value.layout.global_shape, self.pipeline.microbatches
                    if slot.name not in pieces:
                        pieces[slot.name] = list(split_microbatches(batch[slot.name], shape, count, slot.name))
                    store[cell] = self._shard(pieces[slot.name][microbatch or 0], slot, value)
                if slot.kind == "random":
                    store[cell] = [keys[microbatch or 0]] * self.mesh.num_ranks
                if slot.kind == "whole":
                    store[cell] = self._shard(batch[slot.name], slot, value)
                if slot.kind == "scalar":
                    scalar = torch.as_tensor(scalars[slot.name], dtype=value.dtype)
                    store[cell] = [scalar] * self.mesh.num_ranks
                if cell in plan.zeroed:
                    local = torch.zeros(value.layout.local_shape(self.mesh), dtype=value.dtype)
                    store[cell] = _apart(local, self.mesh.num_ranks)

    def _run(self, stage: int, call: Call, messages: dict[Message, Wide]) -> None:
        store, program = self._stores[stage], self.pipeline.stages[stage]
        for message, cell in call.receives:
            store[cell] = messages.pop(message)
        if call.part in program.parts:
            part = program.parts[call.part]
            results = self._interpret(program, part, call, [store[cell] for cell in call.inputs])
            for slot, cell, wide in zip(part.outputs, call.outputs, results, strict=True):
                self._check_shape(program, part, slot, wide)
                if cell >= 0:
                    store[cell] = wide
        for message, cell in call.sends:
            messages[message] = store[cell]
        for cell in call.frees:
            if self._slots[stage][cell].kind != "accumulator":  # these stay, so that gradients can be compared
                del store[cell]

    def _interpret(self, program: StageProgram, part: Part, call: Call, inputs: Sequence[Wide]) -> list[Wide]:
        def observe(node: Node, wide: Wide) -> None:
            if self.observe is not None:
                self.observe(program.index, part.name, call.microbatch, node, wide)

        return self._lockstep.run(part.graph, inputs, observe)

    def _check_shape(self, program: StageProgram, part: Part, slot: Slot, wide: Wide) -> None:
        expected = program.values[slot].layout.local_shape(self.mesh)
        for rank, local in enumerate(wide):
            if tuple(local.shape) != expected:
                raise VerificationError(
                    f"stage {program.index}, part {part.name}: {slot} has local shape {tuple(local.shape)} on rank "
                    f"{rank}, its layout {program.values[slot].layout} says {expected}"
                )

    def _outputs(self, stage: StageProgram) -> dict[str, Tensor]:
        plan, store = self.plans[stage.index], self._stores[stage.index]
        parts: dict[str, list[tuple[int, Tensor]]] = {}
        for (slot, microbatch), cell in plan.cells.items():
            if slot.kind == "output":
                wide, layout = store.pop(cell), stage.values[slot].layout
                whole = whole_value(wide, layout, self.mesh, f"{slot} of microbatch {microbatch}")
                parts.setdefault(slot.name, []).append((microbatch or 0, whole))
        return {name: join_outputs([t for _, t in sorted(found, key=lambda f: f[0])]) for name, found in parts.items()}


@dataclass(frozen=True, slots=True)
class Lockstep:
    """Interprets one graph for all ranks of `mesh` at once."""

    mesh: Mesh

    def run(self, module: GraphModule, inputs: Sequence[Wide], observe: Callable[[Node, Wide], None]) -> list[Wide]:
        """The graph's outputs on wide `inputs`, in order."""
        return self.run_graph(module.graph, inputs, observe, module)

    def run_graph(
        self,
        graph: Graph,
        inputs: Sequence[Wide],
        observe: Callable[[Node, Wide], None],
        root: torch.nn.Module | None = None,
    ) -> list[Wide]:
        """`run` of a graph whose constants (where it has any) are attributes of `root`."""
        env: dict[Node, Wide] = {}
        last_use = {used: node for node in graph.nodes for used in node.all_input_nodes}
        waiting = iter(inputs)
        for node in graph.nodes:
            if node.op == "output":
                return [self._arguments(argument, env) for argument in node.args[0]]
            env[node] = next(waiting) if node.op == "placeholder" else self._value(root, node, env)
            observe(node, env[node])
            for used in node.all_input_nodes:
                if last_use[used] is node:
                    del env[used]
        raise AssertionError("the graph has no output node")

    def _value(self, root: torch.nn.Module | None, node: Node, env: dict[Node, Wide]) -> Wide:
        ranks = range(self.mesh.num_ranks)
        if node.op == "get_attr":
            constant: Any = root
            for name in str(node.target).split("."):
                constant = getattr(constant, name)
            return [constant] * self.mesh.num_ranks
        arguments = [_at_rank((node.args, node.kwargs), env, rank) for rank in ranks]
        if node.op == "call_method":
            return [getattr(args[0], str(node.target))(*args[1:], **kwargs) for args, kwargs in arguments]
        assert node.op == "call_function", node.format_node()
        if node.target in _COLLECTIVES:
            return _COLLECTIVES[node.target](self.mesh, arguments)
        assert callable(node.target)
        return [node.target(*args, **kwargs) for args, kwargs in arguments]

    def _arguments(self, argument: Any, env: dict[Node, Wide]) -> Wide:
        return [_at_rank(argument, env, rank) for rank in range(self.mesh.num_ranks)]


def _at_rank(argument: Any, env: dict[Node, Wide], rank: int) -> Any:
    return map_arg(argument, lambda node: env[node][rank])


# -- collectives on wide values ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Started:
    """What a `…_start` gives: not a tensor, so that a forgotten `wait` shows."""

    value: Tensor


def _per_group(collective: Callable[..., list[Tensor]]) -> Callable[[Mesh, list[Any]], Wide]:
    """From a function of one group's tensors to one of wide arguments `(args, kwargs)`: (x, axis, …)."""

    def run(mesh: Mesh, arguments: list[Any]) -> Wide:
        wide: Wide = [None] * mesh.num_ranks
        args, kwargs = arguments[0]
        axis = kwargs.get("axis", args[1] if len(args) > 1 else None)
        rest = {key: value for key, value in kwargs.items() if key not in ("x", "axis")}
        xs = [args[0] if args else kwargs["x"] for args, kwargs in arguments]
        for group in mesh.groups(axis) if axis in mesh.names else [[rank] for rank in range(mesh.num_ranks)]:
            for rank, result in zip(group, collective([xs[rank] for rank in group], *args[2:], **rest), strict=True):
                wide[rank] = result
        return wide

    return run


def _apart(value: Tensor, count: int) -> list[Tensor]:
    """A tensor of its own for each rank: parts may overwrite what they were given."""
    return [value] + [value.clone() for _ in range(count - 1)]


def _dense(xs: list[Tensor]) -> list[Tensor]:
    """Contiguous, as they are sent: `cat` and sums would keep other strides, and the views that follow expect these."""
    return [x.contiguous() for x in xs]


def _all_gather(xs: list[Tensor], dim: int) -> list[Tensor]:
    return _apart(torch.cat(_dense(xs), dim), len(xs))


def _all_reduce(xs: list[Tensor], op: str = "sum", inplace: bool = False) -> list[Tensor]:
    return _apart(collectives.ordered_reduce(_dense(xs), op), len(xs))


def _reduce_scatter(xs: list[Tensor], dim: int, op: str = "sum") -> list[Tensor]:
    return [chunk.contiguous() for chunk in _all_reduce(xs, op)[0].chunk(len(xs), dim)]


def _all_to_all(xs: list[Tensor], split_dim: int, concat_dim: int) -> list[Tensor]:
    chunks = [x.chunk(len(xs), split_dim) for x in xs]
    return [torch.cat(_dense([chunk[j] for chunk in chunks]), concat_dim) for j in range(len(xs))]


def _shard(xs: list[Tensor], dim: int) -> list[Tensor]:
    return [x.chunk(len(xs), dim)[j] for j, x in enumerate(xs)]


def _wait(mesh: Mesh, arguments: list[Any]) -> Wide:
    pendings = [args[0] if args else kwargs["pending"] for args, kwargs in arguments]
    return [pending.value for pending in pendings]


def _coordinate(mesh: Mesh, arguments: list[Any]) -> Wide:
    args, kwargs = arguments[0]
    axis = args[0] if args else kwargs["axis"]
    return [mesh.coordinates(rank).get(axis, 0) for rank in range(mesh.num_ranks)]


def _window(index: int) -> Callable[[Mesh, list[Any]], Wide]:
    def run(mesh: Mesh, arguments: list[Any]) -> Wide:
        (size, *axes), _ = arguments[0]
        at = [mesh.coordinates(rank) for rank in range(mesh.num_ranks)]
        return [window(size, [(where.get(axis, 0), mesh.size(axis)) for axis in axes])[index] for where in at]

    return run


def _pad(mesh: Mesh, arguments: list[Any]) -> Wide:
    return [padded(x, tuple(sizes), _poison(x.dtype)) for (x, sizes), _ in arguments]


def _start(run: Callable[[Mesh, list[Any]], Wide]) -> Callable[[Mesh, list[Any]], Wide]:
    return lambda mesh, arguments: [_Started(value) for value in run(mesh, arguments)]


_NOW: dict[Any, Callable[[Mesh, list[Any]], Wide]] = {
    collectives.all_gather: _per_group(_all_gather),
    collectives.reduce_scatter: _per_group(_reduce_scatter),
    collectives.all_reduce: _per_group(_all_reduce),
    collectives.all_to_all: _per_group(_all_to_all),
}
_COLLECTIVES: dict[Any, Callable[[Mesh, list[Any]], Wide]] = {
    **_NOW,
    **{started: _start(_NOW[target]) for target, started in collectives.STARTED.items()},
    collectives.shard: _per_group(_shard),
    collectives.wait: _wait,
    collectives.pad: _pad,
    collectives.coordinate: _coordinate,
    collectives.first: _window(0),
    collectives.count: _window(1),
}


def _poison(dtype: torch.dtype) -> float:
    """What stands in padding: NaN; True, or an index out of every range, where there is none."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return 1 if dtype == torch.bool else min(torch.iinfo(dtype).max, 99999)


def poisoned_shard(whole: Tensor, layout: Layout, mesh: Mesh, at: dict[str, int]) -> Tensor:
    """The local tensor of the rank at `at`, with poison for padding: where a program reads any, it shows."""
    local = layout.shard(whole, mesh, at)
    if not layout.is_padded(mesh):
        return local
    content, fill = layout.content(local, mesh, at), _poison(local.dtype)
    return padded(content, layout.local_factor_shape(mesh), fill).reshape(local.shape)


def whole_value(wide: Wide, layout: Layout, mesh: Mesh, name: str, rtol: float = 0.0, atol: float = 0.0) -> Tensor:
    """The global value of all ranks' local tensors; raises `VerificationError` when replicas differ."""
    at = [mesh.coordinates(rank) for rank in range(mesh.num_ranks)]
    content = [layout.content(local, mesh, where) for local, where in zip(wide, at, strict=True)]
    _check_replicas(content, (*layout.split_axes, *dict(layout.partial)), mesh, name, rtol, atol)
    return layout.unshard(lambda at: wide[mesh.rank(at)], mesh)


def _check_replicas(
    wide: Wide, layout_axes: tuple[str, ...], mesh: Mesh, name: str, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Raises `VerificationError` when ranks that differ only along an axis not in `layout_axes` differ in value."""
    for axis in mesh.names:
        if axis in layout_axes:
            continue
        for group in mesh.groups(axis):
            for rank in group[1:]:
                a, b = wide[group[0]], wide[rank]
                if not (torch.equal(a, b) or torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)):
                    difference = (a.double() - b.double()).abs().max().item()
                    raise VerificationError(
                        f"{name}: ranks {group[0]} and {rank} along axis {axis!r} should hold the same values, "
                        f"they differ by up to {difference:.3g}"
                    )
