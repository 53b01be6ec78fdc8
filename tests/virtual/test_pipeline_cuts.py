"""Cuts right after the embedding: its backward runs where it does, and a stage without one still takes its turn."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar import TrainStep, compile, plan


class Model(nn.Module):
    """What runs at the root (positions) comes before the embeddings, so that no unit bears their names."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(16, 8), nn.Embedding(6, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens, targets):
        x = self.position(torch.arange(tokens.shape[1])) + self.token(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def program(frozen: bool):
    torch.manual_seed(0)
    model, tokens = Model(), torch.randint(16, (4, 6))
    model.token.requires_grad_(not frozen)
    model.position.requires_grad_(not frozen)
    step = TrainStep(model, (tokens, tokens), microbatches=2)
    return compile(step, plan(step, "4xcpu", pin="pp=4"))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_stage_of_embeddings_alone(frozen):
    made = program(frozen)
    first = made.pipeline.stages[0].parts
    names = [node.name for node in first["backward"].graph.graph.nodes if node.op == "call_function"]
    assert any("embedding" in name for name in names) != frozen
    report = made.verify(num_steps=2)
    assert report.ok, report
