"""From layouts chosen for the whole model at once to those of a pipeline: each stage takes over what was chosen.

    staged = Staged(built, stage_problem)
    staged.add(layouts)                         # key → strategy, of the one-stage problem
    solution = staged.solve(staged.built.problem)

The layouts of a layer don't depend on its stage: what is searched here is only what the stages add (what crosses
between them, values that both sides of a cut read) and what is computed again, which each stage decides for itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from torch.fx import Node

from autopar import markers
from autopar.fitting import GAP
from autopar.solve.build import BuiltProblem, Strategy
from autopar.solve.held import is_step_relay
from autopar.solve.layers_apart import of_layouts, solve_among
from autopar.solve.problem import Index, Problem, Solution

TIME_LIMIT_S = 10.0


@dataclass(slots=True)
class Staged:
    """The problem of a cut model, and the sets of layouts that are known to be good for its layers."""

    built: BuiltProblem
    columns: list[list[Index]] = field(default_factory=list)
    """Of each set, the strategies of every node that have its layouts."""

    def add(self, chosen: Mapping[str, Strategy]) -> None:
        """Takes over the layouts of a solution of the one-stage problem, by node key."""
        pairs = zip(self.built.nodes, self.built.strategies, strict=True)
        self.columns.append([_kept(node, options, chosen.get(node.meta["key"])) for node, options in pairs])

    def solve(self, problem: Problem) -> Solution:
        """The best within the sets; `problem` is the built one under other limits. Its bound is that of the sets."""
        found = [solve_among(problem, kept, gap=GAP, time_limit_s=TIME_LIMIT_S) for kept in self.columns]
        best = min(found, key=lambda solution: solution.objective)
        return replace(best, bound=min((f.bound for f in found), default=math.inf))


def _kept(node: Node, options: list[Strategy], wanted: Strategy | None) -> Index:
    """The strategies with the wanted layouts, in any mode; all of them for relays of values, which follow the cut."""
    everything = np.arange(len(options))
    passes_value = node.target is markers.relay and not is_step_relay(node) and not _is_parameter(node)
    if wanted is None or passes_value:
        return everything
    kept = of_layouts(options, wanted)
    return kept if len(kept) else everything


def _is_parameter(relay: Node) -> bool:
    source = relay.all_input_nodes[0]
    return source.op == "placeholder" or is_step_relay(source)
