"""A model with ops of its own, no rule of theirs written down: planned, saved, compiled and verified in float64."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.step import TrainStep
from autopar.errors import CaptureError, PlanError
from autopar.plans import Plan
from autopar.rules import registered
from tests.rules.custom_ops import like, ops, own_op


@own_op(lambda g, x, w, eps: (torch.empty_like(x), torch.empty_like(w)))
def rms_norm_backward(g: Tensor, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    inverse = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    scaled = g * w
    dx = inverse * scaled - x * inverse**3 * (scaled * x).mean(-1, keepdim=True)
    return dx, (g * x * inverse).flatten(0, -2).sum(0)


@own_op(like)
def decay(p: Tensor, by: float) -> Tensor:
    return p * (1.0 - by)


def _rms_norm_saved(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.eps = inputs[2]


def _rms_norm_gradient(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
    dx, dw = ops.rms_norm_backward(g, *ctx.saved_tensors, ctx.eps)
    return dx, dw, None


def _swiglu_saved(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_gradient(ctx: Any, g: Tensor) -> Tensor:
    """In torch's own ops: custom ops' gradients may be either."""
    gate, up = ctx.saved_tensors[0].chunk(2, -1)
    sigmoid = gate.sigmoid()
    return torch.cat((g * up * sigmoid * (1 + gate * (1 - sigmoid)), g * gate * sigmoid), -1)


torch.library.register_autograd("trial::rms_norm", _rms_norm_gradient, setup_context=_rms_norm_saved)
torch.library.register_autograd("trial::swiglu", _swiglu_gradient, setup_context=_swiglu_saved)


class Decay(torch.optim.SGD):
    """An optimizer with an op of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(ops.decay(p, 0.01))


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(ops.noisy(p))


class Gated(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = ops.swiglu(self.up(ops.rms_norm(x, self.scale, 1e-5)))
        return (x + self.down(hidden)).square().mean()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@functools.cache
def step_of(optimizer: Any = sgd) -> TrainStep:
    torch.manual_seed(0)
    return TrainStep(Gated(), {"x": torch.randn(4, 6, 16)}, optimizer=optimizer)


@pytest.mark.parametrize("pins", ["tp=2", "dp=2", "dp=2, zero=3"])
def test_planned_saved_and_verified(pins: str) -> None:
    step = step_of()
    plan = autopar.plan(step, "2xcpu", pin=pins)
    assert plan.found_rules == {
        "trial::rms_norm(f32[4 6 16], f32[16], 1e-05)": "a b [c], [c] -> a b [c]; linear 1",
        "trial::rms_norm_backward(f32[4 6 16], f32[4 6 16], f32[16], 1e-05)": (
            "a b [c], a b [c], [c] -> a b [c], [c]; linear 0"
        ),
        "trial::swiglu(f32[4 6 64])": "a b ([2] c) -> a b c",
    }
    again = Plan.from_json(plan.to_json())
    assert again == plan
    program = autopar.compile(step, again)
    report = program.verify()
    assert report.ok, str(report)


def test_ops_of_ones_own_are_split() -> None:
    plan = autopar.plan(step_of(), "4xcpu", pin="dp=2, tp=2")
    choices = {key: choice for key, choice in plan.choices.items() if "trial." in key}
    assert any("dp=a" in choice for choice in choices.values())
    report = autopar.compile(step_of(), plan).verify()
    assert report.ok, str(report)


def test_compiling_does_not_look_for_rules_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = autopar.plan(step_of(), "2xcpu", pin="dp=2")
    monkeypatch.setattr("autopar.rules.found.discover", None)
    assert autopar.compile(step_of(), plan).verify().ok


def test_a_plan_with_a_wrong_rule_is_refused() -> None:
    text = autopar.plan(step_of(), "2xcpu", pin="dp=2").to_json()
    forged = Plan.from_json(text.replace("a b [c], [c] -> a b [c]; linear 1", "a b c, c -> a b c; linear 1"))
    with pytest.raises(PlanError, match=r"of trial::rms_norm.*is wrong.*differs"):
        autopar.compile(step_of(), forged)


def test_a_registered_rule_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "_REGISTERED", {})
    autopar.rule("trial::swiglu", "a [b] ([2] c) -> a [b] c")
    plan = autopar.plan(step_of(), "2xcpu", pin="dp=2")
    assert plan.registered_rules == {"trial::swiglu(f32[4 6 64])": "a [b] ([2] c) -> a [b] c"}
    assert len(plan.found_rules) == 2
    monkeypatch.setattr(registered, "_REGISTERED", {})
    assert autopar.compile(step_of(), plan).verify().ok


def test_ops_of_an_optimizer() -> None:
    step = step_of(functools.partial(Decay, lr=0.1))
    plan = autopar.plan(step, "2xcpu", pin="dp=2, zero=3")
    assert plan.found_rules["trial::decay(f32[16 32], 0.01)"] == "a b -> a b; linear 0"
    report = autopar.compile(step, plan).verify()
    assert report.ok, str(report)


def test_random_ops_of_an_optimizer_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"trial::noisy.*draws random numbers without saying so"):
        autopar.plan(step_of(functools.partial(Noisy, lr=0.1)), "2xcpu")


class Bumped(Gated):
    def forward(self, x: Tensor) -> Tensor:
        offset = torch.zeros(16)
        ops.bump_(offset, 2.0)
        return super().forward(x + offset)


def test_a_mutating_op_runs_whole_and_is_named() -> None:
    step = TrainStep(Bumped(), {"x": torch.randn(4, 6, 16)}, optimizer=sgd)
    with pytest.warns(RuntimeWarning, match=r"trial::bump_ \(test_custom_ops.py:\d+\).*runs whole on every rank"):
        plan = autopar.plan(step, "2xcpu", pin="tp=2")
    assert autopar.compile(step, plan).verify().ok
