"""Losses that are means over tokens, in microbatches of unequal counts: equal to the whole batch at once."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import gradient
from autopar.capture.shares import Shares
from autopar.capture.step import TrainStep
from autopar.compiling import compile
from autopar.planning import plan
from autopar.program.verify import Difference, VerifyReport, _captured_against_eager, verify
from tests.virtual.step_models import LENGTH, VOCAB, adamw, gpt, llama, weights_of

IGNORED = 3
"""What the models here ignore in their targets."""


def uneven(rows: int = 8, ignored: int = IGNORED) -> dict[str, Tensor]:
    """Rows of which each has fewer tokens to predict than the one before; the last one none."""
    tokens = torch.randint(4, VOCAB, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    for row in range(rows):
        targets[row, LENGTH - row * LENGTH // (rows - 1) :] = ignored
    return {"tokens": tokens[:, :-1].contiguous(), "targets": targets}


class Scored(nn.Module):
    """A linear model of tokens; `loss` gives the losses of all tokens [b, s], their logits, targets and features."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.loss = loss

    def forward(self, tokens: Tensor, targets: Tensor, **others: Tensor) -> Any:
        x = self.tokens(tokens)
        logits = self.head(torch.tanh(x))
        losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
        return self.loss(losses, targets != IGNORED, x, **others)


LOSSES: dict[str, Any] = {
    "sum by count": lambda losses, kept, x: losses.sum() / kept.sum(),
    "at least one token": lambda losses, kept, x: (losses * kept).sum() / kept.sum().clamp(min=1),
    "sum": lambda losses, kept, x: losses.sum(),
    "mean": lambda losses, kept, x: losses.mean(),
    "per row": lambda losses, kept, x: losses.sum() / losses.shape[0],
    "times a ratio": lambda losses, kept, x: losses.sum() * (0.5 / losses.numel()),
    "two counts": lambda losses, kept, x: losses.sum() / kept.sum() + 0.1 * (losses * losses).sum() / (2 + kept.sum()),
    "and a mean": lambda losses, kept, x: losses.sum() / kept.sum() + 0.1 * x.square().mean(),
    "a mean, less it": lambda losses, kept, x: 0.1 * x.square().mean() - losses.sum() / kept.sum(),
    "in a list": lambda losses, kept, x: sum([losses.sum() / kept.sum(), x.square().mean(), x.abs().sum()]),
    "in place": lambda losses, kept, x: (losses.sum() / kept.sum()).add_(0.3 * x.square().mean()),
    "a given count": lambda losses, kept, x, count: losses.sum() / count,
}


def half_a(step: TrainStep) -> list[Difference]:
    return list(_captured_against_eager(step, step.capture(), weights_of(step), 1, seed=0))


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_four_microbatches_are_those_of_the_whole_batch(loss: str) -> None:
    torch.manual_seed(0)
    batch = uneven() | ({"count": torch.tensor(21.0)} if loss == "a given count" else {})
    step = TrainStep(Scored(LOSSES[loss]), batch, optimizer=adamw, microbatches=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = half_a(step)
    assert len(found) > 3 and all(difference.ok for difference in found), "\n".join(map(str, found))


class Smoothed(Scored):
    def forward(self, tokens: Tensor, targets: Tensor, **others: Tensor) -> Any:
        logits = self.head(torch.tanh(self.tokens(tokens))).flatten(0, 1)
        weight = torch.linspace(0.5, 1.5, VOCAB)
        return F.cross_entropy(logits, targets.flatten(), weight, ignore_index=IGNORED, label_smoothing=0.1)


def test_smoothed_labels() -> None:
    torch.manual_seed(0)
    step = TrainStep(Smoothed(None), uneven(), optimizer=adamw, microbatches=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = verify(step, compile(step, plan(step, "2xcpu", pin="tp=2")).pipeline, weights_of(step), 1)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (lambda losses, kept, x: losses.sum() / kept.sum() + x.mean((0, 1)).square().sum(), "square"),
        (lambda losses, kept, x: (losses.sum() / kept.sum()).exp(), "exp"),
    ],
)
def test_what_is_no_mean_over_samples_is_averaged_and_named(loss: Any, line: str) -> None:
    torch.manual_seed(0)
    batch = uneven()
    batch["targets"] = batch["tokens"].clone()  # as many tokens in each microbatch: eager accumulates means of means
    step = TrainStep(Scored(loss), batch, optimizer=adamw, microbatches=4)
    with pytest.warns(RuntimeWarning, match=r"loss \(test_token_means.py:\d+\): not a sum or mean over samples"):
        found = half_a(step)
    assert all(difference.ok for difference in found), "\n".join(map(str, found))


@pytest.mark.parametrize("keywords", [{}, {"num_items_in_batch": torch.tensor(17)}], ids=["own count", "given"])
def test_hugging_face_ignores_padded_labels(keywords: dict[str, Any]) -> None:
    torch.manual_seed(0)
    batch = uneven(ignored=-100)
    given = {"input_ids": batch["tokens"], "labels": batch["targets"], **keywords}
    found = half_a(TrainStep(llama(), given, optimizer=adamw, microbatches=4))
    assert all(difference.ok for difference in found), "\n".join(map(str, found))


def uneven_step() -> TrainStep:
    torch.manual_seed(0)
    return TrainStep(gpt(), uneven(), optimizer=adamw, microbatches=4, clip_norm=0.5)


shared_step = functools.cache(uneven_step)


def report_of(step: TrainStep, cluster: str, pins: str) -> VerifyReport:
    return verify(step, compile(step, plan(step, cluster, pin=pins)).pipeline, weights_of(step), 2)


@pytest.mark.parametrize(
    ("cluster", "pins"), [("2xcpu", "dp=2, zero=3"), ("2xcpu", "tp=2"), ("2xcpu", "pp=2"), ("4xcpu", "pp=2, dp=2")]
)
def test_under_plans(cluster: str, pins: str) -> None:
    report = report_of(shared_step(), cluster, pins)
    assert report.ok, str(report)


def test_a_mean_of_means_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gradient.share_out

    def of_means(graph: Any, whole: Any, loss: Any, microbatches: int, mode: Any) -> Shares:
        monkeypatch.setattr("autopar.capture.shares._Reader.factor", lambda *_: None)
        return Shares(right(graph, whole, loss, microbatches, mode).totals, ())

    monkeypatch.setattr(gradient, "share_out", of_means)
    report = report_of(uneven_step(), "2xcpu", "dp=2")
    assert report.first is not None and report.first.name == "loss"
