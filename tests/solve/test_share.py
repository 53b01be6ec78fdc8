"""Equal layers as one: the quotient's objective is that of the expanded choice, and costs little."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from autopar import TrainStep
from autopar.capture.folding import Folded
from autopar.cluster import parse_cluster
from autopar.fitting import GAP
from autopar.layers import Cut
from autopar.mesh import Mesh
from autopar.pins import parse_pins
from autopar.skeletons import Skeletons
from autopar.solve.build import build_problem
from autopar.solve.problem import evaluate, unlimited
from autopar.solve.search import solve
from autopar.solve.share import canonical_keys, share, solve_repeated_first, solve_shared
from autopar.trials import Trials
from tests.virtual.step_models import step_of


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
    trials = trials_of(step, "4xcpu")
    cut = Cut.single(trials.skeletons.units)
    return build_problem(trials.skeletons.graph(cut), trials.setting(cut, Mesh.parse(mesh)))


def trials_of(step: TrainStep, cluster: str, pins: str = "") -> Trials:
    """Trials with all layers of the step."""
    skeletons = Skeletons(Folded(step.capture()), step.microbatches, {})
    return Trials(step, skeletons, parse_cluster(cluster), parse_pins(pins), 1e9)


def test_nodes_of_equal_layers_are_one_group():
    problem = built(6)
    shared = share(problem)
    groups = dict(zip((node.meta["key"] for node in problem.nodes), shared.group, strict=True))
    same = {groups[f"param:layers.{i}.1.weight"] for i in range(6)}
    assert len(same) == 1
    assert canonical_keys(problem.nodes[0].graph)[problem.nodes[0]].startswith("layers.* param:layers.*.")
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


@pytest.mark.parametrize("mesh", ["pp=1 dp=2 tp=2", "pp=1 dp=4 tp=1"])
def test_what_repeats_first_is_near_the_best(mesh):
    whole = built(5, mesh)
    free = unlimited(whole.problem)
    best = solve_shared(whole, free, gap=GAP)
    soon = solve_repeated_first(whole, free, gap=GAP, time_limit_s=5.0)
    assert soon.bound <= best.objective * (1 + 1e-9) and best.bound <= soon.objective * (1 + 1e-9)
    assert soon.objective <= best.objective * 1.05
    assert evaluate(free, soon.choice).objective == pytest.approx(soon.objective, rel=1e-9)


def test_a_model_of_one_layer_has_nothing_that_repeats():
    whole = built(1)
    free = unlimited(whole.problem)
    soon = solve_repeated_first(whole, free, gap=GAP, time_limit_s=5.0)
    assert soon.objective == pytest.approx(solve_shared(whole, free, gap=GAP).objective, rel=GAP)


def test_the_quotient_is_as_large_for_more_layers():
    assert len(share(built(12)).problem.nodes) == len(share(built(5)).problem.nodes)


def test_a_node_more_in_one_layer_shifts_no_other():
    """The decisions of Llama's layers, of which the first has a relay less, are numbered alike (found by a plan with
    two all-to-alls around a relay of the first layer, which decided as another relay of the others)."""
    step = step_of("llama, 3 layers")
    trials = trials_of(step, "2xcpu", "tp=2")
    cut = Cut.single(trials.skeletons.units)
    problem = build_problem(trials.skeletons.graph(cut), trials.setting(cut, Mesh.parse("pp=1 dp=1 tp=2")))
    solution = solve_shared(problem, replace(problem.problem, limits=(), nodes=without_memory(problem)), gap=0.0)
    assert improvements(problem.problem, solution.choice) == []


def improvements(problem, choice) -> list[str]:
    """Nodes of which another strategy alone costs less; every row counts once."""
    near = [[] for _ in problem.nodes]
    for edge in problem.edges:
        near[edge.source].append(edge)
        near[edge.target].append(edge)
    found = []
    for index, node in enumerate(problem.nodes):
        costs = node.cost.copy()
        for edge in near[index]:
            is_source = edge.source == index
            costs += edge.cost[:, choice[edge.target]] if is_source else edge.cost[choice[edge.source]]
        if costs.min() < costs[choice[index]] * (1 - 1e-9) - 1e-12:
            found.append(node.name)
    return found


def without_memory(problem):
    return tuple(replace(node, memory={}) for node in problem.problem.nodes)


@pytest.mark.parametrize(
    ("pins", "mesh", "recompute"),
    [
        ("tp=2", "pp=1 dp=2 tp=2", "none"),
        ("dp=2, zero=3, blocks.1: tp=none", "pp=1 dp=2 tp=2", "auto"),
        ("*.up: tp=out", "pp=2 dp=1 tp=2", "auto"),
        ("", "pp=2 dp=2 tp=1", "full"),
    ],
)
def test_alike_nodes_share_what_each_would_have(pins, mesh, recompute):
    """The problem is the same as where every node derives its own strategies, prices and bytes."""
    step = step_of("gpt, 3 layers", 2)
    mesh = Mesh.parse(mesh)
    trials = trials_of(step, "4xcpu", pins)
    units = trials.skeletons.units
    cut = Cut.single(units) if mesh.num_stages == 1 else Cut.from_boundaries(units, [0, len(units) // 2])
    graph = trials.skeletons.graph(cut)
    setting = replace(trials.setting(cut, mesh), recompute=recompute)
    shared = build_problem(graph, setting)
    alone = build_problem(graph, replace(setting, alike=lambda node, rule: node))
    assert shared.strategies == alone.strategies
    for a, b in zip(shared.problem.nodes, alone.problem.nodes, strict=True):
        assert (a.name, a.row, list(a.memory)) == (b.name, b.row, list(b.memory))
        np.testing.assert_allclose(a.cost, b.cost, rtol=1e-12)
        np.testing.assert_allclose(list(a.memory.values()), list(b.memory.values()))
    for a, b in zip(shared.problem.edges, alone.problem.edges, strict=True):
        assert (a.source, a.target, a.row) == (b.source, b.target, b.row)
        np.testing.assert_allclose(a.cost, b.cost, rtol=1e-12)
