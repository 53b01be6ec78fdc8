"""autopar compiles the training step of a single-device PyTorch model into a program that many devices run together.

    step = autopar.TrainStep(model, batch, optimizer=lambda ps: torch.optim.AdamW(ps, lr=3e-4))
    plan = autopar.plan(step, "8xh100")
    program = autopar.compile(step, plan)

Importing this package loads neither torch nor the solver: each name below is looked up when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autopar.errors import CaptureError, Error, InfeasibleError, PlanError, RuleError, VerificationError

if TYPE_CHECKING:
    from autopar.capture import ForwardStep, TrainStep
    from autopar.capture.drawing import reference_rng
    from autopar.cluster import Cluster
    from autopar.compiling import compile
    from autopar.decorator import parallelize
    from autopar.explaining import explain
    from autopar.layout import Layout
    from autopar.mesh import Mesh
    from autopar.pins import Pins
    from autopar.planning import best_plans, plan
    from autopar.plans import Plan
    from autopar.profiling import profile
    from autopar.rules.registered import rule

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "Cluster",
    "Error",
    "ForwardStep",
    "InfeasibleError",
    "Layout",
    "Mesh",
    "Pins",
    "Plan",
    "PlanError",
    "RuleError",
    "TrainStep",
    "VerificationError",
    "best_plans",
    "compile",
    "explain",
    "parallelize",
    "plan",
    "profile",
    "reference_rng",
    "rule",
]

_HOMES = {
    "Cluster": "autopar.cluster",
    "ForwardStep": "autopar.capture",
    "Layout": "autopar.layout",
    "Mesh": "autopar.mesh",
    "Pins": "autopar.pins",
    "Plan": "autopar.plans",
    "TrainStep": "autopar.capture",
    "best_plans": "autopar.planning",
    "compile": "autopar.compiling",
    "explain": "autopar.explaining",
    "parallelize": "autopar.decorator",
    "plan": "autopar.planning",
    "profile": "autopar.profiling",
    "reference_rng": "autopar.capture.drawing",
    "rule": "autopar.rules.registered",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    value = getattr(importlib.import_module(module), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
