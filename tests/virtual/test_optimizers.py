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
from tests.virtual.step_models import gpt, token_batch, weights_of

NAMES = ("nesterov", "amsgrad", "adagrad", "rmsprop", "nadam", "radam", "adamax", "adadelta", "adafactor", "user's own")


class Matrices(nn.Module):
    """Weights that are all matrices, as Muon wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        error: Tensor = self.down(torch.tanh(self.up(x))) - x
        return error.square().mean()


def report_of(step: TrainStep, pins: str, cluster: str = "2xcpu") -> VerifyReport:
    program = compile(step, plan(step, cluster, pin=pins))
    return verify(step, program.pipeline, weights_of(step), 3)


@pytest.mark.parametrize("pins", ["tp=2", "dp=2, zero=3"])
@pytest.mark.parametrize("name", NAMES)
def test_optimizer(name: str, pins: str) -> None:
    torch.manual_seed(0)
    report = report_of(TrainStep(gpt(), token_batch(), optimizer=OPTIMIZERS[name]), pins)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("name", "cluster", "pins"), [("adafactor", "2xcpu", "pp=2"), ("user's own", "4xcpu", "dp=2, tp=2, zero=1")]
)
def test_optimizer_on_more_axes(name: str, cluster: str, pins: str) -> None:
    torch.manual_seed(0)
    step = TrainStep(gpt(), token_batch(), optimizer=OPTIMIZERS[name], microbatches=2)
    report = report_of(step, pins, cluster)
    assert report.ok, str(report)


@pytest.mark.parametrize("pins", ["tp=2", "dp=2, zero=1", "dp=2, zero=3"])
def test_the_matrix_iteration_of_muon(pins: str) -> None:
    """Both halves: it iterates in bf16, where the captured step rounds as the real optimizer does."""
    torch.manual_seed(0)
    step = TrainStep(Matrices(), {"x": torch.randn(4, 8)}, optimizer=lambda ps: torch.optim.Muon(ps, lr=1e-2))
    report = report_of(step, pins)
    assert report.ok, str(report)
    assert {"param:up.weight", "param:down.weight"} <= {difference.name for difference in report.differences}
