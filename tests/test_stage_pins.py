"""Layers that pins put on a pipeline stage are there, or a message says why they can't be."""

from __future__ import annotations

import pytest

from autopar import compile, plan
from autopar.capture.folding import Folded
from autopar.errors import PlanError
from autopar.pins import parse_pins
from autopar.skeletons import Skeletons
from autopar.stage_pins import cannot_cut, pinned_stages
from tests.virtual.step_models import step_of

NAME = "gpt, 3 layers"
"""Its units: tokens, blocks.0, blocks.1, blocks.2, norm (with the head)."""


def skeletons() -> Skeletons:
    return Skeletons(Folded(step_of(NAME).capture()), 1, {})


def test_a_module_takes_its_unit_with_it() -> None:
    units = skeletons().units
    pinned = dict(
        zip(units, pinned_stages(parse_pins("blocks.1.up: stage=0, head: stage=1"), skeletons()), strict=True)
    )
    assert pinned["blocks.1"] == 0 and pinned[units[-1]] == 1
    assert {pinned[unit] for unit in units if unit not in ("blocks.1", units[-1])} == {None}
    every = pinned_stages(parse_pins("blocks.*: stage=1"), skeletons())
    assert [stage for stage in every if stage is not None] == [1, 1, 1]
    assert pinned_stages(parse_pins("tp=2"), skeletons()) == ()


@pytest.mark.parametrize(
    ("pins", "stages", "reason"),
    [
        ("blocks.0: stage=0", 2, ""),
        ("blocks.2: stage=2", 2, "a pin asks for stage 2, but of 2 the last is 1"),
        ("*: stage=0", 2, "no cut into 2 stages keeps to the pins"),
        ("", 9, "9 stages, but 5 units"),
    ],
)
def test_what_can_be_cut(pins: str, stages: int, reason: str) -> None:
    found = cannot_cut(parse_pins(pins), skeletons(), stages)
    assert found.startswith(reason) and bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ("blocks.0: stage=1, blocks.1: stage=0", "blocks.1 runs after blocks.0, so it can't be on an earlier stage"),
        ("blocks.1: stage=1, blocks.1.up: stage=0", "blocks.1 can't be on two stages"),
    ],
)
def test_pins_that_contradict_the_order(pins: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        pinned_stages(parse_pins(pins), skeletons())


@pytest.mark.parametrize("pin", ["blocks.1: stage=0", "blocks.1: stage=1"])
def test_the_cut_keeps_to_a_pin(pin: str) -> None:
    stage = int(pin[-1])
    found = plan(step_of(NAME), "2xcpu", pin=f"pp=2, {pin}")
    assert found.node_stage["blocks.1"] == stage and pin in found.pins
    assert stage == 0 or compile(step_of(NAME), found).verify().ok


def test_a_mesh_with_too_few_stages_is_not_searched_and_none_is_a_mistake() -> None:
    found = plan(step_of(NAME), "2xcpu", pin="blocks.2: stage=1")
    assert found.mesh.num_stages == 2 and found.node_stage["blocks.2"] == 1
    assert any("a pin asks for stage 1" in candidate.reason for candidate in found.candidates)
    with pytest.raises(PlanError, match="a pin asks for stage 2"):
        plan(step_of(NAME), "2xcpu", pin="pp=2, blocks.2: stage=2")
