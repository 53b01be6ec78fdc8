"""compile: a step and a plan → an executable program.

    program = compile(step, plan)

Invariant: the plan decides everything; the same step and plan give the same program.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import replace

from autopar.capture.graphs import Captured, graph_hash
from autopar.capture.runs import Repeats
from autopar.capture.step import ForwardStep, TrainStep
from autopar.cluster.cluster import Cluster
from autopar.cluster.collectives import cost_lines, least_s
from autopar.cluster.mesh_layout import axis_link
from autopar.cluster.nccl import Line
from autopar.errors import LayersDifferError, VerificationError
from autopar.garbage import collected_seldom
from autopar.joint import StepGraph, join
from autopar.key_globs import matches_any
from autopar.layers import Cut, units_of
from autopar.mesh import PIPELINE_AXIS, Mesh
from autopar.plans import Plan, ValidFor, require_valid_for, stage_of
from autopar.program.generators import make_schedule
from autopar.program.interleaved import interleaved
from autopar.program.parts import Pipeline
from autopar.program.program import Program
from autopar.program.schedule import check_no_deadlock
from autopar.reshard import Price, Resharder
from autopar.rules.annotate import annotate_factors
from autopar.rules.choices import Choice, parse_choice
from autopar.rules.found import require_proven, write_rules
from autopar.rules.nodes import type_text
from autopar.solve.windows import most_ahead


@collected_seldom()
def compile(step: ForwardStep, plan: Plan) -> Program:
    """Builds the program of `plan` for `step`; raises `PlanError` when the plan was made for another step."""
    step = step.with_microbatches(plan.microbatches)
    captured = step.capture()
    actual = valid_for(step, captured)
    if step.unfold() and plan.valid_for.graph_hash != actual.graph_hash:
        raise LayersDifferError(
            "the model treats layers differently that seemed equal by their modules, and the plan looked at few of "
            "them; plan this step again: with all layers captured, each is looked at"
        )
    require_valid_for(plan, actual)
    require_proven(captured.graphs, plan.rules)
    units, _ = units_of(captured.gradient.graph)
    cut = Cut(units, tuple(stage_of(plan.node_stage, unit) for unit in units))
    graph = annotated(captured, plan.microbatches, cut, plan.rules)
    pipeline = lower(
        graph,
        parsed_choices(graph, plan.choices),
        plan.mesh,
        plan.microbatches,
        prices(plan.cluster, plan.mesh),
        plan.schedule,
        plan.recomputed,
        plan.estimate.memory_limit_bytes,
    )
    program = Program(step, plan, pipeline)
    _debug(program)
    return program


def _debug(program: Program) -> None:
    """`AUTOPAR_DEBUG=1` shows the plan; `AUTOPAR_CHECK=2` verifies the numbers before anything runs."""
    if os.environ.get("AUTOPAR_DEBUG", "0") not in ("", "0"):
        print(program.plan, file=sys.stderr)
    if os.environ.get("AUTOPAR_CHECK", "0") == "2" and not (report := program.verify()).ok:
        raise VerificationError(f"the program differs from the single-device step: {report.first}")


def annotated(
    captured: Captured,
    microbatches: int,
    cut: Cut,
    rules: Mapping[str, str] | None = None,
    repeats: Repeats | None = None,
) -> StepGraph:
    """The step graph of a cut, each node with its leaf rule; `rules`: of calls without a row in the table."""
    graph = join(captured, microbatches, cut, repeats)
    write_rules(graph.graph, rules or {})
    annotate_factors(graph.graph, list(graph.state_pairs))
    return graph


def lower(
    step: StepGraph,
    choices: dict[str, Choice],
    mesh: Mesh,
    microbatches: int,
    price: Price,
    schedule: str,
    recomputed: tuple[str, ...] = (),
    capacity: int = 1 << 40,
) -> Pipeline:
    """The step graph as the parts that ranks run, under a schedule that was checked for deadlock.

    `capacity`: bytes of one device; gathers that run ahead of their use may hold a tenth of it.
    """
    import passes
    from passes.context import Context, Overlap

    again = keys_again(step, recomputed)
    ahead = Overlap(gathered_bytes=most_ahead(capacity))
    context = Context(mesh, microbatches, choices, step.state_pairs, Resharder(mesh, price), again, ahead)
    pipeline = passes.lower(step.graph, context)
    actions = make_schedule(schedule, mesh.size(PIPELINE_AXIS), microbatches, mesh.virtual)
    check_no_deadlock(actions, pipeline.transfers)
    return interleaved(replace(pipeline, schedule=actions))


def keys_again(step: StepGraph, recomputed: tuple[str, ...]) -> frozenset[str]:
    """The keys of the nodes that run again, by the plan's globs."""
    keys = [node.meta["key"] for node in step.graph.nodes if "key" in node.meta]
    return frozenset(key for key in keys if matches_any(key, recomputed))


def parsed_choices(step: StepGraph, texts: dict[str, str]) -> dict[str, Choice]:
    """Every node's choice; nodes that the plan doesn't name split nothing."""
    return {
        node.meta["key"]: parse_choice(node.meta["rule"], texts.get(node.meta["key"], ""), node.meta["key"])
        for node in step.graph.nodes
        if "rule" in node.meta
    }


def prices(cluster: Cluster, mesh: Mesh) -> Price:
    """Seconds of a collective over an axis of `mesh` on `cluster`."""
    links = {axis: axis_link(cluster, mesh, axis) for axis in mesh.names}

    @functools.cache
    def lines(kind: str, axis: str) -> tuple[Line, ...]:
        return cost_lines(kind, mesh.size(axis), links[axis])

    return lambda kind, axis, num_bytes: least_s(lines(kind, axis), num_bytes)


def valid_for(step: ForwardStep, captured: Captured) -> ValidFor:
    """What a plan for `step` holds for; `captured`: with all of its layers."""
    optimizer = type(step.optimizer).__name__ if isinstance(step, TrainStep) else ""
    precision = step.precision if isinstance(step, TrainStep) else "fp32"
    shapes = {name: type_text(tensor) for name, tensor in step.batch_tensors().items()}
    return ValidFor(graph_hash(captured), shapes, precision, optimizer, step.microbatches)
