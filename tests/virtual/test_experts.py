"""Mixtures of experts: tokens and experts split, each by an axis of its own, and the router's loss."""

from __future__ import annotations

import pytest
import torch

from autopar.capture.step import TrainStep
from autopar.compiling import compile
from autopar.planning import plan
from autopar.program.verify import verify
from autopar.rules.nodes import op_name
from tests.matrix.models import build
from tests.virtual.step_models import adamw, weights_of


@pytest.mark.parametrize(
    ("pins", "experts", "share"),
    [("dp=2, model.layers.*: dp=batch", 4, 0.5), ("tp=2, model.layers.*.experts: tp=experts", 2, 1.0)],
)
def test_what_a_rank_computes(pins: str, experts: int, share: float) -> None:
    """`experts` of the weights, and the rows of `share` of the tokens."""
    torch.manual_seed(0)
    module, batch = build("mixtral, router's loss")
    step = TrainStep(module, dict(batch), optimizer=adamw)
    pipeline = compile(step, plan(step, "2xcpu", pin=pins)).pipeline
    report = verify(step, pipeline, weights_of(step), 1)
    assert report.ok, str(report)
    nodes = pipeline.stages[0].parts["forward"].graph.graph.nodes
    calls = [node for node in nodes if node.op == "call_function" and op_name(node) == "autopar.expert_mm"]
    tokens = batch["input_ids"].numel() * module.config.num_experts_per_tok
    assert len(calls) == 2 * module.config.num_hidden_layers
    for call in calls:
        x, weight, _ = (operand.meta["local_val"] for operand in call.args)
        assert x.shape[0] == share * tokens and weight.shape[0] == experts
