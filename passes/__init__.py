"""The default pipeline: graph passes on the step graph, the cut into stages, then passes on each part.

    pipeline = lower(step_graph, context)

With `AUTOPAR_CHECK=1` the checker runs after each pass that keeps layouts; `AUTOPAR_DEBUG=2` prints each pass's time
and change in op count, `3` the graph's text.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

from torch.fx import Graph

from autopar.program.parts import Part, Pipeline, StageProgram
from passes.bucket_collectives import bucket_collectives
from passes.check_layouts import check_layouts
from passes.context import Context
from passes.editing import in_place
from passes.eliminate_dead_code import eliminate_dead_code
from passes.insert_moves import insert_moves
from passes.lay_out import lay_out
from passes.localise_shapes import localise_shapes
from passes.place_reductions import place_reductions
from passes.recompute import recompute
from passes.reinplace import reinplace
from passes.schedule_collectives import schedule_collectives
from passes.share_equal_nodes import share_equal_nodes
from passes.simplify import simplify
from passes.split_stages import split_stages

STEP_PASSES = (lay_out, insert_moves, localise_shapes, recompute, place_reductions)
"""Graph → graph, on the whole step."""

PART_PASSES = (simplify, share_equal_nodes, eliminate_dead_code, bucket_collectives, schedule_collectives, reinplace)
"""Part → part, on each part of each stage."""

KEEPS_LAYOUTS = (insert_moves,)
"""Passes after which every layout can be derived anew from the rules."""


def lower(graph: Graph, context: Context, part_passes: tuple[Any, ...] = PART_PASSES) -> Pipeline:
    """The step graph as parts that ranks run."""
    checks = os.environ.get("AUTOPAR_CHECK", "0") != "0"
    for step_pass in STEP_PASSES:
        started, before = time.perf_counter(), len(graph.nodes)
        graph = step_pass(graph, context)
        _report(step_pass.__name__, started, before, graph)
        if checks and step_pass in KEEPS_LAYOUTS:
            check_layouts(graph, context.mesh, step_pass.__name__)
    pipeline = split_stages(graph, context)
    with in_place():
        return replace(pipeline, stages=tuple(_lower_parts(s, context, part_passes) for s in pipeline.stages))


def _lower_parts(stage: StageProgram, context: Context, part_passes: tuple[Any, ...]) -> StageProgram:
    parts: dict[str, Part] = {}
    for name, part in stage.parts.items():
        for part_pass in part_passes:
            started, before = time.perf_counter(), len(part.graph.graph.nodes)
            part = part_pass(part, context)
            _report(f"stage {stage.index} {name} {part_pass.__name__}", started, before, part.graph.graph)
        part.graph.graph.lint()
        parts[name] = part
    return replace(stage, parts=parts)


def _report(name: str, started: float, before: int, graph: Graph) -> None:
    level = int(os.environ.get("AUTOPAR_DEBUG", "0") or 0)
    if level >= 2:
        taken = (time.perf_counter() - started) * 1e3
        print(f"{name:<40} {taken:8.1f} ms  {before} -> {len(graph.nodes)} nodes", file=sys.stderr)
    if level >= 3:
        print(graph, file=sys.stderr)
