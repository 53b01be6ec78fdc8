"""The notation of pipeline schedules, that of `torch.distributed.pipelining`: `0F0` is stage, kind, microbatch.

    rows = parse_schedule("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n")   # one line per pipeline rank
    format_schedule(rows)                                          # the same text

| kind | part          | what runs                                   |
|------|---------------|---------------------------------------------|
| F    | `forward`     | forward of one microbatch                   |
| B    | `backward`    | whole backward                              |
| I    | `input_grad`  | backward, what the previous stage waits for |
| W    | `weight_grad` | backward, the rest                          |

Invariants:
- the actions of a stage all stand on one rank (a rank may have several stages);
- each microbatch of a stage has F, then B, or I and then W; a schedule without any backward is a forward pass.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.errors import PlanError

Row = tuple[str, ...]
Schedule = tuple[Row, ...]
"""Per pipeline rank, its actions of one step in order."""

PART_OF_KIND = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One run of a part of a stage on one microbatch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of `str`; raises `PlanError` when malformed."""
        match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text.strip())
        if match is None:
            raise PlanError(f"{text!r} is not an action; expected stage, one of F B I W, and microbatch, such as '0F0'")
        return cls(int(match[1]), match[2], int(match[3]))

    @property
    def part(self) -> str:
        """The name of the part that runs."""
        return PART_OF_KIND[self.kind]


def format_schedule(schedule: Sequence[Sequence[str]]) -> str:
    """One comma-separated line per pipeline rank."""
    return "".join(f"{','.join(row)}\n" for row in schedule)


def parse_schedule(text: str) -> Schedule:
    """The inverse of `format_schedule`; empty cells (bubbles, in torch's tables) are left out."""
    return tuple(_parse_row(rank, line) for rank, line in enumerate(text.strip().splitlines()))


def _parse_row(rank: int, line: str) -> Row:
    try:
        return tuple(str(Action.parse(cell)) for cell in line.split(",") if cell.strip())
    except PlanError as error:
        raise PlanError(f"schedule, line {rank + 1}: {error}") from None


def parse_rows(schedule: Sequence[Sequence[str]]) -> list[list[Action]]:
    """The schedule's actions, checked: raises `PlanError` where one is malformed, twice, missing or out of order."""
    rows = [[Action.parse(text) for text in row] for row in schedule]
    num_stages = _count_stages(rows)
    for rank, row in enumerate(rows):
        _require_distinct(rank, row)
    actions = [action for row in rows for action in row]
    kinds: dict[tuple[int, int], list[str]] = defaultdict(list)
    for action in actions:
        kinds[action.stage, action.microbatch].append(action.kind)
    is_training = any(action.kind != "F" for action in actions)
    microbatches = 1 + max((action.microbatch for action in actions), default=-1)
    for stage, microbatch in itertools.product(range(num_stages), range(microbatches)):
        _require_complete(stage, microbatch, kinds[stage, microbatch], is_training)
    return rows


def _count_stages(rows: Iterable[Sequence[Action]]) -> int:
    ranks: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if ranks.setdefault(action.stage, rank) != rank:
                raise PlanError(f"schedule: stage {action.stage} has actions on ranks {ranks[action.stage]} and {rank}")
    if missing := set(range(max(ranks, default=0) + 1)) - set(ranks):
        raise PlanError(f"schedule: stage {min(missing)} has no actions")
    return len(ranks)


def _require_distinct(rank: int, row: Sequence[Action]) -> None:
    if len(set(row)) < len(row):
        twice = next(action for action in row if row.count(action) > 1)
        raise PlanError(f"schedule, rank {rank}: {twice} stands twice")


def _require_complete(stage: int, microbatch: int, kinds: list[str], is_training: bool) -> None:
    """`kinds` are those of one microbatch on one stage, in the order in which they run."""
    allowed = (["F", "B"], ["F", "I", "W"]) if is_training else (["F"],)
    if kinds in allowed:
        return
    wanted = " or ".join(", ".join(f"{stage}{kind}{microbatch}" for kind in each) for each in allowed)
    got = ", ".join(f"{stage}{kind}{microbatch}" for kind in kinds) or "nothing"
    problem = "wrong order" if sorted(kinds) in [sorted(each) for each in allowed] else "missing or superfluous actions"
    raise PlanError(f"schedule, stage {stage}, microbatch {microbatch}: {problem}: got {got}; expected {wanted}")
