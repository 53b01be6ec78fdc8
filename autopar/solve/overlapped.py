"""What of a solution's communication hides behind computation, and what the step takes then.

    found = overlapped(built, choice, contention=0.6, is_pipelined=False)
    found.step_s                    # at most the objective, which adds all computation and all communication
    found.axes[0]["dp"]             # Ways(hidden_s, exposed_s) of a step on stage 0

Where communication may hide is what `windows` says. A window with C seconds of computation and H of communication that
may hide takes max(C + kH, H + kC), k being the contention: what runs at the same time slows both sides, as in the cost
model of Galvatron (Miao et al., PVLDB 16(3), 2022). So (1 - k) min(C, H) of it hides, never more than the computation
that runs beside it; the rest is exposed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.mesh import PIPELINE_AXIS
from autopar.solve.build import BuiltProblem, Moved, Setting
from autopar.solve.costs import local_bytes
from autopar.solve.modes import Mode
from autopar.solve.problem import evaluate, objective_of
from autopar.solve.windows import SMALL_BYTES, Shares, Windows, most_ahead, windows_of


@dataclass(frozen=True, slots=True)
class Ways:
    """Seconds of communication in a step: what computation hides, and what it takes beside that."""

    hidden_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Overlapped:
    """`axes`: of each stage that is there, by axis of the mesh."""

    step_s: float
    axes: tuple[dict[str, Ways], ...]


@dataclass(slots=True)
class _Tally:
    """Seconds of one microbatch, or of what runs once a step."""

    num_windows: int
    computing: list[float] = field(init=False)
    hiding: list[float] = field(init=False)
    ways: list[tuple[int, dict[str, float], Shares]] = field(default_factory=list)
    """The row of what is moved, its seconds by axis, and of them those that may hide, by window."""

    def __post_init__(self) -> None:
        self.computing, self.hiding = ([0.0] * self.num_windows for _ in range(2))

    def hides(self, window: int, contention: float) -> float:
        """The part of a window's communication that computation hides."""
        least = min(self.computing[window], self.hiding[window])
        return (1 - contention) * least / self.hiding[window] if least else 0.0


def overlapped(built: BuiltProblem, choice: Sequence[int], contention: float, is_pipelined: bool) -> Overlapped:
    """`contention`: of `cluster.Device`; `is_pipelined`: whether there are other stages, if not in this graph."""
    windows = windows_of(built.step, advances=built.setting.microbatches == 1 and not is_pipelined)
    tally = _Tally(len(windows.windows))
    _add_computation(tally, built, choice, windows)
    _add_communication(tally, built, choice, windows)
    stages, rows = built.setting.mesh.num_stages, list(evaluate(built.problem, choice).rows)
    hidden, exposed = ([defaultdict[str, float](float) for _ in range(stages)] for _ in range(2))
    for row, axes, shares in tally.ways:
        times = built.setting.microbatches if row < stages else 1
        total = math.fsum(axes.values())
        less = math.fsum(seconds * tally.hides(window, contention) for window, seconds in shares)
        rows[row] -= math.fsum(seconds for _, seconds in shares)
        for window, seconds in shares:  # in the row of the window, which may be another one
            rows[windows.windows[window].stage] += seconds * (1 - tally.hides(window, contention))
        for axis, seconds in axes.items():
            hidden[row % stages][axis] += times * less * seconds / total
            exposed[row % stages][axis] += times * (total - less) * seconds / total
    axes_of = (
        {axis: Ways(mine[axis], seconds) for axis, seconds in sorted(rest.items())}
        for mine, rest in zip(hidden, exposed, strict=True)
    )
    return Overlapped(objective_of(built.problem.objective, rows), tuple(axes_of))


def _add_computation(tally: _Tally, built: BuiltProblem, choice: Sequence[int], windows: Windows) -> None:
    picked = zip(built.nodes, built.problem.nodes, choice, built.picked(choice), strict=True)
    for node, priced, pick, strategy in picked:
        seconds, window = float(priced.cost[pick]), windows.of.get(node)
        again = windows.again(node) if strategy.mode is Mode.AGAIN and seconds else None
        if window is not None:
            tally.computing[window] += seconds / 2 if strategy.mode is Mode.AGAIN else seconds
        if again is not None:
            tally.computing[again] += seconds / 2


def _add_communication(tally: _Tally, built: BuiltProblem, choice: Sequence[int], windows: Windows) -> None:
    for edge, moved in zip(built.problem.edges, built.moves, strict=True):
        ends = choice[edge.source], choice[edge.target]
        total = float(edge.cost[ends])
        axes = _axes(moved, built.setting, ends, total) if total else {}
        if not axes:
            continue
        maker, reader = built.nodes[edge.source], built.nodes[edge.target]
        shares = windows.reduced(maker, reader)
        if SMALL_BYTES < _bytes(moved, built.setting, ends) <= most_ahead(built.setting.capacity):
            shares = windows.gathered(maker, reader) or shares
        shares = () if moved.is_again else shares
        once = min(total, moved.times * built.setting.resharder.cost_s(*moved.between(ends), moved.width))
        parts = tuple((window, part * once) for window, part in shares)
        for window, seconds in parts:
            tally.hiding[window] += seconds
        tally.ways.append((edge.row, axes, parts))


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


def _bytes(moved: Moved, setting: Setting, ends: tuple[int, int]) -> float:
    """Of what is moved, on a rank that has it."""
    return local_bytes(moved.between(ends)[1], moved.width, setting.mesh)
