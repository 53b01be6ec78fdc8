"""Let communication run behind computation: each collective becomes a start and a wait, and nodes are put in order.

    w = all_gather(shard, "dp", 0); y = x.mm(w)        ->    p = all_gather_start(shard, "dp", 0)   # a block earlier
                                                             ...
                                                             w = wait(p); y = x.mm(w)

Before: a functional part of local tensors with blocking collectives. After: every collective that communicates is a
start and a wait; the nodes are otherwise the same, and every node still follows its operands (checked). All ranks run
one graph, so the order of starts is the same everywhere. Numbers stay bit-equal.

Where things go, by what a collective hangs on (a block is a run of nodes of one `layers.N`, with a matmul in it):
- *early* (made from the part's inputs by views and casts: parameter gathers): started at the beginning of the block
  before its first reader, awaited by the reader; fewer blocks ahead when gathered buffers would exceed the budget;
- *late* (leads only to the part's outputs: gradient reductions): started when its input is ready, awaited at the end
  of the following block;
- the rest (activations): started when ready, awaited by the first reader. Weight gradients that are computed before
  it, and that only late things read, are moved behind its start: they are what it hides behind.
Sums into accumulators that wait for no collective follow their gradient, which is then free.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from autopar import collectives
from autopar.program.parts import Part
from autopar.program.storages import is_start, is_wait, local_value, nbytes
from autopar.rules.nodes import op_name
from autopar.solve.costs import HEAVY
from passes.context import Overlap
from passes.editing import edit
from passes.kinds import (
    block_of,
    early,
    feeders,
    fillers,
    is_accumulation,
    late,
    small_from_batch,
    started_by,
    summed,
)

_Flight = tuple[float, float, int]
"""(start, first use, bytes)"""


def schedule_collectives(part: Part, context: Any = None) -> Part:
    """`part` with started and awaited collectives in the order described above.

    `context`: the limits, or something with the limits as its attribute `overlap`; by default those of `Overlap()`.
    """
    given = getattr(context, "overlap", context)
    limits = given if isinstance(given, Overlap) else Overlap()
    if not any(node.target in collectives.STARTED or is_accumulation(node) for node in part.graph.graph.nodes):
        return part
    split = edit(part, _split)
    last = late(split.graph.graph)
    order = _limited(_ordered(split, last, limits), last, limits)
    check_order(split.graph.graph, order)
    return edit(split, lambda graph: _reorder(graph, order))


def check_order(graph: fx.Graph, order: list[fx.Node]) -> None:
    """Asserts that `order` holds each node of `graph` once, operands first, placeholders foremost, output last."""
    position = {node: index for index, node in enumerate(order)}
    assert len(order) == len(position) == len(graph.nodes), "schedule_collectives: nodes were lost or doubled"
    for node in order:
        for operand in node.all_input_nodes:
            assert position[operand] < position[node], _misplaced(
                node, operand, order[max(position[node] - 2, 0) :][:5]
            )
    assert order[-1].op == "output"


def _misplaced(node: fx.Node, operand: fx.Node, around: list[fx.Node]) -> str:
    lines = [f"schedule_collectives: {node} precedes {operand}:", *(n.format_node() or str(n) for n in around)]
    return "\n".join(lines)


def _split(graph: fx.Graph) -> None:
    """Each blocking collective → start and wait."""
    for node in list(graph.nodes):
        start = collectives.STARTED.get(node.target) if node.op == "call_function" else None
        if start is None:
            continue
        with graph.inserting_before(node):
            pending = graph.call_function(start, node.args, node.kwargs)
            result = graph.call_function(collectives.wait, (pending,))
        pending.meta, result.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _reorder(graph: fx.Graph, order: list[fx.Node]) -> None:
    """Puts the nodes of `graph` (a copy of what `order` was made for) in that order, matched by name."""
    nodes = {node.name: node for node in graph.nodes}
    last: fx.Node | None = None
    for wanted in order[:-1]:
        node = nodes[wanted.name]
        if last is not None and last.next is not node:
            last.append(node)
        last = node


# -- order -------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Times:
    """When each node is wanted, on the axis of the graph's own positions."""

    graph: fx.Graph
    limits: Overlap
    nodes: list[fx.Node]
    """The order to start from."""
    position: dict[fx.Node, float] = field(init=False)
    begins: list[float] = field(init=False)
    """First position of each block."""
    time: dict[fx.Node, float] = field(init=False)

    def __post_init__(self) -> None:
        self.position = {node: float(index) for index, node in enumerate(self.nodes)}
        self.begins = list(_block_begins(self.nodes))
        self.time = dict(self.position)

    def block(self, time: float) -> int:
        return max(bisect.bisect_right(self.begins, time) - 1, 0)

    def begin(self, block: int) -> float:
        return self.begins[block] if 0 <= block < len(self.begins) else self.begins[0] if block < 0 else float("inf")


def _ordered(part: Part, last: set[fx.Node], limits: Overlap) -> list[fx.Node]:
    """The nodes by the time at which they are wanted, each after its operands; waits come when asked for."""
    graph = part.graph.graph
    if part.name in ("norm", "update"):  # it has no other work: all starts come as soon as the limits allow
        limits = replace(limits, blocks_ahead=len(graph.nodes))
    times = _Times(graph, limits, _ready_first(graph) if part.name in ("norm", "update") else list(graph.nodes))
    first = early(graph)
    _hoist_small(times, part)
    _delay_fillers(times, fillers(part, last), last | first)
    _place_sums(times, last)
    _place_feeders(times, last)
    _place_late(times, last)
    _place_early(times, first - last)
    seeds = [node for node in graph.nodes if not is_wait(node) or _is_returned(node)]
    seeds.sort(key=lambda node: (node.op != "placeholder", node.op == "output", times.time[node]))
    return list(_operands_first(seeds))


def _operands_first(seeds: list[fx.Node]) -> Iterator[fx.Node]:
    done: set[fx.Node] = set()
    for seed in seeds:
        stack = [seed]
        while stack:
            node = stack[-1]
            missing = [operand for operand in node.all_input_nodes if operand not in done]
            if missing:
                stack += reversed(missing)
                continue
            stack.pop()
            if node not in done:
                done.add(node)
                yield node


def _ready_first(graph: fx.Graph) -> list[fx.Node]:
    """The nodes with those that hang on a collective last: what needs none is what the collectives hide behind."""
    hanging: set[fx.Node] = set()
    for node in graph.nodes:
        if is_start(node) or any(operand in hanging for operand in node.all_input_nodes):
            hanging.add(node)
    return sorted(graph.nodes, key=lambda node: node in hanging)


def _block_begins(nodes: list[fx.Node]) -> Iterator[float]:
    """Where runs of nodes of one block begin; nodes outside any module belong to the run around them.

    In a part with matmuls a run without any (a norm between the blocks) goes with the next: it hides nothing.
    """
    current: str | None = None
    is_light = False
    with_matmuls = any(map(_is_matmul, nodes))
    yield 0.0
    for index, node in enumerate(nodes):
        block = block_of(node.meta.get("path", ""))
        if node.op == "call_function" and block and block != current:
            if current is not None and not is_light:
                yield float(index)
            current, is_light = block, with_matmuls
        is_light = is_light and not _is_matmul(node)


# -- placement ---------------------------------------------------------------------------------------------------
def _hoist_small(times: _Times, part: Part) -> None:
    """What leads from the batch to a start by little work is done first, so that the start can follow at once."""
    ready, wanted = small_from_batch(part), set[fx.Node]()
    for node in reversed(times.graph.nodes):
        if node in ready and any(is_start(user) or user in wanted for user in node.users):
            wanted.add(node)
    for node in times.graph.nodes:
        is_fed = is_start(node) and all(operand in wanted for operand in node.all_input_nodes)
        if node.op == "call_function" and (node in wanted or is_fed):
            times.time[node] = 0.0


def _delay_fillers(times: _Times, delayed: set[fx.Node], ends: set[fx.Node]) -> None:
    """Fillers go behind the next start of the middle kind, if it comes within this block or the next.

    Where starts follow on each other with no matmul to put in between, they share those before them.
    """
    middle = [times.position[node] for node in times.nodes if is_start(node) and node not in ends]
    waiting: dict[int, list[fx.Node]] = {}
    for node in times.nodes:
        if node in delayed:
            waiting.setdefault(bisect.bisect_left(middle, times.position[node]), []).append(node)
    for index, nodes in waiting.items():
        shared = [index]
        while shared[-1] + 1 < len(middle) and not any(map(_is_matmul, waiting.get(shared[-1] + 1, ()))):
            shared.append(shared[-1] + 1)
        for node, start in zip(nodes, _dealt(nodes, shared), strict=True):
            near = [i for i in shared if i <= start and _is_near(times, node, middle, i)]
            if near:
                times.time[node] = middle[near[-1]] + 0.5


def _is_matmul(node: fx.Node) -> bool:
    """Whether a node takes time, so that collectives hide behind it."""
    return op_name(node) in HEAVY


def _is_near(times: _Times, node: fx.Node, middle: list[float], start: int) -> bool:
    """Whether a start comes within the node's block or the next."""
    return start < len(middle) and times.block(middle[start]) <= times.block(times.position[node]) + 1


def _dealt(nodes: list[fx.Node], starts: list[int]) -> list[int]:
    """A start for each node, in order, such that each start gets about the same number of matmuls."""
    heavy = list(itertools.accumulate(_is_matmul(node) for node in nodes))
    share = max(heavy[-1], 1)
    return [starts[min(max(count - 1, 0) * len(starts) // share, len(starts) - 1)] for count in heavy]


def _place_sums(times: _Times, last: set[fx.Node]) -> None:
    """A gradient is cast and added to its accumulator at once, so that it needn't be kept beside it."""
    sums = summed(times.graph)
    for node in times.graph.nodes:
        if node in sums and node not in last:
            times.time[node] = max(times.time[operand] for operand in node.all_input_nodes) + 0.01


def _place_feeders(times: _Times, last: set[fx.Node]) -> None:
    """What a late start is made ready by follows its operands: it stands where the sum is that reads what is reduced,
    often at the end of the part."""
    feeding = feeders(times.graph, last)
    for node in times.graph.nodes:
        if node in feeding:
            times.time[node] = max(times.time[operand] for operand in node.all_input_nodes)


def _place_late(times: _Times, last: set[fx.Node]) -> None:
    """Starts follow their input; what follows a wait comes at the end of the next block."""
    for node in times.graph.nodes:
        if node not in last or (is_wait(node) and not _is_returned(node)):
            continue
        ready = max((times.time[operand] for operand in node.all_input_nodes), default=0.0)
        waits = [node] if is_wait(node) else [operand for operand in node.all_input_nodes if is_wait(operand)]
        if waits:
            started = max(times.time[started_by(wait)] for wait in waits)
            ready = max(ready, times.begin(times.block(started) + 2) - 0.25)
        times.time[node] = ready + 0.01 if is_start(node) else ready
        for user in node.users:
            if is_wait(user):
                times.time[user] = times.time[node]


def _is_returned(wait: fx.Node) -> bool:
    """Whether nothing in the part reads what is awaited."""
    return all(user.op == "output" for user in wait.users)


def _place_early(times: _Times, first: set[fx.Node]) -> None:
    """Starts come some blocks before their first reader, later where the buffers would exceed the budget."""
    starts = [node for node in times.graph.nodes if node in first and is_start(node)]
    first_use = {node: _first_use(node, times, first) for node in starts}
    flights: list[_Flight] = []
    for rank, (node, use) in enumerate(sorted(first_use.items(), key=lambda item: item[1])):
        wanted = times.begin(times.block(use) - times.limits.blocks_ahead) - 0.5
        size = nbytes(local_value(node))
        begin = _affordable(wanted, use - 0.25, size, flights, times.limits)
        flights.append((begin, use, size))
        times.time[node] = begin + rank * 1e-6  # at one moment, what is read first goes first
    for node in first:
        if not is_start(node):
            times.time[node] = _first_use(node, times, first) - 0.25


def _first_use(node: fx.Node, times: _Times, first: set[fx.Node]) -> float:
    """When the first reader outside the early chain runs."""
    return min((_first_use(u, times, first) if u in first else times.time[u] for u in node.users), default=float("inf"))


def _affordable(wanted: float, latest: float, size: int, flights: list[_Flight], limits: Overlap) -> float:
    """The first moment from `wanted` on at which what is in flight leaves room, at the latest `latest`."""
    for moment in sorted({wanted, *(end + 0.25 for _, end, _ in flights if wanted < end + 0.25 < latest)}):
        held = [size for _, end, size in flights if end > moment]
        if sum(held) + size <= limits.gathered_bytes and len(held) < limits.outstanding:
            return moment
    return latest


def _limited(order: list[fx.Node], last: set[fx.Node], limits: Overlap) -> list[fx.Node]:
    """The same order with the oldest collectives awaited early wherever too many would be in flight, or too many bytes
    of what is reduced (`last`) and of its results."""
    result: list[fx.Node] = []
    flying: dict[fx.Node, tuple[fx.Node, int]] = {}
    emitted: set[fx.Node] = set()
    for node in order:
        if node in emitted:
            continue
        size = _held_bytes(node) if node in last else 0
        while is_start(node) and flying and not _has_room(flying, size, limits):
            wait, _ = flying.pop(next(iter(flying)))
            result.append(wait)
            emitted.add(wait)
        if is_start(node) and node.users:
            flying[node] = next(iter(node.users)), size
        elif is_wait(node):
            flying.pop(started_by(node), None)
        result.append(node)
        emitted.add(node)
    return result


def _has_room(flying: dict[fx.Node, tuple[fx.Node, int]], size: int, limits: Overlap) -> bool:
    held = sum(held for _, held in flying.values())
    return len(flying) < limits.outstanding and (size == 0 or held + size <= limits.gathered_bytes)


def _held_bytes(start: fx.Node) -> int:
    """Of a collective's operands and results."""
    return sum(nbytes(local_value(node)) for node in (start, *start.all_input_nodes))
