"""Where nothing fits: what overflows is what the accountant says, and what is said to fit does."""

from __future__ import annotations

import functools
import json

import pytest

from autopar import plan
from autopar.certificate import Certificate, enlarged
from autopar.cluster import parse_cluster
from autopar.errors import InfeasibleError
from tests.test_cli import model, run  # noqa: F401
from tests.virtual.step_models import step_of

PINS = "pp=1, tp=1, zero=0, recompute=none"


@pytest.fixture(autouse=True)
def enough_time(monkeypatch):
    monkeypatch.setattr("autopar.certificate.TIME_S", 600.0)


@functools.cache
def certificate(pins: str, memory: str) -> Certificate:
    with pytest.raises(InfeasibleError) as caught:
        plan(step_of("gpt, 8 rows", 2), "2xcpu", pin=pins, memory=memory)
    assert caught.value.certificate is not None
    return caught.value.certificate


def relaxed(kind: str, pins: str = PINS, memory: str = "16KiB"):
    (found,) = (each for each in certificate(pins, memory).relaxations if each.kind == kind)
    return found


def test_the_overflow_is_a_stage_a_class_and_bytes() -> None:
    over = certificate(PINS, "16KiB").overflow
    assert sum(over.classes.values()) == over.peak_bytes == over.limit_bytes + over.over_bytes
    assert over.limit_bytes == 16 * 1024 and over.over_bytes > 0 and over.stage == 0
    before = [size for name, size in over.classes.items()][: list(over.classes).index(over.kind)]
    assert sum(before) <= over.limit_bytes < sum(before) + over.classes[over.kind]
    assert "stage 0 is " in str(certificate(PINS, "16KiB")) and f"by its {over.kind}" in str(certificate(PINS, "16KiB"))


def test_what_is_at_rest_is_named_where_that_alone_is_too_much() -> None:
    assert certificate(PINS, "1KiB").overflow.kind == "parameters"


def test_the_budget_that_is_told_fits_and_less_than_the_smallest_plan_that_was_known() -> None:
    memory = relaxed("memory")
    assert memory.fits and memory.what.startswith("--memory ")
    budget = memory.what.split()[1]
    found = plan(step_of("gpt, 8 rows", 2), "2xcpu", pin=PINS, memory=budget)
    assert max(row.peak for row in found.estimate.memory) <= found.estimate.memory_limit_bytes


def test_recompute_is_looked_at_where_a_pin_forbids_it() -> None:
    again = relaxed("recompute")
    assert again.what == "without the pin recompute=none"
    free = "pp=1, tp=1, dp=2, zero=0"
    if again.fits:
        assert plan(step_of("gpt, 8 rows", 2), "2xcpu", pin=free, memory="16KiB").recomputed
    else:
        with pytest.raises(InfeasibleError):
            plan(step_of("gpt, 8 rows", 2), "2xcpu", pin=free, memory="16KiB")
    pinned = certificate("pp=1, tp=1, dp=2, zero=0", "1KiB")
    assert all(each.kind != "recompute" for each in pinned.relaxations)
    devices = pinned.relaxations[-1]
    assert devices.kind == "devices" and devices.fits is False and "pin" in devices.told


def test_more_microbatches_are_planned() -> None:
    more = relaxed("microbatches")
    assert more.fits is not None and more.what.endswith("microbatches")
    if more.fits:
        step = step_of("gpt, 8 rows", int(more.what.split()[0]))
        assert plan(step, "2xcpu", pin=PINS, memory="16KiB").microbatches == step.microbatches


def test_more_devices_are_planned() -> None:
    more = relaxed("devices")
    assert more.what in ("4xcpu", "8xcpu", "16xcpu") and more.fits is not None
    if more.fits:
        assert plan(step_of("gpt, 8 rows", 2), more.what, pin=PINS, memory="16KiB").cluster.name == more.what


def test_clusters_grow_by_what_is_usual() -> None:
    grown = {name: enlarged(parse_cluster(name), 2) for name in ("2xcpu", "8xh100", "2x8xh100")}
    assert [each.name for each in grown.values()] == ["4xcpu", "2x8xh100", "4x8xh100"]
    assert all(each.num_devices == 2 * parse_cluster(name).num_devices for name, each in grown.items())


def test_the_command_line_exits_with_3_and_prints_the_certificate(capsys, model) -> None:  # noqa: F811
    status, out, err = run(capsys, "plan", "model.py:step", "-c", "2xcpu", "--memory", "1KiB", "--json")
    assert status == 3
    told = json.loads(out)
    assert told["status"] == "infeasible" and told["overflow"]["over_bytes"] > 0
    assert {each["kind"] for each in told["relaxations"]} == {"memory", "microbatches", "devices"}
    assert "no plan fits 1.00 KiB a device on 2xcpu" in err
    status, out, _ = run(capsys, "plan", "model.py:step", "-c", "2xcpu", "--memory", "1KiB")
    assert status == 3 and out == ""
