"""Pipeline schedules (see `generators`): the check that one can't deadlock, what it holds, and its bubble.

    schedule = make_schedule("1f1b", 2, 4)  # (("0F0", "0F1", "0B0", …), ("1F0", "1B0", …))
    check_no_deadlock(schedule, transfers)  # PlanError naming the actions that wait for each other
    bubble_fraction(schedule, {"F": 1, "B": 2})

The check and the simulation run the same events: per stage `start`, `prologue`, `first`, the actions, other
step-level parts by name, `update`, `end`. A value is sent when the event that makes it is done and is taken where
`receiving_event` says. Sends are asynchronous and first in first out per (source, target); receives are posted in the
order of the sends. So nobody waits but at an event that takes a value that isn't made yet.

Invariants:
- every generated schedule passes the check with the transfers of a chain of stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.program.actions import Action, Schedule, parse_rows
from autopar.program.parts import Slot, Transfer


def in_flight(stage: int, actions: Sequence[str]) -> int:
    """The most microbatches of `stage` whose forward has run and whose backward (its W part too) hasn't."""
    held = most = 0
    for action in map(Action.parse, actions):
        if action.stage == stage:
            held += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
            most = max(most, held)
    return most


# -- transfers -----------------------------------------------------------------------------------------------------
MADE_BY = {"forward": "F", "backward": "B", "input_grad": "IB", "weight_grad": "WB"}
"""Microbatch-level part → the kinds of action that run it, first choice first; `B` runs both parts of a backward."""

TAKEN_BY = {"forward": "F", "backward": "BI", "weight_grad": "WB"}
"""Where a target takes a microbatch-level value → the kinds of action, first choice first."""


def is_step_level(transfer: Transfer) -> bool:
    """Whether the value is sent once a step: what no microbatch's part makes, and what accumulates over them."""
    return transfer.part not in MADE_BY or transfer.slot.kind not in ("batch", "saved", "output")


def receiving_event(transfer: Transfer) -> str:
    """Where the target takes the value: a part's name (on the same microbatch), `first`, `update` or `end`.

    Forwards flow up and backwards down the stages; a value that goes the other way waits for the next part that can
    take it. A parameter as it is at the start is taken in the prologue, what a prologue makes before the `first`
    action, what an update makes at the `end`, other step-level values in the update: so no two stages wait for each
    other in one of these.
    """
    up = transfer.target > transfer.source
    if is_step_level(transfer):
        return {"start": "prologue", "prologue": "first", "update": "end"}.get(_step_level_event(transfer), "update")
    if transfer.part == "forward":
        return "forward" if up else "backward"
    if transfer.part == "weight_grad":
        return "update" if up else "weight_grad"
    return "update" if up else "backward"


def chain_transfers(num_stages: int, is_split: bool = False) -> tuple[Transfer, ...]:
    """One activation up and one gradient down between neighbouring stages; `is_split` for I and W actions."""
    backward = "input_grad" if is_split else "backward"
    ups = [Transfer(Slot("saved", f"activation{s}"), s, s + 1, "forward") for s in range(num_stages - 1)]
    downs = [Transfer(Slot("saved", f"gradient{s + 1}"), s + 1, s, backward) for s in range(num_stages - 1)]
    return (*ups, *downs)


def _step_level_event(transfer: Transfer) -> str:
    """The part that makes a step-level value; `start` for a parameter, which is there before the prologue."""
    return "start" if transfer.slot.kind == "param" and transfer.part != "update" else transfer.part


# -- the check -----------------------------------------------------------------------------------------------------
def check_no_deadlock(schedule: Sequence[Sequence[str]], transfers: Sequence[Transfer]) -> None:
    """Runs all ranks' actions against each other; raises `PlanError` where they are incomplete or can't finish.

    The message names the action that is missing, twice or out of order; of a deadlock, each stage with the action
    that it waits at and the one that it waits for.
    """
    events = _events(schedule, transfers)
    _run(events, _messages(events, transfers), lambda event: 0.0, 0.0)


Event = tuple[int, str]
"""(stage, text): an action's text, or the name of a step-level part."""


@dataclass(frozen=True, slots=True)
class _Message:
    """One value on its way: made by `sent` at its source, needed by `taken` at its target."""

    sent: Event
    taken: Event
    text: str


def _events(schedule: Sequence[Sequence[str]], transfers: Sequence[Transfer]) -> list[list[Event]]:
    """Per rank, its actions between the step-level events of its stages."""
    extra = sorted({transfer.part for transfer in transfers} - {*MADE_BY, "prologue", "update"})
    events: list[list[Event]] = []
    for row in parse_rows(schedule):
        stages = sorted({action.stage for action in row})
        before = [(stage, part) for part in ("start", "prologue", "first") for stage in stages]
        after = [(stage, part) for part in (*extra, "update", "end") for stage in stages]
        events.append([*before, *((action.stage, str(action)) for action in row), *after])
    return events


def _messages(events: Sequence[Sequence[Event]], transfers: Sequence[Transfer]) -> list[_Message]:
    order = {event: i for i, event in enumerate(event for row in events for event in row)}
    num_stages = 1 + max((stage for stage, _ in order), default=-1)
    num_microbatches = 1 + max((Action.parse(text).microbatch for _, text in order if _is_action(text)), default=-1)
    messages: list[_Message] = []
    for transfer in transfers:
        _require_stages(transfer, num_stages)
        if is_step_level(transfer):
            messages.append(_step_message(transfer, num_microbatches, order))
        else:
            messages += (_microbatch_message(transfer, i, order) for i in range(num_microbatches))
    return messages


def _microbatch_message(transfer: Transfer, microbatch: int, order: Mapping[Event, int]) -> _Message:
    sent = _action(transfer.source, MADE_BY[transfer.part], microbatch, order)
    if sent is None:
        raise PlanError(_not_made_text(transfer))
    where = receiving_event(transfer)
    taken = _action(transfer.target, TAKEN_BY[where], microbatch, order) if where in TAKEN_BY else None
    return _Message(sent, taken or (transfer.target, "update"), f"{transfer.slot} of microbatch {microbatch}")


def _step_message(transfer: Transfer, num_microbatches: int, order: Mapping[Event, int]) -> _Message:
    """A value that accumulates goes after the last action that adds to it."""
    taken = (transfer.target, receiving_event(transfer))
    part = _step_level_event(transfer)
    if part not in MADE_BY:
        return _Message((transfer.source, part), taken, str(transfer.slot))
    runs = [_action(transfer.source, MADE_BY[part], i, order) for i in range(num_microbatches)]
    made = [event for event in runs if event is not None]
    if not made:
        raise PlanError(_not_made_text(transfer))
    return _Message(max(made, key=order.__getitem__), taken, str(transfer.slot))


def _action(stage: int, kinds: str, microbatch: int, order: Mapping[Event, int]) -> Event | None:
    events = ((stage, f"{stage}{kind}{microbatch}") for kind in kinds)
    return next((event for event in events if event in order), None)


def _is_action(text: str) -> bool:
    return text[0].isdigit()


def _require_stages(transfer: Transfer, num_stages: int) -> None:
    if transfer.source == transfer.target:
        raise PlanError(f"transfer of {transfer.slot}: from stage {transfer.source} to itself")
    for stage in (transfer.source, transfer.target):
        if not 0 <= stage < num_stages:
            raise PlanError(f"transfer of {transfer.slot}: no stage {stage}; the schedule has {num_stages} stages")


def _not_made_text(transfer: Transfer) -> str:
    kinds = " or ".join(MADE_BY[transfer.part])
    return f"transfer of {transfer.slot}: made by {transfer.part!r}, but stage {transfer.source} has no {kinds} actions"


# -- simulation ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Timeline:
    """When each action starts and ends, in seconds from the start of the step."""

    start_s: dict[str, float]
    end_s: dict[str, float]
    rows: Schedule

    @property
    def span_s(self) -> float:
        """The longest time from a rank's first action to the end of its last: the time of a step among others.

        As in Qi et al., 2024: the next step starts on a rank when this one ends there.
        """
        return max(self.end_s[row[-1]] - self.start_s[row[0]] for row in self.rows if row)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Per rank, the time in which it runs actions."""
        return tuple(sum(self.end_s[text] - self.start_s[text] for text in row) for row in self.rows)


def simulate(
    schedule: Sequence[Sequence[str]],
    durations: Mapping[str, float],
    transfers: Sequence[Transfer] | None = None,
    transfer_s: float = 0.0,
) -> Timeline:
    """When each action runs if every rank starts each as soon as it can.

    `durations` are seconds by action (`"1F0"`), else by stage and kind (`"1F"`), else by kind (`"F"`); without
    `transfers` the stages are a chain. A value arrives `transfer_s` after it was made, while its sender goes on.
    """
    rows = tuple(tuple(row) for row in schedule)
    if transfers is None:
        is_split = any("I" in text for row in rows for text in row)
        transfers = chain_transfers(1 + max(Action.parse(text).stage for row in rows for text in row), is_split)
    events = _events(rows, transfers)
    ends, starts = _run(events, _messages(events, transfers), lambda event: _duration_s(event, durations), transfer_s)
    texts = [text for row in rows for text in row]
    by_text = {text: (Action.parse(text).stage, text) for text in texts}
    return Timeline({t: starts[by_text[t]] for t in texts}, {t: ends[by_text[t]] for t in texts}, rows)


def bubble_fraction(
    schedule: Sequence[Sequence[str]],
    durations: Mapping[str, float],
    transfers: Sequence[Transfer] | None = None,
    transfer_s: float = 0.0,
) -> float:
    """The part of the step in which a rank is idle, mean over the ranks: (p − 1)/(m + p − 1) for equal stages in 1F1B.

    Relative to the busy time instead that is the published (p − 1)/m. See `simulate` for the arguments.
    """
    timeline = simulate(schedule, durations, transfers, transfer_s)
    return 1 - sum(timeline.busy_s) / (len(timeline.rows) * timeline.span_s)


def _duration_s(event: Event, durations: Mapping[str, float]) -> float:
    stage, text = event
    if not _is_action(text):
        return 0.0
    kind = Action.parse(text).kind
    for key in (text, f"{stage}{kind}", kind):
        if key in durations:
            return durations[key]
    raise PlanError(f"no duration for {text}: expected one of {text!r}, '{stage}{kind}', {kind!r}")


def _run(
    events: Sequence[Sequence[Event]],
    messages: Sequence[_Message],
    duration_s: Callable[[Event], float],
    transfer_s: float,
) -> tuple[dict[Event, float], dict[Event, float]]:
    """(end, start) of every event; raises `PlanError` when the ranks wait for each other for ever."""
    needed: dict[Event, list[_Message]] = defaultdict(list)
    for message in messages:
        needed[message.taken].append(message)
    ends: dict[Event, float] = {}
    starts: dict[Event, float] = {}
    waiting: dict[Event, list[int]] = defaultdict(list)
    position, clock = [0] * len(events), [0.0] * len(events)
    ready = list(range(len(events)))
    while ready:
        rank = ready.pop()
        while position[rank] < len(events[rank]):
            event = events[rank][position[rank]]
            missing = next((message for message in needed[event] if message.sent not in ends), None)
            if missing is not None:
                waiting[missing.sent].append(rank)
                break
            arrived = max((ends[message.sent] + transfer_s for message in needed[event]), default=0.0)
            starts[event] = max(clock[rank], arrived)
            ends[event] = clock[rank] = starts[event] + duration_s(event)
            position[rank] += 1
            ready += waiting.pop(event, [])
    stuck = [row[i] for row, i in zip(events, position, strict=True) if i < len(row)]
    if stuck:
        raise PlanError(_deadlock_text(stuck, needed, ends))
    return ends, starts


def _deadlock_text(stuck: Sequence[Event], needed: Mapping[Event, list[_Message]], ends: Mapping[Event, float]) -> str:
    """Each stage that waits: `stage 0 waits at 0B0 for saved:g of microbatch 0, made by 1B0`."""
    lines = []
    for event in stuck:
        message = next(message for message in needed[event] if message.sent not in ends)
        source, made = message.sent
        by = made if _is_action(made) else f"{made!r} of stage {source}"
        lines.append(f"stage {event[0]} waits at {event[1]} for {message.text}, made by {by}")
    return f"the schedule deadlocks: {'; '.join(lines)}"
