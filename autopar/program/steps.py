"""One optimizer step of each stage as a flat list of calls: what runs, reads, writes, frees, sends and receives.

    plans = plan_steps(pipeline)
    plans[0].calls       # prologue, forward 0, …, backward 3, update

Everything that can be known before the first batch is decided here, once; the executor and the virtual mesh follow.
A *cell* is a slot at a microbatch (`saved:h` at microbatch 2) or a slot alone (`param:w`), numbered per stage.

Invariants:
- step-level parts run in the order of `StageProgram.parts`: `prologue` before the schedule, all others after it;
- a transfer of what a microbatch-level part writes happens at every microbatch, except `accumulator`s: after the last;
- a cell that doesn't live across steps is freed at its last reader;
- along an edge, receives are posted in the order of the sends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.program.actions import PART_OF_KIND, Action
from autopar.program.parts import Pipeline, Slot, StageProgram, Transfer, part_name, phase_of

MICROBATCH_PARTS = frozenset(PART_OF_KIND.values())
PER_MICROBATCH = frozenset({"batch", "random", "saved", "output"})
ACROSS_STEPS = frozenset({"param", "buffer", "state"})

Key = tuple[Slot, int | None]


@dataclass(frozen=True, slots=True)
class Message:
    """One tensor that crosses: a transfer (by its index), at a microbatch or once a step."""

    transfer: int
    microbatch: int | None

    def text(self, pipeline: Pipeline) -> str:
        transfer = pipeline.transfers[self.transfer]
        where = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        return f"{transfer.slot}{where} from stage {transfer.source}"


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a part. `inputs`, `outputs` and `frees` are cells; an output that nobody reads has cell -1."""

    part: str
    microbatch: int | None
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    receives: tuple[tuple[Message, int], ...] = ()
    """Messages awaited before the call, with their cells."""
    posts: tuple[tuple[Message, int], ...] = ()
    """Messages whose receive must be posted by then: `receives`, and what stands before them on their edges."""
    sends: tuple[tuple[Message, int], ...] = ()
    """Cells sent after the call."""
    settled: tuple[Message, ...] = ()
    """Own earlier sends that are known to have arrived once this call's messages are there: waiting can't block."""

    def __str__(self) -> str:
        return self.part if self.microbatch is None else f"{self.part} {self.microbatch}"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A stage's step."""

    stage: int
    calls: tuple[Call, ...]
    cells: dict[Key, int]
    zeroed: tuple[int, ...]
    """Accumulators that are read before they are written: zero at the start of the step."""
    absent: tuple[int, ...] = ()
    """Those of them for which `None` stands for zero; they live from the first gradient to their last reader."""

    @property
    def slots(self) -> dict[int, Slot]:
        """The slot of each cell."""
        return {cell: slot for (slot, _), cell in self.cells.items()}


def plan_steps(pipeline: Pipeline) -> tuple[StepPlan, ...]:
    """The plan of each stage; raises `PlanError` when the schedule deadlocks or names a part that isn't there."""
    plans = tuple(_Planner(pipeline, stage).plan() for stage in pipeline.stages)
    plans = tuple(_post_in_order(plan, pipeline, plans) for plan in plans)
    return _settle(pipeline, plans)


def run_order(pipeline: Pipeline, plans: tuple[StepPlan, ...]) -> list[tuple[int, int]]:
    """(stage, call index) in an order in which every message has been sent before it is received."""
    order: list[tuple[int, int]] = []
    at, sent = [0] * len(plans), set[Message]()

    def is_ready(stage: int) -> bool:
        calls = plans[stage].calls
        return at[stage] < len(calls) and all(message in sent for message, _ in calls[at[stage]].receives)

    num_calls = sum(len(plan.calls) for plan in plans)
    while len(order) < num_calls:
        ready = [stage for stage in range(len(plans)) if is_ready(stage)]
        if not ready:
            raise PlanError(_deadlock_text(pipeline, plans, at, sent))
        for stage in ready:
            order.append((stage, at[stage]))
            sent.update(message for message, _ in plans[stage].calls[at[stage]].sends)
            at[stage] += 1
    return order


def microbatch_schedule(pipeline: Pipeline, stage: StageProgram) -> tuple[str, ...]:
    """The actions of the stage's rank; where the pipeline has no schedule, all forwards and then all backwards."""
    if pipeline.schedule:
        return pipeline.schedule[stage.index]
    assert pipeline.mesh.virtual == 1, "ranks with several stages have a schedule"
    letters = "FB" if {"backward", "input_grad"} & set(stage.parts) else "F"
    return tuple(f"{stage.index}{letter}{m}" for letter in letters for m in range(pipeline.microbatches))


def without_zeros(plan: StepPlan, optional: Mapping[str, Collection[Slot]]) -> StepPlan:
    """`plan` with the accumulators that the part that reads them first (by its name in `optional`) takes as `None`."""
    first: dict[int, str] = {}
    last: dict[int, int] = {}
    for i, call in enumerate(plan.calls):
        for cell in (*call.inputs, *(cell for _, cell in call.sends)):
            first.setdefault(cell, call.part)
            last[cell] = i
    slots = plan.slots
    absent = tuple(cell for cell in plan.zeroed if slots[cell] in optional.get(first[cell], ()))
    calls = [
        replace(call, frees=(*call.frees, *(cell for cell in absent if last[cell] == i)))
        for i, call in enumerate(plan.calls)
    ]
    zeroed = tuple(cell for cell in plan.zeroed if cell not in absent)
    return replace(plan, calls=tuple(calls), zeroed=zeroed, absent=absent)


# -- one stage ---------------------------------------------------------------------------------------------------
def _actions(pipeline: Pipeline, stage: StageProgram) -> Iterator[tuple[str, int | None]]:
    """(part, microbatch) in order."""
    mesh = pipeline.mesh
    yield from ((part_name("prologue", number, mesh), None) for number in mesh.stages_at(stage.index))
    for text in microbatch_schedule(pipeline, stage):
        action = Action.parse(text)
        for part in _parts_of(action, stage, mesh):
            yield part, action.microbatch
    yield from ((part, None) for part in stage.parts if phase_of(part) not in ("prologue", *MICROBATCH_PARTS))


def _parts_of(action: Action, stage: StageProgram, mesh: Mesh) -> tuple[str, ...]:
    """What the action runs: a whole backward is its two parts where the stage has only these."""
    is_split = action.part == "backward" and part_name("backward", action.stage, mesh) not in stage.parts
    phases = ("input_grad", "weight_grad") if is_split else (action.part,)
    parts = tuple(part_name(phase, action.stage, mesh) for phase in phases)
    missing = [part for part in parts if part not in stage.parts]
    if missing or action.stage not in mesh.stages_at(stage.index):
        raise PlanError(f"action {action}: stage {stage.index} has only the parts {', '.join(stage.parts)}")
    return parts


@dataclass(slots=True)
class _Planner:
    pipeline: Pipeline
    stage: StageProgram
    cells: dict[Key, int] = field(default_factory=dict)
    into: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The transfers to this stage, by what is received."""
    out: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Those from it, by the part that makes what is sent."""
    places: dict[int, tuple[bool, dict[int | None, int]]] = field(default_factory=dict)
    """By a slot's id, for its hash is dear: whether it has a cell at each microbatch, and its cells."""
    same: dict[Slot, tuple[bool, dict[int | None, int]]] = field(default_factory=dict)
    """The same by slot."""

    def plan(self) -> StepPlan:
        for index, transfer in enumerate(self.pipeline.transfers):
            if transfer.target == self.stage.index:
                self.into[transfer.slot.name].append(index)
            if transfer.source == self.stage.index:
                self.out[transfer.part].append(index)
        actions = list(_actions(self.pipeline, self.stage))
        last = {part: i for i, (part, _) in enumerate(actions)}
        received = set[Message]()
        calls = [self._call(part, m, received, last[part] == i) for i, (part, m) in enumerate(actions)]
        return self._with_lifetimes(calls)

    def _call(self, part: str, microbatch: int | None, received: set[Message], is_last: bool) -> Call:
        body = self.stage.parts.get(part)
        inputs, outputs = (body.inputs, body.outputs) if body else ((), ())
        receives = []
        for slot in inputs:
            if slot.kind == "received" and (message := self._message(slot, microbatch)) not in received:
                received.add(message)
                receives.append((message, self._cell(slot, message.microbatch)))
        return Call(
            part=part,
            microbatch=microbatch,
            inputs=tuple(self._cell(slot, microbatch) for slot in inputs),
            outputs=tuple(self._cell(slot, microbatch) for slot in outputs),
            receives=tuple(receives),
            sends=tuple(self._sends(part, microbatch, is_last)),
        )

    def _message(self, slot: Slot, microbatch: int | None) -> Message:
        index = self._transfer_into(slot)
        if not _is_per_microbatch(self.pipeline.transfers[index]):
            return Message(index, None)
        assert microbatch is not None, f"{slot} of stage {self.stage.index} is read by a step-level part"
        return Message(index, microbatch)

    def _sends(self, part: str, microbatch: int | None, is_last: bool) -> Iterator[tuple[Message, int]]:
        for index in self.out.get(part, ()):
            transfer = self.pipeline.transfers[index]
            at = microbatch if _is_per_microbatch(transfer) else None
            if at is not None or is_last:
                yield Message(index, at), self._cell(transfer.slot, microbatch)

    def _cell(self, slot: Slot, microbatch: int | None) -> int:
        if id(slot) not in self.places:
            self.places[id(slot)] = self.same.setdefault(slot, (self._is_per_microbatch(slot), {}))
        is_per_microbatch, cells = self.places[id(slot)]
        at = microbatch if is_per_microbatch else None
        if at not in cells:
            cells[at] = self.cells[slot, at] = len(self.cells)
        return cells[at]

    def _is_per_microbatch(self, slot: Slot) -> bool:
        is_received = slot.kind == "received"
        return slot.kind in PER_MICROBATCH or (
            is_received and _is_per_microbatch(self.pipeline.transfers[self._transfer_into(slot)])
        )

    def _transfer_into(self, slot: Slot) -> int:
        found = self.into.get(slot.name, [])
        assert len(found) == 1, f"{slot} of stage {self.stage.index} comes from {len(found)} transfers"
        return found[0]

    def _with_lifetimes(self, calls: list[Call]) -> StepPlan:
        read_at: dict[int, int] = {}
        first: dict[int, str] = {}
        for i, call in enumerate(calls):
            for cell in (*call.inputs, *(cell for _, cell in call.sends)):
                read_at[cell] = i
            for cell in call.inputs:
                first.setdefault(cell, "read")
            for cell in call.outputs:
                first.setdefault(cell, "written")
        names = {cell: slot for (slot, _), cell in self.cells.items()}
        if early := next(
            (slot for cell, slot in names.items() if slot.kind == "saved" and first[cell] == "read"), None
        ):
            raise PlanError(f"the schedule has stage {self.stage.index} read {early} before it is made")
        zeroed = tuple(c for c, slot in names.items() if slot.kind == "accumulator" and first.get(c) == "read")
        kept = {c for c, slot in names.items() if slot.kind in ACROSS_STEPS or slot.kind == "output"} | set(zeroed)
        kept |= {c for c, slot in names.items() if slot.kind == "accumulator" and c not in read_at}
        frees: list[list[int]] = [[] for _ in calls]
        for cell, i in read_at.items():
            if cell not in kept:
                frees[i].append(cell)
        done = [
            replace(
                call,
                frees=tuple(free),
                outputs=tuple(c if c in read_at or c in kept else -1 for c in call.outputs),
            )
            for call, free in zip(calls, frees, strict=True)
        ]
        return StepPlan(self.stage.index, tuple(done), self.cells, zeroed)


def _is_per_microbatch(transfer: Transfer) -> bool:
    return phase_of(transfer.part) in MICROBATCH_PARTS and transfer.slot.kind in PER_MICROBATCH


# -- all stages --------------------------------------------------------------------------------------------------
def _post_in_order(plan: StepPlan, pipeline: Pipeline, plans: tuple[StepPlan, ...]) -> StepPlan:
    """Fills `posts`: NCCL matches sends and receives of an edge by their order alone."""
    awaited = {message: cell for call in plan.calls for message, cell in call.receives}
    queues: dict[int, list[Message]] = {}
    place: dict[Message, int] = {}
    for source in plans:
        sent = (message for call in source.calls for message, _ in call.sends)
        queue = [message for message in sent if pipeline.transfers[message.transfer].target == plan.stage]
        unread = [message for message in queue if message not in awaited]
        assert not unread, f"stage {plan.stage} never reads {unread[0].text(pipeline)}"
        queues[source.stage] = queue
        place |= {message: number for number, message in enumerate(queue)}
    posted = dict.fromkeys(queues, 0)

    def posts(call: Call) -> Iterator[Message]:
        for message, _ in call.receives:
            source = pipeline.transfers[message.transfer].source
            if message not in place:
                raise PlanError(f"stage {plan.stage}, {call}: {message.text(pipeline)} is never sent")
            yield from queues[source][posted[source] : place[message] + 1]
            posted[source] = max(posted[source], place[message] + 1)

    calls = [replace(call, posts=tuple((message, awaited[message]) for message in posts(call))) for call in plan.calls]
    return replace(plan, calls=tuple(calls))


def _settle(pipeline: Pipeline, plans: tuple[StepPlan, ...]) -> tuple[StepPlan, ...]:
    """Fills `settled` by vector clocks: how far every stage has come, as far as what a call received can tell."""
    needed_at = {message: i for plan in plans for i, call in enumerate(plan.calls) for message, _ in call.receives}
    clock_of: dict[Message, list[int]] = {}
    clocks = [[-1] * len(plans) for _ in plans]
    unsettled: list[list[Message]] = [[] for _ in plans]
    settled: dict[tuple[int, int], tuple[Message, ...]] = {}
    for stage, i in run_order(pipeline, plans):
        call, clock = plans[stage].calls[i], clocks[stage]
        for message, _ in call.receives:
            clock[:] = map(max, clock, clock_of[message])
        arrived = [m for m in unsettled[stage] if _has_arrived(m, call, needed_at, clock, pipeline)]
        settled[stage, i] = tuple(arrived)
        clock[stage] = i
        unsettled[stage] = [m for m in unsettled[stage] if m not in arrived] + [m for m, _ in call.sends]
        clock_of.update((message, list(clock)) for message, _ in call.sends)
    return tuple(
        replace(plan, calls=tuple(replace(call, settled=settled[plan.stage, i]) for i, call in enumerate(plan.calls)))
        for plan in plans
    )


def _has_arrived(
    message: Message, call: Call, needed_at: dict[Message, int], clock: list[int], pipeline: Pipeline
) -> bool:
    """Whether the target has it; state that was sent must have gone before an update writes over it in place."""
    transfer = pipeline.transfers[message.transfer]
    overwrites = call.microbatch is None and transfer.slot.kind in ACROSS_STEPS
    return overwrites or needed_at[message] <= clock[transfer.target]


def _deadlock_text(pipeline: Pipeline, plans: tuple[StepPlan, ...], at: list[int], sent: set[Message]) -> str:
    lines = []
    for plan, i in zip(plans, at, strict=True):
        if i < len(plan.calls):
            call = plan.calls[i]
            waits = [message.text(pipeline) for message, _ in call.receives if message not in sent]
            lines.append(f"stage {plan.stage} at {call} waits for {', '.join(waits)}")
    return f"the schedule deadlocks: {'; '.join(lines)}"
