"""Initial weights without the model: a factory's construction is recorded, then replayed tensor by tensor.

    recording = record(lambda: GPT(config))
    replay(recording, seed=0, consume=lambda name, tensor: shard[name].copy_(tensor[rows[name]]))

The tensors that `consume` gets are bit-equal to those of `torch.manual_seed(0); GPT(config)`. Construction runs on fake
CPU tensors, so nothing in it can tell the difference; every ATen op is recorded with the storages that it reads and
writes. Replaying executes only what a parameter or buffer depends on. A random op whose result is overwritten (Linear's
own init, before a Hugging Face init) still runs, on scratch memory, to advance the generator.

Invariants:
- a tensor is allocated at the first op that must run on it, consumed after the last, and freed: what is held at once is
  what the factory itself keeps unfinished, plus one scratch tensor;
- the recording doesn't depend on the seed; `torch.manual_seed` inside the factory is replayed where it stood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar import private
from autopar.errors import CaptureError
from autopar.private import OpOverload, TorchDispatchMode, schema_of

Consume = Callable[[str, Tensor], None]

_MARK = 0x6175746F7061_0000
"""While recording, the generator's seed is this + the number of random ops so far; any other was set by the factory."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of the recording: where it lies in which storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class Op:
    """One recorded op; tensors in the arguments are `View`s."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[View, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    kills: frozenset[int]
    """Storages whose old content doesn't matter: fresh ones, and those overwritten whole."""
    reseed: tuple[str, int] | None = None
    """Before a random op: ("seed", n), or ("after", i): back to the generator's state after random op i."""

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.target.tags


@dataclass(slots=True)
class Recording:
    """A factory's construction."""

    ops: list[Op] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    """Per storage."""
    constants: dict[int, Tensor] = field(default_factory=dict)
    """Storages that came with values: data written in the code."""
    names: dict[str, View] = field(default_factory=dict)
    """Parameters and buffers."""


# -- recording -------------------------------------------------------------------------------------------------------


def record(factory: Callable[[], nn.Module]) -> Recording:
    """Runs `factory` on fake CPU tensors and returns what it did; the global generator is left as it was.

    Raises `CaptureError` when the construction needs values that depend on random ones.
    """
    recorder = _Recorder()
    state = torch.default_generator.get_state()
    try:
        torch.default_generator.manual_seed(_MARK)
        with private.rejection_sampling_as_ops(), recorder.fake_mode, recorder:
            model = factory()
    finally:
        torch.default_generator.set_state(state)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        recorder.recording.names[name] = recorder.view(tensor)
    return recorder.recording


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_mode = private.new_fake_mode()
        self.recording = Recording()
        self._storages: dict[int, int] = {}
        self._alive: list[Any] = []  # keeps storages alive, so that their keys stay theirs
        self._random_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _mapped((args, kwargs), self.view)
        if func is torch.ops.aten._local_scalar_dense.default:
            return _value_now(self.recording, inputs[0][0])
        known = len(self.recording.num_bytes)
        result = func(*args, **kwargs)
        outputs = tuple(self.view(tensor) for tensor in _tensors(result))
        if schema_of(func).is_mutable or any(view.storage >= known for view in outputs):
            self._append(func, inputs, outputs, known)
        return result

    def view(self, tensor: Tensor) -> View:
        """Where `tensor` lies; a real tensor met for the first time becomes a constant."""
        key = private.storage_key(tensor)
        if key not in self._storages:
            index = self._storages[key] = len(self.recording.num_bytes)
            storage = tensor.untyped_storage()
            self._alive.append(storage)
            self.recording.num_bytes.append(storage.nbytes())
            if not private.is_fake(tensor):
                self.recording.constants[index] = _whole(tensor)
        return View(
            self._storages[key], tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype
        )

    def _append(self, func: Any, inputs: Any, outputs: tuple[View, ...], known: int) -> None:
        args, kwargs = inputs
        written = [
            _argument(args, kwargs, i, a.name) for i, a in enumerate(schema_of(func).arguments) if _is_written(a)
        ]
        targets = [view for item in written for view in _views(item)]
        fresh = frozenset(view.storage for view in outputs if view.storage >= known)
        overwritten = frozenset(v.storage for v in targets if func in OVERWRITING and self._covers(v))
        writes = fresh | {view.storage for view in targets}
        reads = frozenset(view.storage for view in _views(inputs)) - overwritten
        kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        if outputs and not list(_views(inputs)) and any(a.name == "dtype" for a in schema_of(func).arguments):
            kwargs["dtype"] = outputs[0].dtype  # the default dtype may have been another
        if kwargs.get("generator") is not None:
            raise CaptureError("the factory initialises weights with a generator of its own; use the global one")
        op = Op(func, args, kwargs, outputs, reads, frozenset(writes), fresh | overwritten)
        self.recording.ops.append(self._with_seed(op) if op.is_random else op)

    def _with_seed(self, op: Op) -> Op:
        """Notes whether the generator was set since the last random op, and marks it anew."""
        generator = torch.default_generator
        seed, mark = generator.initial_seed(), _MARK + self._random_ops
        self._random_ops += 1
        generator.manual_seed(_MARK + self._random_ops)
        if seed == mark:
            return op
        kind = ("after", seed - _MARK) if _MARK <= seed < mark else ("seed", seed)
        return Op(op.target, op.args, op.kwargs, op.outputs, op.reads, op.writes, op.kills, kind)

    def _covers(self, view: View) -> bool:
        count = 1
        for size in view.size:
            count *= size
        dense = sorted(zip(view.stride, view.size, strict=True))
        step = 1
        for stride, size in dense:
            if size != 1 and stride != step:
                return False
            step *= size
        return count * view.dtype.itemsize == self.recording.num_bytes[view.storage]


_aten = torch.ops.aten
OVERWRITING = {
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.zero_.default,
    _aten.uniform_.default,
    _aten.normal_.default,
    _aten.copy_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
    _aten.bernoulli_.float,
    _aten.exponential_.default,
    torch.ops.autopar_init.trunc_normal_.default,
}
"""Ops that write every element of their first argument without reading it."""


# -- replaying -------------------------------------------------------------------------------------------------------


def replay(recording: Recording, seed: int, consume: Consume) -> None:
    """Calls `consume(name, tensor)` for each parameter and buffer, each as soon as it is final.

    The tensor is freed afterwards: `consume` copies what it wants. The global generator is left as it was.
    """
    state = torch.default_generator.get_state()
    try:
        torch.manual_seed(seed)
        with torch.no_grad():
            _Replay(recording, consume).run()
    finally:
        torch.default_generator.set_state(state)


class _Replay:
    def __init__(self, recording: Recording, consume: Consume) -> None:
        self.recording = recording
        self.consume = consume
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.names: dict[int, list[str]] = {}
        for name, view in recording.names.items():
            self.names.setdefault(view.storage, []).append(name)
        self.needed = needed_ops(recording)
        self.last_use = {s: i for i in sorted(self.needed) for s in (recording.ops[i].reads | recording.ops[i].writes)}
        self.saved_after = {op.reseed[1] for op in recording.ops if op.reseed and op.reseed[0] == "after"}
        self.states: dict[int, Tensor] = {}

    def run(self) -> None:
        random_ops = 0
        self._keep_state(0)
        for i, op in enumerate(self.recording.ops):
            if op.is_random:
                self._reseed(op)
            if i in self.needed:
                self._execute(op)
                self._release(op, i)
            elif op.is_random:
                self._burn(op)
            if op.is_random:
                random_ops += 1
                self._keep_state(random_ops)
        for storage in self.names.keys() - self.last_use.keys():
            self._finish(storage)

    def _execute(self, op: Op) -> None:
        result = op.target(*_viewed(op.args, self._tensor), **_viewed(op.kwargs, self._tensor))
        inputs = op.reads | (op.writes - {view.storage for view in op.outputs})
        for view, tensor in zip(op.outputs, _tensors(result), strict=True):
            if view.storage not in op.reads and view.storage not in self.storages:
                self._adopt(view, tensor, inputs)

    def _adopt(self, view: View, tensor: Tensor, inputs: frozenset[int]) -> None:
        """A fresh output becomes the storage that the recording calls it, copied where strides or aliases differ."""
        storage = tensor.untyped_storage()
        shared = any(self.storages[s].data_ptr() == storage.data_ptr() for s in inputs if s in self.storages)
        same = tensor.stride() == view.stride and tensor.storage_offset() == view.offset
        if shared or not same or storage.nbytes() != self.recording.num_bytes[view.storage]:
            self._tensor(view).copy_(tensor)
        else:
            self.storages[view.storage] = storage

    def _burn(self, op: Op) -> None:
        """Runs a random op whose result nobody needs, for the generator's sake."""
        scratch: dict[View, Tensor] = {}

        def tensor(view: View) -> Tensor:
            if view.storage not in op.writes:
                return self._tensor(view)
            if view not in scratch:
                scratch[view] = torch.empty_strided(view.size, view.stride, dtype=view.dtype)
            return scratch[view]

        op.target(*_viewed(op.args, tensor), **_viewed(op.kwargs, tensor))

    def _tensor(self, view: View) -> Tensor:
        if view.storage not in self.storages:
            constant = self.recording.constants.get(view.storage)
            num_bytes = self.recording.num_bytes[view.storage]
            whole = torch.empty(num_bytes, dtype=torch.uint8) if constant is None else constant.clone()
            self.storages[view.storage] = whole.untyped_storage()
        return view.of(self.storages[view.storage])

    def _release(self, op: Op, index: int) -> None:
        for storage in op.reads | op.writes:
            if self.last_use[storage] == index:
                self._finish(storage)

    def _finish(self, storage: int) -> None:
        for name in self.names.get(storage, ()):
            self.consume(name, self._tensor(self.recording.names[name]))
        self.storages.pop(storage, None)

    def _reseed(self, op: Op) -> None:
        if op.reseed is None:
            return
        kind, value = op.reseed
        if kind == "seed":
            torch.default_generator.manual_seed(value)
        else:
            torch.default_generator.set_state(self.states[value])

    def _keep_state(self, random_ops: int) -> None:
        if random_ops in self.saved_after:
            self.states[random_ops] = torch.default_generator.get_state()


def needed_ops(recording: Recording) -> set[int]:
    """Indices of the ops on which a parameter's or buffer's value depends: liveness of storages, backwards."""
    live = {view.storage for view in recording.names.values()}
    needed = set()
    for i in range(len(recording.ops) - 1, -1, -1):
        op = recording.ops[i]
        if op.writes & live:
            needed.add(i)
            live = (live - op.kills) | (op.reads - op.kills)
        elif op.is_random:
            live |= op.reads - op.writes
    return needed


def _value_now(recording: Recording, view: View) -> Any:
    """The value of a one-element tensor in the middle of a recording."""
    until_now = Recording(recording.ops, recording.num_bytes, recording.constants, {"value": view})
    if any(recording.ops[i].is_random for i in needed_ops(until_now)):
        raise CaptureError("the factory decides by a random value while it builds the model; draw it in Python instead")
    found: list[Any] = []
    deterministic = [op for op in recording.ops if not op.is_random]
    with private.without_modes():
        replay(
            Recording(deterministic, recording.num_bytes, recording.constants, {"value": view}),
            0,
            lambda name, tensor: found.append(tensor.item()),
        )
    return found[0]


# -- helpers ---------------------------------------------------------------------------------------------------------


def _mapped(value: Any, function: Callable[[Tensor], View]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(item, function) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([_mapped(item, function) for item in value]) if type(value) in (tuple, list) else value
    return value


def _viewed(value: Any, function: Callable[[View], Tensor]) -> Any:
    if isinstance(value, View):
        return function(value)
    if isinstance(value, dict):
        return {key: _viewed(item, function) for key, item in value.items()}
    return type(value)([_viewed(item, function) for item in value]) if type(value) in (tuple, list) else value


def _views(value: Any) -> Iterator[View]:
    if isinstance(value, View):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _views(item)


def _tensors(result: Any) -> list[Tensor]:
    items = result if isinstance(result, (tuple, list)) else (result,)
    return [item for item in items if isinstance(item, Tensor)]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str) -> Any:
    return args[index] if index < len(args) else kwargs.get(name)


def _whole(tensor: Tensor) -> Tensor:
    """A copy of the tensor's whole storage, as bytes."""
    with private.without_modes():
        flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        return flat.clone()
