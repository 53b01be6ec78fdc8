"""In what two plans differ, and the seconds and bytes that each difference moves.

    print_tables(difference(before, after))
    moved(before, after)[-1].step_s         # what all of them move together

Invariants:
- everything told stands in the two plans;
- the rows of what moved sum to the difference of the two estimates: of the step's seconds, and of the peak's bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.key_globs import class_of
from autopar.plans import Plan, stage_of
from autopar.show import Cell, Table, grouped, module_path, rule_lines

COMPUTE, AGAIN = "compute", "recompute"
WORKING = "(working set)"
"""The bytes of a peak that no module holds: what ops need while they run, buffers; less what isn't there at once."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What the step spends more, and holds more at its peak, on some modules in the second plan."""

    modules: str
    because: str
    """What differs there: mesh, microbatches, stages, choices, recompute; "" where nothing of its own does."""
    seconds: dict[str, float]
    held_bytes: int

    @property
    def step_s(self) -> float:
        return math.fsum(self.seconds.values())

    @property
    def collectives_s(self) -> float:
        return math.fsum(value for what, value in self.seconds.items() if what not in (COMPUTE, AGAIN))


def difference(before: Plan, after: Plan) -> list[Table]:
    """Decisions, estimate, choices by class of layers, and what they move."""
    facts = [(name, a, b) for (name, a), (_, b) in zip(_facts(before), _facts(after), strict=True) if a != b]
    choices = grouped(
        (key, before.choices.get(key, "absent"), after.choices.get(key, "absent"))
        for key in {**before.choices, **after.choices}
        if before.choices.get(key) != after.choices.get(key)
    )
    return [
        Table("decisions and estimate", ("what", "before", "after"), tuple(facts), "plan"),
        Table("sent in a step", ("collective", "before_bytes", "after_bytes"), _sent_rows(before, after), "sent"),
        Table("choices", ("nodes", "before", "after"), tuple(choices), "choices"),
        *_moved_tables(before, after),
    ]


def ranking(plans: Sequence[Plan]) -> Table:
    """A row for each of several plans of one step, in their order; times are compared with the first one's."""
    columns = ("number", "mesh", "microbatches", "step_s", "times", "peak_bytes", "sent_bytes", "recomputes")
    rows = []
    for number, plan in enumerate(plans, 1):
        times = f"{plan.estimate.objective_s / plans[0].estimate.objective_s:.3f}"
        mesh = " ".join(f"{axis}={size}" for axis, size in plan.mesh.axes if size > 1) or "one rank"
        again = "yes" if any(AGAIN in row.seconds for row in plan.estimate.modules) else "no"
        facts = (plan.microbatches, plan.estimate.objective_s, times, _peak(plan), _sent_bytes(plan), again)
        rows.append((number, mesh, *facts))
    return Table("the best plans", columns, tuple(rows), "plans")


def moved(before: Plan, after: Plan) -> list[Moved]:
    """A row for modules on which the plans spend or hold differently, the greatest first; empty where a plan doesn't
    tell what its modules take."""
    if not (before.estimate.modules and after.estimate.modules):
        return []
    old, new = ({row.modules: row for row in plan.estimate.modules} for plan in (before, after))
    reasons = _reasons(before, after, {**old, **new})
    rows = []
    for name in {**old, **new}:
        seconds, held = defaultdict[str, float](float), 0
        for sign, row in ((-1, old.get(name)), (1, new.get(name))):
            for what, value in row.seconds.items() if row is not None else ():
                seconds[what] += sign * value
            held += sign * row.held_bytes if row is not None else 0
        rows.append(Moved(name, ", ".join(reasons[name]), {k: v for k, v in seconds.items() if v}, held))
    rows.append(Moved(WORKING, "", {}, _working_bytes(after) - _working_bytes(before)))
    different = (row for row in rows if row.seconds or row.held_bytes)
    return sorted(different, key=lambda row: (-abs(row.step_s), -abs(row.held_bytes)))


def _working_bytes(plan: Plan) -> int:
    """What the peak has beyond what modules hold."""
    return _peak(plan) - sum(row.held_bytes for row in plan.estimate.modules)


def _peak(plan: Plan) -> int:
    return max((row.peak for row in plan.estimate.memory), default=0)


def _reasons(before: Plan, after: Plan, known: Mapping[str, object]) -> dict[str, list[str]]:
    """Modules → which of their own decisions differ, after those of the whole plan."""
    whole = [name for name in ("mesh", "microbatches") if getattr(before, name) != getattr(after, name)]
    found = {name: list(whole) for name in known}

    def note(name: str, reason: str) -> None:
        while name and name not in found:
            name = name.rpartition(".")[0]
        if reason not in found.setdefault(name, list(whole)):
            found[name].append(reason)

    for unit in {**before.node_stage, **after.node_stage}:
        if stage_of(before.node_stage, unit) != stage_of(after.node_stage, unit):
            for name in known:
                if f"{name}.".startswith(f"{class_of(unit)}."):
                    note(name, "stages")
    for key in {**before.choices, **after.choices}:
        if before.choices.get(key) != after.choices.get(key):
            note(class_of(module_path(key)), "choices")
    if before.recomputed != after.recomputed:
        for name in _spend_again(before) | _spend_again(after):
            note(name, "recompute")
    return found


def _spend_again(plan: Plan) -> set[str]:
    return {row.modules for row in plan.estimate.modules if row.seconds.get(AGAIN)}


# -- tables --------------------------------------------------------------------------------------------------------
_SPENT = ("compute_more_s", "recompute_more_s", "collectives_more_s", "step_more_s", "peak_more_bytes")


def _moved_tables(before: Plan, after: Plan) -> list[Table]:
    rows = moved(before, after)
    if not rows:
        return []
    by_reason = defaultdict[str, list[Moved]](list)
    for row in rows:
        by_reason[row.because or "nothing of their own"].append(row)
    kinds = _by_collective(rows)
    return [
        Table(
            "what the differences move, together",
            ("differences", *_SPENT),
            (*((reason, *_sums(group)) for reason, group in by_reason.items()), ("in all", *_sums(rows))),
            "moved",
        ),
        Table(
            "by module",
            ("modules", "differences", *_SPENT),
            tuple((row.modules or "(the model itself)", row.because, *_sums([row])) for row in rows),
            "moved_by_module",
        ),
        Table("by collective", ("collective", "step_more_s"), tuple(kinds.items()), "moved_by_collective"),
    ]


def _sums(rows: Iterable[Moved]) -> tuple[float, float, float, float, int]:
    rows = list(rows)
    compute, again = (math.fsum(row.seconds.get(what, 0.0) for row in rows) for what in (COMPUTE, AGAIN))
    collectives, step = math.fsum(row.collectives_s for row in rows), math.fsum(row.step_s for row in rows)
    return compute, again, collectives, step, sum(row.held_bytes for row in rows)


def _by_collective(rows: Iterable[Moved]) -> dict[str, float]:
    found = defaultdict[str, float](float)
    for row in rows:
        for what, value in row.seconds.items():
            if what not in (COMPUTE, AGAIN):
                found[what] += value
    return dict(sorted(found.items(), key=lambda entry: -abs(entry[1])))


def _sent_rows(before: Plan, after: Plan) -> tuple[tuple[Cell, ...], ...]:
    old, new = _sent(before), _sent(after)
    changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    return tuple((key, old.get(key, 0), new.get(key, 0)) for key in changed)


def _sent(plan: Plan) -> dict[str, int]:
    return {f"{row.axis} {row.kind}": row.bytes_per_step for row in plan.estimate.collectives}


def _facts(plan: Plan) -> Iterator[tuple[str, Cell]]:
    estimate = plan.estimate
    yield "cluster", str(plan.cluster)
    yield "mesh", str(plan.mesh)
    yield "microbatches", plan.microbatches
    yield "schedule", plan.schedule
    yield "stages", " | ".join(stage.modules for stage in plan.stages)
    yield "pins", ", ".join(plan.pins) or "none"
    yield "rules", "; ".join(rule_lines(plan)) or "of the table"
    yield "recomputed", ", ".join(str(row[0]) for row in grouped((key,) for key in plan.recomputed)) or "none"
    yield "step_s", estimate.objective_s
    yield "bound_s", estimate.bound_s
    yield "status", estimate.status
    yield "peak_bytes", _peak(plan)
    yield "sent_bytes", _sent_bytes(plan)


def _sent_bytes(plan: Plan) -> int:
    return sum(row.bytes_per_step for row in plan.estimate.collectives)
