"""A forced strategy costs what the problem costs with all others of that node taken out, by brute force."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.solve.forced import Forced
from autopar.solve.layers_apart import restricted
from autopar.solve.problem import Problem, brute_force
from autopar.solve.search import solve
from tests.solve.test_search import random_problem


def alone(problem: Problem, node: int, strategy: int) -> Problem:
    kept = [np.arange(each.num_strategies) for each in problem.nodes]
    kept[node] = np.array([strategy])
    return restricted(problem, kept)


@pytest.mark.parametrize("block", range(3))
def test_equals_brute_force(block: int) -> None:
    outcomes = {True: 0, False: 0}
    for seed in range(block * 5, block * 5 + 5):
        problem = random_problem(seed)
        forced, hint = Forced.of(problem, range(len(problem.nodes))), solve(problem, gap=0).choice
        for node, each in enumerate(problem.nodes):
            one = forced.only(node)
            for strategy in range(each.num_strategies):
                expected = brute_force(alone(problem, node, strategy)).objective
                found = (one if strategy % 2 else forced).best(node, np.array([strategy]), hint)
                outcomes[bool(found.choice)] += 1
                assert found.objective == pytest.approx(expected, rel=1e-4), (seed, node, strategy)
                assert found.bound <= expected * (1 + 1e-9)
                assert strategy in one.allowed(node) or not found.choice
                assert not found.choice or found.choice[node] == strategy
    assert min(outcomes.values()) > 20, outcomes


def test_one_node_asked_is_the_problem_itself() -> None:
    problem = random_problem(3)
    every = np.arange(problem.nodes[0].num_strategies)
    assert Forced.of(problem, [0]).best(0, every).objective == pytest.approx(solve(problem, gap=0).objective, rel=1e-4)
