"""The batch of a step: its tensors by name, its constants, and how the model is called with it.

    form = BatchForm.of(model, {"tokens": tokens, "targets": targets, "scale": 2.0})
    form.tensors(batch)                # {"tokens": Tensor, "targets": Tensor}
    form.call(form.rebuild(tensors))   # ((), {"tokens": …, "targets": …, "scale": 2.0})

Invariants:
- a dict holds keywords, a tuple positionals, a tensor is one argument; non-tensors are constants of the step;
- the batch holds all samples of one optimizer step; a microbatch is a contiguous slice of dim 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar.errors import CaptureError


@dataclass(frozen=True, slots=True)
class BatchForm:
    """How a batch is laid out; the same for every batch of a step."""

    example: Any
    """The user's first batch, as given: what isn't a tensor in it is a constant."""
    names: tuple[str, ...]
    """Of the positionals of the model's forward."""
    accepts: frozenset[str] | None
    """Keywords that the forward takes; None: all."""
    max_positionals: int | None

    @classmethod
    def of(cls, model: nn.Module, batch: Any, *, has_loss: bool = False) -> BatchForm:
        """`has_loss`: the batch may hold more than the forward takes; the rest is for the loss alone."""
        kinds = inspect.Parameter
        parameters = list(inspect.signature(model.forward).parameters.values())
        positional = [p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
        open_keywords = any(p.kind == kinds.VAR_KEYWORD for p in parameters)
        open_positionals = any(p.kind == kinds.VAR_POSITIONAL for p in parameters)
        accepts = None if open_keywords or not has_loss else frozenset(p.name for p in parameters)
        limit = None if open_positionals or not has_loss else len(positional)
        if not isinstance(batch, (Mapping, tuple, list, Tensor)):
            raise CaptureError(f"batch: got {type(batch).__name__}; expected a dict, a tuple or a tensor")
        return cls(batch, tuple(positional), accepts, limit)

    def tensors(self, batch: Any) -> dict[str, Tensor]:
        """The tensors of a batch by name; raises `CaptureError` where its form differs from the first one's."""
        found, expected = dict(self._leaves(batch)), dict(self._leaves(self.example))
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        wanted = [name for name, value in expected.items() if isinstance(value, Tensor)]
        if sorted(tensors) != sorted(wanted):
            raise CaptureError(
                f"batch: got tensors {sorted(tensors)}; expected {sorted(wanted)}, as in the first batch"
            )
        return {name: tensors[name] for name in wanted}

    def rebuild(self, tensors: Mapping[str, Tensor]) -> Any:
        """A batch in the user's form with these tensors."""

        def build(name: str, value: Any) -> Any:
            if isinstance(value, Tensor):
                return tensors[name]
            if isinstance(value, Mapping):
                return {key: build(_join(name, str(key)), item) for key, item in value.items()}
            if isinstance(value, (tuple, list)):
                return type(value)(build(self._name(name, i), item) for i, item in enumerate(value))
            return value

        return build(self._root(), self.example)

    def call(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positionals and keywords with which the model is called."""
        if isinstance(batch, Mapping):
            return (), {key: value for key, value in batch.items() if self.accepts is None or key in self.accepts}
        if isinstance(batch, (tuple, list)):
            return tuple(batch[: self.max_positionals]), {}
        return (batch,), {}

    def _root(self) -> str:
        return self._name("", 0) if isinstance(self.example, Tensor) else ""

    def _leaves(self, batch: Any) -> Iterator[tuple[str, Any]]:
        def walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
            if isinstance(value, Mapping):
                for key, item in value.items():
                    yield from walk(_join(name, str(key)), item)
            elif isinstance(value, (tuple, list)):
                for i, item in enumerate(value):
                    yield from walk(self._name(name, i), item)
            else:
                yield name, value

        return walk(self._root(), batch)

    def _name(self, parent: str, index: int) -> str:
        if parent:
            return f"{parent}.{index}"
        return self.names[index] if index < len(self.names) else f"argument{index}"


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


# -- microbatches ----------------------------------------------------------------------------------------------------


def batch_size(tensors: Mapping[str, Tensor]) -> int:
    """Samples in the batch: dim 0 of its first tensor that has dims."""
    for tensor in tensors.values():
        if tensor.dim():
            return tensor.shape[0]
    raise CaptureError("batch: no tensor with a sample dim in it; expected at least one of shape [samples, ...]")


def microbatch(tensors: Mapping[str, Tensor], index: int, microbatches: int) -> dict[str, Tensor]:
    """Microbatch `index`: consecutive rows of every tensor whose dim 0 is the batch; others are shared by all.

    All are dense: graphs are captured, and programs run, on contiguous inputs whatever the user's strides.
    """
    size = batch_size(tensors)
    check_divides(size, microbatches)
    rows = size // microbatches

    def own(tensor: Tensor) -> Tensor:
        return tensor.narrow(0, index * rows, rows) if tensor.dim() and tensor.shape[0] == size else tensor

    return {name: own(tensor).contiguous() for name, tensor in tensors.items()}


def check_divides(size: int, microbatches: int) -> None:
    """Raises `CaptureError` unless the batch splits into equal microbatches."""
    if microbatches > 0 and size % microbatches == 0:
        return
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    raise CaptureError(
        f"microbatches={microbatches} doesn't divide the batch of {size} samples; use one of {divisors[:16]}"
    )
