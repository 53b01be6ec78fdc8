"""Published pipeline schedules as generators of actions.

    make_schedule("1f1b", 2, 4)                             # (("0F0", "0F1", "0B0", …), ("1F0", "1B0", …))
    make_schedule("interleaved_1f1b", 2, 4, virtual=2)      # (("0F0", "0F1", "2F0", …), ("1F0", "1F1", "3F0", …))

Invariants:
- a schedule has one row per pipeline rank, which runs the actions of all of its stages;
- with v stages a rank, rank r of p has the stages r, r + p, …, r + (v - 1)p.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from autopar.errors import PlanError
from autopar.program.actions import Row, Schedule


def one_f_one_b(num_stages: int, microbatches: int) -> Schedule:
    """1F1B (Narayanan et al., PipeDream-Flush, 2021): stage i runs p − i forwards ahead, then alternates."""

    def row(stage: int) -> Row:
        ahead = min(num_stages - stage, microbatches)
        texts = [f"{stage}F{i}" for i in range(ahead)]
        for i in range(microbatches):
            texts.append(f"{stage}B{i}")
            texts += [f"{stage}F{i + ahead}"] if i + ahead < microbatches else []
        return tuple(texts)

    return tuple(row(stage) for stage in range(num_stages))


def gpipe(num_stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., GPipe, 2019)."""
    return tuple(
        tuple(f"{stage}{kind}{i}" for kind in "FB" for i in range(microbatches)) for stage in range(num_stages)
    )


def zero_bubble_h1(num_stages: int, microbatches: int) -> Schedule:
    """ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2024): 1F1B whose stage i delays weight gradients by i.

    So no stage holds more than p microbatches, and weight gradients fill the end of the step.
    """

    def row(stage: int) -> Row:
        ahead = min(num_stages - stage, microbatches)
        texts = [f"{stage}F{i}" for i in range(ahead)]
        for i in range(microbatches):
            texts.append(f"{stage}I{i}")
            texts += [f"{stage}W{i - stage}"] if i >= stage else []
            texts += [f"{stage}F{i + ahead}"] if i + ahead < microbatches else []
        texts += [f"{stage}W{i}" for i in range(max(0, microbatches - stage), microbatches)]
        return tuple(texts)

    return tuple(row(stage) for stage in range(num_stages))


def forward_only(num_stages: int, microbatches: int) -> Schedule:
    """Inference: the microbatches one after the other."""
    return tuple(tuple(f"{stage}F{i}" for i in range(microbatches)) for stage in range(num_stages))


def interleaved_1f1b(num_ranks: int, virtual: int, microbatches: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., SC'21, section 2.2): with v stages a rank, the bubble is (p - 1)/(v M).

    Microbatches go through the ranks in rounds of p (in `round_of`, where p doesn't divide them), each round through
    all stages of a rank before the next. Rank r runs (v - 1) rounds and 2 (p - 1 - r) forwards ahead, then alternates.
    Raises `PlanError` where rounds can't be equally long.
    """
    size, total = round_of(num_ranks, microbatches), virtual * microbatches

    def nth(rank: int, which: int, kind: str) -> str:
        """The action of a rank's forward, or backward, of number `which`."""
        rounds, place = divmod(which, size)
        first, chunk = divmod(rounds, virtual)
        chunk = chunk if kind == "F" else virtual - 1 - chunk
        return f"{rank + chunk * num_ranks}{kind}{first * size + place}"

    def row(rank: int) -> Row:
        ahead = min((virtual - 1) * size + 2 * (num_ranks - 1 - rank), total)
        forwards = [nth(rank, i, "F") for i in range(total)]
        backwards = [nth(rank, i, "B") for i in range(total)]
        pairs = zip(forwards[ahead:], backwards, strict=False)
        return (*forwards[:ahead], *itertools.chain.from_iterable(pairs), *backwards[total - ahead :])

    return tuple(row(rank) for rank in range(num_ranks))


def round_of(num_ranks: int, microbatches: int) -> int:
    """Microbatches in a round of interleaved 1F1B: as many as ranks, or as little more as makes all rounds equal.

    As in torch's `ScheduleInterleaved1F1B`. Raises `PlanError` where no such rounds make up all microbatches.
    """
    rounds = max(1, microbatches // num_ranks)
    if not has_rounds(num_ranks, microbatches):
        raise PlanError(
            f"schedule {INTERLEAVED!r}: {microbatches} microbatches on {num_ranks} pipeline ranks can't be run in "
            f"{rounds} equal rounds; use a multiple of {num_ranks}, or of {rounds}"
        )
    return microbatches // rounds


def has_rounds(num_ranks: int, microbatches: int) -> bool:
    """Whether microbatches can be run in equal rounds of as many as ranks, or a little more."""
    return microbatches % max(1, microbatches // num_ranks) == 0


INTERLEAVED = "interleaved_1f1b"
"""The schedule of pipelines whose ranks have several stages each."""

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "zb-h1": zero_bubble_h1,
    "forward": forward_only,
}
"""Schedules of one stage a rank, by the name that a plan holds."""


def make_schedule(name: str, num_ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """The schedule called `name` of pipeline ranks that have `virtual` stages each.

    Raises `PlanError` for an unknown name, counts below 1, and several stages a rank where it isn't made for these.
    """
    if name not in (*SCHEDULES, INTERLEAVED):
        raise PlanError(f"schedule {name!r}: unknown; expected one of {', '.join((*SCHEDULES, INTERLEAVED))}")
    if min(num_ranks, microbatches, virtual) < 1:
        counts = f"{num_ranks * virtual} stages and {microbatches} microbatches"
        raise PlanError(f"schedule {name!r}: {counts}; expected at least 1")
    if name == INTERLEAVED:
        return interleaved_1f1b(num_ranks, virtual, microbatches)
    if virtual > 1:
        raise PlanError(f"schedule {name!r}: {virtual} stages a rank; {INTERLEAVED!r} is for several")
    return SCHEDULES[name](num_ranks, microbatches)


def steady_after(name: str, num_ranks: int, microbatches: int) -> int:
    """Of `microbatches` as many as it takes until a schedule only repeats what its stages do and hold in between.

    1F1B has then filled its pipeline and begun to alternate, interleaved also run through all stages of a rank; the
    others hold more with each microbatch.
    """
    enough = {"1f1b": num_ranks + 4, INTERLEAVED: 4 * num_ranks if microbatches % num_ranks == 0 else math.inf}
    return int(min(microbatches, enough.get(name, math.inf)))
