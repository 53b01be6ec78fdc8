"""Elimination by tables against brute force, and what it leaves to others."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.solve.model import Model, NoChoiceError
from autopar.solve.problem import Edge, Limit, Node, Problem, brute_force, evaluate
from autopar.solve.tables import elimination_order, minimise


def random_problem(seed: int) -> Problem:
    """A dense graph of nodes of one to four strategies, some pairs of which are forbidden."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, int(rng.integers(2, 8)))
    nodes = tuple(Node(f"n{i}", rng.random(size) * 10) for i, size in enumerate(sizes))
    pairs = [(i, j) for i in range(len(sizes)) for j in range(len(sizes)) if i != j and rng.random() < 0.4]
    edges = []
    for i, j in pairs:
        costs = rng.random((sizes[i], sizes[j])) * 10
        edges.append(Edge(i, j, np.where(rng.random(costs.shape) < 0.15, np.inf, costs)))
    return Problem(nodes, tuple(edges))


@pytest.mark.parametrize("block", range(4))
def test_equals_brute_force(block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        problem, expected = random_problem(seed), brute_force(random_problem(seed))
        model = Model.of(problem)
        order = elimination_order(model)
        assert order is not None and sorted(order) == list(range(len(problem.nodes)))
        chosen = minimise(model, order)
        if expected.status == "infeasible":
            assert chosen is None, seed
            continue
        assert chosen is not None, seed
        found = evaluate(problem, [chosen[node] for node in range(len(problem.nodes))])
        assert found.objective == pytest.approx(expected.objective, rel=1e-12), seed


def test_what_the_tables_are_not_for() -> None:
    costs = np.zeros(8)
    nodes = tuple(Node(f"n{i}", costs, memory={0: np.arange(8.0)}) for i in range(12))
    edges = tuple(Edge(i, j, np.ones((8, 8)) * (i + j)) for i in range(12) for j in range(i))
    assert elimination_order(Model.of(Problem(nodes, edges, (Limit("limit", 5.0),)))) is None
    assert elimination_order(Model.of(Problem(nodes, edges))) is None  # 8^12 entries
    assert elimination_order(Model.of(Problem(nodes[:5], edges[:10]))) is not None


def test_a_node_without_a_strategy() -> None:
    with pytest.raises(NoChoiceError):
        Model.of(Problem((Node("n", np.array([math.inf])),), ()))
