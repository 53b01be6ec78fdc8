"""What capture yields: the step as graphs, and what each placeholder and output stands for.

    captured = TrainStep(model, batch).capture()
    [node.meta["role"] for node in captured.gradient.graph.nodes if node.op == "placeholder"]
    # [Role("param", "wte.weight"), …, Role("buffer", "mask"), Role("batch", "tokens")]

Documented `node.meta` keys of a captured graph (nothing else is kept):

| key      | type                        | meaning                                                      |
|----------|-----------------------------|--------------------------------------------------------------|
| `val`    | fake tensor(s) or None      | global shape, dtype and strides                              |
| `path`   | str                         | module path, "" at the root                                  |
| `phase`  | str                         | "forward", "backward" or "update"                            |
| `source` | str                         | the user's line, "model.py:41", or ""                        |
| `key`    | str                         | stable and unique: "model.layers.0.mlp.up_proj/linear/forward#0" |
| `role`   | Role                        | placeholders only                                            |

Invariants:
- graphs are functional and free of dead code; placeholders come in the order params, buffers, batch, random key;
- a graph without random ops has no random key;
- a parameter under several names has one: the first of `named_parameters()`.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.private import OpOverload, size_expression


class Uncompiled(fx.GraphModule):
    """A graph with its constants that is only read: nobody calls it, so no Python is generated for it."""

    def recompile(self) -> Any:
        """Nothing; `fx.GraphModule` calls this whenever it is given a graph."""


@dataclass(frozen=True, slots=True, order=True)
class Role:
    """What a placeholder or an output is.

    kind: param | buffer | batch | random | total | whole | grad | state | scalar | loss | output. In an update
    template the names of param and grad are "", those of state are bare keys ("exp_avg"); in a whole step, state is
    "wte.weight.exp_avg".
    """

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


RANDOM_KEY = Role("random", "key")
"""The int64 scalar that a microbatch's random ops draw from: `randomness.microbatch_key(seed, step, microbatch)`."""


@dataclass(frozen=True, slots=True)
class StateInit:
    """How one optimizer state entry starts: filled with `fill`, or (None) a copy of the parameter in `dtype`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float | None = 0.0

    def build(self, parameter: Tensor) -> Tensor:
        """The initial value; `parameter` may be a shard if this entry has the parameter's shape."""
        if self.fill is None:
            return parameter.detach().to(self.dtype, copy=True)
        shape = parameter.shape if self.shape and self.shape == tuple(parameter.shape) else self.shape
        return torch.full(shape, self.fill, dtype=self.dtype, device=parameter.device if self.shape else "cpu")


@dataclass(frozen=True, slots=True)
class UpdateGraph:
    """The optimizer's step for one parameter template (shape, dtype, group).

    Placeholders: param, grad, state:<key>…, scalar:<group.key>…; outputs, a tuple in the order of `output_roles`:
    param, state:<key>….
    """

    graph: fx.GraphModule
    output_roles: tuple[Role, ...]


@dataclass(frozen=True, slots=True)
class Captured:
    """One optimizer step: the gradient graph of a microbatch, and the update templates."""

    gradient: fx.GraphModule
    gradient_outputs: tuple[Role, ...]
    """loss, then grad per updated parameter (shares of the whole batch's), then the new values of changed buffers."""
    updates: tuple[UpdateGraph, ...] = ()
    update_of: dict[str, int] = field(default_factory=dict)
    """parameter → index into `updates`; frozen and unused parameters are absent."""
    scalars: dict[str, float] = field(default_factory=dict)
    """"group0.lr", "group0.betas.0" → value at capture; inputs of the update."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """"group0" → the entries of the param group, as JSON has them; what isn't in `scalars` is part of the templates."""
    initial_state: dict[str, dict[str, StateInit]] = field(default_factory=dict)
    whole: fx.GraphModule | None = None
    """The whole batch → the `total` placeholders of `gradient`, in their order: counts of its tokens, once a step."""
    averaged: tuple[str, ...] = ()
    """Lines of the loss's terms that are averaged over microbatches, not computed over the whole batch."""
    clip_norm: float | None = None
    """What the norm of all gradients together is clipped to, before the updates."""
    narrow_sums: bool = False
    """Whether gradients are summed over microbatches in their own dtype, not in that which the optimizer takes."""
    constants: dict[str, Tensor] = field(default_factory=dict)
    """Values of `buffer` placeholders that the model doesn't own: constants made in the forward ("_constant0")."""

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """The gradient graph, then the update templates."""
        return (self.gradient.graph, *(update.graph.graph for update in self.updates))


# -- reading graphs --------------------------------------------------------------------------------------------------


def placeholders(graph: fx.GraphModule) -> dict[Role, fx.Node]:
    """The placeholders by role, in order."""
    return {node.meta["role"]: node for node in graph.graph.nodes if node.op == "placeholder"}


def outputs(graph: fx.GraphModule) -> tuple[Any, ...]:
    """The items of the flat output tuple."""
    return tuple(next(iter(reversed(graph.graph.nodes))).args[0])


def op_name(node: fx.Node) -> str:
    """ "linear" for `autopar::linear`, "view" for `aten::view`."""
    target: Any = node.target
    if isinstance(target, OpOverload):
        return str(target.overloadpacket.__name__)
    name = str(getattr(target, "__name__", target))
    return name if name == "getitem" else f"python.{name}"


def assign_keys(graph: fx.Graph) -> None:
    """Sets `meta["key"]` of every node: path/op/phase#occurrence, or the role of a placeholder."""
    seen: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["key"] = str(node.meta["role"])
            continue
        if node.op == "output":
            node.meta["key"] = "output"
            continue
        stem = f"{node.meta['path']}/{op_name(node)}/{node.meta['phase']}"
        node.meta["key"] = f"{stem}#{seen[stem]}"
        seen[stem] += 1


# -- hashing ---------------------------------------------------------------------------------------------------------


def graph_hash(captured: Captured) -> str:
    """A text that is equal for equal steps, in every process: ops, arguments, shapes, dtypes, paths and roles."""
    digest = hashlib.sha256()
    for line in _lines(captured):
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def graph_text(graph: fx.GraphModule) -> str:
    """One line a node, without names: what `graph_hash` hashes, and what golden tests diff."""
    return "\n".join(_graph_lines(graph.graph))


def _lines(captured: Captured) -> Iterator[str]:
    yield from _graph_lines(captured.gradient.graph)
    yield " ".join(map(str, captured.gradient_outputs))
    if captured.whole is not None:
        yield from _graph_lines(captured.whole.graph)
    for update in captured.updates:
        yield from _graph_lines(update.graph.graph)
        yield " ".join(map(str, update.output_roles))
    yield repr(sorted(captured.update_of.items()))
    yield repr(sorted(captured.scalars))
    yield repr(sorted((name, sorted(state.items())) for name, state in captured.initial_state.items()))
    if captured.clip_norm is not None:
        yield f"clip_norm {captured.clip_norm!r}"
    if captured.narrow_sums:
        yield "narrow_sums"
    for name, value in sorted(captured.constants.items()):
        yield f"{name} {value.dtype} {value.tolist()}"


def _graph_lines(graph: fx.Graph) -> Iterator[str]:
    index = {node: i for i, node in enumerate(graph.nodes)}
    for node, i in index.items():
        described = fx.node.map_arg((node.args, node.kwargs), lambda other: f"%{index[other]}")
        target = node.target if node.op == "call_function" else node.op
        where = node.meta.get("key", "")
        yield re.sub(
            r" at 0x[0-9a-f]+", "", f"%{i} = {target} {described} : {_value_text(node.meta.get('val'))} {where}"
        )


def _value_text(value: Any) -> str:
    if isinstance(value, Tensor):
        sizes = " ".join(str(size_expression(size)) for size in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_value_text, value)) + ")"
    return "-" if value is None else str(value)
