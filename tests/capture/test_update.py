"""Update templates: three steps with a changing learning rate equal the real optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.graphs import Role, placeholders
from autopar.capture.update import capture_updates
from autopar.errors import CaptureError

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Factory] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "adamw no decay": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.0),
    "adamw betas": lambda ps: torch.optim.AdamW(ps, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3),
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2, momentum=0.9, centered=True),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=1e-2),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=1e-2),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=1e-1),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
}


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's own, with lazily made state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["moment"], state["count"] = torch.zeros_like(p), 0
                state["count"] += 1
                p.add_(torch.sign(state["moment"].lerp(p.grad, 0.1)), alpha=-group["lr"] / state["count"])
                state["moment"].lerp_(p.grad, 1 - group["beta"])


OPTIMIZERS["user's own"] = lambda ps: Lion(ps, lr=1e-2)


def run_template(factory: Factory, parameter: nn.Parameter, grads: list[Tensor], rates: list[float]) -> Tensor:
    """The parameter after the captured update has run for each gradient and learning rate."""
    captured = capture_updates(factory([nn.Parameter(parameter.detach().clone())]), {"w": (parameter, 0)})
    return _run(captured, parameter.detach().clone(), parameter, grads, rates)


def _run(captured: Any, value: Tensor, like: Tensor, grads: list[Tensor], rates: list[float]) -> Tensor:
    update = captured.templates[captured.update_of["w"]]
    state = {key: init.build(like) for key, init in captured.initial_state["w"].items()}
    for grad, rate in zip(grads, rates, strict=True):
        given = {Role("param", ""): value, Role("grad", ""): grad}
        given |= {Role("state", key): entry for key, entry in state.items()}
        scalars = {**captured.scalars, "group0.lr": rate}
        given |= {Role("scalar", key): torch.tensor(number, dtype=torch.float64) for key, number in scalars.items()}
        results = update.graph(*(given[role] for role in placeholders(update.graph)))
        new = dict(zip(update.output_roles, results, strict=True))
        value = new.pop(Role("param", ""))
        state = {role.name: entry for role, entry in new.items()}
    return value


def run_optimizer(factory: Factory, parameter: Tensor, grads: list[Tensor], rates: list[float]) -> Tensor:
    """The parameter after the real optimizer's steps."""
    real = nn.Parameter(parameter.detach().clone())
    optimizer = factory([real])
    for grad, rate in zip(grads, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        real.grad = grad.clone()
        optimizer.step()
    return real.detach()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shape", [(6, 5), (7,)], ids=str)
def test_three_steps_equal_the_real_optimizer(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape))
    grads, rates = [torch.randn(shape) for _ in range(3)], [1e-2, 3e-2, 5e-3]
    real = run_optimizer(OPTIMIZERS[name], parameter, grads, rates)
    captured = run_template(OPTIMIZERS[name], parameter, grads, rates)
    # 1e-6: `alpha=` and `value=` are multiplied in, which rounds once more
    torch.testing.assert_close(captured, real, rtol=1e-6, atol=1e-7)


def test_muon_on_matrices() -> None:
    torch.manual_seed(0)
    muon = functools.partial(torch.optim.Muon, lr=1e-2)
    parameter = nn.Parameter(torch.randn(6, 5))
    grads, rates = [torch.randn(6, 5) for _ in range(3)], [1e-2, 3e-2, 5e-3]
    real = run_optimizer(muon, parameter, grads, rates)
    captured = run_template(muon, parameter, grads, rates)
    # its iteration runs in bf16: another order of roundings anywhere would be a difference of 1e-4 and more
    torch.testing.assert_close(captured, real, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adadelta"])
def test_bf16_parameters_are_rounded_as_the_kernels_do(name: str) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(64, dtype=torch.bfloat16))
    grads, rates = [torch.randn(64, dtype=torch.bfloat16) for _ in range(3)], [1e-2, 3e-2, 5e-3]
    real = run_optimizer(OPTIMIZERS[name], parameter, grads, rates)
    torch.testing.assert_close(run_template(OPTIMIZERS[name], parameter, grads, rates), real)


def test_templates_are_shared_by_shape_and_group() -> None:
    named = {name: nn.Parameter(torch.randn(shape)) for name, shape in {"a": (3, 4), "b": (3, 4), "c": (4,)}.items()}
    optimizer = torch.optim.AdamW(
        [{"params": [named["a"], named["c"]]}, {"params": [named["b"]], "weight_decay": 0.0, "lr": 0.5}], lr=0.1
    )
    captured = capture_updates(optimizer, {n: (p, 1 if n == "b" else 0) for n, p in named.items()})
    assert captured.update_of == {"a": 0, "b": 1, "c": 2}
    assert captured.scalars == {
        "group0.lr": 0.1,
        "group0.weight_decay": 0.01,
        "group0.betas.0": 0.9,
        "group1.lr": 0.5,
        "group1.betas.0": 0.9,
    }
    assert captured.options["group1"]["weight_decay"] == 0.0 and captured.options["group1"]["betas"] == [0.9, 0.999]
    assert optimizer.state == {} and optimizer.param_groups[0]["params"][0] is named["a"]


def test_state_starts_as_the_optimizer_makes_it() -> None:
    parameter = nn.Parameter(torch.randn(3, 4))
    optimizer = torch.optim.Adagrad([parameter], initial_accumulator_value=0.25)
    state = capture_updates(optimizer, {"w": (parameter, 0)}).initial_state["w"]
    assert {key: (init.shape, init.fill) for key, init in state.items()} == {"step": ((), 0.0), "sum": ((3, 4), 0.25)}


def test_mixed_precision_keeps_a_master_copy() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(6, 5))
    grads, rates = [torch.randn(6, 5) for _ in range(3)], [1e-2, 3e-2, 5e-3]
    captured = capture_updates(torch.optim.AdamW([parameter], lr=1e-2), {"w": (parameter, 0)}, mixed=True)
    low = _run(captured, parameter.detach().bfloat16(), parameter, grads, rates)
    whole = run_template(OPTIMIZERS["adamw"], parameter, grads, rates)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low, whole.bfloat16(), rtol=0, atol=0)


def test_dampening_is_refused() -> None:
    parameter = nn.Parameter(torch.randn(3))
    with pytest.raises(CaptureError, match="dampening"):
        capture_updates(torch.optim.SGD([parameter], lr=0.1, momentum=0.9, dampening=0.5), {"w": (parameter, 0)})
