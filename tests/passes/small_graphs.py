"""Small step graphs for tests of passes: traced from a function, with choices given as text by op."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.capture.graphs import Role
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.program.virtual import Lockstep
from autopar.reshard import Resharder
from autopar.rules.annotate import annotate_factors
from autopar.rules.choices import parse_choice
from autopar.rules.nodes import op_name
from passes.context import Context


def step_graph(function: Callable[..., Any], inputs: Mapping[str, Tensor]) -> Graph:
    """The annotated graph of `function(**inputs)`; inputs are batch roles, outputs are named out0, out1, …"""
    module = make_fx(lambda *values: function(*values), tracing_mode="fake")(*inputs.values())
    graph = module.graph
    graph.eliminate_dead_code()
    counts: Counter[str] = Counter()
    for node, name in zip((n for n in graph.nodes if n.op == "placeholder"), inputs, strict=True):
        node.meta.update(role=Role("batch", name), key=f"batch:{name}", phase="prologue")
    for node in graph.nodes:
        if node.op == "call_function":
            base = op_name(node)
            node.meta.update(key=f"{base}#{counts[base]}", phase="forward")
            counts[base] += 1
        node.meta.update(path="", source="", level="step", stage=0)
    output = next(n for n in graph.nodes if n.op == "output")
    values = output.args[0] if isinstance(output.args[0], (tuple, list)) else (output.args[0],)
    output.args = (tuple(values),)
    output.meta["roles"] = tuple(Role("output", f"out{i}") for i in range(len(values)))
    annotate_factors(graph)
    return graph


def context_of(graph: Graph, mesh_text: str, choices: Mapping[str, str]) -> Context:
    """Choices by key; nodes that aren't named split nothing."""
    mesh = Mesh.parse(mesh_text)
    keys = {node.meta["key"] for node in graph.nodes if node.op != "output" and node.target is not operator.getitem}
    assert set(choices) <= keys, set(choices) - keys
    parsed = {
        node.meta["key"]: parse_choice(node.meta["rule"], choices.get(node.meta["key"], ""))
        for node in graph.nodes
        if "rule" in node.meta
    }
    return Context(mesh, 1, parsed, (), Resharder(mesh, lambda _kind, _axis, size: 1e-6 + size * 1e-9))


def executed(graph: Graph, mesh: Mesh, inputs: Mapping[str, Tensor], layouts: list[Layout]) -> list[Tensor]:
    """Runs a localised graph on all ranks; the global values of its outputs, which have `layouts`."""
    places = [node for node in graph.nodes if node.op == "placeholder"]
    wide = [
        [node.meta["layout"].shard(value, mesh, mesh.coordinates(rank)).contiguous() for rank in range(mesh.num_ranks)]
        for node, value in zip(places, inputs.values(), strict=True)
    ]
    results = Lockstep(mesh).run(GraphModule(torch.nn.Module(), graph), wide, lambda _node, _wide: None)
    return [
        layout.unshard(lambda at, value=value: value[mesh.rank(at)], mesh)
        for layout, value in zip(layouts, results, strict=True)
    ]


def named(graph: Graph, key: str) -> Node:
    return next(node for node in graph.nodes if node.meta.get("key") == key)


def kinds(graph: Graph) -> list[str]:
    """The names of the called functions, in order."""
    return [op_name(node) for node in graph.nodes if node.op == "call_function"]
