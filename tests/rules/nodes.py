"""FX nodes to prove rules on: one op between placeholders, from a call written down with meta tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An operand: nothing but shape and dtype."""
    return torch.empty(shape, dtype=dtype, device="meta")


def index(*shape: int) -> Tensor:
    return t(*shape, dtype=torch.int64)


def mask(*shape: int) -> Tensor:
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
