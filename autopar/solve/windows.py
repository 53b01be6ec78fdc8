"""Which communication of a step graph may hide, and behind which computation: what the program lets run together.

    windows = windows_of(step, advances=True)
    windows.of[mm]                          # 3: the window in which an op runs
    windows.hiding(weight, relay).shares    # ((2, 1.0),): its gather runs beside the computation of the window before

A window is a run of a stage's forward or backward through one block, as in `passes.schedule_collectives`, which starts
the gathers of a block when the one before it begins, and awaits the reductions of gradients when the one after it has
ended. So these may hide, each behind one window:
- the way of a parameter from where it rests in a microbatch to the ops that read it;
- the way of a parameter's gradient into its accumulator; where there is one microbatch and no pipeline, its way to
  the update, which `passes.place_reductions` puts into the backward (that of a last block hides in the update).

All else is waited for: activations, whose readers come next; what the first window of a part gathers, and the last one
reduces, since the program waits for it before it goes on; what is too small to be gathered block by block, or too large
to be started ahead; the prologue and the update.

A layer that stands for several is followed by one like it, but for the last of them: what hides is split accordingly.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from autopar import markers
from autopar.capture.runs import Repeats
from autopar.joint import StepGraph
from autopar.layers import block_of
from autopar.rules.nodes import is_view, op_name
from autopar.solve.costs import HEAVY, takes_time
from autopar.solve.modes import producer

Shares = tuple[tuple[int, float], ...]
"""Window → the part of something that falls to it."""

_CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
_SUMS = (torch.ops.aten.add.Tensor,)


SMALL_BYTES = 1 << 16
"""What is gathered into no more than this comes with those of other blocks, at the beginning of a part."""


def most_ahead(capacity: float) -> int:
    """Bytes of gathered parameters that a program for devices of `capacity` bytes starts before they are read."""
    return int(min(1 << 30, capacity // 10))


@dataclass(frozen=True, slots=True)
class Hiding:
    """What of a value's way from its maker to a reader may hide."""

    shares: Shares = ()
    is_gather: bool = False
    """Whether it is a parameter's, which hides at some sizes only."""

    @property
    def part(self) -> float:
        """Of its seconds, in all windows together."""
        return sum(part for _, part in self.shares)

    def holds(self, num_bytes: float, capacity: float) -> bool:
        """Whether it hides where what is moved has so many bytes on a rank, on devices of `capacity` bytes."""
        return not self.is_gather or SMALL_BYTES < num_bytes <= most_ahead(capacity)


NOTHING_HIDES = Hiding()


@dataclass(frozen=True, slots=True)
class Window:
    """A run through one block, and through what little came before it."""

    stage: int
    phase: str
    blocks: tuple[str, ...]
    times: int
    """For how many it stands, one after another."""
    period: tuple[str, int] | None
    """The same for blocks that come in turn."""


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a step graph, in the order in which they run within each part."""

    windows: tuple[Window, ...]
    of: dict[Node, int]
    """What takes time in a microbatch → its window."""
    needed: dict[Node, int | None]
    """What is made from parameters by moving alone → the window of the first op that reads it."""
    made: dict[Node, int | None]
    """What leads to gradients alone → the window that makes its input."""
    advances: bool
    """Whether gradients on their way to the update are reduced by the backward."""

    @property
    def stages(self) -> tuple[int, ...]:
        """The stage of each window."""
        return tuple(window.stage for window in self.windows)

    def again(self, node: Node) -> int | None:
        """The window in which a forward node is computed again."""
        wanted, block = (node.meta["stage"], "backward"), _block(node)
        found = (i for i, w in enumerate(self.windows) if (w.stage, w.phase) == wanted and block in w.blocks)
        return next(found, None)

    def hiding(self, value: Node, reader: Node) -> Hiding:
        """What of a value's way to a reader may hide."""
        gathered = self.gathered(value, reader)
        return Hiding(gathered or self.reduced(value, reader), bool(gathered))

    def gathered(self, value: Node, reader: Node) -> Shares:
        """Behind which windows the way of a parameter to a reader hides; none: it is waited for."""
        if producer(value)[0] not in self.needed or reader.meta["level"] != "microbatch":
            return ()
        return self.beside(self.needed.get(reader, self.of.get(reader)), -1)

    def reduced(self, value: Node, reader: Node) -> Shares:
        """Behind which windows the way of a gradient to its sum hides; none: it is waited for."""
        maker, _ = producer(value)
        is_here = maker.meta["phase"] == "backward" and maker.meta["stage"] == reader.meta["stage"]
        if not is_here or not (reader in self.made or self.is_advanced(value, reader)):
            return ()
        return self.beside(self.made.get(maker, self.of.get(maker)), 1)

    def is_advanced(self, value: Node, reader: Node) -> bool:
        """Whether the way of a gradient to the update is taken in the backward."""
        maker, _ = producer(value)
        is_gradient = "gradient_of" in maker.meta and len(maker.users) == 1
        return self.advances and is_gradient and reader.meta["level"] == "step"

    def beside(self, window: int | None, step: int) -> Shares:
        """The window before one (`step` -1) or after it (1), and in which part of the cases that is the one."""
        if window is None:
            return ()
        group = [i for i in self._part(window) if self._is_in_turn(i, window)]
        (near, far) = (group[0], group[-1]) if step < 0 else (group[-1], group[0])
        if window != near:
            return ((window + step, 1.0),)
        times, beyond = self.windows[window].times, window + step
        inside: Shares = ((far, (times - 1) / times),) if times > 1 else ()
        return (*inside, (beyond, 1 / times)) if beyond in self._part(window) else inside

    def _part(self, window: int) -> list[int]:
        own = self.windows[window]
        return [i for i, other in enumerate(self.windows) if (other.stage, other.phase) == (own.stage, own.phase)]

    def _is_in_turn(self, other: int, window: int) -> bool:
        period = self.windows[window].period
        return other == window or (period is not None and self.windows[other].period == period)


NO_WINDOWS = Windows((), {}, {}, {}, False)


@functools.lru_cache(maxsize=4)
def windows_of(step: StepGraph, advances: bool) -> Windows:
    """The windows of a step graph, layers that stand for several included; `advances`: whether the backward reduces
    gradients on their way to the update. Every candidate mesh asks for them."""
    windows: list[Window] = []
    of: dict[Node, int] = {}
    leading = _leading(step.graph)
    nodes = [n for n in step.graph.nodes if takes_time(n) and n.meta["level"] == "microbatch" and n not in leading]
    places = sorted({(n.meta["stage"], n.meta["phase"]) for n in nodes}, key=lambda p: (p[0], p[1] != "forward"))
    for stage, phase in places:
        here = [n for n in nodes if (n.meta["stage"], n.meta["phase"]) == (stage, phase)]
        for run in _runs(here):
            of.update((node, len(windows)) for node in run)
            windows.append(_window(stage, phase, run, step.repeats))
    made = _made(step.graph, of, leading)
    of.update((node, window) for node, window in made.items() if window is not None and takes_time(node))
    return Windows(tuple(windows), of, _needed(step.graph, of), made, advances)


def _runs(nodes: list[Node]) -> Iterator[list[Node]]:
    """Runs of nodes of one block; one without a matmul goes with the next, where there are matmuls at all."""
    with_matmuls = any(op_name(node) in HEAVY for node in nodes)
    run: list[Node] = []
    current = ""
    for node in nodes:
        block = _block(node)
        is_full = not with_matmuls or any(op_name(n) in HEAVY for n in run)
        if run and block and current and block != current and is_full:
            yield run
            run = []
        run.append(node)
        current = block or current
    yield run


def _window(stage: int, phase: str, run: list[Node], repeats: Repeats) -> Window:
    blocks = tuple(dict.fromkeys(filter(None, map(_block, run))))
    last = blocks[-1] if blocks else ""
    return Window(stage, phase, blocks, repeats.times(last), repeats.period(last))


def _block(node: Node) -> str:
    """As `passes.schedule_collectives` tells blocks apart: without a module list, by the first name of a path."""
    path: str = node.meta.get("path", "")
    return block_of(path) or path.partition(".")[0]


def _needed(graph: Graph, of: dict[Node, int]) -> dict[Node, int | None]:
    """What is made from parameters by moving alone, each with the window of its first reader in its own part."""
    early: list[Node] = []
    found: set[Node] = set()
    for node in graph.nodes:
        is_parameter = node.op == "placeholder" and node.meta["role"].kind == "param"
        is_moved = node.op == "call_function" and (node.target is markers.relay or _is_cheap(node))
        if is_parameter or (is_moved and all(operand in found for operand in node.all_input_nodes)):
            early.append(node)
            found.add(node)
    needed: dict[Node, int | None] = {}
    for node in reversed(early):
        readers = [user for user in node.users if _place(user) == _place(node)]
        uses = [needed.get(user, of.get(user)) for user in readers]
        needed[node] = min((use for use in uses if use is not None), default=None)
    return needed


def _leading(graph: Graph) -> set[Node]:
    """What leads to gradients alone, by casts, views and sums: the program does it as soon as it can."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.meta["phase"] != "backward":
            continue
        is_cheap = node.target is markers.accumulate or _is_cheap(node) or node.target in _SUMS
        if is_cheap and node.users and all(u in found or u.meta.get("level") == "step" for u in node.users):
            found.add(node)
    return found


def _made(graph: Graph, of: dict[Node, int], leading: set[Node]) -> dict[Node, int | None]:
    """What leads to gradients alone, each with the window in which its input is made."""
    found: dict[Node, int | None] = {}
    for node in graph.nodes:
        if node in leading:
            made = [found.get(operand, of.get(operand)) for operand in node.all_input_nodes]
            found[node] = max((window for window in made if window is not None), default=None)
    return found


def _is_cheap(node: Node) -> bool:
    return is_view(node) or node.target in _CASTS


def _place(node: Node) -> tuple[object, ...]:
    return tuple(node.meta.get(name) for name in ("phase", "level", "stage"))
