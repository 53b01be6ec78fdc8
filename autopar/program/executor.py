"""One rank's run of its stage: the store of slots, and the calls of the step in the planned order.

    executor = StageExecutor(pipeline, communicator, program.functions(stage, communicator))
    executor.set(Slot("param", "w"), local_w)
    outputs = executor.step({"tokens": [tokens_0, tokens_1]}, {"group0.lr": lr}, random_keys)

A part's function takes the list of its input tensors, empties it (each is freed after its last use: the executor
keeps no reference either) and returns a tuple. A `torch.nn.Module`, such as a part's graph, is called on the tensors.

Invariants:
- nothing is decided during a step: `plan_steps` has said what runs, moves and is freed;
- the executor owns the accumulators: a part may add in place, and nothing else in the store shares their memory;
- outputs: scalars are summed over the microbatches, others are concatenated along dim 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar import collectives
from autopar.errors import PlanError
from autopar.program.communicator import Edge, Pending, ProcessCommunicator
from autopar.program.parts import Pipeline, Slot, StageProgram
from autopar.program.steps import ACROSS_STEPS, Message, plan_steps, without_zeros

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Step:
    """A `Call` with everything looked up."""

    function: Function | None
    boxed: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...]
    posts: tuple[tuple[int, Edge, tuple[int, ...], torch.dtype], ...]
    """Receives to post before the call *before* this one: (cell, edge, local shape, dtype)."""
    receives: tuple[int, ...]
    sends: tuple[tuple[int, Edge, Message], ...]
    settled: tuple[Message, ...]


class StageExecutor:
    """Runs optimizer steps of the communicator's stage."""

    def __init__(
        self,
        pipeline: Pipeline,
        communicator: ProcessCommunicator,
        functions: Mapping[str, Function],
        optional: Mapping[str, Collection[Slot]] | None = None,
    ) -> None:
        """`optional`: per part, the accumulators for which its function takes `None` as zero."""
        self.pipeline, self.communicator = pipeline, communicator
        self.stage: StageProgram = pipeline.stages[communicator.stage]
        self.plan = without_zeros(plan_steps(pipeline)[self.stage.index], optional or {})
        self._mesh = pipeline.mesh.spmd
        self._steps = self._bind(functions)
        self._store: list[Tensor | None] = [None] * len(self.plan.cells)
        self._receiving: dict[int, Pending] = {}
        self._sending: dict[Message, Pending] = {}
        cells = self.plan.cells.items()
        self._batch = [(slot.name, m or 0, cell) for (slot, m), cell in cells if slot.kind == "batch"]
        self._random = [(m or 0, cell) for (slot, m), cell in cells if slot.kind == "random"]
        self._whole = [(slot.name, cell) for (slot, _), cell in cells if slot.kind == "whole"]
        self._scalars = [(slot.name, cell) for (slot, _), cell in cells if slot.kind == "scalar"]
        self._persistent = [(slot, cell) for (slot, _), cell in cells if slot.kind in ACROSS_STEPS]
        self._outputs = self._output_cells()
        self._shared: list[int] | None = None

    # -- state ---------------------------------------------------------------------------------------------------
    @property
    def slots(self) -> list[Slot]:
        """The slots that live across steps, also those that no part touches."""
        return sorted(slot for slot in self.stage.values if slot.kind in ACROSS_STEPS)

    def set(self, slot: Slot, local: Tensor) -> None:
        """Puts `local`, which the executor then owns, into `slot`."""
        value = self.stage.values[slot]
        expected = value.layout.local_shape(self._mesh)
        assert tuple(local.shape) == expected and local.dtype == value.dtype, (slot, local.shape, local.dtype, value)
        self._store[self._cell(slot)] = local.to(self.communicator.device).contiguous()

    def get(self, slot: Slot) -> Tensor:
        """The local tensor in `slot`."""
        tensor = self._store[self._cell(slot)]
        if tensor is None:
            raise PlanError(f"{slot} has no value yet; load the state before the first step")
        return tensor

    def _cell(self, slot: Slot) -> int:
        if (slot, None) not in self.plan.cells:
            self.plan.cells[slot, None] = len(self._store)
            self._store.append(None)
        return self.plan.cells[slot, None]

    # -- a step --------------------------------------------------------------------------------------------------
    @property
    def draws(self) -> bool:
        """Whether the stage has random ops."""
        return bool(self._random)

    def step(
        self,
        batch: Mapping[str, Sequence[Tensor]],
        scalars: Mapping[str, Tensor],
        random_keys: Sequence[Tensor] = (),
        whole: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Runs one optimizer step on local tensors (per name, one for each microbatch); returns the stage's outputs.

        `random_keys`: where the stage `draws`, the key of each microbatch. `whole`: local tensors of all microbatches
        together, by name, where the program counts in them.
        """
        with torch.inference_mode(), collectives.use(self.communicator):
            self._begin(batch, scalars, random_keys, whole or {})
            for index, step in enumerate(self._steps):
                self._run(step, self._steps[index + 1] if index + 1 < len(self._steps) else None)
            return self._finish()

    def _begin(
        self,
        batch: Mapping[str, Sequence[Tensor]],
        scalars: Mapping[str, Tensor],
        random_keys: Sequence[Tensor],
        whole: Mapping[str, Tensor],
    ) -> None:
        store = self._store
        for slot, cell in self._persistent:
            if store[cell] is None:
                raise PlanError(f"{slot} has no value yet; load the state before the first step")
        for name, microbatch, cell in self._batch:
            store[cell] = batch[name][microbatch]
        for microbatch, cell in self._random:
            store[cell] = random_keys[microbatch]
        for name, cell in self._whole:
            store[cell] = whole[name]
        for name, cell in self._scalars:
            store[cell] = scalars[name]
        self._zero_accumulators()
        self._post(self._steps[0])

    def _zero_accumulators(self) -> None:
        ready = [tensor for cell in self.plan.zeroed if (tensor := self._store[cell]) is not None]
        if ready:
            torch._foreach_zero_(ready)
        if len(ready) < len(self.plan.zeroed):
            slots = self.plan.slots
            for cell in self.plan.zeroed:
                if self._store[cell] is None:
                    self._store[cell] = self._empty(slots[cell]).zero_()

    def _run(self, step: _Step, following: _Step | None) -> None:
        store = self._store
        for cell in step.receives:
            store[cell] = self._receiving.pop(cell).wait()
        for message in step.settled:
            self._sending.pop(message).wait()
        if following is not None and following.posts:
            self._post(following)
        if step.function is not None:
            results = self._call(step)
            for cell, result in zip(step.outputs, results, strict=True):
                if cell >= 0:
                    store[cell] = result
            del results
        for cell, edge, message in step.sends:
            tensor = store[cell]
            assert tensor is not None, message
            self._sending[message] = self.communicator.send(tensor, edge)
        if step.sends:
            self._free(step.frees)

    def _call(self, step: _Step) -> Any:
        assert step.function is not None
        arguments = [self._store[cell] for cell in step.inputs]
        if not step.sends:
            self._free(step.frees)
        return step.function(arguments) if step.boxed else step.function(*arguments)

    def _free(self, cells: tuple[int, ...]) -> None:
        for cell in cells:
            self._store[cell] = None

    def _post(self, step: _Step) -> None:
        for cell, edge, shape, dtype in step.posts:
            buffer = torch.empty(shape, dtype=dtype, device=self.communicator.device)
            self._receiving[cell] = self.communicator.receive(buffer, edge)

    def _finish(self) -> dict[str, Tensor]:
        for pending in self._sending.values():
            pending.wait()
        self._sending.clear()
        self._separate_state()
        return {name: self._collect(cells) for name, cells in self._outputs.items()}

    def _separate_state(self) -> None:
        """State must not lie in an accumulator (zeroed in place) nor be a view of something larger (kept alive).

        Which slots would is a property of the program: looked up after the first step, copied after each.
        """
        if self._shared is None:
            zeroed = {t.untyped_storage().data_ptr() for c in self.plan.zeroed if (t := self._store[c]) is not None}
            self._shared = [cell for _, cell in self._persistent if _lies_elsewhere(self._store[cell], zeroed)]
        for cell in self._shared:
            tensor = self._store[cell]
            assert tensor is not None
            self._store[cell] = tensor.clone(memory_format=torch.contiguous_format)

    def _collect(self, cells: list[int]) -> Tensor:
        parts: list[Tensor] = []
        for cell in cells:
            tensor = self._store[cell]
            assert tensor is not None
            parts.append(tensor)
            self._store[cell] = None
        return join_outputs(parts)

    # -- before the first step -----------------------------------------------------------------------------------
    def _bind(self, functions: Mapping[str, Function]) -> tuple[_Step, ...]:
        slots = self.plan.slots
        steps = []
        for call in self.plan.calls:
            has_part = call.part in self.stage.parts
            function = functions[call.part] if has_part else None
            steps.append(
                _Step(
                    function=function,
                    boxed=not isinstance(function, torch.nn.Module),
                    inputs=call.inputs,
                    outputs=call.outputs,
                    frees=call.frees,
                    posts=tuple(self._posting(message, cell, slots[cell]) for message, cell in call.posts),
                    receives=tuple(cell for _, cell in call.receives),
                    sends=tuple((cell, self._edge(message), message) for message, cell in call.sends),
                    settled=call.settled,
                )
            )
        return tuple(steps)

    def _posting(self, message: Message, cell: int, slot: Slot) -> tuple[int, Edge, tuple[int, ...], torch.dtype]:
        value = self.stage.values[slot]
        transfer = self.pipeline.transfers[message.transfer]
        sent = self.pipeline.stages[transfer.source].values[transfer.slot]
        assert sent == value, f"{transfer.slot}: sent as {sent}, received as {value}"
        return cell, self._edge(message), value.layout.local_shape(self._mesh), value.dtype

    def _edge(self, message: Message) -> Edge:
        transfer = self.pipeline.transfers[message.transfer]
        return Edge(transfer.source, transfer.target, message.transfer)

    def _empty(self, slot: Slot) -> Tensor:
        value = self.stage.values[slot]
        shape = value.layout.local_shape(self._mesh)
        return torch.empty(shape, dtype=value.dtype, device=self.communicator.device)

    def _output_cells(self) -> dict[str, list[int]]:
        by_name: dict[str, list[int]] = {}
        found = [(m or 0, slot.name, cell) for (slot, m), cell in self.plan.cells.items() if slot.kind == "output"]
        for _, name, cell in sorted(found):
            by_name.setdefault(name, []).append(cell)
        return by_name


def _lies_elsewhere(tensor: Tensor | None, zeroed: Collection[int]) -> bool:
    assert tensor is not None
    storage = tensor.untyped_storage()
    return storage.nbytes() > tensor.nbytes or storage.data_ptr() in zeroed


def join_outputs(parts: Sequence[Tensor]) -> Tensor:
    """One output of the microbatches as one of the step: the sum of scalars, else a concatenation along dim 0."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].ndim == 0:
        return torch.stack(list(parts)).sum(0)
    return torch.cat(list(parts))


def split_microbatches(value: Tensor, shape: tuple[int, ...], microbatches: int, name: str) -> Iterator[Tensor]:
    """Contiguous slices of dim 0, of `shape` each; a tensor that has the shape of one microbatch already serves all.

    Raises `PlanError` that names what was got and expected.
    """
    if microbatches > 1 and tuple(value.shape) == shape:
        return iter([value] * microbatches)
    expected = (shape[0] * microbatches, *shape[1:]) if shape else ()
    if tuple(value.shape) != expected:
        raise PlanError(
            f"batch {name!r}: got shape {tuple(value.shape)}, expected {expected} ({microbatches} × {shape}); "
            f"pass a batch of that shape, or plan again for this one"
        )
    return iter(value.chunk(microbatches) if shape else [value])
