"""The forward and the backward of one op as a graph: traced, made functional and cleaned as a step's is."""

from __future__ import annotations

import random
from collections import Counter

import torch
from torch import Tensor
from torch.fx import Graph

from autopar import private
from autopar.capture.clean import clean
from autopar.capture.gradient import _mutates
from autopar.capture.graphs import Role
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.program.promote import default_float64, promote_nodes
from autopar.rules.annotate import annotate_factors
from autopar.rules.examples import Example
from autopar.rules.experiment import difference
from autopar.rules.nodes import op_name, tensor_operands
from autopar.rules.prove import draw
from passes.context import Context
from passes.insert_moves import insert_moves
from passes.lay_out import lay_out
from passes.localise_shapes import localise_graph
from tests.passes.small_graphs import executed
from tests.virtual.random_plans import random_choices, resharder_of

_PLACE = {"path": "", "source": "", "level": "step", "stage": 0, "phase": "forward"}


def joint_graph(example: Example) -> Graph | None:
    """Results and gradients of the example's floating operands; None where the op has no gradient."""
    node = example.node()
    operands = list(dict.fromkeys(tensor_operands(node)))
    mode = private.new_fake_mode()

    def joint(*values: Tensor) -> list[Tensor]:
        env = {o: v.requires_grad_() if v.is_floating_point() else v for o, v in zip(operands, values, strict=False)}
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        result = example.target(*args, **kwargs)
        results = [r for r in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(r, Tensor)]
        sources = [value for value in env.values() if value.requires_grad]
        outs = [r for r in results if r.requires_grad and r.is_floating_point()]
        if not outs:
            return []
        loss = sum((out * out).sum() for out in outs)  # a gradient that differs from element to element
        gradients = torch.autograd.grad(loss, sources, allow_unused=True)
        return [*(r.detach() for r in results), *(g for g in gradients if g is not None)]

    fakes = [private.cpu_fake(mode, torch.empty(o.meta["val"].shape, dtype=o.meta["val"].dtype)) for o in operands]
    with mode:
        traced = private.trace(joint, fakes)
    graph = clean(private.functionalize(traced, mode) if _mutates(traced) else traced, mode).graph
    return _annotated(graph) if _outputs(graph) else None


def _outputs(graph: Graph) -> list:
    output = next(n for n in graph.nodes if n.op == "output")
    return list(output.args[0])


def _annotated(graph: Graph) -> Graph:
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta.update(role=Role("batch", node.name), key=f"batch:{node.name}")
        elif node.op == "call_function":
            node.meta["key"] = f"{op_name(node)}#{counts[op_name(node)]}"
            counts[op_name(node)] += 1
        elif node.op == "output":
            values = tuple(node.args[0])
            node.args, node.meta["roles"] = (values,), tuple(Role("output", f"out{i}") for i in range(len(values)))
        node.meta.update(_PLACE)
    annotate_factors(graph)
    return graph


def differences(graph: Graph, example: Example, mesh: Mesh, seed: int) -> list[float]:
    """How far each output of the graph under random choices is from the whole graph's, in float64."""
    places = [n for n in graph.nodes if n.op == "placeholder"]
    generator = torch.Generator().manual_seed(seed)
    with default_float64():
        drawn = draw(example.node(), example.samples[0], generator)
        inputs = {place.name: value for place, value in zip(places, drawn, strict=True)}
        whole = torch.fx.Interpreter(torch.nn.Module(), graph=promote_nodes(graph)).run(*inputs.values())
        choices = random_choices(graph, mesh, random.Random(seed))
        context = Context(mesh, 1, choices, (), resharder_of(mesh))
        insert_moves(lay_out(graph, context), context)
        layouts = [Layout.whole(value.meta["layout"].factor_sizes) for value in _outputs(graph)]
        got = executed(promote_nodes(localise_graph(graph, mesh)), mesh, inputs, layouts)
    return [difference(a, b) for a, b in zip(got, whole, strict=True)]
