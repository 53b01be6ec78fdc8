"""How long a step takes whose ranks have several stages, action by action: what `solve.ranks` says is held against it.

    waited_s(stage_s, num_ranks=4, microbatches=16)         # seconds; stage_s: of a microbatch, forward and backward

Where rounds aren't equally long, ranks that are in one wait for those that are in the next, which a sum over rounds
doesn't see. A forward is taken to be a third of a stage's time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from autopar.program.actions import Action
from autopar.program.generators import INTERLEAVED, make_schedule

FORWARD = 1 / 3

_Event = tuple[int, float, int, int]
"""Its stage, which part of the stage's time it takes, and the numbers of the events before it: the last of its rank,
and the one that sends to it; -1 for none."""


def waited_s(stage_s: Sequence[float], num_ranks: int, microbatches: int) -> float:
    """Seconds of a step; of more than three groups of as many microbatches as ranks each further one takes what the
    third does."""
    virtual, groups = len(stage_s) // num_ranks, microbatches // num_ranks
    if groups <= 3 or microbatches % num_ranks:
        return _span_s(stage_s, num_ranks, virtual, microbatches)
    two, three = (_span_s(stage_s, num_ranks, virtual, times * num_ranks) for times in (2, 3))
    return two + (groups - 2) * (three - two)


def _span_s(stage_s: Sequence[float], num_ranks: int, virtual: int, microbatches: int) -> float:
    ends: list[float] = []
    for stage, part, before, sender in _events(num_ranks, virtual, microbatches):
        start = max(ends[before] if before >= 0 else 0.0, ends[sender] if sender >= 0 else 0.0)
        ends.append(start + part * stage_s[stage])
    return max(ends)


@functools.lru_cache(maxsize=64)
def _events(num_ranks: int, virtual: int, microbatches: int) -> tuple[_Event, ...]:
    """In an order in which each comes after those before it."""
    rows = [
        [Action.parse(text) for text in row] for row in make_schedule(INTERLEAVED, num_ranks, microbatches, virtual)
    ]
    last, at, known = num_ranks * virtual - 1, [0] * num_ranks, dict[tuple[str, int, int], int]()
    before, found = [-1] * num_ranks, list[_Event]()
    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                sender = _sender(action, last)
                if sender is not None and sender not in known:
                    break
                part = FORWARD if action.kind == "F" else 1 - FORWARD
                found.append((action.stage, part, before[rank], -1 if sender is None else known[sender]))
                before[rank] = known[action.kind, action.stage, action.microbatch] = len(found) - 1
                at[rank] += 1
    return tuple(found)


def _sender(action: Action, last: int) -> tuple[str, int, int] | None:
    if action.kind == "F":
        return ("F", action.stage - 1, action.microbatch) if action.stage else None
    kind, stage = ("B", action.stage + 1) if action.stage < last else ("F", last)
    return kind, stage, action.microbatch
