"""The estimate of a plan: memory by the accountant, collectives as counted in the parts, seconds by the cost model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set

from torch.fx import Node

from autopar.cluster import collective_s
from autopar.cluster.cluster import Cluster
from autopar.cluster.mesh_layout import axis_link
from autopar.counting import Counts
from autopar.key_globs import class_of
from autopar.layers import Cut
from autopar.mesh import PIPELINE_AXIS, Mesh
from autopar.plans import CollectiveRow, Estimate, MemoryRow, ModuleRow, OverlapRow, StageSpan, relative_gap
from autopar.program.generators import make_schedule
from autopar.program.schedule import bubble_fraction, chain_transfers
from autopar.program.traffic import Traffic
from autopar.solve import spent
from autopar.solve.overlapped import Overlapped, overlapped
from autopar.solve.problem import evaluate
from autopar.solve.ranks import Ranks
from autopar.trials import Found


def spans(cut: Cut, num_ranks: int) -> tuple[StageSpan, ...]:
    """First and last unit of each stage, its kind, and which of the pipeline's ranks has it."""
    by_stage: dict[int, list[str]] = defaultdict(list)
    for unit, stage in zip(cut.units, cut.stages, strict=True):
        by_stage[stage].append(unit)
    kinds = cut.kinds or (0,) * cut.num_stages
    rows = zip(kinds, sorted(by_stage.items()), strict=True)
    return tuple(
        StageSpan(units[0], units[-1], ", ".join(units), kind, stage % num_ranks) for kind, (stage, units) in rows
    )


def estimate(
    found: Found, bound: float, cluster: Cluster, capacity: float, captured_s: float, solved_s: float
) -> Estimate:
    """All figures of a solved plan; the objective is recomputed from what is chosen, independently of the solver and of
    how it prices what may hide."""
    overlap = overlapped(found.built, found.solution.choice)
    objective = overlap.step_s
    assert abs(objective - found.solution.objective) <= 1e-6 * max(objective, 1e-12), (objective, found.solution)
    there, counts = len(found.likeness.kept), found.counted()
    rows = (*overlap.rows, *[0.0] * (2 * there - len(overlap.rows)))
    ranks = found.built.setting.ranks
    bound = min(bound, objective)
    return Estimate(
        objective_s=objective,
        bound_s=bound,
        gap=relative_gap(objective, bound),
        status="optimal" if relative_gap(objective, bound) <= 1e-2 else "feasible",
        capture_s=captured_s,
        solve_s=solved_s,
        memory_limit_bytes=int(capacity),
        memory=memory_rows(counts),
        collectives=collective_rows(counts, found.mesh, cluster),
        bubble_fraction=_bubble(found, [rows[like] for like in found.likeness.like]),
        step_s=_parts(objective, rows[:there], rows[there:], ranks, found.microbatches),
        modules=module_rows(found, counts),
        serial_s=overlap.serial_s,
        overlap=overlap_rows(found, overlap),
    )


def overlap_rows(found: Found, overlap: Overlapped) -> tuple[OverlapRow, ...]:
    """One row per stage and axis; axes are called as they are in the plan."""
    called = _called(found)
    rows = []
    for stage, like in enumerate(found.likeness.like):
        ways = overlap.axes[like].items()
        rows += [OverlapRow(stage, called.get(axis, axis), way.hidden_s, way.exposed_s) for axis, way in ways]
    return tuple(rows)


def _called(found: Found) -> dict[str, str]:
    """The names of the problem's axes in the plan."""
    return dict(zip(found.built.setting.mesh.spmd.names, found.mesh.spmd.names, strict=True))


def module_rows(found: Found, counts: Counts) -> tuple[ModuleRow, ...]:
    """Seconds and bytes by module, in the order in which they come; axes are called as they are in the plan."""
    built, choice = found.built, found.solution.choice
    called = _called(found)
    inputs = (node.meta["role"] for node in built.nodes if node.op == "placeholder")
    parameters = {role.name for role in inputs if role.kind == "param"}
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    held: dict[str, float] = defaultdict(float)
    for part in spent.seconds(built, choice):
        axis, space, kind = part.what.partition(" ")
        seconds[_modules(part.node, parameters)][f"{called.get(axis, axis)}{space}{kind}"] += part.seconds
    for node, num_bytes in spent.held_bytes(built, choice, _fullest(found, counts)):
        held[_modules(node, parameters)] += num_bytes
    names = dict.fromkeys((*seconds, *(name for name, num_bytes in held.items() if num_bytes)))
    return tuple(ModuleRow(name, dict(seconds[name]), round(held[name])) for name in names)


def _modules(node: Node, parameters: Set[str]) -> str:
    """The module of a node, or of the parameter that it is about, with `*` for layer numbers."""
    path = node.meta.get("path", "")
    names = path.split(".")
    for end in range(len(names), 0, -1):
        if ".".join(names[:end]) in parameters:
            return class_of(".".join(names[: end - 1]))
    return class_of(path)


def _fullest(found: Found, counts: Counts) -> int:
    """The limit that is nearest on the rank of the greatest peak."""
    kind = found.built.setting.ranks.like[counts.peaks.index(max(counts.peaks))]
    usage = evaluate(found.built.problem, found.solution.choice).usage
    limits = (i for i, own in enumerate(found.built.limit_ranks) if own == kind)
    return max(limits, key=lambda limit: usage[limit])


def memory_rows(counts: Counts) -> tuple[MemoryRow, ...]:
    """One row per stage: every rank of a stage holds the same. Of several stages a rank, one per rank: its first."""
    rows = []
    for stage, found in enumerate(counts.profiles):
        kinds = (found.parameters, found.gradients, found.optimizer, found.activations, found.buffers)
        rows.append(MemoryRow(stage, "all", *kinds, found.peak, found.where))
    return tuple(rows)


def collective_rows(counts: Counts, mesh: Mesh, cluster: Cluster) -> tuple[CollectiveRow, ...]:
    """One row per axis and kind, of the rank that sends most."""
    most: dict[tuple[str, str], Traffic] = {}
    for row in counts.traffic:
        key = (row.axis, row.kind)
        if key not in most or row.bytes_sent > most[key].bytes_sent:
            most[key] = row
    rows = []
    for (axis, kind), row in sorted(most.items()):
        link = axis_link(cluster, mesh, axis)
        ranks = 2 if kind == "p2p" else mesh.size(axis)
        each_bytes, each_s = row.bytes_sent // row.count, collective_s(kind, row.whole_bytes // row.count, ranks, link)
        rows.append(CollectiveRow(axis, kind, row.count, each_bytes, row.bytes_sent, str(link), each_s * row.count))
    return tuple(rows)


def _bubble(found: Found, microbatch_s: Sequence[float]) -> float:
    """Idle share of the schedule at the stages' times, a backward taking two thirds of a microbatch."""
    stages, size = found.mesh.num_stages, found.mesh.size(PIPELINE_AXIS)
    if stages == 1:
        return 0.0
    durations = {}
    for stage, seconds in enumerate(microbatch_s):
        durations[f"{stage}F"], durations[f"{stage}B"] = seconds / 3, seconds * 2 / 3
    all_there = len(found.likeness.kept) == stages
    transfers = found.counting.pipeline.transfers if all_there else chain_transfers(stages)
    schedule = make_schedule(found.schedule, size, found.microbatches, found.mesh.virtual)
    return bubble_fraction(schedule, durations, transfers)


def _parts(
    objective: float, microbatch_s: Sequence[float], once_s: Sequence[float], ranks: Ranks, count: int
) -> dict[str, float]:
    """The step time as work of the slowest stage, bubble, and update; sums to the objective."""
    update, work = ranks.longest(once_s), count * ranks.longest(microbatch_s)
    bubble = max(0.0, objective - update - work)
    return {"microbatches": work, "bubble": bubble, "update": update}
