"""From layouts chosen for the whole model at once to those of a pipeline: each stage takes over what was chosen.

    staged = Staged(built, layouts)             # of each stage: key → strategy, of the one-stage problem
    solution = staged.solve(staged.built.problem)

What is searched here is only what the stages add (what crosses between them, values that both sides of a cut read) and
what is computed again, which each stage decides for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch.fx import Node

from autopar import markers
from autopar.solve.build import BuiltProblem, Strategy
from autopar.solve.held import is_step_relay
from autopar.solve.layers_apart import of_layouts, solve_among
from autopar.solve.problem import Index, Problem, Solution

GAP, TIME_LIMIT_S = 5e-3, 10.0


@dataclass(frozen=True, slots=True)
class Staged:
    """The problem of a cut model, and the layouts that each of its stages takes over, by node key."""

    built: BuiltProblem
    layouts: Sequence[Mapping[str, Strategy]]

    def solve(self, problem: Problem) -> Solution:
        """The best in these layouts, and their bound; `problem` is the built one under other limits."""
        pairs = zip(self.built.nodes, self.built.strategies, strict=True)
        wanted = (self.layouts[node.meta["stage"]].get(node.meta["key"]) for node in self.built.nodes)
        kept = [_kept(node, options, own) for (node, options), own in zip(pairs, wanted, strict=True)]
        return solve_among(problem, kept, gap=GAP, time_limit_s=TIME_LIMIT_S)


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
