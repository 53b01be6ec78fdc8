"""A plan and its step, priced anew: the solver's problem that the plan is a solution of.

    priced = reprice(step, plan)
    step_s(priced.built, priced.choice)     # the plan's own estimate (`solve.beside`)

A plan holds choices by node key. The rest of a solution (which relays hold copies, what is reused, how views come to
the backward) follows from them: it is what costs least with those choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch.fx import Node

from autopar import markers
from autopar.capture.step import ForwardStep
from autopar.compiling import keys_again, parsed_choices, valid_for
from autopar.errors import PlanError
from autopar.joint import StepGraph, forward_twin
from autopar.layers import Cut
from autopar.pins import parse_pins
from autopar.planning import as_pinned
from autopar.plans import Plan, require_valid_for, stage_of
from autopar.rules.choices import Choice, operand_layouts, result_layouts
from autopar.rules.found import require_proven
from autopar.rules.nodes import is_view, node_argument
from autopar.skeletons import Likeness, Skeletons
from autopar.solve.build import BuiltProblem, Strategy, build_problem
from autopar.solve.held import is_step_relay
from autopar.solve.layers_apart import solve_among
from autopar.solve.modes import Mode, is_forward
from autopar.solve.problem import Index, evaluate, unlimited
from autopar.trials import Trials

TIME_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Priced:
    """The problem of a plan's mesh and stages, and the plan as a choice of it."""

    skeletons: Skeletons
    step: StepGraph
    likeness: Likeness
    """For which stages those of the graph stand."""
    built: BuiltProblem
    choice: tuple[int, ...]

    def nodes_by_key(self) -> dict[str, int]:
        """Key of each node, in all layers → the node of the problem that stands for it."""
        own = {node.meta["key"]: number for number, node in enumerate(self.built.nodes)}
        return self.skeletons.everywhere(self.step, own)


def reprice(step: ForwardStep, plan: Plan) -> Priced:
    """Raises `PlanError` where the plan is for another step, or isn't one that its pins allow."""
    step, pins = step.with_microbatches(plan.microbatches), parse_pins(plan.pins)
    folded = as_pinned(step.fold(), pins)
    require_valid_for(plan, valid_for(step, folded.whole))
    require_proven(folded.captured.graphs, plan.rules)
    skeletons = Skeletons(folded, plan.microbatches, plan.rules)
    trials = Trials(step, skeletons, plan.cluster, pins, float(plan.estimate.memory_limit_bytes))
    units = skeletons.units
    stages = [stage_of(plan.node_stage, unit) for unit in units]
    firsts = [stages.index(stage) for stage in range(len(plan.stages))]
    cut = Cut.from_boundaries(units, firsts, tuple(span.kind for span in plan.stages))
    graph, setting = skeletons.graph(cut), trials.setting(cut, plan.mesh)
    again = keys_again(graph, plan.recomputed)
    if pins.recompute is None and any(_runs_again(node, again) for node in graph.graph.nodes):
        setting = replace(setting, recompute="auto")
    built = build_problem(graph, setting)
    return Priced(skeletons, graph, skeletons.likeness(cut), built, _choice(graph, built, plan, again))


def _runs_again(node: Node, again: frozenset[str]) -> bool:
    return node.meta.get("key") in again and node.target is not markers.relay


def _choice(step: StepGraph, built: BuiltProblem, plan: Plan, again: frozenset[str]) -> tuple[int, ...]:
    choices, kept = parsed_choices(step, plan.choices), []
    for node, options in zip(built.nodes, built.strategies, strict=True):
        left = [k for k, option in enumerate(options) if _is_planned(node, option, choices, again)]
        if not left:
            text = plan.choices.get(node.meta["key"], "nothing split")
            raise PlanError(f"{node.meta['key']}: the plan's choice ({text}) isn't one that its pins and rules allow")
        kept.append(np.array(left, dtype=np.int64))
    found = solve_among(built.problem, kept, gap=0.0, time_limit_s=TIME_LIMIT_S).choice
    found = found or _regardless_of_memory(built, kept)
    if not found:
        raise PlanError("the plan's choices don't fit together; was it edited? `autopar plan` makes a new one")
    assert np.isfinite(evaluate(built.problem, found).objective)
    return found


def _regardless_of_memory(built: BuiltProblem, kept: list[Index]) -> tuple[int, ...]:
    return solve_among(unlimited(built.problem), kept, gap=0.0, time_limit_s=TIME_LIMIT_S).choice


def _is_planned(node: Node, option: Strategy, choices: Mapping[str, Choice], again: frozenset[str]) -> bool:
    """Whether a strategy is the plan's, or one that the plan leaves to what costs least."""
    if option.choice != choices[node.meta["key"]]:
        return False
    if is_step_relay(node) and option.holds_copy != _gathers(node, choices):
        return False
    twin = forward_twin(node)
    if option.is_reused and twin is not None and twin.meta["key"] in again:
        return False
    if option.mode is None or not is_forward(node) or node.target is markers.relay:
        return True
    if node.meta["key"] in again:
        return option.mode is Mode.AGAIN
    return option.mode is not Mode.AGAIN or is_view(node)


def _gathers(relay: Node, choices: Mapping[str, Choice]) -> bool:
    """Whether a parameter reaches the microbatches in another layout than the one it rests in."""
    source = node_argument(relay, 0)
    rests = result_layouts(source.meta["rule"], choices[source.meta["key"]])[0]
    return rests != operand_layouts(relay.meta["rule"], choices[relay.meta["key"]])[0]
