"""What a rank holds at the moments when it may need most: the bytes behind the solver's memory limits.

    for node, moment, per_strategy in Holdings(…).rows(): …

Moments: the start of a stage's backward, at the times when its rank may hold most (`solve.in_flight`); where gradients
are never all there beside activations, the end of the step, too. With recompute, what is computed again for the last
block of the stage is there at the start, as far as the backward reads it; a head after the blocks may be small, so the
start of the block before it is a moment of its own; or large on its way, so that its widest op is another.

Invariant: no program of these choices needs less than what a row counts (what it makes on the way comes on top), so
that what the limits rule out can't be had.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.fx import Graph, Node

from autopar import markers
from autopar.gradients import reduced_by_backward
from autopar.joint import forward_twin
from autopar.program.storages import nbytes
from autopar.rules.nodes import is_pointwise, is_view, node_argument, tensor_operands
from autopar.solve import problem as abstract
from autopar.solve.modes import Mode, Modes, is_forward, producer
from autopar.solve.problem import Array, Problem
from autopar.solve.ranks import Owned, RankKind

NO_BLOCK = "none"

Row = tuple[Node, int, Array]
"""A node, the index of a moment, and bytes per strategy."""


@dataclass(frozen=True, slots=True)
class Widest:
    """The op of a block's backward at which most is there that the block makes on its way."""

    node: Node
    live: tuple[Node, ...]
    """Storages made in the block's backward, before or by others, that are still read."""
    read: tuple[Node, ...]
    """Those of the block's forward that it reads."""
    over: Node | None
    """Of these, the one in whose place the result may be, unless it is kept."""
    is_apart: bool
    """Whether the result has a place of its own."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The start of the backward of `block`, what `freed` kept being gone; or the end of the stage's backward."""

    rank: int
    """Which kind of ranks."""
    stages: Mapping[int, Owned]
    """What these have and hold."""
    stage: int
    """Of those, the one whose backward it is."""
    name: str
    block: str = NO_BLOCK
    freed: str | None = None
    widest: Widest | None = None
    """What is there, too, when an op runs."""

    def held(self, stage: int, block: str = "") -> int:
        """Microbatches of which what `block` keeps on a stage is there."""
        if stage not in self.stages:
            return 0
        return max(0, self.stages[stage].held - (stage == self.stage and self.freed == block))


KINDS = (
    Moment(0, {0: Owned(1, held=0, summed=0)}, 0, "at rest"),
    Moment(0, {0: Owned(1, held=0, summed=1)}, 0, "at rest, gradients"),
    Moment(0, {0: Owned(1, held=1, summed=0)}, 0, "at rest, kept of a microbatch"),
)
"""In place of moments: of one stage, what there is of each kind, by itself or beside what rests."""


def kinds_of(graph: Graph, modes: Modes | None) -> list[Moment]:
    """`KINDS` of a graph of one stage; and what the widest op after its blocks needs, where there are such."""
    last = _blocks(graph, 0, modes)[0]
    widest = _widest(graph, 0, last, modes) if last == "after" and modes is not None else None
    return [*KINDS, *([replace(KINDS[0], name="at rest, widest", widest=widest)] if widest is not None else [])]


class Kinds(NamedTuple):
    """Bytes of each strategy of a node, by kind."""

    rest: Array
    """There all the time."""
    gradients: Array
    kept: Array
    """For the backward of one microbatch."""
    widest: Array
    """Read at once by the widest op after the blocks."""


def by_kind(node: abstract.Node) -> Kinds:
    """Of a node of a problem that tells memory by kind."""
    nothing = np.zeros(node.num_strategies)
    rest, *others = (node.memory.get(kind, nothing) for kind in range(len(KINDS) + 1))
    return Kinds(rest, *(np.maximum(each - rest, 0.0) for each in others))


def moments_of(graph: Graph, ranks: Sequence[RankKind], modes: Modes | None) -> list[Moment]:
    """The moments of each kind of ranks, in order."""
    has_backward = any(n.op == "call_function" and n.meta["phase"] == "backward" for n in graph.nodes)
    found: list[Moment] = []
    for rank, kind in enumerate(ranks):
        title, named = f"rank {kind.rank} " * (len(kind.stages) > 1), set[str]()
        for stage, stages in kind.moments if has_backward else kind.moments[:1]:
            number = next(n for n in itertools.count(1) if f"{title}stage {stage} {n}" not in named)
            named.add(f"{title}stage {stage} {number}")
            name = f"{title}stage {stage}" + f" moment {number}" * (number > 1)
            blocks = _blocks(graph, stage, modes)
            found += _starts(functools.partial(Moment, rank, stages, stage), name, blocks)
            if blocks[0] == "after" and modes is not None:
                widest = _widest(graph, stage, "after", modes)
                found.append(Moment(rank, stages, stage, f"{name} widest", freed="after", widest=widest))
        if has_backward and not any(_is_summed(stages) for _, stages in kind.moments):
            stage, stages = kind.moments[-1]
            last = {each: Owned(own.count, held=0, summed=own.count) for each, own in stages.items()}
            found.append(Moment(rank, last, stage, f"{title}stage {stage} end"))
    return found


def _starts(moment: Callable[..., Moment], name: str, blocks: list[str]) -> Iterator[Moment]:
    """Of a stage's backward: that of its last block, and that of the one before a head."""
    last, *before = blocks
    yield moment(name, last)
    if last == "after" and before:
        yield moment(f"{name} {before[0]}", before[0], freed=last)


def _blocks(graph: Graph, stage: int, modes: Modes | None) -> list[str]:
    """Those of a stage, the last first."""
    nodes = [n for n in reversed(graph.nodes) if is_forward(n) and n.meta["stage"] == stage and not is_view(n)]
    return list(dict.fromkeys(modes.block[n] for n in nodes)) if modes is not None and nodes else [""]


def _widest(graph: Graph, stage: int, block: str, modes: Modes) -> Widest | None:
    nodes = [
        node
        for node in graph.nodes
        if node.op == "call_function" and node.meta["phase"] == "backward" and node.meta["stage"] == stage
        if modes.block.get(producer(node)[0]) == block
    ]
    last_read = {_storage(value): number for number, node in enumerate(nodes) for value in tensor_operands(node)}
    best, most = None, 0
    for number, node in enumerate(nodes):
        if _storage(node) is not node or not isinstance(node.meta["val"], Tensor):
            continue
        found = _at(node, nodes[:number], {v for v, last in last_read.items() if last >= number}, block, modes)
        size = sum(map(_size, (*found.live, *found.read)))
        size += _size(node) if found.is_apart or found.over is not None else 0
        if size > most:
            best, most = found, size
    return best


def _at(node: Node, before: Sequence[Node], read_later: set[Node], block: str, modes: Modes) -> Widest:
    operands = list(dict.fromkeys(_storage(value) for value in tensor_operands(node)))
    live = tuple(each for each in before if each in read_later)
    read = tuple(
        v for v in operands if is_forward(producer(v)[0]) and modes.block[producer(v)[0]] == block and not is_view(v)
    )
    alike = [v for v in operands if v.meta["val"].shape == node.meta["val"].shape and _size(v) == _size(node)]
    is_free = any(v not in read for v in alike) or not is_pointwise(node.target)
    over = None if is_free else next((v for v in read if v in alike), None)
    return Widest(node, live, read, over, is_apart=not is_pointwise(node.target) or not alike)


def _storage(value: Node) -> Node:
    """As `base_of`, where relays move nothing."""
    while (
        value.op == "call_function"
        and value.target is not operator.getitem
        and (value.target is markers.relay or is_view(value))
    ):
        value = node_argument(value, 0)
    return value


def _size(value: Node) -> int:
    return nbytes(value.meta["val"]) if isinstance(value.meta["val"], Tensor) else 0


def _is_summed(stages: Mapping[int, Owned]) -> bool:
    """Whether the gradients of all stages are there."""
    return all(own.summed == own.count for own in stages.values())


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the rows are made of. `result_bytes` and `operand_bytes`: of a node's result or operand on a rank, per
    strategy of the node; `in_mode`, `holds_copy` and `is_reused`: 1 for the strategies that are, else 0."""

    graph: Graph
    moments: list[Moment]
    modes: Modes | None
    result_bytes: Callable[[Node, int], Array]
    operand_bytes: Callable[[Node, int], Array]
    in_mode: Callable[[Node, Mode], Array]
    holds_copy: Callable[[Node], Array]
    is_reused: Callable[[Node], Array]

    def rows(self) -> Iterator[Row]:
        """Every row; a node may have several at a moment."""
        for node in self.graph.nodes:
            if node.op == "placeholder" and node.meta["role"].kind in ("param", "state"):
                yield from self._always(node)
            elif is_step_relay(node):
                yield from self._always(node, self.holds_copy(node))
            elif self.modes is not None and is_forward(node):
                yield from self._by_mode(node, self.modes)
            elif forward_twin(node) is not None:
                yield from self._reused(node)
        yield from self._gradients()
        yield from self._widest()
        yield from self._activations() if self.modes is None else self._foreign(self.modes)

    def _always(self, node: Node, count: Array | float = 1.0) -> Iterator[Row]:
        for index, moment in enumerate(self.moments):
            if node.meta["stage"] in moment.stages:
                own = moment.stages[node.meta["stage"]].count
                yield node, index, self.result_bytes(node, 0) * count * own

    # -- gradients ---------------------------------------------------------------------------------------------
    def _gradients(self) -> Iterator[Row]:
        early, reads = set(reduced_by_backward(self.graph)), list(self._gradient_reads())
        reduced = {value: reader for value, reader in reads if value in early and _is_reduced_here(value, reader)}
        for value in dict.fromkeys(value if value in reduced else base_of(value) for value, _ in reads):
            stage = value.meta["stage"]
            for index, moment in enumerate(self.moments):
                if stage not in moment.stages:
                    continue
                own = moment.stages[stage]
                count = min(own.count, own.summed + self._is_early(value, moment))
                if not count:
                    continue
                if value in reduced:
                    reader = reduced[value]
                    place = tensor_operands(reader).index(value)
                    yield reader, index, self.operand_bytes(reader, place) * count
                else:
                    yield self._row(value, index, count)

    def _is_early(self, gradient: Node, moment: Moment) -> bool:
        """Whether it is there at a moment that comes after its own block's backward."""
        is_here = moment.stage == gradient.meta["stage"]
        return is_here and self.modes is not None and moment.freed == self.modes.block[gradient]

    def _gradient_reads(self) -> Iterator[tuple[Node, Node]]:
        """What the backward leaves to the update (sums, or gradients of the only microbatch), each with its reader."""
        for node in self.graph.nodes:
            if node.op == "call_function" and node.meta["phase"] in ("norm", "update"):
                sources = (source for source in node.all_input_nodes if source.op == "call_function")
                yield from ((source, node) for source in sources if source.meta["phase"] == "backward")

    def _widest(self) -> Iterator[Row]:
        """What is there at the widest op of a moment."""
        for index, moment in enumerate(self.moments):
            if moment.widest is None:
                continue
            at = moment.widest
            yield from (self._row(value, index) for value in (*at.live, *at.read, *[at.node] * at.is_apart))
            if at.over is not None:
                maker, item = producer(at.over)
                yield maker, index, self.result_bytes(maker, item) * self.in_mode(maker, Mode.KEPT)

    # -- activations -------------------------------------------------------------------------------------------
    def _activations(self) -> Iterator[Row]:
        """Without recompute: each storage that the backward reads from, once a stage."""
        for base, stage in dict.fromkeys((base_of(value), stage) for value, stage in self._read_by_backward()):
            if base.op == "call_function" and not is_parameter(base):
                yield from self._during(base, stage)

    def _read_by_backward(self) -> Iterator[tuple[Node, int]]:
        for node in self.graph.nodes:
            if node.op == "call_function" and node.meta["phase"] == "backward":
                sources = [n for n in node.all_input_nodes if n.op == "call_function" and n.meta["phase"] == "forward"]
                yield from ((source, node.meta["stage"]) for source in sources)

    def _during(self, value: Node, stage: int) -> Iterator[Row]:
        for index, moment in enumerate(self.moments):
            if held := moment.held(stage):
                yield self._row(value, index, held)

    def _row(self, value: Node, index: int, count: float = 1.0) -> Row:
        node, item = producer(value)
        return node, index, self.result_bytes(node, item) * count

    def _reused(self, relay: Node) -> Iterator[Row]:
        """What a backward's relay reads of the forward's, beside the value itself where that is kept, too."""
        stage, value = relay.meta["stage"], producer(node_argument(relay, 0))[0]
        block = self.modes.block[value] if self.modes is not None else ""
        for index, moment in enumerate(self.moments):
            if held := moment.held(stage, block):
                yield relay, index, self.result_bytes(relay, 0) * self.is_reused(relay) * held

    # -- with recompute ----------------------------------------------------------------------------------------
    def _by_mode(self, node: Node, modes: Modes) -> Iterator[Row]:
        kept, again = self.in_mode(node, Mode.KEPT), self.in_mode(node, Mode.AGAIN)
        block, stage = modes.block[node], node.meta["stage"]
        received = [i for i, value in enumerate(tensor_operands(node)) if self._is_received(value, node, modes)]
        for index, moment in enumerate(self.moments):
            if stage not in moment.stages:
                continue
            is_open = moment.stage == stage and moment.block == block
            for item in sorted(modes.items[node]):
                is_read = is_open and item in modes.read[node] and not is_view(node)
                count = kept * moment.held(stage, block) + again * is_read
                yield node, index, self.result_bytes(node, item) * count
            for i in received:
                yield node, index, self.operand_bytes(node, i) * again * moment.held(stage)

    def _is_received(self, value: Node, reader: Node, modes: Modes) -> bool:
        """Whether another stage makes `value`, and this one needs it later only to compute `reader` again."""
        stage = reader.meta["stage"]
        return is_forward(producer(value)[0]) and value.meta["stage"] != stage and (value, stage) not in modes.foreign

    def _foreign(self, modes: Modes) -> Iterator[Row]:
        for value, stage in sorted(modes.foreign, key=lambda pair: (pair[0].name, pair[1])):
            yield from self._during(value, stage)


def is_step_relay(node: Node) -> bool:
    """Whether a node brings a parameter to the microbatches."""
    return node.target is markers.relay and node.meta["phase"] == "prologue"


def _is_reduced_here(gradient: Node, reader: Node) -> bool:
    """Whether the way of the only microbatch's gradient to its one reader can be taken by the backward."""
    is_sum = gradient.target is markers.accumulate
    return not is_sum and len(gradient.users) == 1 and gradient.meta["stage"] == reader.meta["stage"]


def base_of(value: Node) -> Node:
    """The value whose storage `value` shares; a relay may gather, so it counts as a storage of its own."""
    while value.op == "call_function" and value.target not in (operator.getitem, markers.relay) and is_view(value):
        value = node_argument(value, 0)
    return value


def is_parameter(value: Node) -> bool:
    """Whether relays lead from an input of the step to `value`."""
    while value.target is markers.relay:
        value = node_argument(value, 0)
    return value.op != "call_function"


def least_memory(problem: Problem, bytes_per_s: float) -> Problem:
    """The same choices; the objective is what all limits hold together, and `bytes_per_s` for each second of the step:
    what costs much time for little memory needs room while it runs, which the limits don't count."""
    weights = [sum(term.weight for term in problem.objective if row in term.rows) for row in range(problem.num_rows)]
    nodes = [
        replace(n, cost=n.cost * weights[n.row] * bytes_per_s + sum(n.memory.values()), row=0, memory={})
        for n in problem.nodes
    ]
    edges = [replace(edge, cost=edge.cost * weights[edge.row] * bytes_per_s, row=0) for edge in problem.edges]
    return Problem(tuple(nodes), tuple(edges))
