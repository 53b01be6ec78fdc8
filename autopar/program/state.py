"""A rank's parameters, buffers and optimizer state as DTensors, and to and from the model's ordinary `state_dict`.

    state = LocalState(executor, aliases={"head.weight": "embed.weight"})
    torch.distributed.checkpoint.save(state.state_dict(), checkpoint_id=path)      # every rank its shards
    whole = state.full_state_dict()                                                # on rank 0, on the CPU

A DTensor's `Shard(d)` is a contiguous chunk of dim d, axes of one dim in mesh order. A layout that splits a middle
factor, whose axes stand in another order, or that pads chunks of chunks (torch chunks what is really there) has no such
chunk: it is laid out anew, a tensor at a time.

Invariants:
- never more than one whole tensor at a time on a rank, beside what rank 0 collects;
- DTensors of plain layouts are the executor's own memory, until the next step; the others are copies;
- all ranks call these functions together (`load_full_state_dict` excepted, which communicates nothing).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import PlanError
from autopar.layout import Factor, Layout, chunk_size, prefix, window
from autopar.mesh import PIPELINE_AXIS, Mesh
from autopar.program.communicator import ProcessCommunicator
from autopar.program.executor import StageExecutor
from autopar.program.parts import Slot, Value

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

Source = Mapping[str, Tensor] | Callable[[str], Tensor]
"""Where whole tensors come from, by the model's name."""

SECTIONS = {"param": "model", "buffer": "model", "state": "optimizer"}
"""The kind of a slot → the section of `state_dict()` that it stands in."""


# -- layouts ------------------------------------------------------------------------------------------------------
def plain_layout(layout: Layout, mesh: Mesh) -> Layout:
    """The layout that splits each dim by the same axes into contiguous chunks, axes in the order of the mesh."""

    def plain(dim: tuple[Factor, ...]) -> tuple[Factor, ...]:
        axes = {axis for factor in dim for axis in factor.axes}
        return (Factor(math.prod(f.size for f in dim), tuple(a for a in mesh.names if a in axes)),) if dim else ()

    return Layout(tuple(map(plain, layout.dims)), layout.partial)


def is_plain(layout: Layout, mesh: Mesh) -> bool:
    """Whether a rank's local tensor is the same as in `plain_layout`."""
    for dim in layout.dims:
        order = [axis for factor in dim for axis in factor.axes if mesh.size(axis) > 1]
        split = [i for i, factor in enumerate(dim) if factor.local_size(mesh) < factor.size]
        whole_before = [factor for factor in dim[: split[-1]] if factor.local_size(mesh) > 1] if split else []
        otherwise_chunked = any(factor.is_padded(mesh) for factor in dim) and (len(order) > 1 or len(dim) > 1)
        if whole_before or otherwise_chunked or order != [axis for axis in mesh.names if axis in order]:
            return False
    return True


def placements(layout: Layout, mesh: Mesh) -> tuple[Placement, ...]:
    """The DTensor placements of a plain layout, one per axis of `mesh`."""
    from torch.distributed.tensor import Replicate, Shard

    where = [layout.position(axis) for axis in mesh.names]
    return tuple(Replicate() if at is None else Shard(at[0]) for at in where) or (Replicate(),)


def gather_whole(local: Tensor, layout: Layout, mesh: Mesh, communicator: ProcessCommunicator) -> Tensor:
    """The global value, on every rank of `mesh`, of a local tensor in `layout`."""
    factors = [factor for dim in layout.dims for factor in dim]
    value = local.reshape(layout.local_factor_shape(mesh))
    for axis, op in layout.partial:
        value = communicator.all_reduce(value, axis, op)
    for dim, factor in enumerate(factors):
        for index in reversed(range(len(factor.axes))):
            size = chunk_size(factor.size, map(mesh.size, factor.axes[:index]))
            value = communicator.all_gather(value, factor.axes[index], dim).narrow(dim, 0, size)
    return value.reshape(layout.global_shape)


# -- state --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class LocalState:
    """What a rank's executor keeps across steps."""

    executor: StageExecutor
    aliases: Mapping[str, str] = field(default_factory=dict)
    """A tied name → the name of the parameter that it shares."""
    unsaved: Collection[str] = ()
    """Buffers that the model's own `state_dict` leaves out."""

    @property
    def mesh(self) -> Mesh:
        return self.executor.pipeline.mesh.spmd

    # -- DTensors ------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def state_dict(self) -> dict[str, dict[str, Any]]:
        """`{"model": {name: DTensor}, "optimizer": {"PARAM.exp_avg": DTensor}}`, for torch.distributed.checkpoint."""
        sections: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
        for slot in self.executor.slots:
            sections[SECTIONS[slot.kind]][slot.name] = self._to_dtensor(slot)
        return sections

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes the tensors of a `state_dict()`, for instance one that a checkpoint was read into."""
        _require([slot for slot in self.executor.slots if slot.name not in state[SECTIONS[slot.kind]]])
        for slot in self.executor.slots:
            self._from_dtensor(slot, state[SECTIONS[slot.kind]][slot.name])

    def _to_dtensor(self, slot: Slot) -> DTensor:
        from torch.distributed.tensor import DTensor

        layout, local = self._value(slot).layout, ordinary(self.executor.get(slot))
        saved = self._saved_layout(slot)
        where = placements(plain_layout(saved, self.mesh), self.mesh)
        if layout == saved and is_plain(layout, self.mesh):
            local = prefix(local, layout.content_shape(self.mesh, self.executor.communicator.coordinates))
        else:
            whole = gather_whole(local, layout, self.mesh, self.executor.communicator)
            local = self._chunk(whole, where).clone()
        shape = torch.Size(layout.global_shape)
        return DTensor.from_local(
            local, self._device_mesh(), where, run_check=False, shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )  # fmt: skip

    def _from_dtensor(self, slot: Slot, tensor: DTensor) -> None:
        layout, local, at = self._value(slot).layout, tensor.to_local(), self.executor.communicator.coordinates
        own = self.executor.get(slot)
        if layout != self._saved_layout(slot) or not is_plain(layout, self.mesh):
            whole = tensor.full_tensor()
            self.executor.set(slot, layout.shard(whole, self.mesh, at).clone())
        elif local.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
            self.executor.set(slot, layout.padded(local, self.mesh, at).clone())

    def _chunk(self, whole: Tensor, where: tuple[Placement, ...]) -> Tensor:
        """The rank's chunk, as DTensor counts: an axis chunks what the one before it has left."""
        for axis, placement in zip(self.mesh.names, where, strict=False):
            if placement.is_shard():
                dim = int(placement.dim)  # type: ignore[attr-defined]
                coordinate = self.executor.communicator.coordinate(axis)
                start, count = window(whole.shape[dim], [(coordinate, self.mesh.size(axis))])
                whole = whole.narrow(dim, min(start, whole.shape[dim]), count)
        return whole

    def _saved_layout(self, slot: Slot) -> Layout:
        """That of the first stage that has the slot: all must write the same chunks."""
        return next(stage.values[slot].layout for stage in self.executor.pipeline.stages if slot in stage.values)

    def _value(self, slot: Slot) -> Value:
        return self.executor.stage.values[slot]

    def _device_mesh(self) -> Any:
        names = self.mesh.names or ("rank",)
        device_mesh = self.executor.communicator.device_mesh
        return device_mesh if device_mesh.mesh_dim_names == names else device_mesh[names]

    # -- whole tensors -------------------------------------------------------------------------------------------
    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's ordinary `state_dict`, tied names included, on the CPU of rank 0; empty on the others."""
        full: dict[str, Tensor] = {}
        for stage, slot in self._model_slots():
            whole = self._whole_on_rank_0(stage, slot)
            if whole is not None:
                full[slot.name] = whole
        full.update({alias: full[name] for alias, name in self.aliases.items() if name in full})
        return full

    @torch.no_grad()
    def load_full_state_dict(self, source: Source) -> None:
        """Takes the rank's slices of whole parameters and buffers, one after the other.

        Raises `PlanError` for a name that is missing and for another shape. Buffers that the model doesn't save may be
        missing where they already have a value.
        """
        names = set(source) if isinstance(source, Mapping) else None
        found: dict[Slot, str | None] = {slot: self._find(slot, names) for slot in self._model_slots_here()}
        _require([slot for slot, name in found.items() if name is None and slot.name not in self.unsaved])
        for slot, name in found.items():
            if name is not None:
                self.load(slot, source(name) if callable(source) else source[name])

    def load(self, slot: Slot, whole: Tensor) -> None:
        """Takes the rank's slice of one whole tensor."""
        value = self._value(slot)
        if tuple(whole.shape) != value.layout.global_shape:
            raise PlanError(f"{slot}: got shape {tuple(whole.shape)}, expected {value.layout.global_shape}")
        local = value.layout.shard(whole.detach(), self.mesh, self.executor.communicator.coordinates)
        self.executor.set(slot, local.to(value.dtype, copy=True, memory_format=torch.contiguous_format))

    def _find(self, slot: Slot, names: Collection[str] | None) -> str | None:
        """The name under which `names` (None: it can't be told, a callable will be asked) has the slot."""
        own = [slot.name, *(alias for alias, name in self.aliases.items() if name == slot.name)]
        return slot.name if names is None else next((name for name in own if name in names), None)

    def _model_slots_here(self) -> list[Slot]:
        return [slot for slot in self.executor.slots if slot.kind != "state"]

    def _model_slots(self) -> Iterator[tuple[int, Slot]]:
        """(stage, slot) of what the model saves, each slot once, in the same order on every rank."""
        seen = set[Slot](Slot(kind, name) for kind in ("buffer", "param") for name in self.unsaved)
        for stage in self.executor.pipeline.stages:
            for slot in sorted(stage.values):
                if slot.kind in ("param", "buffer") and slot not in seen:
                    seen.add(slot)
                    yield stage.index, slot

    def _whole_on_rank_0(self, stage: int, slot: Slot) -> Tensor | None:
        """Gathered on the ranks of `stage`, and sent on from its first."""
        communicator, pipeline = self.executor.communicator, self.executor.pipeline
        sender = pipeline.mesh.rank({PIPELINE_AXIS: stage})
        whole = None
        if communicator.stage == stage:
            whole = gather_whole(ordinary(self.executor.get(slot)), self._value(slot).layout, self.mesh, communicator)
        if sender == 0 or communicator.rank not in (0, sender):
            return whole.to("cpu", copy=True) if whole is not None and communicator.rank == 0 else None
        group = communicator.device_mesh.get_group(PIPELINE_AXIS)
        if communicator.rank == sender:
            assert whole is not None
            dist.send(whole.contiguous(), 0, group)
            return None
        value = pipeline.stages[stage].values[slot]
        buffer = torch.empty(value.layout.global_shape, dtype=value.dtype, device=communicator.device)
        dist.recv(buffer, sender, group)
        return buffer.cpu()


def _require(missing: Collection[Slot]) -> None:
    if missing:
        names = [slot.name for slot in missing]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise PlanError(f"the state to load has no {', '.join(names[:3])}{more}; load one of the same model")


def ordinary(tensor: Tensor) -> Tensor:
    """`tensor`, or where it was made in inference mode the same memory as a tensor that may be written anywhere."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
