"""What can't be captured says so, with the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import capture_models as models
import pytest
import torch
from torch import Tensor, nn

from autopar.capture import ForwardStep, TrainStep
from autopar.errors import CaptureError


class Trouble(nn.Module):
    """A linear layer, then what the test is about."""

    def __init__(self, then: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.then = then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.linear(x))


def branches(x: Tensor) -> Tensor:
    if x.sum() > 0:  # line of the branch
        return x.mean()
    return -x.mean()


def reads(x: Tensor) -> Tensor:
    return x.mean() * x.max().item()


def selects(x: Tensor) -> Tensor:
    return x[x > 0].mean()


def counts(x: Tensor) -> Tensor:
    return x.mean() + len(torch.nonzero(x))


def mismatched(x: Tensor) -> Tensor:
    return (x @ torch.ones(5, 5)).mean()


@pytest.mark.parametrize("then", [branches, reads, selects, counts], ids=lambda f: f.__name__)
def test_data_dependence_names_the_line(then: Callable[[Tensor], Any]) -> None:
    line = then.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=rf"test_errors.py:{line}: .*needs the value of a tensor.*torch.where"):
        TrainStep(Trouble(then), torch.randn(4, 3)).capture()


def test_other_failures_name_the_line() -> None:
    line = mismatched.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=rf"test_errors.py:{line}: .*failed while"):
        TrainStep(Trouble(mismatched), torch.randn(4, 3)).capture()


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (lambda x: x, r"shape \[4, 3\]; expected a scalar"),
        (lambda x: {"logits": x}, "without a loss"),
        (lambda x: (x,), "without a loss"),
        (lambda x: x.detach().mean(), "no trainable parameter"),
    ],
    ids=["matrix", "dict", "tuple", "detached"],
)
def test_no_loss(then: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        TrainStep(Trouble(then), torch.randn(4, 3)).capture()


def test_hugging_face_without_labels() -> None:
    with pytest.raises(CaptureError, match="labels"):
        TrainStep(models.tiny_llama(), {"input_ids": models.hf_batch()["input_ids"]}).capture()


def test_microbatches_must_divide() -> None:
    with pytest.raises(
        CaptureError, match=r"microbatches=3 doesn't divide the batch of 4 samples; use one of \[1, 2, 4\]"
    ):
        TrainStep(models.GPT(), models.token_batch(4), microbatches=3)


def test_batch_of_another_form() -> None:
    step = TrainStep(models.GPT(), models.token_batch())
    with pytest.raises(CaptureError, match=r"got tensors \['tokens'\]"):
        step.batch_tensors({"tokens": torch.zeros(4, 8)})
    with pytest.raises(CaptureError, match="expected a dict, a tuple or a tensor"):
        ForwardStep(models.GPT(), 3)


@pytest.mark.parametrize("model", [3, lambda: 3], ids=["number", "factory of a number"])
def test_model_of_another_type(model: Any) -> None:
    with pytest.raises(CaptureError, match="expected a"):
        ForwardStep(model, torch.zeros(2, 2))


def test_optimizer_and_precision() -> None:
    with pytest.raises(CaptureError, match="expected one of 'fp32', 'mixed', "):
        TrainStep(models.GPT(), models.token_batch(), precision="fp8")
    with pytest.raises(CaptureError, match="got int"):
        TrainStep(models.GPT(), models.token_batch(), optimizer=lambda ps: 3).capture()  # type: ignore[arg-type,return-value]


def test_everything_frozen() -> None:
    model = models.GPT().requires_grad_(False)
    with pytest.raises(CaptureError, match="no parameter to train"):
        TrainStep(model, models.token_batch()).capture()
