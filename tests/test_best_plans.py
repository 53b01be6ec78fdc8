"""The best plans of several meshes: in order, distinct, each a plan like any other."""

from __future__ import annotations

import functools
import re

import pytest

from autopar import best_plans, compile, plan
from autopar.differing import ranking
from autopar.errors import PlanError
from autopar.planning import CUT_GAP
from autopar.plans import Plan
from tests.virtual.step_models import step_of

NAME = "gpt"


@functools.cache
def found(count: int) -> list[Plan]:
    return best_plans(step_of(NAME, 2), "2xcpu", count)


def test_they_are_distinct_and_in_order() -> None:
    plans = found(3)
    assert len({(each.mesh, each.microbatches) for each in plans}) == len(plans) >= 2
    seconds = [each.estimate.objective_s for each in plans]
    assert seconds == sorted(seconds)
    assert all(each.estimate.bound_s <= seconds[0] for each in plans)


def test_the_first_is_no_worse_than_the_plan_and_each_is_what_its_mesh_pinned_gives() -> None:
    """To look for one plan alone leaves open what may be a little better (`CUT_GAP`)."""
    one, best = found(1)[0].estimate, found(3)[0].estimate
    assert len(found(1)) == 1 and best.objective_s <= one.objective_s <= best.objective_s / (1 - CUT_GAP)
    for each in found(3)[:2]:
        pins = " ".join(f"{axis}={size}" for axis, size in each.mesh.axes)
        pinned = plan(step_of(NAME, 2), "2xcpu", pin=pins).estimate.objective_s
        # the pinned axes have roles, too, which only narrows what a mesh may do
        assert each.estimate.objective_s <= pinned * (1 + 2e-3)


def test_the_second_is_proven_too() -> None:
    assert compile(step_of(NAME, 2), found(3)[1]).verify().ok


def test_the_ranking_compares_with_the_first() -> None:
    rows = ranking(found(3)).records()
    assert [row["number"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[0]["times"] == "1.000" and all(float(str(row["times"])) >= 1 for row in rows)


def test_less_than_one_is_refused() -> None:
    with pytest.raises(PlanError, match="expected at least 1"):
        best_plans(step_of(NAME), "2xcpu", 0)


def test_a_time_limit_ends_the_search_at_its_first_plan_and_the_bound_holds() -> None:
    told: list[str] = []
    soon = plan(step_of(NAME, 2), "2xcpu", time_limit_s=1e-9, progress=told.append)
    assert [text.split()[0] for text in told] == ["relaxing", "solving"]
    best = found(3)[0].estimate.objective_s
    assert {c.reason for c in soon.candidates if c.status == "cut"} == {"time ran out"}
    assert soon.estimate.bound_s <= best <= soon.estimate.objective_s
    assert soon.estimate.status == "feasible" and soon.estimate.gap > CUT_GAP


def test_no_time_is_refused() -> None:
    with pytest.raises(PlanError, match="expected seconds, more than 0"):
        plan(step_of(NAME, 2), "2xcpu", time_limit_s=0)


def test_progress_tells_the_best_plan_by_now_and_how_far_it_may_be_from_the_optimum() -> None:
    told: list[str] = []
    best_plans(step_of(NAME, 2), "2xcpu", 2, progress=told.append)
    assert "gap" not in told[0] and re.search(r"best by now .*s \(pp=.*\), gap \d+\.\d%", told[-1])
