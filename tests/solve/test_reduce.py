"""The exact reductions: what they leave, what they keep, and that they are quick."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.solve.flow import Flow, marginals, price, relax
from autopar.solve.model import LINEAR, Model, NoChoiceError, recover
from autopar.solve.problem import Edge, Limit, Node, Problem, Term, brute_force, evaluate
from autopar.solve.reduce import classes, min_plus, reduce


def chain(num_nodes: int, num_strategies: int, chords: int = 0) -> Problem:
    rng = np.random.default_rng(0)
    nodes = tuple(Node(f"n{i}", rng.random(num_strategies)) for i in range(num_nodes))
    ends = [(i, i + 1) for i in range(num_nodes - 1)]
    if chords:
        ends += [(i, i + 7) for i in range(0, num_nodes - 8, chords)]
    return Problem(nodes, tuple(Edge(a, b, rng.random((num_strategies, num_strategies))) for a, b in ends))


def reduced(problem: Problem) -> Model:
    model = Model.of(problem)
    reduce(model)
    return model


def test_five_thousand_nodes_in_chains_disappear() -> None:
    problem = chain(5000, 50, chords=20)
    model = reduced(problem)
    choice = recover(model, {}, len(problem.nodes))
    assert not model.alive
    assert evaluate(problem, choice).objective == pytest.approx(model.constant[LINEAR], rel=1e-12)


def test_a_chain_is_solved_exactly() -> None:
    problem = chain(7, 5)
    model = reduced(problem)
    assert model.constant[LINEAR] == pytest.approx(brute_force(problem).objective)


def test_parallel_edges_and_rows_that_only_add_are_merged() -> None:
    nodes = (Node("a", np.array([0.0, 1.0])), Node("b", np.array([0.0, 2.0]), 1))
    cost = np.array([[3.0, 0.0], [0.0, 3.0]])
    problem = Problem(nodes, (Edge(0, 1, cost), Edge(1, 0, cost, 1)), (), (Term(4.0, (0,)), Term(1.0, (1,))))
    model = Model.of(problem)
    assert len(model.links[0]) == 1
    np.testing.assert_array_equal(model.links[0][1][LINEAR], 4 * cost + cost.T)


def test_dead_ends_are_followed_to_a_contradiction() -> None:
    same = np.where(np.eye(2, dtype=bool), 0.0, np.inf)
    nodes = tuple(Node(f"n{i}", np.zeros(2)) for i in range(3))
    edges = (Edge(0, 1, same), Edge(1, 2, same), Edge(2, 0, same[::-1]))
    with pytest.raises(NoChoiceError):
        reduced(Problem(nodes, edges))


def test_what_a_limit_forbids_goes_and_a_limit_that_holds_anyway_goes() -> None:
    node = Node("a", np.array([1.0, 2.0, 3.0]), 0, {0: np.array([9.0, 5.0, 1.0]), 1: np.array([1.0, 2.0, 3.0])})
    model = reduced(Problem((node,), (), (Limit("tight", 6.0), Limit("loose", 3.0))))
    assert not model.alive and recover(model, {}, 1) == (1,)


def test_a_link_that_only_shifts_costs_goes() -> None:
    left, right = np.array([1.0, 5.0, 2.0]), np.array([0.0, 4.0])
    used = np.array([4.0, 0.0, 1.0])
    nodes = (Node("a", np.zeros(3), 0, {0: used}), Node("b", np.zeros(2), 0, {0: used[:2]}))
    edges = (Edge(0, 1, left[:, None] + right),)
    model = reduced(Problem(nodes, edges, (Limit("memory", 4.5),)))
    assert not any(model.links.values())


def test_min_plus_and_classes() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.random((40, 30)), rng.random((30, 50))
    left[rng.random(left.shape) < 0.2] = np.inf
    np.testing.assert_array_equal(min_plus(left, right), (left[:, :, None] + right[None]).min(axis=1))
    rows = np.array([[1.0, np.inf], [2.0, 3.0], [1.0, np.inf], [2.0, 3.0 + 1e-15]])
    first, group = classes(rows)
    assert len(first) == 2 and group[0] == group[2] != group[1] == group[3]


def test_any_prices_prove_a_bound_and_marginals_never_exceed_what_a_choice_costs() -> None:
    rng = np.random.default_rng(1)
    nodes = tuple(Node(f"n{i}", rng.random(3), i % 2, {0: rng.integers(0, 9, 3).astype(float)}) for i in range(5))
    pairs = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (0, 2)]
    edges = tuple(Edge(a, b, rng.random((3, 3)), a % 2) for a, b in pairs)
    problem = Problem(nodes, edges, (Limit("memory", 14.0),), (Term(1.0, (0, 1)), Term(0.5, (0,))))
    flow, best = Flow.of(reduced(problem)), brute_force(problem)
    relaxed = relax(flow)
    assert relaxed is not None
    priced = price(flow, relaxed.prices)
    assert priced.bound <= best.objective + 1e-12
    least = marginals(flow, priced.reduced)
    for node, first in flow.first.items():
        at = int(np.flatnonzero(flow.model.alive[node] == best.choice[node])[0])
        assert priced.bound + least[first + at] <= best.objective + 1e-9
