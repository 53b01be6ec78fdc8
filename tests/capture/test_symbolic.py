"""Sizes as formulas in b and s."""

from __future__ import annotations

import capture_models as models
import pytest
import sympy
from torch import nn

from autopar.capture import TrainStep, op_name
from autopar.capture.symbolic import BATCH, SEQUENCE


@pytest.mark.parametrize("make", [models.GPT, models.tiny_llama, models.tiny_gpt2], ids=lambda f: f.__name__)
@pytest.mark.parametrize("size", [1, 4])
def test_formulas_give_the_static_shapes(make: type[nn.Module], size: int) -> None:
    batch = models.token_batch(size) if make is models.GPT else models.hf_batch(size)
    step = TrainStep(make(), batch)
    shapes = step.symbolic_shapes()
    for node in step.capture().gradient.graph.nodes:
        if node.name in shapes:
            at = {BATCH: size, SEQUENCE: 8}
            values = [n.subs(at) if isinstance(n, sympy.Expr) else n for n in shapes[node.name]]
            assert values == list(node.meta["val"].shape)
    assert {shapes[node.name][:2] for node in step.capture().gradient.graph.nodes if op_name(node) == "linear"} == {
        (BATCH, SEQUENCE)
    }


def test_flattened_dims_are_products() -> None:
    step = TrainStep(models.tiny_gpt2(), models.hf_batch(), microbatches=2)
    shapes = step.symbolic_shapes()
    products = [node for node in step.capture().gradient.graph.nodes if op_name(node) == "mm"]
    assert products and any(shapes[node.name][0] == BATCH * SEQUENCE for node in products)
