"""Sums into accumulators, and what the first of a step's sums may keep instead of adding.

    total = accumulator + gradient      # accumulator is None, meaning zero:  total = gradient

Invariants:
- an accumulator is optional only if its one reader adds a value of its shape and dtype to it, and gives the output;
- a gradient is kept itself only if it fills a storage that the part made and that nothing else lies in afterwards;
  otherwise it is copied. So no two slots ever share the memory of an accumulator.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from autopar.program.parts import Part, Slot
from autopar.program.storages import Lifetimes, lifetimes, local_value, nbytes
from autopar.rules.nodes import node_argument

ADDS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


def accumulations(part: Part, lives: Lifetimes | None = None) -> dict[fx.Node, bool]:
    """The sums into optional accumulators, each with whether the gradient itself may be kept (else a copy)."""
    graph = part.graph.graph
    known = lives or lifetimes(graph)
    return {node: _is_adoptable(gradient, node, known) for node, gradient in _sums(part)}


def optional_slots(part: Part) -> tuple[Slot, ...]:
    """The accumulators for which `None` may be passed as zero."""
    slot_of = _slots(part)
    return tuple(slot_of[node_argument(node, 0)] for node, _ in _sums(part))


def _slots(part: Part) -> dict[fx.Node, Slot]:
    placeholders = (node for node in part.graph.graph.nodes if node.op == "placeholder")
    return dict(zip(placeholders, part.inputs, strict=True))


def _sums(part: Part) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(sum, gradient) for each optional accumulator."""
    slot_of = _slots(part)
    for node in part.graph.graph.nodes:
        if node.target not in ADDS or len(node.args) != 2 or node.kwargs:
            continue
        accumulator, gradient = node.args
        slot = slot_of.get(accumulator) if isinstance(accumulator, fx.Node) else None
        if slot is None or slot.kind != "accumulator" or slot not in part.outputs or len(accumulator.users) != 1:
            continue
        if isinstance(gradient, fx.Node) and _are_alike(accumulator, gradient):
            yield node, gradient


def _are_alike(left: fx.Node, right: fx.Node) -> bool:
    a, b = local_value(left), local_value(right)
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return both and a.shape == b.shape and a.dtype == b.dtype


def _is_adoptable(gradient: fx.Node, reader: fx.Node, lives: Lifetimes) -> bool:
    origins = list(lives.of(gradient))
    value = local_value(gradient)
    if len(origins) != 1 or not value.is_contiguous():
        return False
    maker, index = origins[0]
    made = local_value(maker)
    whole = made[index] if isinstance(made, (tuple, list)) else made
    is_last = maker.op == "call_function" and lives.death[origins[0]] == lives.position[reader]
    return is_last and isinstance(whole, torch.Tensor) and nbytes(whole) == nbytes(value)
