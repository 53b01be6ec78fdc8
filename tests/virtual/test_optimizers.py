"""Optimizers in whole steps, their state split over ranks: equal to the captured updates and to the real optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.step import TrainStep
from autopar.compiling import compile
from autopar.planning import plan
from autopar.program.verify import VerifyReport, verify
from tests.capture.test_update import OPTIMIZERS
from tests.virtual.step_models import weights_of

PINS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("nesterov", "adagrad", "nadam", "adamax"), ("tp=2",)),
    **dict.fromkeys(("rmsprop", "radam", "adadelta"), ("dp=2, zero=3",)),
    **dict.fromkeys(("amsgrad", "adafactor", "user's own"), ("tp=2", "dp=2, zero=3")),
}
"""By optimizer; most are pointwise, and one way of splitting their state is as good as another."""


class Perceptron(nn.Module):
    """Weights that are matrices and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        error: Tensor = self.down(torch.tanh(self.norm(self.up(x)))) - x
        return error.square().mean()


class Matrices(nn.Module):
    """Weights that are all matrices, as Muon wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        error: Tensor = self.down(torch.tanh(self.up(x))) - x
        return error.square().mean()


def perceptron_step(name: str, microbatches: int = 1) -> TrainStep:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 8)}
    return TrainStep(Perceptron(), batch, optimizer=OPTIMIZERS[name], microbatches=microbatches)


def report_of(step: TrainStep, pins: str, cluster: str = "2xcpu") -> VerifyReport:
    program = compile(step, plan(step, cluster, pin=pins))
    return verify(step, program.pipeline, weights_of(step), 3)


@pytest.mark.parametrize(("name", "pins"), [(name, pins) for name in PINS for pins in PINS[name]])
def test_optimizer(name: str, pins: str) -> None:
    report = report_of(perceptron_step(name), pins)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("name", "cluster", "pins"), [("adafactor", "2xcpu", "pp=2"), ("user's own", "4xcpu", "dp=2, tp=2, zero=1")]
)
def test_optimizer_on_more_axes(name: str, cluster: str, pins: str) -> None:
    report = report_of(perceptron_step(name, 2), pins, cluster)
    assert report.ok, str(report)


@pytest.mark.parametrize("pins", ["tp=2", "dp=2, zero=3"])
def test_the_matrix_iteration_of_muon(pins: str) -> None:
    """Both halves: it iterates in bf16, where the captured step rounds as the real optimizer does."""
    torch.manual_seed(0)
    step = TrainStep(Matrices(), {"x": torch.randn(4, 8)}, optimizer=lambda ps: torch.optim.Muon(ps, lr=1e-2))
    report = report_of(step, pins)
    assert report.ok, str(report)
    assert {"param:up.weight", "param:down.weight"} <= {difference.name for difference in report.differences}
