"""Garbage collection while a plan is made: graphs are made of millions of objects, which live until the end."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

ALLOCATIONS = 100_000
"""Between two collections of what is young (Python's own default is 700)."""


@contextlib.contextmanager
def collected_seldom() -> Iterator[None]:
    """While open, what was there before isn't searched for garbage, and the rest less often: half of the time of
    capture, planning and lowering went into that."""
    before = gc.get_threshold()
    if not 0 < before[0] < ALLOCATIONS:  # whoever said so decides what is frozen, too
        yield
        return
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
