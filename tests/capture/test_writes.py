"""Writes into parts of a tensor: what is put together of them, and what has to stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.graphs import op_name
from autopar.capture.step import TrainStep
from tests.capture.test_gradient import call_nodes, run_captured, run_eager

WRITES = {"copy", "slice_scatter", "new_empty", "new_empty_strided", "empty"}


def parts_of_a_new_tensor(x: Tensor) -> Tensor:
    """As latent attention makes its keys: a part for each head, and one that all heads share."""
    keys = x.new_empty(x.shape[0], 2, 3, 6)
    keys[..., :2] = x.view(-1, 3, 2, 2).transpose(1, 2)
    keys[..., 2:] = x.view(-1, 1, 3, 4).expand(-1, 2, -1, -1)
    return keys.transpose(1, 2).reshape(x.shape[0], -1)


def parts_in_any_order(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], 12)
    y[:, 8:] = x[:, 4:8] * 2
    y[:, :3] = x[:, :3]
    y[:, 3:8] = 1.0 + x[:, 3:8]
    return y


def a_part_is_missing(x: Tensor) -> Tensor:
    y = torch.zeros(x.shape[0], 12)
    y[:, 2:5] = x[:, :3]
    return y + x


def a_part_is_written_twice(x: Tensor) -> Tensor:
    y = x * 2
    y[:, :8] = x[:, 4:]
    y[:, 6:] = x[:, :6]
    return y[:, 4:10] * y[:, 6:]


def every_other_column(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], 12)
    y[:, ::2], y[:, 1::2] = x[:, :6], x[:, 6:] * 3
    return y


class Writing(nn.Module):
    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.write = nn.Linear(12, 12), write
        self.last = nn.LazyLinear(4)
        self.last(write(torch.zeros(1, 12)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.write(self.first(x))).square().mean()


FUNCTIONS = {
    parts_of_a_new_tensor: set(),
    parts_in_any_order: set(),
    a_part_is_missing: {"slice_scatter"},
    a_part_is_written_twice: {"slice_scatter"},
    every_other_column: {"slice_scatter", "empty"},
}


@pytest.mark.parametrize("write", FUNCTIONS, ids=lambda write: write.__name__)
def test_what_was_written_is_put_together(write: Callable[[Tensor], Tensor]) -> None:
    step = TrainStep(Writing(write), torch.randn(5, 12))
    got, want = run_captured(step, step.batch), run_eager(step, step.batch)
    assert got.keys() == want.keys()
    for role in got:
        torch.testing.assert_close(got[role], want[role], rtol=1e-5, atol=1e-6)
    forward = [node for node in call_nodes(step.capture()) if node.meta["phase"] == "forward"]
    assert {op_name(node) for node in forward} & WRITES == FUNCTIONS[write]


def test_nothing_is_written_where_a_whole_tensor_is() -> None:
    step = TrainStep(Writing(parts_of_a_new_tensor), torch.randn(5, 12))
    assert not {op_name(node) for node in call_nodes(step.capture())} & WRITES
