"""Formulas in batch and sequence, against counts of steps captured at those sizes."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar import TrainStep
from autopar.capture.symbolic import BATCH, SEQUENCE
from autopar.compiling import annotated
from autopar.layers import Cut, units_of
from autopar.solve.costs import flops


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20, 12), nn.Linear(12, 12), nn.Linear(12, 20)
        self.back = nn.Linear(6, 12)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        q = self.mix(x).unflatten(-1, (3, 4)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        x = x + self.back(F.scaled_dot_product_attention(q, q, q[..., :2]).transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def step(batch, sequence):
    torch.manual_seed(0)
    tokens = torch.randint(20, (batch, sequence))
    return TrainStep(Tiny(), {"tokens": tokens, "targets": tokens})


@functools.cache
def formulas():
    return step(3, 10).formulas()


def counted(step):
    captured = step.capture()
    graph = annotated(captured, 1, Cut.single(units_of(captured.gradient.graph)[0])).graph
    return sum(
        flops(n) for n in graph.nodes if n.op == "call_function" and "rule" in n.meta and n.meta["phase"] != "update"
    )


@pytest.mark.parametrize(("batch", "sequence"), [(2, 7), (5, 7), (2, 33)])
def test_matmul_flops_are_those_of_the_rules_at_any_size(batch, sequence):
    formula = formulas()["matmul_flops"]
    assert int(formula.subs({BATCH: batch, SEQUENCE: sequence})) == counted(step(batch, sequence))


def test_saved_bytes_grow_with_the_tokens_and_parameters_do_not():
    found = formulas()
    assert found["parameter_bytes"] == 4 * sum(p.numel() for p in Tiny().parameters())
    saved = found["saved_bytes"]
    assert saved.free_symbols == {BATCH, SEQUENCE}
    assert saved.subs({BATCH: 6, SEQUENCE: 10}) > 1.9 * saved.subs({BATCH: 3, SEQUENCE: 10})
