"""Where nothing fits: what overflows is what the accountant says, and what is said to fit does."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import Tensor, nn

from autopar import TrainStep, plan
from autopar.certificate import Certificate, Relaxation, enlarged
from autopar.cluster import parse_cluster
from autopar.errors import InfeasibleError
from autopar.plans import Plan
from tests.test_cli import model, run  # noqa: F401

PINS = "pp=1, tp=1, zero=0, recompute=none"
ALL_AXES = "pp=1, tp=1, dp=2, zero=0"
BUDGET, TINY = "12KiB", "1KiB"


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def step(microbatches: int = 2) -> TrainStep:
    torch.manual_seed(0)
    return TrainStep(Layers(), torch.randn(64, 8), optimizer=momentum, microbatches=microbatches)


@pytest.fixture(autouse=True)
def enough_time(monkeypatch):
    monkeypatch.setattr("autopar.certificate.TIME_S", 600.0)


@functools.cache
def certificate(pins: str, memory: str) -> Certificate:
    with pytest.raises(InfeasibleError) as caught:
        plan(step(), "2xcpu", pin=pins, memory=memory)
    assert caught.value.certificate is not None and str(caught.value) == str(caught.value.certificate)
    return caught.value.certificate


def relaxed(kind: str) -> Relaxation:
    (found,) = (each for each in certificate(PINS, BUDGET).relaxations if each.kind == kind)
    assert found.fits
    return found


def peak(found: Plan) -> int:
    return max(row.peak for row in found.estimate.memory)


def test_the_overflow_is_a_stage_a_class_and_bytes() -> None:
    over = certificate(PINS, BUDGET).overflow
    assert sum(over.classes.values()) == over.peak_bytes == over.limit_bytes + over.over_bytes
    assert over.limit_bytes == 12 * 1024 and over.over_bytes > 0 and over.stage == 0
    before = list(over.classes.values())[: list(over.classes).index(over.kind)]
    assert sum(before) <= over.limit_bytes < sum(before) + over.classes[over.kind]
    assert over.kind == "activations"
    assert f"stage 0 is 1.59 KiB over at {over.moment}, by its activations: " in str(certificate(PINS, BUDGET))
    assert over.peak_bytes == peak(plan(step(), "2xcpu", pin=PINS))  # with these pins there is nothing else to do


def test_what_is_at_rest_is_named_where_that_alone_is_too_much() -> None:
    assert certificate(ALL_AXES, TINY).overflow.kind == "parameters"


def test_the_budget_that_is_told_fits() -> None:
    budget = relaxed("memory").what.removeprefix("--memory ")
    found = plan(step(), "2xcpu", pin=PINS, memory=budget)
    assert peak(found) <= found.estimate.memory_limit_bytes <= 1.03 * certificate(PINS, BUDGET).overflow.peak_bytes


def test_recompute_is_looked_at_where_a_pin_forbids_it() -> None:
    assert relaxed("recompute").what == "without the pin recompute=none"
    assert plan(step(), "2xcpu", pin="pp=1, tp=1, zero=0", memory=BUDGET).recomputed
    assert all(each.kind != "recompute" for each in certificate(ALL_AXES, TINY).relaxations)


def test_more_microbatches_fit() -> None:
    count = int(relaxed("microbatches").what.removesuffix(" microbatches"))
    assert plan(step(count), "2xcpu", pin=PINS, memory=BUDGET).microbatches == count == 4


def test_more_devices_fit() -> None:
    cluster = relaxed("devices").what
    assert plan(step(), cluster, pin=PINS, memory=BUDGET).cluster.num_devices == 4


def test_what_cannot_help_is_said_not_to() -> None:
    by_kind = {each.kind: each for each in certificate(ALL_AXES, TINY).relaxations}
    assert by_kind["memory"].fits
    assert by_kind["microbatches"].fits is False and by_kind["devices"].fits is False
    assert "pp=1 tp=1 dp=2: 2 ranks, but 4xcpu has 4 devices" in by_kind["devices"].told
    assert "4xcpu: doesn't fit (pp=1 tp=1 dp=2: " in str(certificate(ALL_AXES, TINY))
    assert "pin 'dp=2': a microbatch has 1 rows" in by_kind["microbatches"].told


def test_clusters_grow_by_what_is_usual() -> None:
    grown = {name: enlarged(parse_cluster(name), 2) for name in ("2xcpu", "8xh100", "2x8xh100")}
    assert [each.name for each in grown.values()] == ["4xcpu", "2x8xh100", "4x8xh100"]
    assert all(each.num_devices == 2 * parse_cluster(name).num_devices for name, each in grown.items())


def test_the_command_line_exits_with_3_and_prints_the_certificate(capsys, model) -> None:  # noqa: F811
    command = ["plan", "model.py:step", "-c", "2xcpu", "--memory", "1KiB", "--pin", "pp=1 tp=1 dp=2 zero=0"]
    status, out, err = run(capsys, *command, "--json")
    assert status == 3
    told = json.loads(out)
    assert told["status"] == "infeasible" and told["overflow"]["over_bytes"] > 0
    assert told["overflow"]["mesh"] == {"pp": 1, "dp": 2, "tp": 1}
    assert [each["kind"] for each in told["relaxations"]] == ["memory", "microbatches", "devices"]
    assert "no plan fits 1.00 KiB a device on 2xcpu" in err
