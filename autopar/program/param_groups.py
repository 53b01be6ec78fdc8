"""The optimizer's param groups as the user sees them while a program trains: its scalars are inputs of each step.

    groups = ParamGroups(program.scalars, program.options)
    torch.optim.lr_scheduler.OneCycleLR(groups, max_lr=0.1, total_steps=100)
    groups.scalars()        # {"group0.lr": 0.004, "group0.betas.0": 0.95}, read anew by each step

Invariants:
- an entry that the program took as an input (`"group0.lr"`) may be set to any number, before any step;
- every other entry is part of the program: a step after it was changed raises, and is never made with the old value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.errors import PlanError


class ParamGroups(torch.optim.Optimizer):
    """The param groups of the captured optimizer, without parameters: torch's LR schedulers set them."""

    def __init__(self, scalars: Mapping[str, float], options: Mapping[str, Mapping[str, Any]]) -> None:
        """`scalars`: `"group0.lr"` → value, the program's inputs; `options`: all entries, by group."""
        self._names = tuple(scalars)
        self._group_names = tuple(options) or tuple(dict.fromkeys(_parse(name)[0] for name in scalars)) or ("group0",)
        groups = [{key: _plain(value) for key, value in options.get(name, {}).items()} for name in self._group_names]
        for name, value in scalars.items():
            group, key, index = _parse(name)
            _put(groups[self._group_names.index(group)], key, index, value)
        self._captured = [dict(group) for group in groups]
        super().__init__([{"params": [torch.zeros(0)], **group} for group in groups], dict(groups[0]))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Takes the group as it is (torch's own would import torch._dynamo: a second on every rank)."""
        self.param_groups.append(param_group)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing: the program has the update. It tells LR schedulers that a step was made."""

    def scalars(self) -> dict[str, float]:
        """The present values by their name in the program; raises `PlanError` where another entry was changed."""
        self._require_unchanged()
        groups = dict(zip(self._group_names, self.param_groups, strict=True))
        found = {}
        for name in self._names:
            group, key, index = _parse(name)
            value = groups[group][key]
            found[name] = float(value if index is None else value[index])
        return found

    def _require_unchanged(self) -> None:
        live = set(self._names)
        for name, captured, group in zip(self._group_names, self._captured, self.param_groups, strict=True):
            for key, value in captured.items():
                now = _plain(group.get(key))
                if now == value or f"{name}.{key}" in live or _differs_in_live(now, value, f"{name}.{key}", live):
                    continue
                hint = "capture the step with a value that isn't 0" if value == 0 and key != "lr" else "capture it anew"
                raise PlanError(
                    f"optimizer.param_groups: {key!r} of {name} was set to {now!r}; the program was captured with "
                    f"{value!r}, which is part of it: {hint} (inputs of a step are {', '.join(self._names) or 'none'})"
                )

    def groups(self) -> dict[str, dict[str, Any]]:
        """What `param_groups` holds beside parameters (schedulers keep `initial_lr` there), by the group's name."""
        return {
            name: {key: value for key, value in group.items() if key != "params"}
            for name, group in zip(self._group_names, self.param_groups, strict=True)
        }

    def load_groups(self, groups: Mapping[str, Mapping[str, Any]]) -> None:
        """The inverse of `groups`."""
        if set(groups) != set(self._group_names):
            raise PlanError(f"param groups: got {', '.join(groups)}, expected {', '.join(self._group_names)}")
        for name, group in zip(self._group_names, self.param_groups, strict=True):
            group.update(groups[name])


def _parse(name: str) -> tuple[str, str, int | None]:
    """`"group0.betas.0"` → group, key, and the index in a tuple."""
    group, key, *rest = name.split(".")
    return group, key, int(rest[0]) if rest else None


def _plain(value: Any) -> Any:
    """Lists, as JSON has them, are tuples; a tensor without dims is its number."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _put(group: dict[str, Any], key: str, index: int | None, value: float) -> None:
    if index is None:
        group[key] = value
        return
    items = list(group.get(key, ()))
    items += [None] * (index + 1 - len(items))
    items[index] = value
    group[key] = tuple(items)


def _differs_in_live(now: Any, value: Any, name: str, live: set[str]) -> bool:
    """Whether two tuples differ only where the items are inputs."""
    if not isinstance(now, tuple) or not isinstance(value, tuple) or len(now) != len(value):
        return False
    return all(a == b or f"{name}.{i}" in live for i, (a, b) in enumerate(zip(now, value, strict=True)))
