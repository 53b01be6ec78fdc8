"""What a step takes where communication hides behind computation, and the choices for which it takes least.

    step_s(built, choice)                       # seconds; at least the problem's objective
    solution = solve_beside(built, problem, solve, gap=1e-3)        # solve: of a problem under other costs

A window (see `windows`) with C seconds of computation and H of communication that may hide takes

    max(C + kH, H + kC)

k being the device's contention: what runs at the same time slows both sides, as in the cost model of Galvatron (Miao et
al., PVLDB 16(3), 2022). So (1 - k) min(C, H) of it hides, never more than the computation that runs beside it. A built
problem prices the window at C + kH, which no choice takes less than; where H > C it takes (1 - k)(H - C) more, which is
late. For any r in [0, 1] the window takes no less than r(C + kH) + (1 - r)(H + kC), either, so that a problem with
these prices bounds the step, too (Lagrangian duality), and its best choice communicates less where r is small. So where
too much is late, r is bisected, window by window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solve.build import BuiltProblem, Strategy
from autopar.solve.modes import Mode
from autopar.solve.problem import Array, Edge, Node, Problem, Solution, evaluate, objective_of

ROUNDS = 4
"""Bisections of the prices of windows."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Seconds of each window, in one microbatch: of computation, and of communication that may hide behind it."""

    computing: list[float]
    hiding: list[float]

    def late_s(self, contention: float) -> list[float]:
        """What each window takes beyond its price."""
        pairs = zip(self.computing, self.hiding, strict=True)
        return [(1 - contention) * max(0.0, hiding - computing) for computing, hiding in pairs]

    def hidden_parts(self, contention: float) -> list[float]:
        """Which part of each window's communication hides."""
        pairs = zip(self.computing, self.hiding, strict=True)
        return [(1 - contention) * min(computing, hiding) / hiding if hiding else 0.0 for computing, hiding in pairs]


def beside(built: BuiltProblem, choice: Sequence[int]) -> Beside:
    """What runs in each window under a choice."""
    computing, hiding = ([0.0] * len(built.windows.windows) for _ in range(2))
    if not computing:
        return Beside(computing, hiding)
    for number, (here, again) in enumerate(_computed_in(built)):
        pick, node = choice[number], built.problem.nodes[number]
        is_again = built.strategies[number][pick].mode is Mode.AGAIN
        for window, part in ((here, 0.5 if is_again else 1.0), (again, 0.5 * is_again)):
            if window is not None:
                computing[window] += part * float(node.cost[pick])
    for edge, moved in zip(built.problem.edges, built.moves, strict=True):
        if moved.hideable is not None:
            seconds = float(moved.hideable[choice[edge.source], choice[edge.target]])
            for window, part in moved.hiding.shares:
                hiding[window] += part * seconds
    return Beside(computing, hiding)


def step_s(built: BuiltProblem, choice: Sequence[int], problem: Problem | None = None) -> float:
    """Seconds of a step under a choice that is allowed; `problem`: `built.problem` under other weights or prices."""
    problem = problem or built.problem
    rows = list(evaluate(problem, choice).rows)
    late = beside(built, choice).late_s(built.setting.contention)
    for window, seconds in zip(built.windows.windows, late, strict=True):
        rows[window.stage] += seconds
    return objective_of(problem.objective, rows)


def solve_beside(
    built: BuiltProblem,
    problem: Problem,
    solve: Callable[[Problem], Solution],
    *,
    gap: float,
    cutoff: float = np.inf,
    is_cut: bool = False,
) -> Solution:
    """The best solution that `solve` finds of `problem`, `built.problem` under other limits or weights, at some prices
    of its windows: its objective is what the step takes, its bound what no choice takes less than.

    More prices are tried where more than `gap` of what the first find is late, as long as the bound leaves more than
    that, and is below `cutoff`. `is_cut`: whether the bound is to hold for the stages of a pipeline, too, whose windows
    are others: then it is that of the first prices."""
    found = solve(problem)
    if not found.choice or not built.windows.windows:
        return found
    best = replace(found, objective=step_s(built, found.choice, problem))
    if best.objective - found.objective <= gap * best.objective:
        return best
    prices, bound = _Prices.of(built, found.choice), found.bound
    for _ in range(ROUNDS):
        if best.objective - bound <= gap * best.objective or bound >= cutoff:
            break
        found = solve(weighed(built, problem, prices.parts))
        bound = bound if is_cut else max(bound, found.bound)
        if not found.choice:
            break
        found = replace(found, objective=step_s(built, found.choice, problem))
        best, prices = min(best, found, key=lambda solution: solution.objective), prices.nearer(built, found.choice)
    is_closed = best.objective - bound <= gap * best.objective
    return replace(best, bound=min(bound, best.objective), status="optimal" if is_closed else "feasible")


@dataclass(frozen=True, slots=True)
class _Prices:
    """Of each window, between which two r its best one is."""

    low: list[float]
    high: list[float]

    @property
    def parts(self) -> list[float]:
        return [(low + high) / 2 for low, high in zip(self.low, self.high, strict=True)]

    @classmethod
    def of(cls, built: BuiltProblem, choice: Sequence[int]) -> _Prices:
        """After a solution in which all r are 1: those are open in which there is too little computation."""
        late = beside(built, choice).late_s(built.setting.contention)
        return cls([0.0 if seconds else 1.0 for seconds in late], [1.0] * len(late))

    def nearer(self, built: BuiltProblem, choice: Sequence[int]) -> _Prices:
        """After a solution at `parts`: where still too much is late, communication is to cost more."""
        late = beside(built, choice).late_s(built.setting.contention)
        rows = list(zip(self.low, self.high, self.parts, late, strict=True))
        low = [low if seconds else middle for low, _, middle, seconds in rows]
        return _Prices(low, [middle if seconds else high for _, high, middle, seconds in rows])


def weighed(built: BuiltProblem, problem: Problem, parts: Sequence[float]) -> Problem:
    """`problem` where each window takes r(C + kH) + (1 - r)(H + kC); `parts`: the r of each."""
    contention = built.setting.contention
    less = [(1 - part) * (1 - contention) for part in parts]  # of computation; of communication so much more
    nodes = list(problem.nodes)
    for number, (here, again) in enumerate(_computed_in(built)):
        off = [less[window] if window is not None else 0.0 for window in (here, again)]
        if any(off):
            nodes[number] = _cheaper(nodes[number], built, number, *off)
    edges = list(problem.edges)
    for number, moved in enumerate(built.moves):
        more = sum(part * less[window] for window, part in moved.hiding.shares)
        if moved.hideable is not None and more:
            edge = edges[number]
            edges[number] = Edge(edge.source, edge.target, edge.cost + more * moved.hideable, edge.row)
    return replace(problem, nodes=tuple(nodes), edges=tuple(edges))


def _cheaper(node: Node, built: BuiltProblem, number: int, here: float, again: float) -> Node:
    """A node that costs a part less; `again`: what is computed a second time, in the backward."""
    is_again = np.array([option.mode is Mode.AGAIN for option in built.strategies[number]])
    part: Array = np.where(is_again, (here + again) / 2, here)
    return replace(node, cost=node.cost - part * built.problem.nodes[number].cost)


def _computed_in(built: BuiltProblem) -> list[tuple[int | None, int | None]]:
    """Of each node, the window in which it runs, and that in which it may run again."""
    windows = built.windows
    pairs = zip(built.nodes, built.strategies, strict=True)
    return [(windows.of.get(n), windows.again(n) if _may_run_again(options) else None) for n, options in pairs]


def _may_run_again(options: Sequence[Strategy]) -> bool:
    return options[0].mode is not None and any(option.mode is Mode.AGAIN for option in options)
