"""Calls that prove the rules of `rules/losses.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.rules.examples.example import Example, Examples, aten, call, drawn, index, t, unit
from autopar.rules.prove import random_value

_THRESHOLDS: dict[str, tuple[float, ...]] = {
    "mse_loss": (),
    "smooth_l1_loss": (1.0,),
    "huber_loss": (1.0,),
    "soft_margin_loss": (),
}
"""Losses with the arguments that follow `reduction`."""


def _op(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(aten, name).default
    return found


def _elementwise(name: str) -> list[Example]:
    return [call(_op(name), t(4, 6), t(4, 6), how) for how in (0, 1, 2)]


def _elementwise_backward(name: str, *rest: float) -> list[Example]:
    return [
        call(_op(name), t(4, 6), t(4, 6), t(4, 6), 0, *rest),
        *(call(_op(name), t(), t(4, 6), t(4, 6), how, *rest) for how in (1, 2)),
    ]


def _nll_backward(target: Callable[..., Any], *args: Any) -> Example:
    """The total weight, which divides, is not 0."""
    return drawn(random_value, target, *args, t())


EXAMPLES: Examples = {
    **{f"aten.{name}": _elementwise(name) for name in _THRESHOLDS},
    "aten.binary_cross_entropy": [
        drawn(unit, aten.binary_cross_entropy.default, t(4, 6), t(4, 6)),
        drawn(unit, aten.binary_cross_entropy.default, t(4, 6), t(4, 6), t(6), 2),
        drawn(unit, aten.binary_cross_entropy.default, t(4, 6), t(4, 6), None, 0),
    ],
    "aten.binary_cross_entropy_with_logits": [
        call(aten.binary_cross_entropy_with_logits.default, t(4, 6), t(4, 6)),
        call(aten.binary_cross_entropy_with_logits.default, t(4, 6), t(4, 6), t(6), t(6), 2),
        call(aten.binary_cross_entropy_with_logits.default, t(4, 6), t(4, 6), None, t(6), 0),
    ],
    **{
        f"aten.{name}_backward": _elementwise_backward(f"{name}_backward", *rest)
        for name, rest in {
            "mse_loss": (),
            "smooth_l1_loss": (1.0,),
            "huber_loss": (1.0,),
            "soft_margin_loss": (),
        }.items()
    },
    "aten.binary_cross_entropy_backward": [
        drawn(unit, aten.binary_cross_entropy_backward.default, t(), t(4, 6), t(4, 6), None, 1),
        drawn(unit, aten.binary_cross_entropy_backward.default, t(4, 6), t(4, 6), t(4, 6), t(6), 0),
    ],
    "aten.nll_loss_forward": [
        *(call(aten.nll_loss_forward.default, t(6, 4), index(6), None, how, -100) for how in (0, 1, 2)),
        call(aten.nll_loss_forward.default, t(6, 4), index(6), t(4), 2, 1),
        call(aten.nll_loss_forward.default, t(4), index(), t(4), 1, -100),
    ],
    "aten.nll_loss_backward": [
        *(
            drawn(random_value, aten.nll_loss_backward.default, t(), t(6, 4), index(6), None, how, -100, t())
            for how in (1, 2)
        ),
        drawn(random_value, aten.nll_loss_backward.default, t(6), t(6, 4), index(6), t(4), 0, 1, t()),
    ],
    "aten.nll_loss2d_forward": [
        *(call(aten.nll_loss2d_forward.default, t(6, 4, 2, 3), index(6, 2, 3), None, how, -100) for how in (0, 1, 2))
    ],
    "aten.nll_loss2d_backward": [
        drawn(random_value, aten.nll_loss2d_backward.default, t(), t(6, 4, 2, 3), index(6, 2, 3), t(4), 1, -100, t()),
        drawn(
            random_value, aten.nll_loss2d_backward.default, t(6, 2, 3), t(6, 4, 2, 3), index(6, 2, 3), None, 0, 2, t()
        ),
    ],
}
