"""A call that proves a rule, written down with operands that are nothing but shape and dtype.

    call(aten.mm.default, t(6, 4), t(4, 12))

A size is divisible by 2 and by 3 where a factor of it should split both ways; sizes are distinct, so that dims that are
confused show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from autopar import composites, random_ops
from autopar.rules.prove import Sample, random_value, ties

aten, own = torch.ops.aten, torch.ops.autopar
assert composites.LOWERED and random_ops.LOWERED  # imported for its registration

bf16, f32, f64, c64 = torch.bfloat16, torch.float32, torch.float64, torch.complex64
i8, i32, i64 = torch.int8, torch.int32, torch.int64

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """One call; `has_values` is False where the result's values are not defined (`aten.empty`).

    `samples` draw its operands: an op may take nothing but definite matrices, or probabilities.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_values: bool = True
    samples: tuple[Sample, ...] = (random_value, ties)

    def node(self) -> Node:
        """The call as a node between placeholders."""
        return node_of(self.target, *self.args, **self.kwargs)

    def __str__(self) -> str:
        words = [str(list(a.shape)) if isinstance(a, Tensor) else str(a) for a in self.args]
        return f"{self.target}({', '.join(words)})"


Examples = dict[str, list[Example]]
"""Examples by the row that they prove."""


def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Example:
    """The example `target(*args, **kwargs)`."""
    return Example(target, args, kwargs)


def undefined(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Example:
    """An example whose result has a shape, but no defined values."""
    return Example(target, args, kwargs, has_values=False)


def drawn(sample: Sample, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Example:
    """An example whose operands come from `sample` alone."""
    return Example(target, args, kwargs, samples=(sample,))


def definite(operand: Node, generator: torch.Generator) -> Tensor:
    """Symmetric positive definite matrices."""
    value = random_value(operand, generator)
    if value.dim() < 2 or value.shape[-1] != value.shape[-2]:
        return value
    return value @ value.mT + torch.eye(value.shape[-1])


def factored(operand: Node, generator: torch.Generator) -> Tensor:
    """Definite matrices, and pivots that exchange nothing: 1, 2, …"""
    value = operand.meta["val"]
    if value.dtype.is_floating_point:
        return definite(operand, generator)
    return torch.arange(1, value.shape[-1] + 1, dtype=value.dtype).expand(value.shape).clone()


def ascending(operand: Node, generator: torch.Generator) -> Tensor:
    """Values that ascend along the last dim, as boundaries do."""
    return random_value(operand, generator).sort(-1).values


def unit(operand: Node, generator: torch.Generator) -> Tensor:
    """Probabilities, well inside (0, 1)."""
    return torch.rand(tuple(operand.meta["val"].shape), generator=generator, dtype=f64) * 0.8 + 0.1


def t(*shape: int, dtype: torch.dtype = f32) -> Tensor:
    """An operand: nothing but shape and dtype."""
    return torch.empty(shape, dtype=dtype, device="meta")


def index(*shape: int) -> Tensor:
    """An operand of indices."""
    return t(*shape, dtype=i64)


def mask(*shape: int) -> Tensor:
    """An operand of booleans."""
    return t(*shape, dtype=torch.bool)


def node_of(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """The node `target(*args, **kwargs)`; a tensor that stands twice becomes one placeholder."""
    graph, mode = Graph(), FakeTensorMode()
    places: dict[int, Node] = {}

    def place(argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        if id(argument) not in places:
            node = graph.placeholder(f"x{len(places)}")
            with mode:
                node.meta["val"] = torch.empty(argument.shape, dtype=argument.dtype)
            places[id(argument)] = node
        return places[id(argument)]

    node_args, node_kwargs = pytree.tree_map(place, (args, kwargs))
    node = graph.call_function(target, node_args, node_kwargs)
    values = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode:
        node.meta["val"] = target(*values[0], **values[1])
    node.meta.update(path="", source="", phase="forward", level="step", stage=0)
    return node
