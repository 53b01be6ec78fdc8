"""Memory at a price: choices that fit, near the best ones, and bounds that hold."""

from dataclasses import replace

import pytest
import torch

from autopar import TrainStep
from autopar.layers import Cut
from autopar.mesh import Mesh
from autopar.solve.build import BuiltProblem, build_problem
from autopar.solve.held import least_memory
from autopar.solve.priced import Within
from autopar.solve.problem import Problem, evaluate, unlimited
from autopar.solve.share import solve_shared
from tests.solve.test_share import Layers, trials_of

GAP = 1e-3


@pytest.fixture(scope="module")
def built() -> BuiltProblem:
    trials = trials_of(TrainStep(Layers(6), torch.randn(8, 16, 64)), "4xcpu")
    cut = Cut.single(trials.skeletons.units)
    setting = replace(trials.setting(cut, Mesh.parse("pp=1 dp=2 tp=2")), recompute="auto")
    return build_problem(trials.skeletons.graph(cut), setting)


@pytest.fixture(scope="module")
def fastest(built: BuiltProblem) -> tuple[int, ...]:
    return solve_shared(built, unlimited(built.problem), gap=GAP).choice


@pytest.fixture(scope="module")
def priced(built: BuiltProblem, fastest: tuple[int, ...]) -> Within:
    """By prices, though it is small enough to be solved itself."""
    bound = evaluate(built.problem, fastest).objective * (1 - GAP)
    within = Within(built, bound, built.picked(fastest))
    assert within.is_small
    within.is_small = False
    return within


def limited(built: BuiltProblem, capacity: float) -> Problem:
    limits = tuple(replace(limit, capacity=capacity) for limit in built.problem.limits)
    return replace(built.problem, limits=limits)


def test_what_is_found_fits_and_is_near_the_best(built, fastest, priced) -> None:
    problem = limited(built, 0.7 * max(evaluate(built.problem, fastest).usage))
    assert not evaluate(problem, fastest).feasible
    best, found = solve_shared(built, problem, gap=GAP), priced.solve(problem)
    assert evaluate(problem, found.choice).feasible
    assert priced.bound <= found.bound <= best.objective * (1 + 1e-9)
    assert best.bound <= found.objective * (1 + 1e-9) and found.objective <= 1.1 * best.objective


def test_nothing_is_found_where_nothing_fits(built, priced) -> None:
    assert not priced.solve(limited(built, 1000.0)).choice


def test_without_limits_it_is_a_good_choice(built, priced) -> None:
    problem = least_memory(built.problem, 1.0)
    best, found = solve_shared(built, problem, gap=GAP), priced.solve(problem)
    assert best.bound <= found.objective <= 1.05 * best.objective
