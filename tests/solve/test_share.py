"""Equal layers as one: the quotient's objective is that of the expanded choice, and costs little."""

import pytest
import torch
from torch import nn

from autopar import TrainStep
from autopar.cluster import parse_cluster
from autopar.layers import Cut, units_of
from autopar.mesh import Mesh
from autopar.pins import Pins
from autopar.planning import GAP, _Search
from autopar.solve.build import build_problem
from autopar.solve.problem import evaluate
from autopar.solve.search import solve
from autopar.solve.share import canonical_keys, share, solve_shared


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(count)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def built(count: int, mesh: str = "pp=1 dp=2 tp=2"):
    step = TrainStep(Layers(count), torch.randn(8, 16, 64))
    cluster = parse_cluster("4xcpu")
    search = _Search(step, step.capture(), cluster, Pins(), 1e9, lambda _: None)
    graph = search._graph(Cut.single(units_of(step.capture().gradient.graph)[0]))
    return build_problem(graph, search._setting(graph, Mesh.parse(mesh)))


def test_nodes_of_equal_layers_are_one_group():
    problem = built(6)
    shared = share(problem)
    groups = dict(zip((node.meta["key"] for node in problem.nodes), shared.group, strict=True))
    same = {groups[f"param:layers.{i}.1.weight"] for i in range(6)}
    assert len(same) == 1
    assert canonical_keys(problem.nodes)[0].startswith("layers.* param:layers.*.")
    assert len(shared.problem.nodes) < len(problem.nodes) / 2


@pytest.mark.parametrize("count", [2, 4])
def test_the_quotient_costs_what_the_expanded_choice_does(count):
    problem = built(count)
    shared = share(problem)
    solution = solve(shared.problem, gap=GAP)
    whole = evaluate(problem.problem, shared.expand(solution.choice))
    assert whole.objective == pytest.approx(solution.objective, rel=1e-9)
    assert whole.usage == pytest.approx(evaluate(shared.problem, solution.choice).usage)


def test_sharing_loses_little_and_never_gains():
    problem = built(4)
    free = solve(problem.problem, gap=GAP)
    shared = solve_shared(problem, problem.problem, gap=GAP)
    assert free.bound <= shared.objective * (1 + 1e-9)
    assert shared.objective <= free.objective * 1.03


def test_the_quotient_is_as_large_for_more_layers():
    assert len(share(built(12)).problem.nodes) == len(share(built(5)).problem.nodes)
