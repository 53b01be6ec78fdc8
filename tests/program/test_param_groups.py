"""Param groups beside a program: schedulers set what the step takes as an input, anything else is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from autopar.capture.graphs import Role, placeholders
from autopar.capture.update import Updates, capture_updates
from autopar.errors import PlanError
from autopar.program.param_groups import ParamGroups

Scheduler = Callable[[torch.optim.Optimizer], Any]


class SignOfMomentum(torch.optim.Optimizer):
    """A user's own, that uses `math` on its betas: these stay constants."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta, _), scale = group["betas"], math.sqrt(1 - group["betas"][0])
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["moment"] = torch.zeros_like(p)
                state["moment"].mul_(beta).add_(p.grad, alpha=1 - beta)
                p.add_(torch.sign(state["moment"]), alpha=-group["lr"] * scale)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.1),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.1),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=0.1),
}
SCHEDULERS: dict[str, Scheduler] = {
    "one cycle, momentum too": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=6),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "warmup, then decay": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}


def groups_of(updates: Updates) -> ParamGroups:
    return ParamGroups(updates.scalars, updates.options)


def captured(optimizer: Any, parameter: nn.Parameter) -> Updates:
    return capture_updates(optimizer([parameter]), {"w": (parameter, 0)})


class Captured:
    """A parameter that the captured update trains, under the present scalars of `groups`."""

    def __init__(self, updates: Updates, value: Tensor) -> None:
        self.updates, self.value, self.groups = updates, value, groups_of(updates)
        self.state = {key: init.build(value) for key, init in updates.initial_state["w"].items()}

    def step(self, grad: Tensor) -> None:
        update = self.updates.templates[0]
        given = {Role("param", ""): self.value, Role("grad", ""): grad}
        given |= {Role("state", key): entry for key, entry in self.state.items()}
        given |= {
            Role("scalar", key): torch.tensor(value, dtype=torch.float64)
            for key, value in self.groups.scalars().items()
        }
        results = update.graph(*(given[role] for role in placeholders(update.graph)))
        new = dict(zip(update.output_roles, results, strict=True))
        self.value = new.pop(Role("param", ""))
        self.state = {role.name: entry for role, entry in new.items()}
        self.groups.step()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_schedulers_do_what_they_do_to_the_real_optimizer(name: str, scheduler: str) -> None:
    torch.manual_seed(0)
    real = nn.Parameter(torch.randn(6, 5))
    ours = Captured(captured(OPTIMIZERS[name], real), real.detach().clone())
    optimizer = OPTIMIZERS[name]([real])
    schedules = [SCHEDULERS[scheduler](optimizer), SCHEDULERS[scheduler](ours.groups)]
    for _ in range(5):
        grad = torch.randn(6, 5)
        real.grad = grad.clone()
        optimizer.step()
        ours.step(grad)
        for schedule in schedules:
            schedule.step()
        momentum = "betas" if "betas" in optimizer.param_groups[0] else "momentum"
        for key in ("lr", momentum):
            assert ours.groups.param_groups[0][key] == optimizer.param_groups[0][key]
    torch.testing.assert_close(ours.value, real.detach(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("adamw", "betas", (0.9, 0.5)),
        ("adamw", "eps", 1e-3),
        ("adamw", "amsgrad", True),
        ("adam", "weight_decay", 0.1),
        ("sgd", "nesterov", True),
    ],
)
def test_what_is_part_of_the_program_is_refused(name: str, key: str, value: Any) -> None:
    groups = groups_of(captured(OPTIMIZERS[name], nn.Parameter(torch.randn(3))))
    groups.scalars()
    groups.param_groups[0][key] = value
    with pytest.raises(PlanError, match=f"'{key}' of group0 was set to"):
        groups.scalars()


def test_a_zero_at_capture_says_what_to_do() -> None:
    groups = groups_of(captured(OPTIMIZERS["adam"], nn.Parameter(torch.randn(3))))
    groups.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(PlanError, match="capture the step with a value that isn't 0"):
        groups.scalars()


def test_betas_that_the_optimizer_computes_with_by_itself_stay_constants() -> None:
    updates = captured(lambda ps: SignOfMomentum(ps, 0.1), nn.Parameter(torch.randn(3)))
    assert updates.scalars == {"group0.lr": 0.1}
    groups = groups_of(updates)
    groups.param_groups[0]["betas"] = (0.8, 0.99)
    with pytest.raises(PlanError, match="betas"):
        groups.scalars()


def test_groups_come_back_from_a_checkpoint() -> None:
    updates = captured(OPTIMIZERS["adamw"], nn.Parameter(torch.randn(3)))
    one, other = groups_of(updates), groups_of(updates)
    SCHEDULERS["one cycle, momentum too"](one)
    other.load_groups(one.groups())
    assert other.scalars() == one.scalars() and other.groups() == one.groups()
