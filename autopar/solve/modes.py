"""How each forward value may come to the backward: kept, computed again, or not at all.

    modes = modes_of(graph)
    modes.of[gelu]          # (Mode.KEPT, Mode.AGAIN): the backward reads it
    modes.of[linear]        # (Mode.AGAIN, Mode.DROPPED): only of use for computing something else again

What the forward's relay moved may be kept in place of the value itself (`joint.forward_twin`): then that is dropped. A
value is *needed* when the backward reads it, or when something that may be computed again reads it. What is computed
again needs each of its forward operands kept or computed again; parameters, buffers and the batch are always there.

Restrictions, beside what follows from that:
- what one block needs of another is kept, so that a block's values come back just before its own backward runs;
- random ops are never run again, nor (unless a pin says so) what is small beside the greatest value of its block;
- a relay is never kept (the value that it passes on may be), and a view only where the backward reads it;
- a value with one reader isn't kept where that reader's result, which is no bigger, may be.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch.fx import Graph, Node

from autopar import markers
from autopar.joint import forward_twin
from autopar.layers import blocks_of
from autopar.rules.nodes import argument, is_random, is_view, node_argument

SMALL = 1 / 32
"""Of the greatest value of the block: what takes less is kept where the backward reads it."""


class Mode(Enum):
    """What becomes of a forward value until its backward."""

    KEPT = "kept"
    AGAIN = "again"
    DROPPED = "dropped"


Wanted = Callable[[Node], bool]
"""Which nodes a pin wants computed again; all others then are not."""


@dataclass(slots=True)
class Modes:
    """The modes of the forward nodes that run each microbatch (a getitem has those of its tuple)."""

    of: dict[Node, tuple[Mode, ...]] = field(default_factory=dict)
    block: dict[Node, str] = field(default_factory=dict)
    items: dict[Node, set[int]] = field(default_factory=dict)
    """Which of a node's results are needed."""
    read: dict[Node, set[int]] = field(default_factory=dict)
    """Which of them the backward reads, itself or a view; the others are gone once what is made of them is there."""
    runs: dict[Node, int] = field(default_factory=dict)
    """How often a node is computed again: once a block that needs it; more than once only for views and relays."""
    foreign: set[tuple[Node, int]] = field(default_factory=set)
    """(value, stage): the backward of a stage reads what another stage made, so it is kept there in any mode."""


def modes_of(graph: Graph, wanted: Wanted | None = None) -> Modes:
    """The modes of a step graph; see the module's docstring."""
    return _Analysis(graph, wanted).run()


def producer(value: Node) -> tuple[Node, int]:
    """The node that makes a value, and which of its results it is."""
    if value.target is not operator.getitem:
        return value, 0
    return node_argument(value, 0), argument(value, 1, "item")


def is_forward(node: Node) -> bool:
    """Whether a node has modes."""
    return node.op == "call_function" and node.meta["phase"] == "forward" and node.target is not operator.getitem


def may_be_reused(reader: Node, wanted: Wanted | None) -> bool:
    """Whether a node of the backward may read what the forward's relay moved: where no pin wants that moved again."""
    twin = forward_twin(reader)
    return twin is not None and (wanted is None or not wanted(twin))


@dataclass(slots=True)
class _Analysis:
    graph: Graph
    wanted: Wanted | None
    found: Modes = field(default_factory=Modes)
    read: dict[Node, set[int]] = field(default_factory=dict)
    """The results that the backward of the same stage reads."""
    irreplaceable: set[Node] = field(default_factory=set)
    """Those of which it may not read what the forward's relay moved instead."""
    readers: dict[Node, set[str]] = field(default_factory=dict)
    """The blocks that need a node."""
    greatest: dict[str, int] = field(default_factory=dict)

    def run(self) -> Modes:
        self.found.block = blocks_of(self.graph)
        for node in filter(is_forward, self.graph.nodes):
            block = self.found.block[node]
            self.greatest[block] = max(self.greatest.get(block, 0), _size(node, None))
        for node in self.graph.nodes:
            if node.op == "call_function" and node.meta["phase"] == "backward":
                self._note_reads(node)
        for node in reversed(self.graph.nodes):
            if is_forward(node):
                self._decide(node)
        return self.found

    def _note_reads(self, reader: Node) -> None:
        blocks = {self.found.block[user] for user in reader.users} if reader.target is markers.relay else set()
        for value in reader.all_input_nodes:
            node, item = producer(value)
            if not is_forward(node):
                continue
            if node.meta["stage"] != reader.meta["stage"]:
                self.found.foreign.add((value, reader.meta["stage"]))
                continue
            self.read.setdefault(node, set()).add(item)
            if not may_be_reused(reader, self.wanted):
                self.irreplaceable.add(node)
            self.readers.setdefault(node, set()).update(blocks or {self.found.block[reader]})

    def _decide(self, node: Node) -> None:
        again = list(self._again(node))
        read = self.read.get(node, set())
        self.found.items[node] = read | {item for _, item in again}
        self.found.read[node] = read | {item for view, item in again if is_view(view) and self.found.read[view]}
        blocks = self.readers.setdefault(node, set())
        for reader, _ in again:
            blocks |= self.readers[reader] if is_view(reader) else {self.found.block[reader]}
        self.found.runs[node] = max(1, len(blocks)) if is_view(node) else 1
        self.found.of[node] = self._modes(node, bool(read), [reader for reader, _ in again])

    def _again(self, node: Node) -> Iterator[tuple[Node, int]]:
        """The forward readers on the same stage that may be computed again, with the result that they read."""
        for value in (node, *(user for user in node.users if user.target is operator.getitem)):
            for reader in value.users:
                is_here = is_forward(reader) and reader.meta["stage"] == node.meta["stage"]
                if is_here and Mode.AGAIN in self.found.of[reader]:
                    yield reader, producer(value)[1]

    def _modes(self, node: Node, is_read: bool, again: list[Node]) -> tuple[Mode, ...]:
        if not is_read and not again:
            return (Mode.DROPPED,)
        can_again = is_view(node) or self._may_run_again(node)
        if is_read and self.wanted is None and self._is_small(node):
            return (Mode.KEPT,)
        is_pinned = self.wanted is not None and can_again and self.wanted(node)
        can_keep = not is_pinned and self._may_be_kept(node, is_read, again)
        can_drop = node not in self.irreplaceable
        modes = [Mode.KEPT] * can_keep + [Mode.AGAIN] * can_again + [Mode.DROPPED] * can_drop
        assert modes, f"{node.meta['key']}: neither kept nor computed again"
        return tuple(modes)

    def _may_run_again(self, node: Node) -> bool:
        if is_random(node) or not self.readers[node] <= {self.found.block[node]}:
            return False
        return self.wanted is None or self.wanted(node)

    def _is_small(self, node: Node) -> bool:
        return not is_view(node) and _size(node, self.found) < SMALL * self.greatest[self.found.block[node]]

    def _may_be_kept(self, node: Node, is_read: bool, again: list[Node]) -> bool:
        if node.target is markers.relay:
            return False
        if is_read:
            return not is_view(node) or _size(node, self.found) <= _size(producer(node_argument(node, 0))[0], None)
        if is_view(node):
            return False
        (only, *others) = again
        return bool(others) or Mode.KEPT not in self.found.of[only] or _size(only, self.found) > _size(node, self.found)


def _size(node: Node, modes: Modes | None) -> int:
    """Bytes of the whole value; of a tuple, those of the results that are needed."""
    value = node.meta["val"]
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    needed = range(len(values)) if modes is None else modes.items[node]
    tensors = [values[item] for item in needed if isinstance(values[item], torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
