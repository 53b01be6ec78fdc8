"""What running a part allocates and frees, storage by storage, in the order of its nodes.

    events = part_events(part, mesh)
    events.events[3]      # linear_2: makes 131072 bytes of activations, frees the storage of view_1

Invariants:
- a storage has one size and one class (`CLASSES`), by what made it;
- what kernels allocate within one call isn't counted, except the buffers of collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.layers import block_of
from autopar.mesh import Mesh
from autopar.program.accumulation import accumulations
from autopar.program.parts import Part, Slot, Value, phase_of
from autopar.program.storages import (
    Lifetimes,
    Origin,
    gathers_in_place,
    is_collective,
    is_start,
    is_view,
    is_wait,
    lifetimes,
    local_value,
    nbytes,
    output_values,
    target_name,
)

CLASSES = ("parameters", "gradients", "optimizer", "activations", "buffers")

CLASS_OF_SLOT = {
    "param": "parameters",
    "buffer": "parameters",
    "gathered": "parameters",
    "state": "optimizer",
    "scalar": "optimizer",
    "accumulator": "gradients",
}
"""What a slot's memory counts as; the rest are activations."""


def local_bytes(node: fx.Node, mesh: Mesh) -> int:
    """Bytes of the node's local value: of `local_val`, else of `val` divided by the shards of its layout."""
    if "local_val" in node.meta:
        return nbytes(node.meta["local_val"])
    layout = node.meta.get("layout")
    value = node.meta.get("val")
    if value is None or layout is None or isinstance(layout, tuple):
        return nbytes(value)
    size: int = math.prod(layout.local_shape(mesh))
    return size * int(value.element_size())


def slot_bytes(value: Value, mesh: Mesh) -> int:
    """Bytes of a slot's local tensor."""
    return torch.Size(value.layout.local_shape(mesh)).numel() * value.dtype.itemsize


def class_of(slot: Slot) -> str:
    """The class that a slot's memory counts as."""
    return CLASS_OF_SLOT.get(slot.kind, "activations")


def placeholders(part: Part) -> list[fx.Node]:
    """The part's inputs as nodes, in the order of its slots."""
    return [node for node in part.graph.graph.nodes if node.op == "placeholder"]


# -- events ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Sum:
    """A sum into an optional accumulator, by storages; where that is `None` the gradient or a copy is kept."""

    accumulator: Origin
    gradient: Origin
    total: Origin
    size: int
    keeps_gradient: bool


@dataclass(frozen=True, slots=True)
class Event:
    """One node: what it allocates, which storages die after it."""

    name: str
    makes: tuple[tuple[Origin, int, str], ...] = ()
    """(storage, bytes, class)."""
    transient: int = 0
    """Bytes of buffers that live only while the node runs."""
    sums: Sum | None = None
    frees: tuple[Origin, ...] = ()
    region: str = ""
    """The layer to which the node belongs, "model.layers.3", or that which came last before it."""


@dataclass(frozen=True, slots=True)
class Events:
    """A part's inputs, allocations and outputs, by storage."""

    inputs: tuple[Origin, ...]
    unread: tuple[Origin, ...]
    """Inputs that nothing reads: freed at once."""
    events: tuple[Event, ...]
    outputs: tuple[Origin | None, ...]
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What was derived from these, by what else it depends on."""


def part_events(part: Part, mesh: Mesh) -> Events:
    """The part's allocations and frees in order; made once, walked at every call."""
    graph = part.graph.graph
    lives = lifetimes(graph)
    classes = _classes(part)
    adopted = accumulations(part, lives)
    dying: dict[int, list[Origin]] = {}
    for origin, position in lives.death.items():
        dying.setdefault(position, []).append(origin)
    inputs = tuple((node, 0) for node in placeholders(part))
    events, regions = [], _regions(graph)
    for node in graph.nodes:
        if node.op == "call_function":
            dead = tuple(dying.get(lives.position[node], ()))
            events.append(_event(node, mesh, lives, classes, adopted, dead, regions[node]))
    unread = tuple(origin for origin in inputs if lives.death[origin] == lives.position[origin[0]])
    return Events(inputs, unread, tuple(events), tuple(_origin_of(value, lives) for value in output_values(graph)))


def _regions(graph: fx.Graph) -> dict[fx.Node, str]:
    found: dict[fx.Node, str] = {}
    region = ""
    for node in graph.nodes:
        region = found[node] = block_of(node.meta.get("path", "")) or region
    return found


def _origin_of(value: Any, lives: Lifetimes) -> Origin | None:
    """The storage of a value (None for a constant)."""
    if not isinstance(value, fx.Node):
        return None
    return min(lives.of(value), key=lambda origin: lives.position[origin[0]], default=None)


def _event(
    node: fx.Node,
    mesh: Mesh,
    lives: Lifetimes,
    classes: Mapping[fx.Node, str],
    adopted: Mapping[fx.Node, bool],
    dying: tuple[Origin, ...],
    region: str,
) -> Event:
    own = sorted({origin for origin in lives.of(node) if origin[0] is node}, key=lambda origin: origin[1])
    if node in adopted:
        accumulator, gradient = (_origin_of(operand, lives) for operand in node.args)
        total, size = _origin_of(node, lives), local_bytes(node, mesh)
        assert accumulator is not None and gradient is not None and total is not None
        makes = tuple((origin, size, "gradients") for origin in own)
        return Event(node.name, makes, 0, Sum(accumulator, gradient, total, size, adopted[node]), dying, region)
    makes = tuple((origin, _made_bytes(node, origin[1], mesh), classes[node]) for origin in own)
    transient = buffer_bytes(node, mesh) if is_collective(node) and not is_start(node) else 0
    return Event(node.name, makes, transient, None, dying, region)


def _made_bytes(node: fx.Node, output: int, mesh: Mesh) -> int:
    if is_start(node):
        return local_bytes(node, mesh) if gathers_in_place(node) else buffer_bytes(node, mesh)
    value = local_value(node)
    return nbytes(value[output]) if isinstance(value, (tuple, list)) else local_bytes(node, mesh)


def buffer_bytes(node: fx.Node, mesh: Mesh) -> int:
    """What a collective allocates beside its result, as `ProcessCommunicator` does for chunks that go directly."""
    name = target_name(node).removesuffix("_start")
    if name not in _BUFFERS:
        return 0
    operand, axis = node.args[0], node.args[1]
    assert isinstance(operand, fx.Node) and isinstance(axis, str)
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", node.kwargs.get("split_dim", 0))
    given, size = local_bytes(operand, mesh), mesh.size(axis)
    value = local_value(operand)
    copied = 0 if not isinstance(value, torch.Tensor) or value.is_contiguous() else given
    return _BUFFERS[name](given, size, isinstance(dim, int) and dim == 0) + copied


_BUFFERS: dict[str, Callable[[int, int, bool], int]] = {
    "all_gather": lambda given, size, leading: 0 if leading else given * (size - 1),
    "reduce_scatter": lambda given, size, leading: given * (size - 1) // size + (0 if leading else given),
    "all_reduce": lambda given, size, leading: given * (size - 1) if size <= 2 else given,
    "all_to_all": lambda given, size, leading: given * (size - 1) // size + (0 if leading else given),
}
"""Collective → bytes from (bytes given, size of the axis, whether chunks lie along dim 0)."""


def _classes(part: Part) -> dict[fx.Node, str]:
    """What each node's own storage counts as."""
    graph = part.graph.graph
    is_update = phase_of(part.name) in ("norm", "update")
    default = "optimizer" if is_update else "activations"
    classes = dict.fromkeys(graph.nodes, default)
    from_parameters: set[fx.Node] = set()
    slots = dict(zip(placeholders(part), part.inputs, strict=True))
    for node in graph.nodes:
        operands = node.all_input_nodes
        is_parameter = node in slots and slots[node].kind in ("param", "gathered")
        if is_parameter or (operands and node.op == "call_function" and all(n in from_parameters for n in operands)):
            from_parameters.add(node)
            classes[node] = default if is_update else "parameters"
    for node in _gradients(part):
        classes[node] = "gradients"
    return classes | {node: "buffers" for node in graph.nodes if is_start(node) and not gathers_in_place(node)}


def _gradients(part: Part) -> Iterator[fx.Node]:
    """What is added into accumulators, back to where it was made: through views, casts and collectives."""
    for total, slot in zip(output_values(part.graph.graph), part.outputs, strict=True):
        if slot.kind != "accumulator" or not isinstance(total, fx.Node):
            continue
        stack = [total]
        while stack:
            node = stack.pop()
            if node.op != "call_function":
                continue
            yield node
            passes = node is total or is_view(node) or is_wait(node) or is_collective(node)
            stack += node.all_input_nodes if passes else []
