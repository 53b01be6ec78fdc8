"""Models of which a part is trained, and weights that are used in a narrower dtype than they are kept in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar import collectives
from autopar.capture.step import TrainStep
from autopar.compiling import compile
from autopar.planning import plan
from autopar.program.parts import Pipeline
from autopar.program.verify import verify
from tests.virtual.step_models import VOCAB, adamw, gpt, token_batch, weights_of


class Adapted(nn.Module):
    """A frozen linear layer beside a trained product of low rank (LoRA, arXiv:2106.09685)."""

    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x)) * 0.5
        return y


class AdaptedModel(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width).requires_grad_(False)
        self.layers = nn.ModuleList(Adapted(width) for _ in range(2))
        self.unused = nn.Linear(width, width)

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = F.linear(x, self.tokens.weight)
        auxiliary = x.square().mean() * 1e-2
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + auxiliary, "logits": logits}


class Autocast(nn.Module):
    """float32 weights whose matmuls run in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.model = wide_gpt()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = self.model(tokens, targets)
        return loss


def wide_gpt() -> nn.Module:
    return gpt(width=16, heads=4, tied=False)


@pytest.mark.parametrize("pins", ["tp=2", "dp=2, zero=3", "pp=2, microbatches=2", "dp=2, tp=2"])
def test_low_rank_adapters(pins: str) -> None:
    """Frozen and unused parameters have no gradient, no state and no reduction; the rest is exact."""
    torch.manual_seed(0)
    step = TrainStep(AdaptedModel(), token_batch(), optimizer=adamw, microbatches=2 if "pp" in pins else 1)
    program = compile(step, plan(step, "4xcpu" if "tp=2" in pins and "dp" in pins else "2xcpu", pin=pins))
    report = verify(step, program.pipeline, weights_of(step), 2)
    assert report.ok, str(report)
    slots = {slot for stage in program.pipeline.stages for slot in stage.values}
    trained = {slot.name for slot in slots if slot.kind == "accumulator"}
    assert trained == {f"layers.{i}.{name}.weight" for i in range(2) for name in ("down", "up")}
    assert {slot.name.rpartition(".")[0] for slot in slots if slot.kind == "state"} == trained


def test_zero_3_gathers_the_narrow_weights() -> None:
    """What the matmuls read is sent, two bytes an element; the float32 master weights stay where they are."""
    torch.manual_seed(0)
    step = TrainStep(wide_gpt(), token_batch(), optimizer=adamw, precision="mixed")
    gathered = list(matrices_gathered(compile(step, plan(step, "2xcpu", pin="dp=2, zero=3")).pipeline))
    assert gathered and all(value.dtype == torch.bfloat16 for value in gathered)


@pytest.mark.parametrize("pins", ["dp=2, zero=3", "tp=2"])
def test_autocast(pins: str) -> None:
    """Weights that matmuls read are sent after their cast to bfloat16, and once for forward and backward."""
    torch.manual_seed(0)
    step = TrainStep(Autocast(), token_batch(), optimizer=adamw)
    pipeline = compile(step, plan(step, "2xcpu", pin=pins)).pipeline
    report = verify(step, pipeline, weights_of(step), 1)
    assert report.ok, str(report)
    gathered = list(matrices_gathered(pipeline))
    assert all(value.dtype == torch.bfloat16 for value in gathered)
    assert bool(gathered) == ("zero" in pins)


def matrices_gathered(pipeline: Pipeline) -> Iterator[Tensor]:
    """The weights of linear layers that any part gathers, as a rank sends them."""
    for stage in pipeline.stages:
        for part in stage.parts.values():
            for node in part.graph.graph.nodes:
                if node.target in (collectives.all_gather, collectives.all_gather_start):
                    value = node.args[0].meta["local_val"]
                    if "blocks" in node.meta.get("path", "") and value.numel() >= 64:
                        yield value
