"""Several stages a rank: the programs of a rank's stages as one.

    interleaved(pipeline)       # mesh pp=2 virtual=2: of stages 0, 1, 2, 3 the programs of ranks (0, 2) and (1, 3)

Invariants:
- a rank's program has all parts of its stages, called `forward_2` and so on, prologues first and updates last;
- what one stage makes for another of its rank stays in its slot; between ranks, each value is sent once to each;
- names of slots stay, but for those of later stages that an earlier one has too (a tied parameter's gradient, summed on
  each): `accumulator:w@2`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import PlanError
from autopar.mesh import PIPELINE_AXIS
from autopar.program.actions import PART_OF_KIND
from autopar.program.parts import Part, Pipeline, Slot, StageProgram, Transfer, Value, part_name

_OF_STAGE = ("saved", "gathered", "accumulator", "output")
"""Kinds of slots that each stage has for itself; state, batch and the like are those of the rank."""

_ORDER = ("prologue", *PART_OF_KIND.values(), "norm", "update")


def own_name(slot: Slot) -> str:
    """The name of a slot before stages were put together."""
    return slot.name.partition("@")[0]


def interleaved(pipeline: Pipeline) -> Pipeline:
    """The pipeline with one program per rank; as it is where each rank has one stage."""
    mesh = pipeline.mesh
    if mesh.virtual == 1:
        return pipeline
    merger = _Merger(pipeline, mesh.size(PIPELINE_AXIS))
    merger.name_slots()
    ranks = tuple(merger.rank(rank) for rank in range(merger.num_ranks))
    return replace(pipeline, stages=ranks, transfers=tuple(merger.transfers))


@dataclass(slots=True)
class _Merger:
    pipeline: Pipeline
    num_ranks: int
    names: list[dict[Slot, Slot]] = field(default_factory=list)
    """Of each stage, its slots that are called otherwise in the program of its rank."""
    transfers: dict[Transfer, None] = field(default_factory=dict)

    def name_slots(self) -> None:
        taken: list[set[Slot]] = [set() for _ in range(self.num_ranks)]
        for stage in self.pipeline.stages:
            known = taken[stage.index % self.num_ranks]
            own = {slot for slot in stage.values if slot.kind in _OF_STAGE}
            self.names.append({slot: Slot(slot.kind, f"{slot.name}@{stage.index}") for slot in own & known})
            known |= own
        for transfer in self.pipeline.transfers:
            self._connect(transfer)

    def _connect(self, transfer: Transfer) -> None:
        source, target = transfer.source % self.num_ranks, transfer.target % self.num_ranks
        slot = self.names[transfer.source].get(transfer.slot, transfer.slot)
        received = Slot("received", transfer.slot.name)
        if source == target:
            self.names[transfer.target][received] = slot
            return
        self.names[transfer.target][received] = Slot("received", slot.name)
        part = part_name(transfer.part, transfer.source, self.pipeline.mesh)
        self.transfers[Transfer(slot, source, target, part)] = None

    def rank(self, rank: int) -> StageProgram:
        mesh, stages = self.pipeline.mesh, self.pipeline.stages[rank :: self.num_ranks]
        _require_settled_buffers(stages)
        parts: dict[str, Part] = {}
        values: dict[Slot, Value] = {}
        for stage in stages:
            named = ((self.names[stage.index].get(slot, slot), value) for slot, value in stage.values.items())
            for slot, value in named:
                assert values.setdefault(slot, value) == value, f"{slot} of stage {stage.index}: {value}"
        for phase in _ORDER:
            for stage in stages:
                if phase in stage.parts:
                    name = part_name(phase, stage.index, mesh)
                    parts[name] = _renamed(stage.parts[phase], name, self.names[stage.index])
        return StageProgram(rank, parts, values)


def _renamed(part: Part, name: str, names: Mapping[Slot, Slot]) -> Part:
    inputs, outputs = (tuple(names.get(slot, slot) for slot in slots) for slots in (part.inputs, part.outputs))
    return replace(part, name=name, inputs=inputs, outputs=outputs)


def _require_settled_buffers(stages: Iterable[StageProgram]) -> None:
    """Of a buffer that changes, another stage of the rank would read the value of after the change."""
    written: dict[Slot, int] = {}
    read: list[tuple[Slot, int]] = []
    for stage in stages:
        for part in stage.parts.values():
            written |= {slot: stage.index for slot in part.outputs if slot.kind == "buffer"}
            read += [(slot, stage.index) for slot in part.inputs if slot.kind == "buffer"]
    for slot, reader in read:
        if written.get(slot, reader) != reader:
            raise PlanError(
                f"{slot} changes on stage {written[slot]} and is read by stage {reader} of the same rank; "
                f"use one stage a rank (virtual=1)"
            )
