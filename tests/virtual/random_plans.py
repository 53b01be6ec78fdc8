"""Random valid plans: at each node a random choice whose operands can be had, then lowered to a pipeline."""

from __future__ import annotations

import math
import operator
import random
from dataclasses import replace
from typing import Any

from torch.fx import Graph, Node

import passes
from autopar.capture.step import TrainStep
from autopar.compiling import annotated
from autopar.layers import Cut, units_of
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.program.generators import one_f_one_b
from autopar.program.parts import Pipeline
from autopar.program.verify import Difference, _program_against_captured
from autopar.reshard import Resharder
from autopar.rules.choices import Choice, enumerate_choices, operand_layouts, result_layouts
from autopar.rules.nodes import result_values, tensor_operands
from passes.context import Context
from tests.virtual.step_models import weights_of

STEPS = 2


def resharder_of(mesh: Mesh) -> Resharder:
    return Resharder(mesh, lambda _kind, _axis, num_bytes: 1e-5 + num_bytes * 1e-9)


def random_choices(graph: Graph, mesh: Mesh, rng: random.Random) -> dict[str, Choice]:
    """A choice for every node of an annotated step graph; buffers and scalars stay whole."""
    resharder = resharder_of(mesh)
    layouts: dict[Node, Any] = {}
    choices: dict[str, Choice] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.target is operator.getitem:
            layouts[node] = layouts[node.args[0]][node.args[1]]
            continue
        key = node.meta["key"]
        choices[key] = _random_choice(node, mesh, resharder, layouts, rng)
        results = iter(result_layouts(node.meta["rule"], choices[key]))
        several = isinstance(node.meta["val"], (tuple, list))
        laid_out = [None if value is None else next(results) for value in result_values(node)]
        layouts[node] = tuple(laid_out) if several else laid_out[0]
    return choices


def _random_choice(
    node: Node, mesh: Mesh, resharder: Resharder, layouts: dict[Node, Any], rng: random.Random
) -> Choice:
    if node.op != "call_function" and node.meta["role"].kind in ("scalar", "buffer", "whole"):
        return ()
    options = enumerate_choices(node.meta["rule"], mesh, allow_partial=node.op == "call_function")
    rng.shuffle(options)
    for choice in options:
        needed = operand_layouts(node.meta["rule"], choice)
        if all(_can(resharder, layouts[o], layout) for o, layout in zip(tensor_operands(node), needed, strict=True)):
            return choice
    raise AssertionError(f"{node.meta['key']}: no choice has its operands")


def _can(resharder: Resharder, source: Layout, target: Layout) -> bool:
    return resharder.cost_s(source, target, 4) < math.inf


def even_cut(step: TrainStep, num_stages: int) -> Cut:
    units, _ = units_of(step.capture().gradient.graph)
    if num_stages == 1:
        return Cut.single(units)
    assert len(units) >= num_stages, units
    return Cut.from_boundaries(units, [round(s * len(units) / num_stages) for s in range(num_stages)])


def random_pipeline(
    step: TrainStep, mesh: Mesh, seed: int, part_passes: tuple[Any, ...] = passes.PART_PASSES
) -> Pipeline:
    graph = annotated(step.capture(), step.microbatches, even_cut(step, mesh.num_stages))
    choices = random_choices(graph.graph, mesh, random.Random(seed))
    context = Context(mesh, step.microbatches, choices, graph.state_pairs, resharder_of(mesh))
    pipeline = passes.lower(graph.graph, context, part_passes)
    return replace(pipeline, schedule=one_f_one_b(mesh.num_stages, step.microbatches))


def differences(step: TrainStep, pipeline: Pipeline, num_steps: int = STEPS) -> list[Difference]:
    """Every comparison of the program with the captured step, in float64."""
    return _program_against_captured(step, step.capture(), pipeline, weights_of(step), num_steps)


def wrong(step: TrainStep, pipeline: Pipeline, num_steps: int = STEPS) -> list[str]:
    found = differences(step, pipeline, num_steps)
    assert len(found) > num_steps * len(step.trainable_names)
    return [str(difference) for difference in found if not difference.ok]
