"""Which module of a model runs, eagerly or while it is traced, by its path; and the names of draws made of it.

    running = Running(model)
    with running.followed():
        model(x)                        # in the forward of its dropout `running.path` is "blocks.3.dropout"
    draw_name("blocks.3.dropout", 0)    # "blocks.3.dropout#0"

Invariants:
- a module used under several names has its first, as in `labels`; one that isn't the model's has its caller's;
- what runs outside of all modules (the loss, the user's own backward functions) has the path "";
- eager code and capture go through the same hooks, so that they find the same paths.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from autopar.errors import CaptureError


class Running:
    """Follows the calls of modules."""

    def __init__(self, model: nn.Module | None = None) -> None:
        """`model`: the one whose paths count; without it, the first module that is called."""
        self._is_given = model is not None
        self._model = model
        self._paths = {} if model is None else _paths_in(model)
        self._stack: list[tuple[str | None, nn.Module]] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        """While open, calls are followed."""
        handles = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),  # a checkpoint stops what it runs again
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def path(self) -> str:
        """Of the module that runs; raises `CaptureError` where that isn't part of a model that wasn't given."""
        path, module = self._stack[-1] if self._stack else ("", None)
        if path is None and not self._is_given:
            raise CaptureError(
                f"{type(module).__name__} draws numbers, but isn't part of {type(self._model).__name__}, the first "
                "module that was called under reference_rng; say reference_rng(..., model=the model of the step)"
            )
        return path or ""

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        if self._model is None:
            self._model, self._paths = module, _paths_in(module)
        outer = self._stack[-1][0] if self._stack else None
        self._stack.append((self._paths.get(id(module), outer), module))

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._stack.pop()


def _paths_in(model: nn.Module) -> dict[int, str]:
    return {id(module): path for path, module in model.named_modules()}


# -- names of draws --------------------------------------------------------------------------------------------------
def draw_name(path: str, occurrence: int) -> str:
    """The name of a module's draw number `occurrence`."""
    return f"{path}#{occurrence}"


def parsed_draw_name(name: str) -> tuple[str, int]:
    """(path, occurrence) of a draw."""
    path, _, occurrence = name.rpartition("#")
    return path, int(occurrence)
