"""The configs of well-known models under `examples/configs`: each has a source, and as many parameters as published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autopar.models import StepOptions, load_step

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"

BILLIONS = {
    "deepseek-v3": 671.0,
    "gemma2-9b": 9.24,
    "gpt3-175b": 174.6,
    "llama3-405b": 405.9,
    "llama3-70b": 70.6,
    "llama3-8b": 8.03,
    "mixtral-8x7b": 46.7,
    "qwen3-8b": 8.19,
}
"""Parameters, as their authors count them."""


def test_all_are_known() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == BILLIONS.keys()


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters(name: str) -> None:
    path = CONFIGS / f"{name}.json"
    assert "arXiv:" in json.loads(path.read_text())["_source"]
    model = load_step(str(path), StepOptions()).model
    assert all(parameter.device == torch.device("meta") for parameter in model.parameters())
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert f"{billions:.3g}" == f"{BILLIONS[name]:.3g}"
