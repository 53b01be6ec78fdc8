"""Whole models under the plans that the solver picks and under pinned ones: both halves of `verify`, several steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.step import ForwardStep, TrainStep
from autopar.compiling import compile
from autopar.planning import plan
from autopar.program.verify import VerifyReport, verify
from tests.virtual.step_models import (
    BATCH,
    LENGTH,
    VOCAB,
    Perceptrons,
    adamw,
    momentum,
    step_of,
    token_batch,
    weights_of,
)

CASES = [
    ("gpt", 1, "2xcpu", ""),
    ("gpt, frozen, momentum", 2, "2xcpu", "dp=2, zero=3"),
    ("gpt, 3 layers", 2, "4xcpu", "pp=2, tp=2"),
    ("gpt, odd sizes", 2, "4xcpu", "dp=2, tp=2"),
    ("gpt, odd sizes", 1, "4xcpu", "dp=4, zero=3"),
    ("gpt, odd sizes", 1, "2xcpu", "tp=2, head: tp=out, blocks.*: tp=heads"),
    ("llama", 1, "2xcpu", "tp=2"),
    ("llama, 3 layers", 2, "2xcpu", "pp=2"),
    ("llama, 2 layers", 2, "4xcpu", "pp=2, dp=2, zero=1"),
    ("gpt2", 1, "4xcpu", "dp=2, tp=2, zero=2"),
    ("convnet", 2, "2xcpu", "dp=2"),
    ("squares", 1, "2xcpu", ""),
]


def verified(step: TrainStep, cluster: str, pins: str, num_steps: int = 2) -> VerifyReport:
    program = compile(step, plan(step, cluster, pin=pins or None))
    return verify(step, program.pipeline, weights_of(step), num_steps)


@pytest.mark.parametrize(("model", "microbatches", "cluster", "pins"), CASES)
def test_model(model: str, microbatches: int, cluster: str, pins: str) -> None:
    report = verified(step_of(model, microbatches), cluster, pins)
    assert report.ok, str(report)
    named = {difference.name for difference in report.differences if difference.half == "program = captured"}
    assert {"loss", *(f"grad:{name}" for name in step_of(model).trainable_names)} <= named | {"grad:one", "grad:other"}


def test_buffers_and_frozen_parameters_are_compared_too() -> None:
    report = verified(step_of("convnet", 2), "2xcpu", "dp=2", 1)
    named = {difference.name for difference in report.differences}
    assert {"buffer:norm.running_mean", "buffer:norm.running_var", "buffer:norm.num_batches_tracked"} <= named


class SeparateKeys(nn.Module):
    """A bias of the attention keys: its gradient is zero but for rounding, so there is nothing to be relative to."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        heads = [layer(x).view(BATCH, LENGTH, 2, -1).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        x = x + F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(x.shape)
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), targets.flatten())


def test_a_gradient_that_is_zero_but_for_rounding() -> None:
    torch.manual_seed(0)
    step = TrainStep(SeparateKeys(), token_batch(), optimizer=adamw)
    report = verified(step, "2xcpu", "tp=2")
    assert report.ok, str(report)


def test_a_bias_before_a_norm_has_such_a_gradient_too() -> None:
    report = verified(step_of("convnet", 1), "2xcpu", "dp=2", 1)
    assert report.ok, str(report)


def test_gradients_summed_in_bf16() -> None:
    torch.manual_seed(0)
    step = TrainStep(Perceptrons(8), token_batch(), optimizer=momentum, microbatches=2, precision="mixed-bf16-sums")
    report = verified(step, "2xcpu", "dp=2, zero=2", 1)
    assert report.ok, str(report)


def test_forward_only() -> None:
    torch.manual_seed(0)
    model = step_of("llama").model
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH))
    step = ForwardStep(model, {"input_ids": tokens, "use_cache": False})
    program = compile(step, plan(step, "2xcpu", pin="tp=2"))
    report = verify(step, program.pipeline, weights_of(step), 1)  # type: ignore[arg-type]
    assert report.ok and report.differences, str(report)
