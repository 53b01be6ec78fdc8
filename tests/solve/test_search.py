"""The search against brute force on random small problems, and what it promises: bounds, determinism, certificates."""

from __future__ import annotations

import math

import numpy as np
import pytest

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
