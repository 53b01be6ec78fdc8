"""Overwrite what is dead: functional ops become in-place ones where the operand's storage has no later reader.

    x = a + b; y = x * c; return y                ->   x = a + b; y = x.mul_(c); return y
    exp_avg' = lerp(exp_avg, grad, 0.1)           ->   exp_avg' = exp_avg.lerp_(grad, 0.1)        # a donated slot

Before: a functional part, in its final order. After: the same values, and every donated output (below) is the very
tensor that was passed in. Numbers stay bit-equal.

What may be overwritten:
- a value that the part itself made, once no value that lies in its storage is read later (views count, as do
  collectives in flight, which hold their input until they are awaited); an all-reduce may do so, too;
- a donated input: a `param`, `state` or `accumulator` slot that is also an output, but only by ops on the way to that
  output. Other inputs are never written: somebody may be sending them.
The operand must be dense and agree with the result in shape, dtype and strides; no other operand may be another view
of its storage. Where a donated output's value can't be computed in place it is copied there at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar import collectives
from autopar.program.parts import Part, Slot
from autopar.program.storages import (
    Lifetimes,
    Origin,
    is_view,
    lifetimes,
    local_value,
    nodes_in,
    output_values,
    written_operand,
)
from autopar.rules.nodes import is_pointwise, node_argument
from passes.editing import edit, is_mutating

DONATED_KINDS = ("param", "state", "accumulator")
COMMUTATIVE = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)


def reinplace(part: Part, context: Any = None) -> Part:
    """`part` with in-place ops wherever they are safe."""
    return edit(part, lambda graph: _reinplace(part, graph))


def donated_slots(part: Part) -> tuple[Slot, ...]:
    """The slots whose storage the outputs reuse: across steps they stay the same tensors."""
    given = set(part.inputs)
    return tuple(slot for slot in part.outputs if slot.kind in DONATED_KINDS and slot in given)


def _reinplace(part: Part, graph: fx.Graph) -> None:
    lives = lifetimes(graph)
    if _copy_outputs_that_pass_through(part, graph, lives):
        lives = lifetimes(graph)
    if _reduce_in_place(graph, lives):
        lives = lifetimes(graph)
    storage = _Storage(graph, part, lives)
    for node in list(graph.nodes):
        if node.op == "call_function" and not is_mutating(node):
            _overwrite(node, storage)
    _return_donated(part, graph)


def _placeholders(part: Part, graph: fx.Graph) -> dict[Slot, fx.Node]:
    return dict(zip(part.inputs, (n for n in graph.nodes if n.op == "placeholder"), strict=True))


# -- which storage may be written --------------------------------------------------------------------------------
@dataclass(slots=True)
class _Storage:
    """Who owns each storage and when it dies, kept up to date as nodes are overwritten."""

    graph: fx.Graph
    part: Part
    lives: Lifetimes
    merged: dict[Origin, Origin] = field(default_factory=dict)
    """Storage that is no longer made → the storage that its value is written into."""
    death: dict[Origin, int] = field(init=False)
    writers: dict[Origin, frozenset[fx.Node]] = field(init=False)
    """Donated input → the nodes that may write it."""
    returned: dict[Origin, set[Slot]] = field(init=False)
    """Storage → the slots that are returned in it."""

    slot_of: dict[Origin, Slot] = field(init=False)
    """Input storage → its slot."""

    def __post_init__(self) -> None:
        self.slot_of = {(node, 0): slot for slot, node in _placeholders(self.part, self.graph).items()}
        self.death = dict(self.lives.death)
        self.writers = dict(self._donations())
        self.returned = self._returned()

    def _donations(self) -> Iterator[tuple[Origin, frozenset[fx.Node]]]:
        placeholders = _placeholders(self.part, self.graph)
        results = dict(zip(self.part.outputs, output_values(self.graph), strict=True))
        for slot, node in placeholders.items():
            if slot.kind in DONATED_KINDS and slot in results:
                yield (node, 0), _way_to(results[slot], node)

    def _returned(self) -> dict[Origin, set[Slot]]:
        returned: dict[Origin, set[Slot]] = {}
        for value, slot in zip(output_values(self.graph), self.part.outputs, strict=True):
            for origin in self.lives.of(value) if isinstance(value, fx.Node) else ():
                returned.setdefault(origin, set()).add(slot)
        return returned

    def of(self, node: fx.Node) -> frozenset[Origin]:
        return frozenset(self._current(origin) for origin in self.lives.of(node))

    def _current(self, origin: Origin) -> Origin:
        while origin in self.merged:
            origin = self.merged[origin]
        return origin

    def may_write(self, operand: fx.Node, writer: fx.Node) -> bool:
        """Whether `writer` may overwrite `operand`: one storage, ours to write, dead afterwards."""
        origins = self.of(operand)
        if len(origins) != 1:
            return False
        (origin,) = origins
        owner, _ = origin
        owned = owner.op == "call_function" or self._may_write_input(origin, writer)
        return owned and self.death[origin] <= self.lives.position[writer]

    def _may_write_input(self, origin: Origin, writer: fx.Node) -> bool:
        """Whether `writer` is on the way to the output of a donated input, and isn't returned in another slot."""
        elsewhere = self.returned.get((writer, 0), set()) - {self.slot_of.get(origin)}
        return writer in self.writers.get(origin, ()) and not elsewhere

    def merge(self, node: fx.Node, operand: fx.Node) -> None:
        """From now on `node`'s value lies in `operand`'s storage."""
        (origin,) = self.of(operand)
        (made,) = self.of(node)
        self.merged[made] = origin
        self.death[origin] = self.death[made]


def _way_to(result: Any, placeholder: fx.Node) -> frozenset[fx.Node]:
    """The nodes from `placeholder` to `result` along first operands; empty when the way leads elsewhere."""
    way: list[fx.Node] = []
    node = result
    while isinstance(node, fx.Node) and node is not placeholder:
        if is_view(node):
            return frozenset()
        way.append(node)
        operands = node.args[:2] if node.target in COMMUTATIVE else node.args[:1]
        inner = [operand for operand in operands if isinstance(operand, fx.Node)]
        node = next((operand for operand in inner if _descends(operand, placeholder)), None)
    return frozenset(way) if node is placeholder else frozenset()


def _descends(node: fx.Node, placeholder: fx.Node) -> bool:
    """Whether first operands (either operand of a sum or product) lead from `node` to `placeholder`."""
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current is placeholder:
            return True
        if current in seen or current.op != "call_function":
            continue
        seen.add(current)
        operands = current.args[:2] if current.target in COMMUTATIVE else current.args[:1]
        stack += [operand for operand in operands if isinstance(operand, fx.Node)]
    return False


# -- rewriting ---------------------------------------------------------------------------------------------------
def _overwrite(node: fx.Node, storage: _Storage) -> None:
    """Turns `node` in place if one of its operands may be overwritten."""
    target = inplace_overload(node.target)
    if target is not None and _try_first(node, storage, target):
        return
    out = out_overload(node.target)
    if out is not None:
        _try_out(node, storage, *out)


def _try_first(node: fx.Node, storage: _Storage, target: Any) -> bool:
    for swapped in (False, True) if node.target in COMMUTATIVE and not node.kwargs else (False,):
        args = (node.args[1], node.args[0], *node.args[2:]) if swapped else node.args
        operand = args[0]
        if isinstance(operand, fx.Node) and _may_overwrite(operand, node, storage):
            storage.merge(node, operand)
            node.target, node.args = target, args
            return True
    return False


def _try_out(node: fx.Node, storage: _Storage, target: Any, keyword: str) -> None:
    """A pointwise op without an in-place form writes into a dead operand through its `out=` form."""
    for operand in nodes_in(node.args):
        if _may_overwrite(operand, node, storage):
            storage.merge(node, operand)
            node.target, node.kwargs = target, {**node.kwargs, keyword: operand}
            return


def _may_overwrite(operand: fx.Node, node: fx.Node, storage: _Storage) -> bool:
    return _fits(operand, node) and storage.may_write(operand, node) and _others_are_apart(operand, node, storage)


def _fits(operand: fx.Node, node: fx.Node) -> bool:
    """Same shape, dtype and strides, and no two elements in one place."""
    old, new = local_value(operand), local_value(node)
    if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
        return False
    same = old.shape == new.shape and old.dtype == new.dtype and old.stride() == new.stride()
    return same and old.device == new.device and _is_dense(old)


def _is_dense(value: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory, each at a place of its own, in any order of dims."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _others_are_apart(operand: fx.Node, node: fx.Node, storage: _Storage) -> bool:
    """Whether the other operands lie elsewhere, or are the operand itself in a pointwise op."""
    own = storage.of(operand)
    others = [other for other in nodes_in((node.args, node.kwargs)) if storage.of(other) & own]
    return len(others) == 1 or (is_pointwise(node.target) and all(other is operand for other in others))


@functools.cache
def inplace_overload(target: Any) -> torch._ops.OpOverload | None:
    """The in-place form with the same arguments: `aten.add.Tensor` → `aten.add_.Tensor`."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or len(target._schema.returns) != 1:
        return None
    packet = getattr(torch.ops.aten, f"{target._opname}_", None)
    found = getattr(packet, target._overloadname, None) if packet is not None else None
    if found is None or not found._schema.is_mutable:
        return None
    same = _argument_names(target) == _argument_names(found)
    return found if same else None


@functools.cache
def out_overload(target: Any) -> tuple[torch._ops.OpOverload, str] | None:
    """The `out=` form of a pointwise op, and the keyword of what it writes."""
    if not is_pointwise(target) or target.namespace != "aten" or len(target._schema.returns) != 1:
        return None
    packet = getattr(torch.ops.aten, target._opname)
    names = _argument_names(target)
    for overload in packet.overloads():
        found = getattr(packet, overload)
        if torch.Tag.generated in found.tags:  # computes elsewhere and copies: no gain
            continue
        written = [a.name for a in found._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        types = [str(a.type) for a in found._schema.arguments][: len(names)]
        same = _argument_names(found) == [*names, *written] and types == [str(a.type) for a in target._schema.arguments]
        if len(written) == 1 and same and found._schema.arguments[-1].kwarg_only:
            return found, written[0]
    return None


def _argument_names(target: torch._ops.OpOverload) -> list[str]:
    return [argument.name for argument in target._schema.arguments]


def _reduce_in_place(graph: fx.Graph, lives: Lifetimes) -> bool:
    """An all-reduce takes the storage of what it reduces, if the part made that and nothing in it is read later.

    Whether there is such a one.
    """
    starts = [node for node in graph.nodes if node.target is collectives.all_reduce_start]
    lying: dict[Origin, list[fx.Node]] = {}
    for node in graph.nodes if starts else ():
        for origin in lives.of(node) if node.op == "call_function" else ():
            lying.setdefault(origin, []).append(node)
    found = False
    for node in starts:
        operand = node_argument(node, 0)
        origins = lives.of(operand)
        others = [other for origin in origins for other in lying.get(origin, ()) if other is not node]
        is_last = all(lives.last_use[other] <= lives.position[node] for other in others)
        if len(origins) == 1 and _owner(origins).op == "call_function" and is_last and _is_whole(operand):
            node.kwargs = {**node.kwargs, "inplace": True}
            found = True
    return found


def _owner(origins: frozenset[Origin]) -> fx.Node:
    return next(iter(origins))[0]


def _is_whole(node: fx.Node) -> bool:
    value = local_value(node)
    return isinstance(value, torch.Tensor) and value.numel() > 1 and value.is_contiguous()


# -- donated outputs ---------------------------------------------------------------------------------------------
def _copy_outputs_that_pass_through(part: Part, graph: fx.Graph, lives: Lifetimes) -> bool:
    """An output that lies in a donated input but belongs to another slot gets a storage of its own.

    Whether there is such a one.
    """
    placeholders = _placeholders(part, graph)
    donated = {(placeholders[slot], 0): slot for slot in donated_slots(part)}
    final = graph.output_node()
    values, found = list(output_values(graph)), False
    for index, (value, slot) in enumerate(zip(values, part.outputs, strict=True)):
        if isinstance(value, fx.Node) and any(donated.get(origin, slot) != slot for origin in lives.of(value)):
            with graph.inserting_before(final):
                values[index] = graph.call_function(torch.ops.aten.clone.default, (value,))
            values[index].meta = dict(value.meta)
            found = True
    final.args = (tuple(values),)
    return found


def _return_donated(part: Part, graph: fx.Graph) -> None:
    """Copies into its slot each donated output that didn't come out there by itself."""
    placeholders, final = _placeholders(part, graph), graph.output_node()
    donated, values = set(donated_slots(part)), list(output_values(graph))
    for index, (value, slot) in enumerate(zip(values, part.outputs, strict=True)):
        if slot not in donated or _is_in_place(value, placeholders[slot]):
            continue
        with graph.inserting_before(final):
            values[index] = graph.call_function(torch.ops.aten.copy_.default, (placeholders[slot], value))
        values[index].meta = dict(placeholders[slot].meta)
    final.args = (tuple(values),)


def _is_in_place(value: Any, placeholder: fx.Node) -> bool:
    """Whether `value` is the placeholder's tensor itself, through in-place ops only."""
    while isinstance(value, fx.Node) and value is not placeholder and is_mutating(value):
        value = written_operand(value)
    return value is placeholder
