"""Where a program's initial values come from: the live model, or its factory replayed tensor by tensor.

    put_initial_values(step, recipe, seed=0, put=lambda slot, whole: ...)

Invariants:
- the values are those of `torch.manual_seed(seed); factory()`, bit for bit;
- one whole tensor at a time: nothing here keeps what the caller doesn't.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.graphs import Captured, StateInit
from autopar.capture.initial import record, replay
from autopar.capture.step import ForwardStep
from autopar.errors import PlanError
from autopar.program.parts import Slot

Put = Callable[[Slot, Tensor], None]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What of the initial values the model itself doesn't say: optimizer state, and constants made in the forward."""

    state: dict[str, dict[str, StateInit]] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, captured: Captured) -> Recipe:
        return cls(captured.initial_state, captured.constants)

    def to_dict(self) -> dict[str, Any]:
        """As JSON: `{"state": {"w": {"step": [[], "float32", 0.0]}}, "constants": {name: [dtype, values]}}`."""
        state = {
            name: {key: [list(init.shape), _name(init.dtype), init.fill] for key, init in entries.items()}
            for name, entries in self.state.items()
        }
        return {"state": state, "constants": {n: [_name(t.dtype), t.tolist()] for n, t in self.constants.items()}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Recipe:
        """The inverse of `to_dict`; raises `PlanError` when malformed."""
        try:
            state = {
                name: {key: _state_init(*init) for key, init in entries.items()}
                for name, entries in data["state"].items()
            }
            constants = {n: torch.tensor(v, dtype=getattr(torch, dtype)) for n, (dtype, v) in data["constants"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"recipe.json: malformed ({error}); build the program anew") from None
        return cls(state, constants)


def _state_init(shape: list[int], dtype: str, fill: float | None) -> StateInit:
    return StateInit(tuple(shape), getattr(torch, dtype), fill)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def put_initial_values(step: ForwardStep, recipe: Recipe, seed: int, put: Put) -> None:
    """Calls `put` with each parameter, buffer, constant and optimizer state entry, whole."""

    def consume(name: str, value: Tensor) -> None:
        kind = "param" if name in parameters else "buffer"
        put(Slot(kind, name), value)
        for key, init in recipe.state.get(name, {}).items():
            put(Slot("state", f"{name}.{key}"), init.build(value))

    parameters = set(step.parameter_names)
    named = {**dict(step.model.named_parameters()), **dict(step.model.named_buffers())}
    if not any(value.is_meta for value in named.values()):
        for name, value in named.items():
            consume(name, value.detach())
    elif step.factory is not None:
        replay(record(step.factory), seed, lambda name, value: consume(name, value) if name in named else None)
    else:
        raise PlanError("the model's weights are on meta; pass TrainStep a factory of the model, to make them with")
    for name, value in recipe.constants.items():
        put(Slot("buffer", name), value)


def with_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the model (on meta or not) that holds copies of `weights`; what was tied stays tied."""
    copied = copy.deepcopy(model)
    made: dict[int, Tensor] = {}
    for path, module in copied.named_modules(remove_duplicate=False):
        for entries in (module._parameters, module._buffers):
            for name, old in entries.items():
                if old is None:
                    continue
                if id(old) not in made:
                    made[id(old)] = _like(old, weights[f"{path}.{name}" if path else name])
                entries[name] = made[id(old)]
    return copied


def _like(old: Tensor, value: Tensor) -> Tensor:
    value = value.detach().clone()
    return nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value


def whole_weights(step: ForwardStep, seed: int = 0) -> dict[str, Tensor]:
    """All parameters and buffers at once, for `verify`."""
    found: dict[str, Tensor] = {}
    put_initial_values(step, Recipe(), seed, lambda slot, value: found.__setitem__(slot.name, value.detach().clone()))
    return found
