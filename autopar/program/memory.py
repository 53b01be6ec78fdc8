"""How much memory a rank needs: liveness over storages, in the order in which the program runs.

    profile = stage_peak(pipeline, 0)
    profile.peak, profile.activations, profile.where       # 96796672, 41943040, "backward 1: linear_dx_3"

The step is walked as the executor runs it (`plan_steps`): slots hold storages, a part's function allocates and frees as
its source does, transfers hold what they carry until it is known to have arrived. It is the figure that is reported;
at 512 wide it agrees with what is measured to the percent.

Invariants:
- the five classes of a `MemoryProfile` sum to its peak, at the one moment of the peak;
- a storage counts once, however many views, slots or parts share it, with the class of what made it;
- what kernels allocate within one call isn't counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.mesh import Mesh
from autopar.program.accumulation import optional_slots
from autopar.program.allocations import (
    CLASSES,
    Event,
    Events,
    Sum,
    class_of,
    local_bytes,
    part_events,
    placeholders,
    slot_bytes,
)
from autopar.program.parts import Part, Pipeline, Slot, StageProgram
from autopar.program.steps import ACROSS_STEPS, Call, Message, StepPlan, plan_steps, without_zeros
from autopar.program.storages import Origin

PERSISTENT_KINDS = ("param", "buffer", "state", "scalar", "gathered")


Region = tuple[str, str]
"""A call of the step, "backward 1", and a layer (`Event.region`)."""


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes at the moment of the peak, by class."""

    parameters: int = 0
    """At rest, gathered or cast."""
    gradients: int = 0
    optimizer: int = 0
    """State, and what the update makes on the way."""
    activations: int = 0
    buffers: int = 0
    """Of collectives and transfers in flight."""
    where: str = ""
    """The call and the node at which the peak is reached."""

    @property
    def peak(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def part_peak(part: Part, mesh: Mesh, first: bool = False) -> MemoryProfile:
    """The peak while `part` runs alone: its inputs, of which the caller keeps those that outlive it, and all it makes.

    With `first`, optional accumulators are `None`.
    """
    memory = _Memory()
    absent = set(optional_slots(part)) if first else set()
    inputs: list[_Block | None] = []
    for node, slot in zip(placeholders(part), part.inputs, strict=True):
        kept = slot.kind in PERSISTENT_KINDS
        block = None if slot in absent else memory.new(local_bytes(node, mesh), class_of(slot))
        if block is not None and not kept:
            memory.drop_after_call(block)
        inputs.append(block)
    memory.run(part_events(part, mesh), inputs, part.name)
    return greatest(memory.peaks)


def stage_peak(pipeline: Pipeline, stage: int, optional: Mapping[str, Collection[Slot]] | None = None) -> MemoryProfile:
    """The peak of a whole step on a rank of `stage`, in the order of the pipeline's schedule.

    `optional`: per part, the accumulators that may be `None` (by default those of the generated source).
    """
    return greatest(stage_peaks(pipeline, stage, optional))


def greatest(peaks: Mapping[Region, MemoryProfile]) -> MemoryProfile:
    """The greatest of several peaks, the first of equal ones."""
    return max(peaks.values(), key=lambda profile: profile.peak, default=MemoryProfile())


def stage_peaks(
    pipeline: Pipeline, stage: int, optional: Mapping[str, Collection[Slot]] | None = None
) -> dict[Region, MemoryProfile]:
    """The peak in each call and layer of a whole step on a rank of `stage`, see `stage_peak`."""
    return peaks_in(pipeline, plan_steps(pipeline)[stage], optional)


def peaks_in(
    pipeline: Pipeline, plan: StepPlan, optional: Mapping[str, Collection[Slot]] | None = None
) -> dict[Region, MemoryProfile]:
    """The same by a stage's planned step."""
    program = pipeline.stages[plan.stage]
    taken = without_zeros(plan, optional_of(program) if optional is None else optional)
    return _StageWalk(pipeline, program, taken).peaks()


def optional_of(program: StageProgram) -> dict[str, tuple[Slot, ...]]:
    """Per part, the accumulators that its generated source takes as `None`."""
    if "optional" not in program.memo:
        program.memo["optional"] = {name: optional_slots(part) for name, part in program.parts.items()}
    found: dict[str, tuple[Slot, ...]] = program.memo["optional"]
    return found


def events_of(program: StageProgram, mesh: Mesh) -> dict[str, Events]:
    """What each part allocates and frees."""
    if ("events", mesh) not in program.memo:
        program.memo["events", mesh] = {name: part_events(part, mesh) for name, part in program.parts.items()}
    found: dict[str, Events] = program.memo["events", mesh]
    return found


# -- the heap --------------------------------------------------------------------------------------------------------
@dataclass(eq=False, slots=True)
class _Block:
    """One storage; free once nobody holds it."""

    size: int
    kind: str
    holders: int = 0


_Given = tuple[tuple[int, int, str, bool] | None, ...]
"""What a call is given: per input its number (of a block that stands several times, the last), bytes, class, and
whether somebody else holds it."""


@dataclass(frozen=True, slots=True)
class _Walk:
    """What a call does to the memory, from what is live at its start."""

    peaks: Mapping[str, MemoryProfile]
    """By layer, less what was live; `where` is the text after the call's."""
    live: Mapping[str, int]
    """By class, how much more there is afterwards."""
    made: tuple[tuple[int, str], ...]
    """(bytes, class) of new blocks that are returned."""
    outputs: tuple[int | None, ...]
    """Numbers of inputs, and after those of `made`."""


def _walk(part: Events, given: _Given) -> _Walk:
    memory, known = _Memory(), dict[int, _Block]()
    inputs: list[_Block | None] = []
    for each in given:
        if each is None:
            inputs.append(None)
        else:
            number, size, kind, is_held = each
            inputs.append(known.setdefault(number, _Block(size, kind, int(is_held))))
    numbers = {id(block): number for number, block in enumerate(inputs) if block is not None}
    made: list[tuple[int, str]] = []
    outputs: list[int | None] = []
    for block in memory.walk(part, inputs):
        if block is not None and id(block) not in numbers:
            numbers[id(block)] = len(inputs) + len(made)
            made.append((block.size, block.kind))
        outputs.append(None if block is None else numbers[id(block)])
    peaks = {region: peak for (_, region), peak in memory.peaks.items()}
    return _Walk(peaks, dict(memory.live), tuple(made), tuple(outputs))


@dataclass(slots=True)
class _Memory:
    """What is allocated at the moment, and the profile of the greatest moment so far in each call and layer."""

    live: Counter[str] = field(default_factory=Counter)
    peaks: dict[Region, MemoryProfile] = field(default_factory=dict)
    dropped: list[_Block] = field(default_factory=list)

    def new(self, size: int, kind: str) -> _Block:
        """A block with one holder."""
        self.live[kind] += size
        return _Block(size, kind, 1)

    def hold(self, block: _Block | None) -> None:
        if block is not None:
            block.holders += 1

    def drop(self, block: _Block | None) -> None:
        if block is None:
            return
        block.holders -= 1
        assert block.holders >= 0, block
        if block.holders == 0:
            self.live[block.kind] -= block.size

    def drop_after_call(self, block: _Block) -> None:
        """The caller gives its hold away with the next call."""
        self.dropped.append(block)

    def change_class(self, block: _Block, kind: str) -> None:
        self.live[block.kind] -= block.size
        self.live[kind] += block.size
        block.kind = kind

    def record(self, where: str, event: Event | None = None) -> None:
        transient, region = (event.transient, event.region) if event is not None else (0, "")
        before = self.peaks.get((where, region))
        if before is None or self.live.total() + transient > before.peak:
            now = {kind: self.live[kind] for kind in CLASSES}
            now["buffers"] += transient
            self.peaks[where, region] = MemoryProfile(**now, where=f"{where}: {event.name}" if event else where)

    def run(self, part: Events, inputs: list[_Block | None], where: str) -> list[_Block | None]:
        """Walks one call; the returned blocks of the outputs are held once more, for the caller.

        Calls that are given alike do alike: each kind of them is walked once, from nothing live.
        """
        numbers = {id(block): number for number, block in enumerate(inputs) if block is not None}
        for block in self.dropped:
            if id(block) in numbers:
                block.holders -= 1  # it dies within the call, if nobody else holds it
            else:
                self.drop(block)
        self.dropped.clear()
        given = tuple(None if b is None else (numbers[id(b)], b.size, b.kind, b.holders > 0) for b in inputs)
        if given not in part.memo:
            part.memo[given] = _walk(part, given)
        return self._apply(part.memo[given], inputs, where)

    def _apply(self, call: _Walk, inputs: Sequence[_Block | None], where: str) -> list[_Block | None]:
        for region, peak in call.peaks.items():
            before = self.peaks.get((where, region))
            if before is None or self.live.total() + peak.peak > before.peak:
                now = {kind: self.live[kind] + getattr(peak, kind) for kind in CLASSES}
                self.peaks[where, region] = MemoryProfile(**now, where=f"{where}{peak.where}")
        for kind, size in call.live.items():
            self.live[kind] += size
        blocks = [*inputs, *(_Block(size, kind) for size, kind in call.made)]
        outputs = [blocks[number] if number is not None else None for number in call.outputs]
        for block in outputs:
            self.hold(block)
        return outputs

    def walk(self, part: Events, inputs: Sequence[_Block | None]) -> list[_Block | None]:
        """Walks one call event by event, as `run` does."""
        where = ""
        blocks: dict[Origin, _Block | None] = dict(zip(part.inputs, inputs, strict=True))
        for block in inputs:
            self.hold(block)
        for origin in part.unread:
            self.drop(blocks.pop(origin))
        self.record(where)
        for event in part.events:
            self._step(event, blocks, where)
        outputs = [blocks.get(origin) if origin is not None else None for origin in part.outputs]
        for block in outputs:
            self.hold(block)
        for block in blocks.values():
            self.drop(block)
        return outputs

    def _step(self, event: Event, blocks: dict[Origin, _Block | None], where: str) -> None:
        if event.sums is not None and blocks.get(event.sums.accumulator) is None:
            self._keep_gradient(event.sums, blocks)
        else:
            for origin, size, kind in event.makes:
                blocks[origin] = self.new(size, kind)
        self.record(where, event)
        for origin in event.frees:
            if origin in blocks:
                self.drop(blocks.pop(origin))

    def _keep_gradient(self, sums: Sum, blocks: dict[Origin, _Block | None]) -> None:
        """The accumulator is `None`: the gradient itself, or a copy of it, becomes the sum."""
        block = blocks[sums.gradient] if sums.keeps_gradient else self.new(sums.size, "gradients")
        if sums.keeps_gradient:
            self.hold(block)
        blocks[sums.total] = block


# -- a whole step ------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _StageWalk:
    """The executor's store, with blocks in place of tensors."""

    pipeline: Pipeline
    program: StageProgram
    plan: StepPlan
    memory: _Memory = field(default_factory=_Memory)
    store: dict[int, _Block] = field(default_factory=dict)
    sending: dict[Message, _Block] = field(default_factory=dict)
    slots: dict[int, Slot] = field(default_factory=dict)

    def peaks(self) -> dict[Region, MemoryProfile]:
        mesh = self.pipeline.mesh.spmd
        events = events_of(self.program, mesh)
        self.slots = self.plan.slots
        self._begin(mesh)
        calls = self.plan.calls
        self._post(calls[0], mesh)
        for index, call in enumerate(calls):
            self._receive(call)
            if index + 1 < len(calls):
                self._post(calls[index + 1], mesh)
            if call.part in events:
                self._call(call, events[call.part])
            for message, cell in call.sends:
                self.sending[message] = self.store[cell]
                self.memory.hold(self.store[cell])
            if call.sends:
                self._free(call)
        return self.memory.peaks

    def _begin(self, mesh: Mesh) -> None:
        """What the step starts with: everything across steps, the batch, scalars, accumulators that are kept."""
        slots = self.slots
        for cell, slot in slots.items():
            given = (*ACROSS_STEPS, "batch", "whole", "random", "scalar")
            if slot.kind in given or cell in self.plan.zeroed:
                self.store[cell] = self.memory.new(slot_bytes(self.program.values[slot], mesh), class_of(slot))
        elsewhere = {slot for slot in self.program.values if slot.kind in ACROSS_STEPS} - set(slots.values())
        for slot in elsewhere:
            self.memory.new(slot_bytes(self.program.values[slot], mesh), class_of(slot))
        for part in self.program.parts.values():
            for node in part.graph.graph.nodes:
                if node.op == "get_attr":
                    self.memory.new(local_bytes(node, mesh), "parameters")

    def _post(self, call: Call, mesh: Mesh) -> None:
        for _, cell in call.posts:
            self.store[cell] = self.memory.new(slot_bytes(self.program.values[self.slots[cell]], mesh), "buffers")

    def _receive(self, call: Call) -> None:
        for _, cell in call.receives:
            self.memory.change_class(self.store[cell], class_of(self.slots[cell]))
        for message in call.settled:
            self.memory.drop(self.sending.pop(message))

    def _call(self, call: Call, events: Events) -> None:
        inputs = [self.store.get(cell) for cell in call.inputs]
        if not call.sends:
            for cell in call.frees:
                if cell in self.store:
                    self.memory.drop_after_call(self.store.pop(cell))
        outputs = self.memory.run(events, inputs, str(call))
        for cell, block in zip(call.outputs, outputs, strict=True):
            if cell < 0 or block is None:
                self.memory.drop(block)
                continue
            if cell in self.store:
                self.memory.drop(self.store[cell])
            self.store[cell] = block

    def _free(self, call: Call) -> None:
        for cell in call.frees:
            if cell in self.store:
                self.memory.drop(self.store.pop(cell))
