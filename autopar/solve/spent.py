"""What the seconds and the bytes of a solution are for, node by node.

    for part in seconds(built, choice): ...       # Part(node, "tp all_gather", 1.2e-3)
    held_bytes(built, choice, limit)                    # bytes of each node at a moment

Invariants:
- the parts' seconds sum to what the step takes: a stage that is waited for counts as often as it is waited for, the
  others once, for filling and draining the pipeline; what hides of a collective isn't spent;
- what is done a second time for the backward is `AGAIN`, its collectives included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node

from autopar.mesh import PIPELINE_AXIS
from autopar.solve.build import BuiltProblem, Moved, Setting
from autopar.solve.costs import local_bytes
from autopar.solve.modes import Mode
from autopar.solve.overlapped import overlapped
from autopar.solve.problem import Problem

ROUNDING = 1e-6
COMPUTE, AGAIN, TRANSFER = "compute", "recompute", f"{PIPELINE_AXIS} p2p"


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of a step that are spent for a node: `COMPUTE`, `AGAIN`, or an axis and a collective."""

    node: Node
    what: str
    seconds: float


def seconds(built: BuiltProblem, choice: Sequence[int]) -> Iterator[Part]:
    """All parts of a step under `choice`, which may break the limits but nothing that is forbidden."""
    problem, overlap = built.problem, overlapped(built, choice)
    weights = row_weights(problem, overlap.rows)
    picked = built.picked(choice)
    for graph_node, node, pick, strategy in zip(built.nodes, problem.nodes, choice, picked, strict=True):
        total = weights[node.row] * float(node.cost[pick])
        again = total / 2 if strategy.mode is Mode.AGAIN else 0.0
        yield from _parts(graph_node, {COMPUTE: total - again, AGAIN: again})
    for edge, moved, (total, hidden) in zip(problem.edges, built.moves, overlap.edges, strict=True):
        if total:
            own = _moved(moved, built.setting, (choice[edge.source], choice[edge.target]), total, hidden)
            reader = built.nodes[edge.source if moved.is_again else edge.target]
            yield from _parts(reader, {what: weights[edge.row] * each for what, each in own.items()})


def row_weights(problem: Problem, rows: Sequence[float]) -> list[float]:
    """How often the step waits for each row's total: of several, for the greatest."""
    weights = [0.0] * problem.num_rows
    for term in problem.objective:
        weights[max(term.rows, key=lambda row: rows[row])] += term.weight
    return weights


def _parts(node: Node, by_name: dict[str, float]) -> Iterator[Part]:
    yield from (Part(node, what, total) for what, total in by_name.items() if total)


def _moved(moved: Moved, setting: Setting, ends: tuple[int, int], total: float, hidden: float) -> dict[str, float]:
    """An edge's seconds that aren't hidden by what they are for."""
    if moved.is_again:
        return {AGAIN: total}
    source, target = moved.between(ends)
    sent = setting.transfer(local_bytes(source, moved.width, setting.mesh)) * moved.times if moved.crosses else 0.0
    parts = setting.resharder.parts_s(source, target, moved.width)
    once = moved.times * setting.resharder.cost_s(source, target, moved.width)
    again = total - sent - once
    found: dict[str, float] = {TRANSFER: sent, AGAIN: again if again > ROUNDING * total else 0.0}
    rest, whole = total - hidden - sent - found[AGAIN], sum(each for _, _, each in parts)
    for axis, kind, each in parts:
        name = f"{axis} {kind}"
        found[name] = found.get(name, 0.0) + rest * each / whole
    if not parts:
        found[COMPUTE] = rest  # what breaks ties among paths without a collective
    return found


def held_bytes(built: BuiltProblem, choice: Sequence[int], limit: int) -> Iterator[tuple[Node, float]]:
    """What each node holds at the moment of a limit, all of them in sum what the limit counts but for its constant."""
    for graph_node, node, pick in zip(built.nodes, built.problem.nodes, choice, strict=True):
        if limit in node.memory:
            yield graph_node, float(node.memory[limit][pick])
