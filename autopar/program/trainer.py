"""Runs a program on real ranks, one optimizer step a call.

    trainer = Trainer(program, initial)            # under torchrun, or alone when the plan has one rank
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, 100)
    for batch in data:
        metrics = trainer.step(*batch)             # {"loss": 3.21}, the same on every rank
        scheduler.step()
    torch.distributed.checkpoint.save(trainer.state_dict(), checkpoint_id="out")

Invariants:
- every rank runs the same program: hashes are compared before anything else;
- a batch holds all samples of the step; microbatches are contiguous slices of dim 0, and each rank takes its own rows
  of each (`local=True`: it is given only these);
- the scalars of a step are what `optimizer.param_groups` holds when the step begins;
- random ops draw by the seed, the number of the step, and the microbatch: `state_dict()` has them, so that a run that
  is resumed goes on with the same numbers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import PlanError
from autopar.mesh import PIPELINE_AXIS, Mesh
from autopar.program.communicator import ProcessCommunicator
from autopar.program.executor import StageExecutor, split_microbatches
from autopar.program.param_groups import ParamGroups
from autopar.program.parts import Pipeline, Slot, Value
from autopar.program.ranks import join, leave, own_device
from autopar.program.state import LocalState, Source, gather_whole
from autopar.randomness import random_keys


class Program(Protocol):
    """What the trainer needs of a compiled program."""

    @property
    def pipeline(self) -> Pipeline: ...
    @property
    def hash(self) -> str: ...
    @property
    def scalars(self) -> Mapping[str, float]: ...  # "group0.lr" → initial value
    @property
    def options(self) -> Mapping[str, Mapping[str, Any]]: ...  # "group0" → all entries of the param group
    @property
    def aliases(self) -> Mapping[str, str]: ...  # tied name → name of its parameter
    @property
    def batch_layout(self) -> Sequence[str]: ...  # names of the batch's tensors in order
    def functions(self, stage: int, comm: Any) -> Mapping[str, Callable[..., Any]]: ...


class Trainer:
    """This rank's share of a program, with its state."""

    def __init__(
        self,
        program: Program,
        initial: Callable[[Slot], Tensor] | None = None,
        *,
        optional: Callable[[int], Mapping[str, Collection[Slot]]] | None = None,
        unsaved: Collection[str] = (),
        device: str | torch.device | None = None,
        deterministic: bool = False,
        seed: int = 0,
    ) -> None:
        """Joins the other ranks and fills the state from `initial(slot)`, a whole tensor at a time.

        `optional(stage)`: see `StageExecutor`. `unsaved`: buffers that the model's `state_dict` leaves out. `seed`: of
        the random ops. Raises `PlanError` when the number of ranks isn't the plan's, or the ranks' programs or seeds
        differ.
        """
        self.program, self.mesh = program, program.pipeline.mesh
        _require_ranks(self.mesh)
        self.device = own_device(device)
        self._is_owner = join(self.device)
        require_same_hash(f"{program.hash} seed {seed}", self.device)
        self.seed, self.num_steps = seed, 0
        edges = [(transfer.source, transfer.target) for transfer in program.pipeline.transfers]
        self.communicator = ProcessCommunicator(self.mesh, self.device, edges, deterministic)
        stage = self.communicator.stage
        functions = program.functions(stage, self.communicator)
        chosen = optional(stage) if optional else None
        self.executor = StageExecutor(program.pipeline, self.communicator, functions, chosen)
        self.state = LocalState(self.executor, program.aliases, unsaved)
        self.optimizer = ParamGroups(program.scalars, program.options)
        self._batch_values = _batch_values(program.pipeline)
        own = self.executor.stage.values.items()
        self._whole_values = {slot.name: value for slot, value in own if slot.kind == "whole"}
        self._scalars: dict[str, tuple[float, Tensor]] = {}
        if initial is not None:
            for slot in self.executor.slots:
                self.state.load(slot, initial(slot))

    # -- steps ---------------------------------------------------------------------------------------------------
    def step(self, *batch: Any, local: bool = False, **named: Any) -> dict[str, float | Tensor]:
        """One optimizer step; scalars such as `loss` (the global mean) come back as floats, equal on every rank.

        The batch is given as for `TrainStep`: one dict, one tuple, tensors, or keywords. `local=True`: each rank passes
        its own rows only, of all microbatches. Raises `PlanError` for another shape, dtype or other names.
        """
        tensors = name_batch(self.program.batch_layout, batch, named)
        pieces = {name: self._pieces(name, tensors[name], local) for name in self._batch_values}
        whole = {name: self._whole(name, value, tensors[name], local) for name, value in self._whole_values.items()}
        outputs = self.executor.step(pieces, self._step_scalars(), self._random_keys(), whole)
        self.num_steps += 1
        self.optimizer.step()
        return self._shared(outputs)

    def _pieces(self, name: str, value: Tensor, local: bool) -> list[Tensor]:
        """The rank's local tensor for each microbatch."""
        described, microbatches = self._batch_values[name], self.program.pipeline.microbatches
        mesh, layout = self.mesh.spmd, described.layout
        if value.dtype != described.dtype:
            raise PlanError(f"batch {name!r}: got {value.dtype}, expected {described.dtype}")
        at = self.communicator.coordinates
        shape = layout.content_shape(mesh, at) if local else layout.global_shape
        pieces: Iterator[Tensor] = split_microbatches(value.detach().contiguous(), shape, microbatches, name)
        take = layout.padded if local else layout.shard
        pieces = (take(piece, mesh, at).contiguous() for piece in pieces)
        return [piece.to(self.device, non_blocking=True) for piece in pieces]

    def _whole(self, name: str, described: Value, value: Tensor, local: bool) -> Tensor:
        """The rank's local tensor of all microbatches together; given its own rows alone, it gets the others'."""
        layout, mesh = described.layout, self.mesh.spmd
        if local and name not in self._batch_values:
            raise PlanError(f"batch {name!r}: only counted, so it isn't split over ranks: pass the whole batch instead")
        if local:
            rows = self._batch_values[name].layout
            gathered = [gather_whole(p, rows, mesh, self.communicator) for p in self._pieces(name, value, local)]
            whole = torch.cat(gathered) if layout.global_shape != rows.global_shape else gathered[0]
        else:
            whole = value.detach().contiguous().to(self.device, non_blocking=True)
        return layout.shard(whole, mesh, self.communicator.coordinates).contiguous()

    def _random_keys(self) -> list[Tensor]:
        """What the microbatches' random ops draw from, where there are any."""
        if not self.executor.draws:
            return []
        return random_keys(self.seed, self.num_steps, self.program.pipeline.microbatches)

    def _step_scalars(self) -> dict[str, Tensor]:
        """The scalars' tensors, made anew only where a value has changed."""
        values = self.executor.stage.values
        for name, value in self.optimizer.scalars().items():
            slot = Slot("scalar", name)
            if slot in values and (name not in self._scalars or self._scalars[name][0] != value):
                self._scalars[name] = value, torch.tensor(value, dtype=values[slot].dtype, device=self.device)
        return {name: tensor for name, (_, tensor) in self._scalars.items()}

    @torch.no_grad()
    def _shared(self, outputs: Mapping[str, Tensor]) -> dict[str, float | Tensor]:
        """The outputs of all stages, whole, on every rank; all scalars of a stage in one message."""
        shared: dict[str, float | Tensor] = {}
        for stage in self.program.pipeline.stages:
            values = {slot.name: value for slot, value in sorted(stage.values.items()) if slot.kind == "output"}
            scalars = [name for name, value in values.items() if not value.layout.dims]
            if scalars:
                shared.update(self._shared_scalars(stage.index, scalars, values, outputs))
            for name in (name for name in values if name not in scalars):
                shared[name] = self._shared_tensor(stage.index, values[name], outputs.get(name))
        return shared

    def _shared_scalars(
        self, stage: int, names: Sequence[str], values: Mapping[str, Value], outputs: Mapping[str, Tensor]
    ) -> dict[str, float | Tensor]:
        packed = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        if self.communicator.stage == stage:
            mesh = self.mesh.spmd
            whole = [gather_whole(outputs[name], values[name].layout, mesh, self.communicator) for name in names]
            packed = torch.stack([value.double() for value in whole])
        self.communicator.broadcast(packed, PIPELINE_AXIS, stage)
        return dict(zip(names, packed.tolist(), strict=True))

    def _shared_tensor(self, stage: int, value: Value, output: Tensor | None) -> Tensor:
        """An output that isn't a scalar: microbatches along dim 0."""
        layout, count = value.layout, self.program.pipeline.microbatches
        if output is None:
            rows, *rest = layout.global_shape
            whole = torch.empty((rows * count, *rest), dtype=value.dtype, device=self.device)
        else:
            parts = [gather_whole(part, layout, self.mesh.spmd, self.communicator) for part in output.chunk(count)]
            whole = torch.cat(parts)
        return self.communicator.broadcast(whole, PIPELINE_AXIS, stage)

    # -- state ---------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """DTensors of the model and the optimizer, the param groups, and the place in the stream of random numbers.

        For torch.distributed.checkpoint.
        """
        random = {"seed": self.seed, "num_steps": self.num_steps}
        return {**self.state.state_dict(), "param_groups": self.optimizer.groups(), "random": random}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a `state_dict()`, such as one that `torch.distributed.checkpoint.load` has read into."""
        self.state.load_state_dict({name: state[name] for name in ("model", "optimizer")})
        self.optimizer.load_groups(state["param_groups"])
        self.seed, self.num_steps = state["random"]["seed"], state["random"]["num_steps"]

    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's ordinary `state_dict` on rank 0, empty on the others; every rank must call it."""
        return self.state.full_state_dict()

    def load_full_state_dict(self, source: Source) -> None:
        """Takes this rank's slices of the model's ordinary `state_dict`, or of `source(name)`."""
        self.state.load_full_state_dict(source)

    def close(self) -> None:
        """Leaves the process group, if the trainer made it. Without it, that happens at the interpreter's exit."""
        if self._is_owner:
            self._is_owner = False
            self.communicator.close()
            leave()


# -- the ranks ----------------------------------------------------------------------------------------------------
def _require_ranks(mesh: Mesh) -> None:
    started = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if started != mesh.num_ranks:
        raise PlanError(
            f"the plan is for {mesh.num_ranks} ranks (mesh {mesh or 'of one rank'}), {started} were started; "
            f"use torchrun --nproc-per-node {mesh.num_ranks}, or plan for {started}"
        )


def require_same_hash(program_hash: str, device: torch.device) -> None:
    """Raises `PlanError`, on every rank, where ranks have different programs."""
    digest = hashlib.sha256(program_hash.encode()).digest()
    own = torch.tensor([int.from_bytes(digest[:7], "big")], device=device)
    hashes = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(hashes, own)
    values = [int(value) for value in hashes]
    others = [rank for rank, value in enumerate(values) if value != values[0]]
    if others:
        raise PlanError(
            f"ranks {', '.join(map(str, others))} have another program than rank 0; "
            f"start every rank with the same model, plan, seed and versions"
        )


# -- batches ------------------------------------------------------------------------------------------------------
def name_batch(names: Sequence[str], batch: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Tensor]:
    """The batch's tensors by name, from a dict, a tuple, tensors in order or keywords; constants are skipped."""
    if len(batch) == 1 and isinstance(batch[0], Mapping):
        return name_batch(names, (), {**batch[0], **named})
    if len(batch) == 1 and isinstance(batch[0], (tuple, list)):
        return name_batch(names, tuple(batch[0]), named)
    given = [value for value in batch if isinstance(value, Tensor)]
    by_name = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    rest = [name for name in names if name not in by_name]
    if len(given) != len(rest) or not by_name.keys() <= set(names):
        got = [*(f"{len(given)} in order" for _ in given[:1]), *by_name] or ["none"]
        raise PlanError(f"batch: got tensors {', '.join(got)}; expected {', '.join(names)}")
    return {**by_name, **dict(zip(rest, given, strict=True))}


def _batch_values(pipeline: Pipeline) -> dict[str, Value]:
    """Batch name → its value (dtype, layout of one microbatch), of every stage: all ranks check the whole batch."""
    found = {
        slot.name: value for stage in pipeline.stages for slot, value in stage.values.items() if slot.kind == "batch"
    }
    return dict(sorted(found.items()))
