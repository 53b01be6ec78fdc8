"""diff: what the differences of two plans move sums to the difference of their estimates."""

from __future__ import annotations

import functools

import pytest

from autopar import plan
from autopar.differing import AGAIN, WORKING, difference, moved
from autopar.plans import Plan
from autopar.show import json_tables, tables_text
from tests.small_plan import small_plan
from tests.virtual.step_models import step_of

PLANS = ("pp=1 dp=2 tp=1 recompute=none", "pp=1 dp=1 tp=2", "pp=2 dp=1 tp=1", "pp=1 dp=2 tp=1 recompute=full")


@functools.cache
def planned(pins: str) -> Plan:
    return plan(step_of("gpt", 2), "2xcpu", pin=pins)


def peak(found: Plan) -> int:
    return max(row.peak for row in found.estimate.memory)


@pytest.mark.parametrize("pins", PLANS)
def test_the_modules_of_a_plan_take_its_seconds(pins: str) -> None:
    estimate = planned(pins).estimate
    assert sum(sum(row.seconds.values()) for row in estimate.modules) == pytest.approx(estimate.objective_s, rel=1e-9)
    held = sum(row.held_bytes for row in estimate.modules)
    assert 0.5 * peak(planned(pins)) < held < 1.2 * peak(planned(pins))
    axes = {what.partition(" ")[0] for row in estimate.modules for what in row.seconds if " " in what}
    assert axes <= {row.axis for row in estimate.collectives} and axes
    assert Plan.from_json(planned(pins).to_json()) == planned(pins)


@pytest.mark.parametrize(("before", "after"), [PLANS[:2], PLANS[1:3], PLANS[::3]])
def test_what_moves_sums_to_the_difference(before: str, after: str) -> None:
    old, new = planned(before), planned(after)
    rows, estimates = moved(old, new), (old.estimate.objective_s, new.estimate.objective_s)
    assert sum(row.step_s for row in rows) == pytest.approx(estimates[1] - estimates[0], rel=1e-6, abs=1e-9)
    assert sum(row.held_bytes for row in rows) == peak(new) - peak(old)
    tables = json_tables(difference(old, new))
    *groups, total = tables["moved"]
    for column in ("compute_more_s", "recompute_more_s", "collectives_more_s", "step_more_s", "peak_more_bytes"):
        assert sum(row[column] for row in groups) == pytest.approx(total[column], abs=1e-9)
        assert sum(row[column] for row in tables["moved_by_module"]) == pytest.approx(total[column], abs=1e-9)
    collectives = sum(row["step_more_s"] for row in tables["moved_by_collective"])
    assert collectives == pytest.approx(total["collectives_more_s"], abs=1e-9)


def test_recompute_alone_moves_seconds_of_recompute_and_names_it() -> None:
    rows = moved(planned(PLANS[0]), planned(PLANS[3]))
    again = [row for row in rows if row.seconds.get(AGAIN, 0) > 0]
    assert {row.because for row in again} <= {"recompute", "choices, recompute"} and again
    assert all(row.modules.startswith("blocks.*") for row in again)


def test_reasons_are_those_of_each_module() -> None:
    by_name = {row.modules: row for row in moved(planned(PLANS[0]), planned(PLANS[1]))}
    assert by_name["blocks.*.up"].because == "mesh, choices"
    assert by_name[WORKING].because == ""


def test_a_plan_does_not_differ_from_itself() -> None:
    assert moved(planned(PLANS[0]), planned(PLANS[0])) == []
    assert not any(json_tables(difference(planned(PLANS[0]), planned(PLANS[0]))).values())


def test_signs_are_shown() -> None:
    text = tables_text(difference(planned(PLANS[0]), planned(PLANS[3])))
    assert "what the differences move, together" in text and "  +" in text and "in all" in text


def test_plans_that_do_not_tell_their_modules_are_compared_without() -> None:
    one, two = small_plan("dp=2", "2xcpu"), small_plan("tp=2", "2xcpu")
    assert moved(one, two) == [] and "moved" not in json_tables(difference(one, two))
