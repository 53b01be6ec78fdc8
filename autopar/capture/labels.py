"""Where each traced node comes from: its module path, phase and line of source.

Module hooks keep the path and a TorchFunctionMode the line; both are put on the tracer's nodes as they are made. A
backward node is matched to its forward op by autograd's sequence number; what the backward runs again (checkpointed
code) is followed as in the forward.

Invariants:
- a module used under several names has its first;
- a line is the innermost one of the user's own code, else of the library that holds the model, else "".
"""

from __future__ import annotations

import bisect
import functools
import linecache
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar import private

_SKIPPED = (Path(__file__).absolute().parents[1], Path(torch.__file__).absolute().parent)
_INSTALLED = (Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib")))
_STANDARD = Path(sysconfig.get_path("stdlib"))


class Labels:
    """The current module path and source line, and which sequence numbers they cover."""

    def __init__(self, root: CodeType) -> None:
        """`root`: the code of the traced function; frames outside of it are not the model's."""
        self.root = root
        self.phase = "forward"
        self._paths = [""]
        self._source = ""
        self._starts: list[int] = []
        self._labels: list[dict[str, str]] = []

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """While open, labels follow the modules of `model`."""
        handles = []
        for path, module in model.named_modules():
            enter = functools.partial(self._enter, path)
            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(self._leave))
        try:
            self._mark()
            yield
        finally:
            for handle in handles:
                handle.remove()

    def at_call(self) -> None:
        """To be called for each torch function: notes the line that called it.

        In the backward there is one only in what is run again, and in the user's own backward functions.
        """
        source = caller_source(sys._getframe(1), self.root)
        if source != self._source and (source or self.phase == "forward"):
            self._source = source
            self._mark()

    def begin_backward(self, loss: Tensor) -> None:
        """Labels every node of the autograd graph behind `loss`, for when it runs."""
        self.phase = "backward"
        self._at({"path": "", "phase": "backward", "source": self._labels[-1]["source"]})
        seen: set[Any] = {None}
        pending: list[Any] = [loss.grad_fn]
        while pending:
            grad_fn = pending.pop()
            if grad_fn in seen:
                continue
            seen.add(grad_fn)
            pending.extend(parent for parent, _ in grad_fn.next_functions)
            if "AccumulateGrad" not in grad_fn.name():
                grad_fn.register_prehook(functools.partial(self._at, self._label_of(grad_fn)))

    def _at(self, label: dict[str, str], gradients: Any = None) -> None:
        """The backward is at a node with this label."""
        self._paths, self._source = [label["path"]], label["source"]
        private.set_label(label)

    def _enter(self, path: str, module: nn.Module, arguments: Any) -> None:
        self._paths.append(path)
        self._mark()

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._paths.pop()
        self._mark()

    def _mark(self) -> None:
        label = {"path": self._paths[-1], "phase": self.phase, "source": self._source}
        private.set_label(label)
        if self.phase == "forward":
            self._starts.append(private.sequence_number())
            self._labels.append(label)

    def _label_of(self, grad_fn: Any) -> dict[str, str]:
        at = bisect.bisect_right(self._starts, private.sequence_number_of(grad_fn)) - 1
        return {**self._labels[max(at, 0)], "phase": "backward"}


class CallMode(TorchFunctionMode):
    """Notes the line of each torch call, and calls what `replaced` holds for it instead, if that accepts."""

    def __init__(self, labels: Labels, replaced: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.labels = labels
        self.replaced = replaced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":
            self.labels.at_call()
        replacement = self.replaced.get(func)
        if replacement is not None:
            result = replacement(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


# -- frames ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _ownership(filename: str) -> str:
    """Whose code it is: "user", "library" (installed; may hold the model) or "skip" (torch, autopar, Python)."""
    roots = Path(filename).absolute().parents
    if filename.startswith(("<frozen", "<string", "<eval")) or any(root in roots for root in _SKIPPED):
        return "skip"
    if any(root in roots for root in _INSTALLED):
        return "library"
    return "skip" if _STANDARD in roots else "user"


def caller_source(frame: FrameType | None, root: CodeType) -> str:
    """The line ("model.py:41") of the innermost frame below `root` that is the user's, else a library's."""
    fallback = ""
    while frame is not None and frame.f_code is not root:
        owner = _ownership(frame.f_code.co_filename)
        if owner == "user":
            return _text(frame.f_code.co_filename, frame.f_lineno)
        if owner == "library" and not fallback:
            fallback = _text(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return fallback


def error_source(error: BaseException, root: CodeType) -> tuple[str, str]:
    """The line at which `error` was raised inside of `root`, as ("model.py:41", its text)."""
    found = [("", "")]
    fallback = ("", "")
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        code, line = traceback.tb_frame.f_code, traceback.tb_lineno
        if code is root:
            found, fallback = [("", "")], ("", "")
        where = (_text(code.co_filename, line), linecache.getline(code.co_filename, line).strip())
        owner = _ownership(code.co_filename)
        if owner == "user":
            found.append(where)
        elif owner == "library":
            fallback = where
        traceback = traceback.tb_next
    return found[-1] if found[-1][0] else fallback


def _text(filename: str, line: int) -> str:
    return f"{Path(filename).name}:{line}"
