"""Sizes as formulas in b and s."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import capture_models as models
import pytest
import sympy
from torch import nn

from autopar.capture import TrainStep, op_name
from autopar.capture.symbolic import BATCH, SEQUENCE


@functools.cache
def step_and_shapes(make: Callable[[], nn.Module], size: int) -> tuple[TrainStep, dict[str, tuple[Any, ...]]]:
    """A step with microbatches of `size`, and its shapes."""
    microbatches = 2 if make is models.tiny_gpt2 else 1
    rows = size * microbatches
    batch = models.token_batch(rows) if make is models.GPT else models.hf_batch(rows)
    step = TrainStep(make(), batch, microbatches=microbatches)
    return step, step.symbolic_shapes()


@pytest.mark.parametrize(
    ("size", "make"),
    [(1, models.GPT), (1, models.tiny_llama), (4, models.tiny_llama), (4, models.tiny_gpt2)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_formulas_give_the_static_shapes(size: int, make: Callable[[], nn.Module]) -> None:
    step, shapes = step_and_shapes(make, size)
    for node in step.capture().gradient.graph.nodes:
        if node.name in shapes:
            at = {BATCH: size, SEQUENCE: 8}
            values = [n.subs(at) if isinstance(n, sympy.Expr) else n for n in shapes[node.name]]
            assert values == list(node.meta["val"].shape)
    assert {shapes[node.name][:2] for node in step.capture().gradient.graph.nodes if op_name(node) == "linear"} == {
        (BATCH, SEQUENCE)
    }


def test_flattened_dims_are_products() -> None:
    step, shapes = step_and_shapes(models.tiny_gpt2, 4)
    products = [node for node in step.capture().gradient.graph.nodes if op_name(node) == "mm"]
    assert products and any(shapes[node.name][0] == BATCH * SEQUENCE for node in products)
