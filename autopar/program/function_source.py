"""The source of one part: names, statements, frees and comments.

    # model.layers.0.mlp.up_proj
    mm_4 = view_3.mm(up_proj_weight.t()); del view_3  # model.py:41

Invariants:
- statements stand in the order of the graph's nodes;
- a view with one reader is written inside the reader, at most `MAX_INLINED` deep;
- an in-place op is a statement of its own, and its result goes by its operand's name.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autopar.program.accumulation import accumulations, optional_slots
from autopar.program.parts import Part, Slot, Value
from autopar.program.spelling import PYTHON_INFIX, Speller
from autopar.program.storages import (
    Lifetimes,
    is_collective,
    is_start,
    is_unpacked,
    is_view,
    is_wait,
    lifetimes,
    local_value,
    nodes_in,
    output_values,
    target_name,
    written_operand,
)
from autopar.rules.nodes import node_argument

MAX_INLINED = 2
PERSISTENT = {"param", "buffer", "state", "scalar", "gathered"}
"""Slots that the caller keeps while a part runs."""
DTYPE_NAMES = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"} | {
    getattr(torch, f"int{n}"): f"i{n}" for n in (8, 16, 32, 64)
}


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: `"bf16"`."""
    name: str = DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))
    return name


class Writer:
    """Writes one part as a function."""

    def __init__(self, part: Part, values: dict[Slot, Value], speller: Speller) -> None:
        self.part, self.values, self.speller = part, values, speller
        self.graph = part.graph.graph
        self.nodes = list(self.graph.nodes)
        self.lives: Lifetimes = lifetimes(self.graph)
        self.placeholders = [node for node in self.nodes if node.op == "placeholder"]
        assert len(self.placeholders) == len(part.inputs), f"{part.name}: one placeholder per input slot"
        self.slot_of = dict(zip(self.placeholders, part.inputs, strict=True))
        self.accumulations = accumulations(part, self.lives)
        self.inlined = self._inlined()
        self.names = self._names()
        self.last_use = self._last_use()
        self.kept = {self.names[node] for node in self._kept()}

    # -- facts about the part ----------------------------------------------------------------------------------
    @property
    def optional(self) -> tuple[Slot, ...]:
        return optional_slots(self.part)

    @property
    def donated(self) -> tuple[Slot, ...]:
        """Output slots that come back as the tensor that was passed in."""
        inputs = {slot: self.names[node] for node, slot in self.slot_of.items()}
        outputs = zip(self.part.outputs, output_values(self.graph), strict=True)
        return tuple(slot for slot, node in outputs if slot in inputs and self._is_same_tensor(node, inputs[slot]))

    def _is_same_tensor(self, node: Any, name: str) -> bool:
        return isinstance(node, fx.Node) and self.names[node] == name

    def _inlined(self) -> dict[fx.Node, int]:
        """Nodes that are written inside their one reader, with their depth."""
        inlined: dict[fx.Node, int] = {}
        for node in self.nodes:
            if node.op != "call_function" or len(node.users) != 1 or not _is_inlinable(node):
                continue
            (reader,) = node.users
            depth = 1 + max((inlined.get(operand, 0) for operand in node.all_input_nodes), default=0)
            if depth <= MAX_INLINED and _can_hold(reader, node) and reader not in self.accumulations:
                inlined[node] = depth
        return inlined

    def _kept(self) -> Iterator[fx.Node]:
        """Nodes whose names are never dropped: what is returned, and what the caller or the module keeps anyway."""
        yield from (value for value in output_values(self.graph) if isinstance(value, fx.Node))
        for node in self.nodes:
            origins = self.lives.of(node) if node.op != "output" else frozenset()
            if origins and all(self._is_persistent(origin) for origin, _ in origins):
                yield node

    def _is_persistent(self, node: fx.Node) -> bool:
        return node.op == "get_attr" or (node in self.slot_of and self.slot_of[node].kind in PERSISTENT)

    # -- names -------------------------------------------------------------------------------------------------
    def _names(self) -> dict[fx.Node, str]:
        names: dict[fx.Node, str] = {}
        taken = {"comm", "device", "constants", "inputs", "torch", "autopar", *self.part_names()}
        for node in self.nodes:
            shared = self._shared_name(node, names)
            names[node] = shared or _unique(self._wanted_name(node), taken)
            taken.add(names[node])
        return names

    def part_names(self) -> tuple[str, ...]:
        return (self.part.name,)

    def _shared_name(self, node: fx.Node, names: dict[fx.Node, str]) -> str | None:
        """The name of the operand whose tensor the node is: in-place results, equal items of a tuple."""
        if node.target is operator.getitem:
            twins = [user for user in node_argument(node, 0).users if user.args == node.args and user in names]
            return names[twins[0]] if twins else None
        operand = written_operand(node)
        return names[operand] if operand is not None else None

    def _wanted_name(self, node: fx.Node) -> str:
        slot = self.slot_of.get(node)
        if slot is not None:
            return slot.name if slot.kind == "param" else f"{slot.kind}_{slot.name}"
        return f"{self._wanted_name(_subject(node))}{_suffix(node)}" if _suffix(node) else node.name

    def _last_use(self) -> dict[str, int]:
        """Name → position of the statement after which it may be dropped."""
        last: dict[str, int] = {}
        for node in self.nodes:
            if node in self.inlined:
                continue
            position = self.lives.position[node]
            last[self.names[node]] = max(last.get(self.names[node], 0), position)
            for operand in self._operands(node):
                last[self.names[operand]] = max(last[self.names[operand]], position)
        return last

    def _operands(self, node: fx.Node) -> Iterator[fx.Node]:
        """The operands by name, looking through what is written inside."""
        for operand in node.all_input_nodes:
            if operand in self.inlined:
                yield from self._operands(operand)
            else:
                yield operand

    # -- text --------------------------------------------------------------------------------------------------
    def function(self) -> str:
        """`def name(inputs): …`"""
        lines = [f"def {self.part.name}(inputs):", *self._unpacking()]
        path = source = ""
        for node in self.nodes:
            statement = self._statement(node)
            if statement is None:
                continue
            if is_collective(node):  # moved away from its module; its name says what it is about
                lines.append(f"    {statement}")
                continue
            path_here, source_here = node.meta.get("path", ""), node.meta.get("source", "")
            if path_here != path:
                lines.append(f"    # {path_here or 'the model'}")
            comment = f"  # {source_here}" if source_here and (path_here, source_here) != (path, source) else ""
            lines.append(f"    {statement}{comment}")
            path, source = path_here, source_here
        return "\n".join([*lines, *self._returning()]) + "\n"

    def _unpacking(self) -> list[str]:
        if not self.placeholders:
            return []
        names = [self.names[node] for node in self.placeholders]
        unused = [self.names[n] for n in self.placeholders if not n.users and self.names[n] not in self.kept]
        listed = [
            f"        {name},  # {self._slot_text(slot)}" for name, slot in zip(names, self.part.inputs, strict=True)
        ]
        dropped = [f"    del {', '.join(unused)}"] if unused else []
        return ["    (", *listed, "    ) = inputs", "    inputs.clear()", *dropped]

    def _returning(self) -> list[str]:
        outputs = zip(output_values(self.graph), self.part.outputs, strict=True)
        listed = [f"        {self._literal(value)},  # {self._slot_text(slot)}" for value, slot in outputs]
        return ["    return (", *listed, "    )"] if listed else ["    return ()"]

    def _slot_text(self, slot: Slot) -> str:
        value = self.values.get(slot)
        return f"{slot} {dtype_name(value.dtype)}{value.layout}" if value else str(slot)

    def _literal(self, value: Any) -> str:
        return self.speller.literal(value, self._name)

    def _name(self, node: fx.Node) -> str:
        return self._expression(node) if node in self.inlined else self.names[node]

    def _statement(self, node: fx.Node) -> str | None:
        """The node's line, or None where it has none."""
        if node.op == "get_attr":
            return f'{self.names[node]} = constants["{self.part.name}.{node.target}"]'
        if node.op != "call_function" or node in self.inlined or self._is_unpacked(node):
            return None
        return f"{self._assignment(node)}{self._dropping(node)}{_layout_comment(node)}"

    def _assignment(self, node: fx.Node) -> str:
        if node in self.accumulations:
            return self._accumulation(node)
        text = _without_parentheses(self._expression(node))
        if written_operand(node) is not None:
            return text
        items = self._items(node)
        if items:
            return self._unpacked(node, items, text)
        return f"{self.names[node]} = {text}" if node.users else text

    def _accumulation(self, node: fx.Node) -> str:
        accumulator, gradient = (self._literal(operand) for operand in node.args)
        kept = gradient if self.accumulations[node] else f"{gradient}.clone(memory_format=torch.contiguous_format)"
        return (
            f"{self.names[node]} = {kept} if {accumulator} is None else {_without_parentheses(self._expression(node))}"
        )

    def _expression(self, node: fx.Node) -> str:
        if is_collective(node):
            words = [self._literal(argument) for argument in node.args]
            words += [f"{key}={self._literal(value)}" for key, value in node.kwargs.items()]
            return f"comm.{target_name(node)}({', '.join(words)})"
        return self.speller.call(node, self._name)

    def _items(self, node: fx.Node) -> dict[int, str]:
        """Index → name of a tuple's items, when every reader takes an item."""
        if not is_unpacked(node):
            return {}
        return {int(user.args[1]): self.names[user] for user in node.users}  # type: ignore[arg-type]

    def _unpacked(self, node: fx.Node, items: dict[int, str], text: str) -> str:
        if len(items) == 1:
            ((index, name),) = items.items()
            return f"{name} = {text}[{index}]"
        length = len(local_value(node)) if isinstance(local_value(node), (tuple, list)) else max(items) + 1
        targets = ", ".join(items.get(index, "_") for index in range(length))
        return f"{targets} = {text}" + ("; del _" if len(items) < length else "")

    def _is_unpacked(self, node: fx.Node) -> bool:
        return node.target is operator.getitem and bool(self._items(node_argument(node, 0)))

    def _dropping(self, node: fx.Node) -> str:
        """`; del a, b` for what no later statement reads."""
        position = self.lives.position[node]
        names = dict.fromkeys(self.names[operand] for operand in self._operands(node))
        if not node.users and written_operand(node) is None:
            names.pop(self.names[node], None)
        dead = [name for name in names if self.last_use[name] <= position and name not in self.kept]
        return f"; del {', '.join(dead)}" if dead else ""


_SUFFIXES = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "reduc", "all_to_all": "exchang"}


def _suffix(node: fx.Node) -> str:
    """`_gathering` for what a start gives, `_gathered` for what the collective or its wait gives."""
    start = node.all_input_nodes[0] if is_collective(node) and is_wait(node) else node
    verb = _SUFFIXES.get(target_name(start).removesuffix("_start")) if is_collective(start) else None
    return "" if verb is None else f"_{verb}{'ing' if is_start(node) else 'ed'}"


def _subject(node: fx.Node) -> fx.Node:
    """What a collective is about: its operand, seen through views, waits and other collectives."""
    operand = node.all_input_nodes[0]
    while is_view(operand) or _suffix(operand):
        operand = operand.all_input_nodes[0]
    return operand


def _is_inlinable(node: fx.Node) -> bool:
    is_number = node.target in PYTHON_INFIX and not isinstance(local_value(node), torch.Tensor)
    return is_number or (is_view(node) and isinstance(local_value(node), torch.Tensor))


def _can_hold(reader: fx.Node, node: fx.Node) -> bool:
    """Whether `node` may be written inside `reader`: a call that reads it once and doesn't write it."""
    occurrences = [operand for operand in nodes_in((reader.args, reader.kwargs)) if operand is node]
    is_call = reader.op == "call_function" and reader.target is not operator.getitem
    return is_call and len(occurrences) == 1 and written_operand(reader) is not node


def _unique(wanted: str, taken: set[str]) -> str:
    base = re.sub(r"\W+", "_", wanted).lstrip("_") or "value"
    base = f"{base}_" if keyword.iskeyword(base) else f"v{base}" if base[0].isdigit() else base
    name, count = base, 1
    while name in taken:
        name, count = f"{base}_{count}", count + 1
    return name


def _without_parentheses(text: str) -> str:
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


def _layout_comment(node: fx.Node) -> str:
    """The layout of what a collective gives: where the values of a program change hands."""
    layout = node.meta.get("layout")
    if not is_collective(node) or layout is None or isinstance(layout, tuple):
        return ""
    value = local_value(node)
    return f"  # {dtype_name(value.dtype)}{layout}" if isinstance(value, torch.Tensor) else ""
