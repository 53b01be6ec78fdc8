"""What it would cost if a node had to take a strategy, all others chosen anew around it.

    forced = Forced.of(problem, [3, 7])
    one = forced.only(3)
    one.best(3, np.array([2]))              # the best solution in which node 3 takes strategy 2

What no question is about is reduced once for all questions, and again for those about one node, exactly; each is then
a small problem.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solve.model import Model, NoChoiceError
from autopar.solve.problem import Index, Problem, Solution
from autopar.solve.reduce import reduce
from autopar.solve.search import State, search, solution_of

GAP = 1e-4
TIME_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class Forced:
    """A problem reduced to the nodes that are asked about and what lies between them; None where nothing fits."""

    problem: Problem
    model: Model | None

    @classmethod
    def of(cls, problem: Problem, asked: Collection[int]) -> Forced:
        """`asked`: the nodes of the questions to come."""
        try:
            model = Model.of(problem)
        except NoChoiceError:
            return cls(problem, None)
        model.asked = frozenset(asked)
        return cls._reduced(problem, model)

    @classmethod
    def _reduced(cls, problem: Problem, model: Model) -> Forced:
        try:
            reduce(model)
        except NoChoiceError:
            return cls(problem, None)
        return cls(problem, model)

    def only(self, node: int) -> Forced:
        """The same, for questions about this node alone."""
        return self if self.model is None else Forced._reduced(self.problem, self._without_questions({node}))

    def allowed(self, node: int) -> Index:
        """The strategies of an asked node that some solution may have, as far as is seen without a search."""
        return np.zeros(0, np.int64) if self.model is None else self.model.alive[node]

    def best(self, node: int, strategies: Index, hint: Sequence[int] = ()) -> Solution:
        """The best solution in which `node` takes one of `strategies`; infeasible where there is none.

        The bound is proven; `hint` is a choice to start from, where it has one of them.
        """
        begin = time.monotonic()
        state = State(self.problem, GAP, 0, TIME_LIMIT_S, begin + 4 * TIME_LIMIT_S)
        if hint and hint[node] in strategies:
            state.offer(hint)
        try:
            bound = search(state, self._asked(node, strategies))
        except NoChoiceError:
            bound = np.inf
        return solution_of(state, bound, time.monotonic() - begin)

    def _asked(self, node: int, strategies: Index) -> Model:
        model = self._without_questions(set())
        model.restrict(node, np.isin(model.alive[node], strategies))
        reduce(model)
        return model

    def _without_questions(self, left: set[int]) -> Model:
        """A copy that may be reduced further; `left`: what is still asked about."""
        if self.model is None:
            raise NoChoiceError
        model = self.model.copy()
        model.touched = set(model.asked)
        model.asked = frozenset(left)
        return model
