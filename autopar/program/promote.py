"""Every floating dtype and cast of a graph promoted to float64: what `verify` compares in.

Invariant: but for its dtypes the graph is the same; integer and bool values stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.node import map_aggregate

from autopar.capture.graphs import Uncompiled
from autopar.program.parts import Pipeline, StageProgram, Value
from autopar.rules.nodes import copy_graph


def promoted_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for every floating dtype, complex128 for every complex one."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def promoted(value: Tensor) -> Tensor:
    """A copy in the promoted dtype."""
    return value.detach().to(promoted_dtype(value.dtype), copy=True)


def promote_graph(module: GraphModule) -> GraphModule:
    """A copy of the graph whose dtype arguments and constants are promoted."""
    graph = promote_nodes(module.graph)
    root = torch.nn.Module()
    for name in {str(n.target) for n in graph.nodes if n.op == "get_attr"}:
        setattr(root, name, promoted(getattr(module, name)))
    return Uncompiled(root, graph)


def promote_nodes(nodes: Graph) -> Graph:
    """A copy of the graph whose dtype arguments are promoted; nodes keep what their `meta` holds."""
    graph, _ = copy_graph(nodes)
    for node in graph.nodes:
        given = (node.args, node.kwargs)
        changed: Any = map_aggregate(given, _promoted_argument)
        if changed != given:
            node.args, node.kwargs = changed
    return graph


def _promoted_argument(argument: Any) -> Any:
    return promoted_dtype(argument) if isinstance(argument, torch.dtype) else argument


def promote_pipeline(pipeline: Pipeline) -> Pipeline:
    """The pipeline over promoted graphs and values."""
    return replace(pipeline, stages=tuple(_promote_stage(stage) for stage in pipeline.stages))


def _promote_stage(stage: StageProgram) -> StageProgram:
    parts = {name: replace(part, graph=promote_graph(part.graph)) for name, part in stage.parts.items()}
    values = {slot: Value(promoted_dtype(value.dtype), value.layout) for slot, value in stage.values.items()}
    return replace(stage, parts=parts, values=values)


@contextlib.contextmanager
def default_float64() -> Iterator[None]:
    """What ops without a dtype argument make is float64 inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
