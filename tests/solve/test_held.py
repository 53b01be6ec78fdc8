"""What the solver's limits count of a plan, beside what the accountant counts of its program: never more."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.capture.step import TrainStep
from autopar.compiling import annotated, lower
from autopar.mesh import Mesh
from autopar.planning import CUT_GAP, plan
from autopar.program.memory import stage_peak
from autopar.program.parts import Pipeline
from autopar.solve.build import BuiltProblem
from autopar.solve.problem import evaluate
from autopar.solve.search import solve
from tests.solve.test_recompute import built_for, price
from tests.solve.test_share import trials_of
from tests.virtual.step_models import momentum
from tests.virtual.step_models import step_of as step_named


class Block(nn.Module):
    """Values that only what follows them is made of stand between those that its backward reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        wide = (((self.up(x) + 1.0) * 2.0 - 3.0) * 0.5).sin()
        return x + self.down(wide)


class Blocks(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def step_of(width: int, rows: int, microbatches: int, layers: int = 4) -> TrainStep:
    torch.manual_seed(0)
    model = Blocks(width, layers)
    return TrainStep(model, {"x": torch.randn(rows, width)}, optimizer=momentum, microbatches=microbatches)


def lean_choice(built: BuiltProblem, seed: int) -> tuple[int, ...]:
    """A choice under random prices that keeps nothing of no use: bytes have a price, too."""
    rng, nodes = np.random.default_rng(seed), built.problem.nodes
    step_s = sum(float(node.cost[np.isfinite(node.cost)].mean()) for node in nodes)
    most = sum(float(max(used.max() for used in node.memory.values())) for node in nodes if node.memory)
    priced = []
    for node in nodes:
        held = sum(node.memory.values(), np.zeros(node.num_strategies))
        more = rng.random(node.num_strategies) * step_s / len(nodes) + held * step_s / most
        priced.append(replace(node, cost=node.cost + more, memory={}))
    return solve(replace(built.problem, nodes=tuple(priced), limits=()), gap=1e-3).choice


def lowered(step: TrainStep, mesh: Mesh, recompute: str, seed: int) -> tuple[BuiltProblem, tuple[int, ...], Pipeline]:
    cut, built = built_for(step, mesh, recompute)
    choice = lean_choice(built, seed)
    again = tuple(node.meta["key"] for node in (*built.recomputed(choice), *built.moved_again(choice)))
    graph = annotated(step.capture(), step.microbatches, cut)
    return built, choice, lower(graph, built.choices(choice), mesh, step.microbatches, price, "1f1b", again)


CASES = [
    ("dp=4", 1, 16, 8, "auto"),
    ("dp=2", 2, 4, 128, "full"),  # much is made on the way to what the backward reads of a block that runs again
    ("pp=2 dp=1", 2, 16, 32, "kept"),  # all microbatches are there before there are gradients
    ("pp=2 dp=1", 2, 16, 64, "full"),
    ("pp=2 dp=2", 4, 8, 64, "auto"),
]


@pytest.mark.parametrize(("mesh", "microbatches", "width", "rows", "recompute"), CASES)
def test_limits_count_no_more_than_the_program_holds(
    mesh: str, microbatches: int, width: int, rows: int, recompute: str
) -> None:
    step = step_of(width, rows, microbatches, layers=8 if recompute != "auto" else 4)
    built, choice, pipeline = lowered(step, Mesh.parse(mesh), recompute, seed=width)
    usage = evaluate(built.problem, choice).usage
    kinds = built.setting.ranks.kinds
    for limit, rank, used in zip(built.problem.limits, built.limit_ranks, usage, strict=True):
        assert used <= stage_peak(pipeline, kinds[rank].rank).peak, limit.name


@pytest.mark.parametrize(
    ("cluster", "pins", "microbatches", "width", "rows"),
    [
        # of one microbatch's gradients, whole on every rank as the ops leave them, few are there at one time
        ("8xcpu", "pp=1, dp=8, zero=3, recompute=full", 1, 128, 64),
        ("2xcpu", "pp=2, recompute=full", 2, 16, 64),
        ("2xcpu", "pp=1, dp=2, zero=0, recompute=full", 2, 4, 128),
    ],
)
def test_a_plan_fits_in_what_it_needs_and_the_search_finds_no_worse_one(
    cluster: str, pins: str, microbatches: int, width: int, rows: int
) -> None:
    step = step_of(width, rows, microbatches, layers=12)
    pinned = plan(step, cluster, pin=pins, memory="10GiB")
    needed = float(max(row.peak for row in pinned.estimate.memory))
    again = plan(step, cluster, pin=pins, memory=needed)
    free = plan(step, cluster, pin=pins.rpartition(", recompute")[0].replace(", zero=3", ""), memory=needed)
    for found in (again, free):
        assert found.estimate.bound_s <= pinned.estimate.objective_s * (1 + 1e-9)
        assert found.estimate.objective_s <= pinned.estimate.objective_s * (1 + CUT_GAP)
        assert max(row.peak for row in found.estimate.memory) <= needed


def test_without_recompute_what_was_moved_is_kept_in_place_of_the_value() -> None:
    """Under prices by which the backward reads what the forward gathered, limits count that alone; and nothing runs
    again."""
    step = step_named("gpt, 3 layers")
    cut, built = built_for(step, Mesh.parse("dp=2"), "kept")
    choice = lean_choice(built, seed=0)
    picked = built.picked(choice)
    assert any(strategy.is_reused for strategy in picked) and not built.recomputed(choice)
    pipeline = lower(annotated(step.capture(), 1, cut), built.choices(choice), Mesh.parse("dp=2"), 1, price, "1f1b")
    assert max(evaluate(built.problem, choice).usage) <= stage_peak(pipeline, 0).peak


def test_what_fits_of_one_stage_is_guessed_where_the_fastest_layouts_do_not() -> None:
    """The search goes by guesses: a mesh without one comes last."""
    mesh = Mesh.parse("pp=1 dp=4 tp=1")
    loose = trials_of(step_of(32, 8, 1), "4xcpu", "pp=1, dp=4, tp=1")
    relaxed = loose.relaxed(mesh)
    fastest, tight = loose.planned(mesh, relaxed), replace(loose, capacity=1.0, guesses={})
    assert fastest is not None and math.isinf(tight.guess_s(mesh, relaxed))
    tight = replace(loose, capacity=0.6 * max(fastest.peaks), guesses={})
    found = tight.planned(mesh, relaxed)
    assert found is not None and found.solution.objective > fastest.solution.objective
    assert loose.guess_s(mesh, relaxed) < tight.guess_s(mesh, relaxed) < math.inf
