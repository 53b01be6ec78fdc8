"""Clipping by the global norm: equal to `clip_grad_norm_` on one device, in one scalar all-reduce per axis."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from autopar import clipping, collectives
from autopar.capture.step import TrainStep
from autopar.compiling import compile
from autopar.errors import CaptureError
from autopar.planning import plan
from autopar.program.parts import Pipeline
from autopar.program.verify import initial_values, verify
from autopar.program.virtual import VirtualMesh
from autopar.rules.nodes import node_argument
from tests.virtual.step_models import adamw, frozen_gpt, gpt, momentum, token_batch, weights_of

LIMIT = 0.1
"""Below the norms of the models here, so that it clips."""


def clipped_step(microbatches: int = 1, optimizer: Any = momentum, model: Any = None, **options: Any) -> TrainStep:
    torch.manual_seed(0)
    model = gpt() if model is None else model
    return TrainStep(model, token_batch(), optimizer=optimizer, microbatches=microbatches, clip_norm=LIMIT, **options)


shared_step = functools.cache(clipped_step)


def lowered(step: TrainStep, cluster: str, pins: str) -> Pipeline:
    return compile(step, plan(step, cluster, pin=pins)).pipeline


@pytest.mark.parametrize(
    ("cluster", "pins", "microbatches"),
    [
        ("2xcpu", "dp=2, zero=3", 2),
        ("2xcpu", "tp=2", 1),
        ("2xcpu", "pp=2", 2),
        ("4xcpu", "dp=2, tp=2, zero=2", 1),
        ("4xcpu", "pp=2, tp=2", 2),
    ],
)
def test_norm_and_parameters(cluster: str, pins: str, microbatches: int) -> None:
    step = shared_step(microbatches)
    pipeline = lowered(step, cluster, pins)
    report = verify(step, pipeline, weights_of(step), 2)
    assert report.ok, str(report)
    assert "grad_norm" in {difference.name for difference in report.differences}
    for stage in pipeline.stages:
        graphs = [part.graph.graph for name, part in stage.parts.items() if name in ("norm", "update")]
        axes = [node.args[1] for graph in graphs for node in graph.nodes if _reduces_a_scalar(node)]
        assert len(axes) == len(set(axes)) <= len(pipeline.mesh.spmd.names), axes


def _reduces_a_scalar(node: Node) -> bool:
    return node.target is collectives.all_reduce_start and node_argument(node, 0).meta["local_val"].numel() == 1


def test_it_does_clip_and_says_by_how_much() -> None:
    """Against torch's own function, frozen parameters left out."""
    step = clipped_step(model=frozen_gpt())
    mesh = VirtualMesh(lowered(step, "2xcpu", "dp=2"))
    mesh.load(initial_values(step, step.capture(), weights_of(step)))
    got = mesh.step(step.batch_tensors(), step.capture().scalars)
    loss = step.model(**token_batch())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_([p for p in step.model.parameters() if p.requires_grad], LIMIT)
    assert norm > 5 * LIMIT
    torch.testing.assert_close(got["grad_norm"], norm)


def test_mixed_precision_and_adam() -> None:
    step = clipped_step(2, adamw, gpt(), precision="mixed")
    report = verify(step, lowered(step, "2xcpu", "dp=2, zero=3"), weights_of(step), 2)
    assert report.ok, str(report)


def test_a_norm_per_stage_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = clipping._norm

    def own_stage_only(graph: Graph, stage: int, totals: list[Node]) -> Node:
        return right(graph, stage, [total for total in totals if total.meta["stage"] == stage])

    monkeypatch.setattr(clipping, "_norm", own_stage_only)
    step = shared_step(2)
    report = verify(step, lowered(step, "2xcpu", "pp=2"), weights_of(step), 1)
    assert report.first is not None and report.first.name == "grad_norm"


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_a_limit_that_is_none(limit: float) -> None:
    with pytest.raises(CaptureError, match="clip_norm="):
        TrainStep(gpt(), token_batch(), clip_norm=limit)
