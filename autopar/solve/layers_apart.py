"""Which layers compute what again, once the layouts are chosen: each layer decides for itself.

    solution = solve_modes(built, problem, solve_shared(built, problem, gap=1e-3))

Layers that decide as one either all keep a value or none does, so that up to a layer's worth of values times their
number is left of the memory. With the layouts as they are, the modes alone are a small problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.solve.build import BuiltProblem, Strategy
from autopar.solve.problem import Problem, Solution
from autopar.solve.search import solve

GAP, TIME_LIMIT_S = 1e-3, 5.0


def solve_modes(built: BuiltProblem, problem: Problem, found: Solution) -> Solution:
    """The best solution with the layouts of `found`, which may break the limits of `problem`: `built.problem` under
    other limits. Without recompute it is `found`."""
    if not found.choice or not built.has_modes:
        return found
    kept = [of_layouts(options, options[pick]) for options, pick in zip(built.strategies, found.choice, strict=True)]
    solution = solve_among(problem, kept, gap=GAP, time_limit_s=TIME_LIMIT_S, hint=found.choice)
    if not solution.choice:
        return solution
    return replace(solution, bound=min(found.bound, solution.objective), status=found.status, seconds=found.seconds)


def solve_among(
    problem: Problem, kept: list[np.ndarray], *, gap: float, time_limit_s: float, hint: Sequence[int] | None = None
) -> Solution:
    """`solve` with only the strategies `kept` (indices in order) of each node; `hint` is a choice among them."""
    place = None if hint is None else [int(np.searchsorted(left, pick)) for left, pick in zip(kept, hint, strict=True)]
    found = solve(restricted(problem, kept), gap=gap, time_limit_s=time_limit_s, hint=place)
    if not found.choice:
        return found
    return replace(found, choice=tuple(int(left[pick]) for left, pick in zip(kept, found.choice, strict=True)))


def of_layouts(options: Sequence[Strategy], wanted: Strategy) -> np.ndarray:
    """The indices of the strategies with the layouts of `wanted`, whatever their modes."""
    same = (option.choice == wanted.choice and option.holds_copy == wanted.holds_copy for option in options)
    return np.flatnonzero(list(same))


def restricted(problem: Problem, kept: list[np.ndarray]) -> Problem:
    """The same problem with only the strategies `kept` (indices in order) of each node."""
    nodes = tuple(
        replace(node, cost=node.cost[left], memory={limit: used[left] for limit, used in node.memory.items()})
        for node, left in zip(problem.nodes, kept, strict=True)
    )
    edges = tuple(replace(edge, cost=edge.cost[np.ix_(kept[edge.source], kept[edge.target])]) for edge in problem.edges)
    return replace(problem, nodes=nodes, edges=edges)
