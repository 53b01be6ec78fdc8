"""The solver beside trying everything, on problems of real step graphs: stages, modes of recompute, meshes, budgets."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from autopar.capture.step import TrainStep
from autopar.mesh import Mesh
from autopar.solve.build import BuiltProblem
from autopar.solve.layers_apart import restricted
from autopar.solve.problem import Limit, Problem, evaluate
from autopar.solve.search import solve
from tests.solve.test_recompute import Wide, built_for

MOST = 20_000
"""Choices that are tried for one problem."""

DRAWS = 34
"""Problems drawn of each graph."""


@functools.cache
def built(mesh: str, microbatches: int) -> tuple[BuiltProblem, tuple[int, ...]]:
    """A problem with recompute, and its best choice regardless of memory."""
    torch.manual_seed(0)
    step = TrainStep(Wide(), torch.randn(16, 8), microbatches=microbatches)
    made = built_for(step, Mesh.parse(mesh))[1]
    return made, solve(made.problem, gap=1e-2).choice


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2 tp=2", "pp=2 dp=2"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_best_of_what_is_left_free_is_found(mesh: str, microbatches: int) -> None:
    """Some nodes next to each other are free, all others do what they do in a good plan; the budget is drawn, too."""
    made, base = built(mesh, microbatches)
    fitting = 0
    for seed in range(DRAWS):
        draw = random.Random(seed)
        free = free_nodes(made.problem, draw)
        kept = [
            np.arange(n.num_strategies) if i in free else np.array([base[i]]) for i, n in enumerate(made.problem.nodes)
        ]
        problem = with_budget(restricted(made.problem, kept), free, draw)
        best, found = exhaustive(problem, free), solve(problem, gap=0.0)
        assert found.status == ("optimal" if np.isfinite(best) else "infeasible"), seed
        if np.isfinite(best):
            fitting += 1
            assert found.objective == pytest.approx(best, rel=1e-7), seed
            assert evaluate(problem, found.choice).feasible, seed
    assert fitting >= DRAWS // 2


def free_nodes(problem: Problem, draw: random.Random) -> list[int]:
    """Nodes around a drawn one, as many as can be tried together."""
    near: dict[int, set[int]] = {i: set() for i in range(len(problem.nodes))}
    for edge in problem.edges:
        near[edge.source].add(edge.target)
        near[edge.target].add(edge.source)
    found: list[int] = []
    waiting, choices = [draw.randrange(len(problem.nodes))], 1
    while waiting and len(found) < 7:
        node = waiting.pop(draw.randrange(len(waiting)))
        size = problem.nodes[node].num_strategies
        if node not in found and choices * size <= MOST:
            found.append(node)
            choices *= size
            waiting += sorted(near[node])
    return found


def with_budget(problem: Problem, free: Sequence[int], draw: random.Random) -> Problem:
    """The problem with limits between the least and the most that its choices may use."""
    limits = []
    for index, limit in enumerate(problem.limits):
        used = [node.memory[index] for node in problem.nodes if index in node.memory]
        least, most = (sum(float(f(each)) for each in used) for f in (np.min, np.max))
        limits.append(Limit(limit.name, least + draw.uniform(0.1, 1.1) * (most - least)))
    return replace(problem, limits=tuple(limits))


def exhaustive(problem: Problem, free: Sequence[int]) -> float:
    """The least objective of all choices, each tried; infinite where none is allowed and fits."""
    sizes = [problem.nodes[node].num_strategies for node in free]
    on_grid = functools.partial(spread, problem, free)
    rows = [np.zeros(sizes) for _ in range(problem.num_rows)]
    usage = [np.zeros(sizes) for _ in problem.limits]
    for index, node in enumerate(problem.nodes):
        rows[node.row] = rows[node.row] + on_grid(node.cost, [index])
        for limit, memory in node.memory.items():
            usage[limit] = usage[limit] + on_grid(memory, [index])
    for edge in problem.edges:
        rows[edge.row] = rows[edge.row] + on_grid(edge.cost, [edge.source, edge.target])
    forbidden = ~np.all([np.isfinite(row) for row in rows], axis=0)
    terms = [term for term in problem.objective if term.weight > 0]
    total = sum(term.weight * np.max([rows[row] for row in term.rows], axis=0) for term in terms)
    for bound, used in zip(problem.limits, usage, strict=True):
        forbidden = forbidden | (used > bound.threshold)
    return float(np.min(np.where(forbidden, np.inf, total)))


def spread(problem: Problem, free: Sequence[int], values: np.ndarray, nodes: Sequence[int]) -> np.ndarray:
    """Values by the strategies of `nodes`, over the grid of all choices of `free` ones; others have one strategy."""
    axis = {node: position for position, node in enumerate(free)}
    order = sorted(range(len(nodes)), key=lambda i: axis.get(nodes[i], -1))
    shape = [1] * len(free)
    for node in nodes:
        if node in axis:
            shape[axis[node]] = problem.nodes[node].num_strategies
    return np.transpose(values, order).reshape(shape)
