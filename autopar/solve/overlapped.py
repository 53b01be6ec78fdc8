"""What of a solution's communication hides behind computation, way by way and axis by axis.

    found = overlapped(built, choice)
    found.step_s                    # what the step takes, as `beside.step_s` says
    found.serial_s                  # what it would take if all communication were waited for
    found.axes[0]["dp"]             # Ways(hidden_s, exposed_s) of a step on stage 0

What may hide is worked out from the windows and the layouts alone, without the problem's prices: it says of these that
they are right.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.mesh import PIPELINE_AXIS
from autopar.reshard import TIE_S
from autopar.solve.beside import Beside, beside
from autopar.solve.build import BuiltProblem, Moved, Setting
from autopar.solve.costs import local_bytes
from autopar.solve.problem import evaluate, objective_of


@dataclass(frozen=True, slots=True)
class Ways:
    """Seconds of communication in a step: what computation hides, and what it takes beside that."""

    hidden_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Overlapped:
    """`axes`: of each stage that is there, by axis of the mesh."""

    step_s: float
    serial_s: float
    rows: tuple[float, ...]
    """Seconds of each row of the problem in `step_s`."""
    edges: tuple[tuple[float, float], ...]
    """Of each edge of the problem: its seconds, and how many of them are hidden."""
    axes: tuple[dict[str, Ways], ...]


def overlapped(built: BuiltProblem, choice: Sequence[int]) -> Overlapped:
    """Of a choice that is allowed."""
    contention, stages = built.setting.contention, built.setting.mesh.num_stages
    ways = [list(_ways(built, choice, number)) for number in range(len(built.moves))]
    hiding = [0.0] * len(built.windows.windows)
    for window, seconds in (way for own in ways for way in own):
        hiding[window] += seconds
    parts = Beside(beside(built, choice).computing, hiding).hidden_parts(contention)
    rows = list(evaluate(built.problem, choice).rows)
    serial, edges = list(rows), []
    for edge, own in zip(built.problem.edges, ways, strict=True):
        may_hide = math.fsum(seconds for _, seconds in own)
        priced = float(edge.cost[choice[edge.source], choice[edge.target]])
        serial[edge.row] += (1 - contention) * may_hide
        rows[edge.row] -= contention * may_hide
        for window, seconds in own:  # in the row of the window, which may be another one
            rows[built.windows.windows[window].stage] += seconds * (1 - parts[window])
        hidden = math.fsum(parts[window] * seconds for window, seconds in own)
        edges.append((priced + (1 - contention) * may_hide, hidden))
    return Overlapped(
        objective_of(built.problem.objective, rows),
        objective_of(built.problem.objective, serial),
        tuple(rows),
        tuple(edges),
        tuple(_by_axis(built, choice, edges, stages)),
    )


def _ways(built: BuiltProblem, choice: Sequence[int], number: int) -> Iterator[tuple[int, float]]:
    """The windows behind which what an edge moves may hide, with the seconds of it."""
    edge, moved = built.problem.edges[number], built.moves[number]
    ends = choice[edge.source], choice[edge.target]
    if moved.is_again or not edge.cost[ends]:
        return
    hiding = built.windows.hiding(built.nodes[edge.source], built.nodes[edge.target])
    source, target = moved.between(ends)
    if hiding.shares and hiding.holds(local_bytes(target, moved.width, built.setting.mesh), built.setting.capacity):
        seconds = moved.times * max(0.0, built.setting.resharder.cost_s(source, target, moved.width) - TIE_S)
        yield from ((window, part * seconds) for window, part in hiding.shares if seconds)


def _by_axis(
    built: BuiltProblem, choice: Sequence[int], edges: Sequence[tuple[float, float]], stages: int
) -> Iterator[dict[str, Ways]]:
    hidden, exposed = ([defaultdict[str, float](float) for _ in range(stages)] for _ in range(2))
    for edge, moved, (total, less) in zip(built.problem.edges, built.moves, edges, strict=True):
        axes = _axes(moved, built.setting, (choice[edge.source], choice[edge.target]), total) if total else {}
        times = built.setting.microbatches if edge.row < stages else 1
        whole = math.fsum(axes.values())
        for axis, seconds in axes.items():
            hidden[edge.row % stages][axis] += times * less * seconds / whole
            exposed[edge.row % stages][axis] += times * (total - less) * seconds / whole
    for mine, rest in zip(hidden, exposed, strict=True):
        yield {axis: Ways(mine[axis], seconds) for axis, seconds in sorted(rest.items())}


def _axes(moved: Moved, setting: Setting, ends: tuple[int, int], total: float) -> dict[str, float]:
    """The seconds of an edge by axis; what breaks ties among paths without a collective is of none."""
    source, target = moved.between(ends)
    sent = setting.transfer(local_bytes(source, moved.width, setting.mesh)) * moved.times if moved.crosses else 0.0
    parts = setting.resharder.parts_s(source, target, moved.width)
    whole, found = sum(seconds for _, _, seconds in parts), defaultdict[str, float](float)
    if sent:
        found[PIPELINE_AXIS] = sent
    for axis, _, seconds in parts:
        found[axis] += (total - sent) * seconds / whole
    return dict(found)
