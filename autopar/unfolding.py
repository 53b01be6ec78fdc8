"""The program of each rank of a pipeline, from a few stages that stand for all of them, to be counted.

    pipeline = unfolded([few] * 3, likeness, mesh, 64, schedule)      # `few`: of the stages that are there
    peaks = stage_peaks(pipeline, rank)

Each stage gets slots of its own, called after it (`saved:add_3@5`), and passes to its neighbours what its like passes
to the next one that is there, in the same order. What else crosses (tied parameters, sums of squares) comes from the
first stage that may send it.

Invariant: where all stages are there, ranks hold what those of the plan's own program hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.layers import block_of
from autopar.mesh import Mesh
from autopar.program.interleaved import interleaved
from autopar.program.memory import events_of, optional_of
from autopar.program.parts import Part, Pipeline, Slot, StageProgram, Transfer, part_name
from autopar.program.schedule import is_step_level
from autopar.skeletons import Likeness

_OF_RANK = ("batch", "whole", "random", "scalar")
"""Kinds of slots that the stages of a rank share."""


def unfolded(
    of_kind: Sequence[Pipeline],
    likeness: Likeness,
    mesh: Mesh,
    microbatches: int,
    schedule: tuple[tuple[str, ...], ...],
) -> Pipeline:
    """`of_kind`: for each stage that is there the pipeline from which it is taken; they differ in layers alone."""
    like = likeness.like
    transfers, received = [], []
    for stage in range(len(like)):
        own: dict[Slot, Slot] = {}
        for at_source, slot, source in _incoming(of_kind, likeness, stage):
            sent = Slot(at_source.slot.kind, f"{at_source.slot.name}@{source}")
            own[Slot("received", slot.name)] = Slot("received", sent.name)
            place = of_kind[like[source]].transfers.index(at_source)
            transfers.append((place, Transfer(sent, source, stage, at_source.part)))
        received.append(own)
    stages = tuple(_named(of_kind[kind].stages[kind], stage, received[stage]) for stage, kind in enumerate(like))
    sent_in_order = tuple(transfer for _, transfer in sorted(transfers, key=lambda pair: pair[0]))
    pipeline = interleaved(Pipeline(mesh, microbatches, stages, sent_in_order, schedule))
    for rank in pipeline.stages:
        _remember(rank, of_kind, likeness, mesh)
    return pipeline


def _incoming(of_kind: Sequence[Pipeline], likeness: Likeness, stage: int) -> Iterator[tuple[Transfer, Slot, int]]:
    """What a stage is sent: the transfer at its source's like, the slot that its own like gets it from, the source."""
    kind = likeness.like[stage]
    wanted = [transfer for transfer in of_kind[kind].transfers if transfer.target == kind]
    for there, is_next in dict.fromkeys((t.source, _is_passed_on(t, of_kind[kind])) for t in wanted):
        source = stage + there - kind if is_next else likeness.kept[there]
        sender = likeness.like[source]
        target = sender + kind - there if is_next else kind
        sent = _between(of_kind[sender], sender, target, is_next)
        slots = [transfer.slot for transfer in _between(of_kind[kind], there, kind, is_next)]
        assert len(sent) == len(slots), f"stage {stage} gets {slots} of its like, {sent} of stage {source}"
        yield from ((transfer, slot, source) for transfer, slot in zip(sent, slots, strict=True))


def _between(pipeline: Pipeline, source: int, target: int, is_next: bool) -> list[Transfer]:
    return [
        transfer
        for transfer in pipeline.transfers
        if (transfer.source, transfer.target) == (source, target) and _is_passed_on(transfer, pipeline) == is_next
    ]


def _is_passed_on(transfer: Transfer, pipeline: Pipeline) -> bool:
    """Whether each stage passes such a value to the next, or to the one before it."""
    layout = pipeline.stages[transfer.source].values[transfer.slot].layout
    return abs(transfer.source - transfer.target) == 1 and not is_step_level(transfer) and bool(layout.dims)


def _named(program: StageProgram, stage: int, received: dict[Slot, Slot]) -> StageProgram:
    """A stage's program with slots of its own."""
    names = {slot: received.get(slot) or _own(slot, stage) for slot in program.values}

    def named(part: Part) -> Part:
        inputs, outputs = (tuple(names[slot] for slot in slots) for slots in (part.inputs, part.outputs))
        return replace(part, inputs=inputs, outputs=outputs)

    parts = {name: named(part) for name, part in program.parts.items()}
    return StageProgram(stage, parts, {names[slot]: value for slot, value in program.values.items()})


def _own(slot: Slot, stage: int) -> Slot:
    is_shared = slot.kind in _OF_RANK or (slot.kind == "buffer" and block_of(slot.name) is None)
    return slot if is_shared else Slot(slot.kind, f"{slot.name}@{stage}")


def _remember(rank: StageProgram, of_kind: Sequence[Pipeline], likeness: Likeness, mesh: Mesh) -> None:
    """What is known of a stage's parts holds for those of all that it stands for."""
    events, optional = {}, {}
    for stage in mesh.stages_at(rank.index):
        kind = likeness.like[stage]
        known = of_kind[kind].stages[kind]
        for phase, part in known.parts.items():
            name = part_name(phase, stage, mesh)
            events[name] = events_of(known, mesh.spmd)[phase]
            slots = dict(zip(part.inputs, rank.parts[name].inputs, strict=True))
            optional[name] = tuple(slots[slot] for slot in optional_of(known)[phase])
    rank.memo["events", mesh.spmd], rank.memo["optional"] = events, optional
