"""The search against brute force on random small problems, and what it promises: bounds, determinism, certificates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from autopar.solve import search
from autopar.solve.problem import Edge, Limit, Node, Problem, Term, brute_force, evaluate
from autopar.solve.search import min_limit_usage, min_overflow, solve

OBJECTIVES = (
    (Term(1.0, (0,)),),
    (Term(4.0, (0,)), Term(1.0, (1,))),
    (Term(1.0, (0,)), Term(1.0, (1,)), Term(3.0, (0, 1)), Term(1.0, (2,))),
    (Term(2.5, (0, 1, 2)), Term(0.0, (3,))),
    (Term(1.0, (0,)), Term(1.0, (1,)), Term(7.0, (0, 1)), Term(1.0, (2, 3))),
)


def random_problem(seed: int, num_nodes: int = 6, num_strategies: int = 4, tightness: float | None = None) -> Problem:
    """A graph with cycles, parallel edges and self loops; forbidden strategies and pairs; several rows and limits."""
    rng = np.random.default_rng(seed)
    terms = OBJECTIVES[seed % len(OBJECTIVES)]
    rows = sorted({row for term in terms for row in term.rows})
    num_limits = int(rng.integers(0, 3))
    whole = bool(rng.random() < 0.7)

    def costs(*shape: int, forbid: float) -> np.ndarray:
        values = rng.integers(0, 12, shape).astype(float) if rng.random() < 0.5 else rng.random(shape) * 10
        return np.where(rng.random(shape) < forbid, np.inf, values)

    def memory(size: int) -> np.ndarray:
        return rng.integers(0, 50, size).astype(float) if whole else rng.random(size) * 50

    nodes = []
    for index in range(num_nodes):
        size = int(rng.integers(1, num_strategies + 1))
        used = {limit: memory(size) for limit in range(num_limits) if rng.random() < 0.7}
        nodes.append(Node(f"n{index}", costs(size, forbid=0.03), int(rng.choice(rows)), used))
    edges = []
    for _ in range(int(rng.integers(num_nodes - 1, 2 * num_nodes))):
        ends = rng.integers(0, num_nodes, 2)
        shape = (nodes[ends[0]].num_strategies, nodes[ends[1]].num_strategies)
        edges.append(Edge(int(ends[0]), int(ends[1]), costs(*shape, forbid=0.08), int(rng.choice(rows))))
    limits = []
    for limit in range(num_limits):
        used = [node.memory[limit] for node in nodes if limit in node.memory]
        least, most = sum(float(part.min()) for part in used), sum(float(part.max()) for part in used)
        share = float(rng.random()) * 0.7 if tightness is None else tightness
        limits.append(Limit(f"limit{limit}", least + share * (most - least) + 7.0, 7.0))
    return Problem(tuple(nodes), tuple(edges), tuple(limits), terms)


@pytest.mark.parametrize("block", range(10))
def test_equals_brute_force(block: int) -> None:
    for seed in range(30 * block, 30 * block + 30):
        problem = random_problem(seed)
        expected, found = brute_force(problem), solve(problem, gap=0.0, time_limit_s=20.0)
        assert found.status == expected.status, seed
        if expected.status == "infeasible":
            assert found.choice == () and math.isinf(found.bound)
            continue
        assert found.objective == pytest.approx(expected.objective, rel=1e-7, abs=1e-9), seed
        assert found.bound <= expected.objective * (1 + 1e-9) + 1e-9, seed
        evaluation = evaluate(problem, found.choice)
        assert evaluation.feasible and evaluation.objective == found.objective, seed


@pytest.mark.parametrize("block", range(2))
def test_equals_brute_force_with_messages_instead_of_linear_programs(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "LARGEST_LINEAR_PROGRAM", 0)
    monkeypatch.setattr(search, "elimination_order", lambda model: None if model.alive else [])
    for seed in range(12 * block, 12 * block + 12):
        problem = random_problem(seed)
        expected, found = brute_force(problem), solve(problem, gap=0.0, time_limit_s=20.0)
        assert found.status == expected.status, seed
        if expected.status == "optimal":
            assert found.objective == pytest.approx(expected.objective, rel=1e-7, abs=1e-9), seed


@pytest.mark.parametrize("block", range(2))
def test_equals_brute_force_with_linear_programs_instead_of_tables(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "elimination_order", lambda model: None if model.alive else [])
    test_equals_brute_force(block)


def test_nothing_is_looked_for_above_the_cutoff() -> None:
    for seed in range(40):
        problem = random_problem(seed, num_nodes=8)
        best = brute_force(problem).objective
        if math.isinf(best) or best == 0:
            continue
        below, above = (solve(problem, gap=0.0, cutoff=share * best) for share in (0.9, 1.1))
        assert 0.9 * best <= below.bound <= best * (1 + 1e-9), seed
        assert above.objective == pytest.approx(best, rel=1e-7), seed


def test_the_gap_asked_for_is_met_and_the_bound_holds() -> None:
    for seed in range(40):
        problem = random_problem(seed)
        expected, found = brute_force(problem), solve(problem, gap=0.2)
        if expected.status == "infeasible":
            continue
        assert found.status == "optimal" and found.gap <= 0.2, seed
        assert found.bound <= expected.objective + 1e-9 <= found.objective + 2e-9, seed


def test_the_same_problem_gives_the_same_choice() -> None:
    for seed in range(12):
        problem = random_problem(seed, num_nodes=9, num_strategies=5)
        assert solve(problem).choice == solve(problem).choice, seed


def test_presolve_of_cp_sat_is_not_trusted() -> None:
    """OR-Tools 9.15 with presolve proved 118.46 optimal here."""
    problem = random_problem(1052, num_nodes=7, num_strategies=6)
    assert solve(problem, gap=0.0).objective == pytest.approx(brute_force(problem).objective)


def test_a_hint_that_is_best_is_kept() -> None:
    problem = random_problem(4)
    expected = brute_force(problem)
    assert solve(problem, gap=0.0, hint=expected.choice).objective == pytest.approx(expected.objective)
    assert solve(problem, gap=0.0, hint=[0] * len(problem.nodes)).objective == pytest.approx(expected.objective)


def test_without_time_there_is_still_a_bound_and_a_gap() -> None:
    problem = ring(num_nodes=40, num_strategies=6, share=0.2)
    found = solve(problem, gap=0.0, time_limit_s=0.0)
    best = solve(problem, gap=0.0)
    assert best.status == "optimal"
    assert found.status in ("feasible", "optimal") and found.bound <= best.objective <= found.objective + 1e-9


def test_least_usage_and_least_overflow_are_exact() -> None:
    checked = 0
    for seed in range(60):
        problem = random_problem(seed, num_nodes=5, num_strategies=3)
        if not problem.limits:
            continue
        usages = [evaluate(problem, choice) for choice in every_choice(problem)]
        usage = np.array([found.usage for found in usages if math.isfinite(found.objective)])
        capacity = np.array([limit.capacity for limit in problem.limits])
        least = min_limit_usage(problem)
        if not len(usage):
            assert all(math.isinf(value) for value in least.values())
            continue
        checked += 1
        for index, limit in enumerate(problem.limits):
            assert least[limit.name] == pytest.approx(usage[:, index].min()), seed
        assert min_overflow(problem) == pytest.approx((usage - capacity).max(axis=1).min()), seed
    assert checked > 20


def test_a_limit_that_nothing_meets_is_infeasible_and_the_overflow_says_by_how_much() -> None:
    nodes = tuple(Node(f"n{i}", np.array([1.0, 2.0]), 0, {0: np.array([8.0, 5.0])}) for i in range(3))
    problem = Problem(nodes, (), (Limit("memory", 14.0, 2.0),))
    assert solve(problem).status == "infeasible"
    assert min_limit_usage(problem) == {"memory": 17.0}
    assert min_overflow(problem) == pytest.approx(3.0)
    assert solve(Problem(nodes, (), (Limit("memory", 17.0, 2.0),))).objective == 6.0


def test_no_nodes_and_one_node() -> None:
    assert solve(Problem(())).status == "optimal"
    assert solve(Problem((Node("x", np.array([3.0, 1.0])),))).choice == (1,)
    assert solve(Problem((Node("x", np.array([np.inf])),))).status == "infeasible"


def every_choice(problem: Problem) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(node.num_strategies) for node in problem.nodes))


def ring(num_nodes: int, num_strategies: int, share: float) -> Problem:
    """A ring with chords, memory on every node."""
    rng = np.random.default_rng(0)
    nodes = [
        Node(f"n{i}", rng.random(num_strategies), 0, {0: rng.integers(1, 100, num_strategies).astype(float)})
        for i in range(num_nodes)
    ]
    ends = [(i, (i + step) % num_nodes) for i in range(num_nodes) for step in (1, 5)]
    edges = tuple(Edge(a, b, rng.random((num_strategies, num_strategies))) for a, b in ends)
    least = sum(float(node.memory[0].min()) for node in nodes)
    most = sum(float(node.memory[0].max()) for node in nodes)
    return Problem(tuple(nodes), edges, (Limit("memory", float(round(least + share * (most - least)))),))
