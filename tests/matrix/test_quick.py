"""A varied few of the matrix; the whole of it runs by command (see `run.py`)."""

from __future__ import annotations

import pytest

from tests.matrix.cells import run_cell

QUICK = [
    ("gemma2", "tp2"),
    ("mixtral", "capture"),
    ("mixtral", "pp2"),
    ("bert, padded", "dp2"),
    ("t5", "pp2"),
    ("vit", "tp2"),
    ("whisper", "tp2"),
    ("mamba", "capture"),
    ("nn.Transformer", "dp2"),
    ("nn.Transformer", "dp2tp2pp2"),
]


@pytest.mark.parametrize(("model", "cell"), QUICK)
def test_cell(model: str, cell: str) -> None:
    result = run_cell(model, cell)
    assert result.ok, result.problem
