"""Runs a function in a forked process: an op that is tried at sizes it wasn't made for may take its process down.

    aside(lambda: discover(node))       # its result; raises `CrashError("it crashed (SIGFPE)")` where nothing helps

Where a process dies in a trial that it had announced (`may_try`), another one is started that leaves this trial out.

Invariants:
- the function's result, or what it raises, must pickle; nothing else that it does is seen here;
- it computes on one thread: the threads of a pool don't survive a fork.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

LIMIT_S = 120.0
"""After which the process is ended; far more than any trial takes, so that it decides nothing where all is well."""

_MOST_CRASHES = 8

_fatal: ContextVar[frozenset[str]] = ContextVar("fatal trials", default=frozenset())
_announce: ContextVar[Callable[[str], object]] = ContextVar("announce", default=lambda text: None)


class CrashError(Exception):
    """The process died, by this signal or after the time limit."""


def may_try(text: str) -> bool:
    """Announces a trial by a text of its own; False where it is known to take its process down."""
    if text in _fatal.get():
        return False
    _announce.get()(text)
    return True


def aside(function: Callable[[], Result]) -> Result:
    """The function's result; raises what it raises, or `CrashError`. Runs it here where there is no `fork`."""
    if not hasattr(os, "fork"):
        return function()
    fatal: set[str] = set()
    for _ in range(_MOST_CRASHES):
        answer, last_trial, status = _forked(function, frozenset(fatal))
        if answer:
            result, error = pickle.loads(answer)
            if error is not None:
                raise error
            return result  # type: ignore[no-any-return]
        if not last_trial or last_trial in fatal:
            break
        fatal.add(last_trial)
    raise CrashError(_ending(status))


def _forked(function: Callable[[], Any], fatal: frozenset[str]) -> tuple[bytes, str, int]:
    """What the child answered, the last trial that it announced, and how it ended."""
    answers, trials = os.pipe(), os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, of which none is used
        child = os.fork()
    if child == 0:
        _answer(function, fatal, answers[1], trials[1])
    os.close(answers[1])
    os.close(trials[1])
    answer, announced = _read(answers[0], trials[0], child)
    _, status = os.waitpid(child, 0)
    return answer, announced.rpartition(b"\n")[0].rpartition(b"\n")[2].decode(), status


def _answer(function: Callable[[], Any], fatal: frozenset[str], answers: int, trials: int) -> None:
    """In the child: computes, writes result and error, and ends without running anybody's exit handlers."""
    try:
        faulthandler.disable()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        torch.set_num_threads(1)
        _fatal.set(fatal)
        _announce.set(lambda text: os.write(trials, text.replace("\n", " ").encode() + b"\n"))
        try:
            answer = pickle.dumps((function(), None))
        except Exception as error:
            answer = pickle.dumps((None, error))
        with os.fdopen(answers, "wb") as file:
            file.write(answer)
    finally:
        os._exit(0)


def _read(answers: int, trials: int, child: int) -> tuple[bytes, bytes]:
    """All that the child writes to either, until it ends; no answer where it takes too long."""
    parts: dict[int, list[bytes]] = {answers: [], trials: []}
    pending, deadline = [answers, trials], time.monotonic() + LIMIT_S
    while pending:
        ready = select.select(pending, [], [], max(0.0, deadline - time.monotonic()))[0]
        if not ready:
            os.kill(child, signal.SIGKILL)
            parts[answers] = []
            break
        for pipe in ready:
            part = os.read(pipe, 1 << 16)
            parts[pipe].append(part)
            if not part:
                pending.remove(pipe)
    os.close(answers)
    os.close(trials)
    return b"".join(parts[answers]), b"".join(parts[trials])


def _ending(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"it ended with status {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL:
        return f"it took more than {LIMIT_S:.0f} s"
    return f"it crashed ({signal.Signals(number).name})"
