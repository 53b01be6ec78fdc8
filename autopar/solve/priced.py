"""One stage under its memory limits, where an exact search takes long: memory has a price instead.

    within = Within(built, relaxed_bound, near)         # near: a strategy per node, whose layouts are worth a try
    solution = within.solve(problem)                    # `built.problem` under other limits

Where each byte that the stage holds costs some seconds there are no limits, and what repeats is solved first. The
higher the price, the less is held: two prices are found, one at which the limits hold, one at which they don't. The
layouts of both, and those of no price (`near`), are then given the best modes within the limits.

Bound: at any price, what fits costs no less than the least of seconds + price * (held - capacity), since the second
part isn't positive for it (Lagrangian duality). Several limits share the price.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.solve.beside import solve_beside, step_s
from autopar.solve.build import BuiltProblem, Strategy
from autopar.solve.layers_apart import of_layouts, solve_among, solve_modes
from autopar.solve.problem import Problem, Solution, evaluate, unlimited
from autopar.solve.share import share, solve_repeated_first, solve_shared

EXACT = 10_000
"""Strategies, of equal layers once, up to which the problem itself is solved."""

EXACT_GAP, GAP, TIME_LIMIT_S = 1e-3, 5e-3, 1.0
"""Effort for the problem itself, and for layouts at a price."""

FIRST, FACTOR, MOST = 0.03, 4.0, 8.0
"""Prices that are tried, in parts of the step's time for all of a device's memory: the first, how many times as much
the next one is, and the last. At that what holds least is cheapest, near enough."""


@dataclass(slots=True)
class Within:
    """A one-stage problem with its limits, and what it costs at the prices that were tried."""

    built: BuiltProblem
    bound: float
    """Seconds that no choice beats, whatever the limits."""
    near: Sequence[Strategy] = ()
    known: dict[float, Solution] = field(default_factory=dict)
    """By price; the objective and its bound count the price of all that is held."""
    is_small: bool = False

    def __post_init__(self) -> None:
        nodes = share(self.built).problem.nodes
        self.is_small = sum(node.num_strategies for node in nodes) <= EXACT

    def solve(self, problem: Problem) -> Solution:
        """A good choice within the limits of `problem`, and a bound; without limits, a good choice."""
        if self.is_small:
            floor = self.bound if problem.limits else -math.inf
            solve = functools.partial(solve_shared, self.built, gap=EXACT_GAP, near=self.near, floor=floor)
            return solve_beside(self.built, problem, solve, gap=GAP) if problem.limits else solve(problem)
        if not problem.limits:
            return solve_repeated_first(self.built, problem, gap=GAP, time_limit_s=TIME_LIMIT_S)
        tried = list(self._tried(problem))
        bound = max(self.bound, *(self._proven(problem, price) for price in self.known))
        found = [solve_modes(self.built, problem, self.known[price]) for price in tried[-2:]]
        found.append(self._in_layouts(problem))
        best = min(found, key=self._step_s)
        return replace(best, bound=min(bound, best.objective))

    def _step_s(self, solution: Solution) -> float:
        """With what computation is too short to hide."""
        return step_s(self.built, solution.choice) if solution.choice else math.inf

    def _tried(self, problem: Problem) -> Iterator[float]:
        """The prices that are tried, the last ones the nearest to where the limits begin to hold."""
        low, high = 0.0, FIRST
        while not self._fits(problem, high) and high < MOST:
            yield high
            low, high = high, FACTOR * high
        if low and self._fits(problem, high):
            middle = math.sqrt(low * high)
            yield from (low, middle) if self._fits(problem, middle) else (high, middle)
        else:
            yield high

    def _fits(self, problem: Problem, price: float) -> bool:
        choice = self._at(price).choice
        return bool(choice) and evaluate(problem, choice).feasible

    def _at(self, price: float) -> Solution:
        """The best choice at a price, without limits."""
        if price not in self.known:
            priced = self._priced(price)
            self.known[price] = solve_repeated_first(self.built, priced, gap=GAP, time_limit_s=TIME_LIMIT_S)
        return self.known[price]

    def _priced(self, price: float) -> Problem:
        """Without limits; each byte that they count has its price."""
        problem, bytes_s = self.built.problem, self._bytes_s(price)
        weight = {row: term.weight for term in problem.objective for row in term.rows}
        nodes = tuple(
            replace(free, cost=free.cost + sum(node.memory.values(), 0.0) * (bytes_s / weight[node.row]))
            for free, node in zip(unlimited(problem).nodes, problem.nodes, strict=True)
        )
        return replace(unlimited(problem), nodes=nodes)

    def _bytes_s(self, price: float) -> float:
        """Seconds for a byte under each limit."""
        return price * self.bound / sum(limit.capacity for limit in self.built.problem.limits)

    def _proven(self, problem: Problem, price: float) -> float:
        """What no choice within the limits beats, by what is known at a price."""
        room = sum(limit.capacity - limit.constant for limit in problem.limits)
        return self._at(price).bound - self._bytes_s(price) * room

    def _in_layouts(self, problem: Problem) -> Solution:
        """The best choice with the layouts of `near`."""
        pairs = zip(self.built.strategies, self.near, strict=True)
        kept = [of_layouts(options, wanted) for options, wanted in pairs] if self.near else []
        if not kept or not all(map(len, kept)):
            return Solution((), math.inf, self.bound, "unknown")
        return solve_among(problem, kept, gap=GAP, time_limit_s=TIME_LIMIT_S)
