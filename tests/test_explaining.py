"""explain: each alternative's seconds are those of the plan that is forced to it, and the words say what moved."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from autopar import TrainStep, plan, show
from autopar.errors import PlanError
from autopar.explaining import WHOLE, Alternative, Explanation, explain
from autopar.plans import Plan
from autopar.repriced import Priced, reprice
from autopar.rules.choices import choice_text
from autopar.solve import spent
from autopar.solve.beside import step_s
from autopar.solve.layers_apart import restricted
from autopar.solve.problem import Problem, evaluate
from autopar.solve.search import min_overflow, solve
from tests.virtual.step_models import GPT, momentum, step_of, token_batch

NAME = "gpt"
UP = "blocks.0.up/autopar.linear/forward#0"


PINS = "pp=1 dp=1 tp=2"
SEVERAL = [PINS, "pp=2 dp=1 tp=1", "pp=1 dp=2 zero=3", "pp=1 dp=2 recompute=full"]


@functools.cache
def planned(pins: str, cluster: str = "2xcpu") -> Plan:
    return plan(step_of(NAME), cluster, pin=pins)


@functools.cache
def repriced(pins: str, cluster: str = "2xcpu") -> Priced:
    return reprice(step_of(NAME), planned(pins, cluster))


@functools.cache
def explained(target: str, pins: str, cluster: str = "2xcpu") -> Explanation:
    return explain(step_of(NAME), planned(pins, cluster), target)


def alone(priced: Priced, problem: Problem, key: str, choice: str) -> Problem:
    """The problem in which a node has one choice left."""
    number = priced.nodes_by_key()[key]
    rule, options = priced.built.nodes[number].meta["rule"], priced.built.strategies[number]
    kept = [np.arange(each.num_strategies) for each in problem.nodes]
    kept[number] = np.flatnonzero([(choice_text(rule, o.choice) or WHOLE) == choice for o in options])
    return restricted(problem, kept)


@pytest.mark.parametrize("pins", SEVERAL)
def test_the_plan_costs_what_it_says_and_its_seconds_and_bytes_add_up(pins: str) -> None:
    priced = repriced(pins)
    found = evaluate(priced.built.problem, priced.choice)
    assert found.objective == pytest.approx(planned(pins).estimate.objective_s, rel=1e-9)
    parts = list(spent.seconds(priced.built, priced.choice))
    assert sum(part.seconds for part in parts) == pytest.approx(found.objective, rel=1e-9)
    assert any(part.what == spent.AGAIN for part in parts) == ("recompute=full" in pins)
    for limit, used in enumerate(found.usage):
        held = sum(held for _, held in spent.held_bytes(priced.built, priced.choice, limit))
        assert held == pytest.approx(used)


def test_layers_and_stages_that_stand_for_others_count_as_often() -> None:
    """Eight equal layers on four stages, of which three are there: the figures are those of the whole plan."""
    torch.manual_seed(0)
    step = TrainStep(GPT(layers=8, tied=False), token_batch(8), optimizer=momentum, microbatches=2)
    made = plan(step, "4xcpu", pin="pp=4")
    priced = reprice(step, made)
    assert len(priced.likeness.kept) < 4 and len(priced.nodes_by_key()) > len(priced.built.nodes)
    assert step_s(priced.built, priced.choice) == pytest.approx(made.estimate.objective_s, rel=1e-9)
    told = sum(sum(row.seconds.values()) for row in made.estimate.modules)
    assert told == pytest.approx(made.estimate.objective_s, rel=1e-9)


def test_collectives_take_what_the_plan_says_of_the_emitted_ones() -> None:
    found: Counter[str] = Counter()
    for part in spent.seconds(repriced(PINS).built, repriced(PINS).choice):
        found[part.what] += part.seconds
    told = {f"{row.axis} {row.kind}": row.step_s for row in planned(PINS).estimate.collectives}
    assert told and {what for what in found if " " in what} == set(told)
    for what, seconds in told.items():
        assert found[what] == pytest.approx(seconds, rel=0.2), what  # in the program, small ones share a bucket


@pytest.mark.parametrize(
    ("pins", "cluster", "target"),
    [(PINS, "2xcpu", "blocks.0.up"), ("pp=2 tp=2", "4xcpu", UP)],
)
def test_alternatives_cost_what_the_forced_problem_costs(pins: str, cluster: str, target: str) -> None:
    priced, checked = repriced(pins, cluster), 0
    for node in explained(target, pins, cluster).nodes[::3]:
        for alternative in node.alternatives[:2]:
            expected = solve(alone(priced, priced.built.problem, node.node, alternative.choice), gap=1e-4)
            assert alternative.step_s == pytest.approx(expected.objective, rel=1e-3), (node.node, alternative)
            checked += 1
    assert checked


def up_alternatives() -> dict[str, Alternative]:
    (node,) = explained(UP, PINS).nodes
    return {alternative.choice: alternative for alternative in node.alternatives}


def test_an_alternative_costs_what_the_pin_for_it_costs() -> None:
    """Two matmuls between the same activations: only the order in which they are split is asked for, of the first."""
    (node,) = explained(UP, PINS).nodes
    words = {"tp=o": "out", "tp=i": "in"}
    other = next(choice for choice in words if choice != node.choice)
    forced = plan(step_of(NAME), "2xcpu", pin=f"{PINS} blocks.0.up: tp={words[other]}").estimate.objective_s
    alternative = up_alternatives()[other]
    assert alternative.step_s is not None and alternative.more_s is not None
    assert alternative.more_s > 0
    assert alternative.step_s - alternative.more_s == pytest.approx(planned(PINS).estimate.objective_s)
    assert alternative.step_s <= forced * (1 + 1e-3)  # the pin asks it of the backward, too


def test_the_words_say_what_moved() -> None:
    for alternative in up_alternatives().values():
        assert alternative.more_s is not None
        if alternative.why != "as fast":
            assert "more: " in alternative.why and ("tp all" in alternative.why or "compute" in alternative.why)


def test_what_breaks_a_limit_says_by_how_much() -> None:
    """Parameters split over dp because whole ones don't fit: the least overflow of a whole one is proven."""
    pins = "pp=1 dp=2 tp=1 recompute=none"
    split = planned(f"{pins} zero=3")
    least = split.estimate.memory[0].peak
    tight = replace(split, pins=tuple(pins.split()), estimate=replace(split.estimate, memory_limit_bytes=least))
    key = "param:blocks.0.up.weight"
    (node,) = explain(step_of(NAME), tight, key).nodes
    whole = next(each for each in node.alternatives if each.choice == WHOLE)
    assert whole.step_s is None and whole.stage == 0 and whole.over_bytes > 0
    priced = reprice(step_of(NAME), tight)
    unseen = least - max(evaluate(priced.built.problem, priced.choice).usage)
    limits = tuple(replace(limit, constant=unseen) for limit in priced.built.problem.limits)
    over = min_overflow(alone(priced, replace(priced.built.problem, limits=limits), key, WHOLE))
    assert whole.over_bytes == pytest.approx(over, rel=2e-3)
    assert "over the limit of stage 0" in whole.why


def test_tables_have_a_row_for_each_alternative() -> None:
    explanation = explained("blocks.0.up", PINS)
    rows = show.json_tables(explanation.tables())["alternatives"]
    assert sum(row["why"] == "chosen" for row in rows) >= 1
    assert {row["node"] for row in rows if row["node"]} == {node.name for node in explanation.nodes}
    assert "blocks.0.up: " in str(explanation) and "more: " in str(explanation)


def test_another_step_and_another_target_are_refused() -> None:
    with pytest.raises(PlanError, match="the plan is for another step"):
        explain(step_of("llama"), planned(PINS), UP)
    with pytest.raises(PlanError, match="'nowhere': no module or node of the plan"):
        explain(step_of(NAME), planned(PINS), "nowhere")
