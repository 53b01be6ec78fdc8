"""How a batch is read, split and given to the model."""

from __future__ import annotations

import capture_models as models
import pytest
import torch
from torch import Tensor, nn

from autopar.capture import ForwardStep, TrainStep


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, scale: float = 1.0, bias: Tensor | None = None) -> Tensor:
        y = self.linear(x) * scale
        return (y if bias is None else y + bias).square().mean()


def test_a_dict_is_keywords_and_constants_stay() -> None:
    batch = {"x": torch.randn(4, 3), "scale": 2.0}
    step = TrainStep(TwoInputs(), batch)
    assert step.fresh_batch_shapes == {"x": (4, 3)}
    assert step.form.call(step.form.rebuild(step.batch_tensors())) == ((), {"x": batch["x"], "scale": 2.0})


def test_a_tuple_is_positionals_named_by_the_signature() -> None:
    step = TrainStep(TwoInputs(), (torch.randn(4, 3), 2.0, torch.randn(3)))
    assert list(step.batch_tensors()) == ["x", "bias"]


def test_a_tensor_is_one_argument() -> None:
    step = ForwardStep(nn.Linear(3, 2), torch.randn(4, 3))
    assert list(step.batch_tensors()) == ["input"]


def test_microbatches_are_contiguous_rows() -> None:
    batch = {"x": torch.arange(12.0).view(4, 3), "bias": torch.ones(3)}
    step = TrainStep(TwoInputs(), batch, microbatches=2)
    second = step.microbatch(batch, 1)
    torch.testing.assert_close(second["x"], batch["x"][2:])
    torch.testing.assert_close(second["bias"], batch["bias"])


def test_a_loss_may_read_what_the_model_does_not_take() -> None:
    batch = {"input": torch.randn(4, 3), "targets": torch.randn(4, 2)}
    step = TrainStep(nn.Linear(3, 2), batch, loss=lambda output, b: (output - b["targets"]).square().mean())
    assert step.form.call(batch) == ((), {"input": batch["input"]})
    assert len(step.capture().gradient_outputs) == 3


@pytest.mark.parametrize("size", [2, 6])
def test_symbolic_batch_of_another_size(size: int) -> None:
    step = TrainStep(models.GPT(), models.token_batch(size), microbatches=2)
    assert step.microbatch(models.token_batch(size), 0)["tokens"].shape[0] == size // 2
