"""Batch norm in training: the statistics of the whole microbatch, however it is split, and exact running buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar import collectives
from autopar.capture.graphs import Captured
from autopar.capture.step import TrainStep
from autopar.compiling import compile
from autopar.planning import plan
from autopar.program.verify import _captured_against_eager, verify
from tests.virtual.step_models import momentum, weights_of

CHANNELS, CLASSES = 4, 6


class Residual(nn.Module):
    """Convolutions with batch norms, whose buffers change, and one on what they give to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS), nn.ReLU())
            for _ in range(2)
        )
        self.head, self.norm = nn.Linear(CHANNELS, CLASSES), nn.BatchNorm1d(CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            images = images + block(images)
        return F.cross_entropy(self.norm(self.head(images.mean((2, 3)))), labels)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.randn(CHANNELS)), norm

    def forward(self, x: Tensor) -> Tensor:
        scaled = torch.tanh(x * self.scale.view(1, -1, *[1] * (x.dim() - 2)))  # a norm forgets a mere factor
        return (self.norm(scaled) * x).mean()


def images(rows: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(rows, CHANNELS, 5, 5, generator=generator)
    return {"images": pictures, "labels": torch.randint(0, CLASSES, (rows,), generator=generator)}


def step_of(microbatches: int) -> TrainStep:
    torch.manual_seed(0)
    return TrainStep(Residual(), images(), optimizer=momentum, microbatches=microbatches)


@pytest.mark.parametrize(
    ("microbatches", "cluster", "pins"),
    [(1, "2xcpu", "tp=2"), (2, "2xcpu", "dp=2, zero=3"), (2, "4xcpu", "pp=2, dp=2")],
)
def test_under_plans(microbatches: int, cluster: str, pins: str) -> None:
    step = step_of(microbatches)
    pipeline = compile(step, plan(step, cluster, pin=pins)).pipeline
    report = verify(step, pipeline, weights_of(step), 2)
    assert report.ok, str(report)
    changed = {f"buffer:{name}" for name, _ in step.model.named_buffers()}
    assert len(changed) == 9 and changed <= {difference.name for difference in report.differences}
    if "dp=2" in pins:
        reduced = [n for n in pipeline.stages[0].parts["forward"].graph.graph.nodes if _reduces_statistics(n)]
        assert len(reduced) >= 2  # the mean and the squares: samples are split


def _reduces_statistics(node: Any) -> bool:
    return node.target is collectives.all_reduce_start and node.args[0].meta["local_val"].numel() == CHANNELS


NORMS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(CHANNELS), (6, CHANNELS)),
    "1d, of sequences": (lambda: nn.BatchNorm1d(CHANNELS, eps=1e-3, momentum=0.3), (6, CHANNELS, 3)),
    "cumulative": (lambda: nn.BatchNorm1d(CHANNELS, momentum=None), (6, CHANNELS)),
    "3d": (lambda: nn.BatchNorm3d(CHANNELS), (6, CHANNELS, 2, 3, 2)),
    "no weights": (lambda: nn.BatchNorm2d(CHANNELS, affine=False), (6, CHANNELS, 2, 3)),
    "no buffers": (lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False), (6, CHANNELS, 2, 3)),
    "not training": (lambda: nn.BatchNorm2d(CHANNELS).eval(), (6, CHANNELS, 2, 3)),
}


@pytest.mark.parametrize("name", NORMS)
def test_kinds(name: str) -> None:
    torch.manual_seed(0)
    make, shape = NORMS[name]
    model = Normed(make())
    microbatches = 1 if name == "no buffers" else 2  # eager, which sees no buffer change, takes the batch in one piece
    step = TrainStep(model, {"x": torch.randn(shape)}, optimizer=momentum, microbatches=microbatches)
    found = list(_captured_against_eager(step, step.capture(), weights_of(step), 2, seed=0))
    assert all(difference.ok for difference in found), "\n".join(map(str, found))


def test_a_synchronized_norm_is_the_same_in_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(norm: nn.Module) -> Captured:
        return TrainStep(Normed(norm), {"x": torch.randn(6, CHANNELS, 2, 3)}, optimizer=momentum).capture()

    plain = captured(nn.BatchNorm2d(CHANNELS))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    own = nn.SyncBatchNorm.forward
    synchronized = captured(nn.SyncBatchNorm(CHANNELS))
    assert nn.SyncBatchNorm.forward is own
    assert [str(n.target) for n in synchronized.gradient.graph.nodes] == [
        str(n.target) for n in plain.gradient.graph.nodes
    ]
