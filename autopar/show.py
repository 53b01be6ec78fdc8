"""A plan as people read it: a few lines and tables, for a terminal, a pipe or a notebook.

    print(text(plan))
    print_tables(explain(plan, "blocks.0.up"))

Invariants:
- everything shown stands in the plan: nothing is computed here but sums and ratios of its figures;
- layers that were treated alike share a row: `blocks.*.up.weight (4)`.
"""

from __future__ import annotations

import html as html_module
import itertools
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import PlanError
from autopar.key_globs import class_of, matches_any
from autopar.pins import matches_module
from autopar.plans import Plan, StageSpan, stage_of
from autopar.units import format_bytes, format_seconds, signed_bytes, signed_seconds

MEMORY_CLASSES = ("parameters", "gradients", "optimizer", "activations", "buffers")
PHASES = ("prologue", "forward", "backward", "norm", "update")
Cell = str | int | float
Row = tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A caption, column names and rows; without columns, only the caption.

    Cells hold plain values; a column whose name ends in `_bytes`, `_s` or `_part` is shown with its unit, one in
    `_more_bytes` or `_more_s` with its sign. Where the column is `before` or `after`, the name of the quantity stands
    first in the row.
    """

    caption: str
    columns: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    name: str = ""

    def records(self) -> list[dict[str, Cell]]:
        """One dict per row, for JSON."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    @property
    def titles(self) -> list[str]:
        """Column names without units."""
        return [re.sub(r"(_more)?_(bytes|s|part)$", "", column).replace("_", " ") for column in self.columns]

    @property
    def texts(self) -> list[list[str]]:
        """The cells as they are shown."""
        return [[_shown(self._quantity(i, row), cell) for i, cell in enumerate(row)] for row in self.rows]

    def _quantity(self, column: int, row: Row) -> str:
        name = self.columns[column]
        return str(row[0]) if name in ("before", "after") else name


def _shown(quantity: str, cell: Cell) -> str:
    if isinstance(cell, str):
        return re.sub(r"_(bytes|s)$", "", cell).replace("_", " ") if cell == quantity else cell
    if quantity.endswith(("_more_bytes", "_more_s")):
        return (signed_bytes if quantity.endswith("_bytes") else signed_seconds)(cell) if cell else ""
    if quantity.endswith("_bytes"):
        return format_bytes(cell)
    if quantity.endswith("_s"):
        return format_seconds(cell)
    return f"{cell:.0%}" if quantity.endswith("_part") else str(cell)


def json_tables(tables: Sequence[Table]) -> dict[str, list[dict[str, Cell]]]:
    """Named tables for machines: bytes and seconds as numbers."""
    return {table.name: table.records() for table in tables if table.name}


# -- what is shown -----------------------------------------------------------------------------------------------
def summary(plan: Plan) -> list[Table]:
    """The plan in a few lines: mesh, step time, stages, parameters, memory, collectives, search."""
    return [
        Table(_headline(plan)),
        Table(_step_line(plan)),
        _stages(plan),
        _parameters(plan),
        _memory(plan),
        Table(_binding_line(plan)),
        _collectives(plan),
        _overlap(plan),
        *map(Table, rule_lines(plan)),
        Table(_search_line(plan)),
    ]


def explain(plan: Plan, target: str) -> list[Table]:
    """The choices at the nodes of a module (its path, or a glob) or at one node (its key); raises `PlanError`.

    Nodes that split nothing have no choice and aren't listed.
    """
    keys = sorted((key for key in plan.choices if is_meant(target, key)), key=_phase_rank)
    stages = {stage for unit, stage in plan.node_stage.items() if matches_module(target, unit)}
    stages |= {stage_of(plan.node_stage, module_path(key)) for key in keys}
    if not stages:
        raise nothing_meant(plan, target)
    places = {key: stage_of(plan.node_stage, module_path(key)) for key in keys}
    nodes = [(key, places[key], plan.choices[key], _recompute(plan, key)) for key in keys]
    homes = {plan.stages[stage].rank for stage in stages} if plan.mesh.virtual > 1 else stages
    peaks = [(row.stage, row.ranks, row.peak) for row in plan.estimate.memory if row.stage in homes]
    return [
        Table(
            f"{target}: {len(keys)} nodes with a choice; the rest are whole on every rank"
            if keys
            else f"{target}: whole on every rank"
        ),
        Table("choices", ("node", "stage", "choice", "backward"), tuple(nodes), "nodes"),
        Table("memory of its stages", ("stage", "ranks", "peak_bytes"), tuple(peaks), "memory"),
        Table("what the alternatives would have cost: add --model MODEL, or autopar.explain(step, plan, target)"),
        *map(Table, rule_lines(plan, {_op(key) for key in keys})),
    ]


def nothing_meant(plan: Plan, target: str) -> PlanError:
    """The error for a target that names nothing of a plan."""
    modules = sorted({*plan.node_stage, *map(module_path, plan.choices)} - {""}, key=_natural)
    return PlanError(f"{target!r}: no module or node of the plan; its modules are {_listed(modules)}")


# -- the parts of a summary --------------------------------------------------------------------------------------
def _headline(plan: Plan) -> str:
    axes = " ".join(f"{axis}={size}" for axis, size in plan.mesh.axes if size > 1)
    microbatches = f"{plan.microbatches} microbatch{'es' if plan.microbatches > 1 else ''}"
    return f"{plan.cluster}: mesh {axes or 'of one rank'}, {microbatches}, schedule {plan.schedule}"


def _step_line(plan: Plan) -> str:
    estimate = plan.estimate
    parts = ", ".join(f"{name} {format_seconds(value)}" for name, value in estimate.step_s.items() if value)
    step = f"step {format_seconds(estimate.objective_s)}" + (f" = {parts}" if parts else "")
    return f"{step}; {estimate.status}, bound {format_seconds(estimate.bound_s)}, gap {estimate.gap:.1%}"


def _search_line(plan: Plan) -> str:
    outcomes = Counter(candidate.status for candidate in plan.candidates)
    tried = ", ".join(f"{count} {status}" for status, count in outcomes.items())
    searched = f"meshes tried: {tried}; " if outcomes else ""
    estimate = plan.estimate
    return f"{searched}captured in {format_seconds(estimate.capture_s)}, solved in {format_seconds(estimate.solve_s)}"


def _stages(plan: Plan) -> Table:
    """With the ranks they live on, where these have several."""
    if plan.mesh.virtual > 1:
        homes = tuple((index, stage.rank, _brief(stage)) for index, stage in enumerate(plan.stages))
        return Table("stages", ("stage", "pp", "modules"), homes)
    rows = tuple((index, _brief(stage)) for index, stage in enumerate(plan.stages))
    return Table("stages", ("stage", "modules"), rows if len(rows) > 1 else ())


def _brief(stage: StageSpan) -> str:
    return stage.modules if len(stage.modules) <= 60 else f"{stage.first} … {stage.last}"


def _parameters(plan: Plan) -> Table:
    """A row for each way in which parameters are split."""
    prefix = "param:"
    split = [(key.removeprefix(prefix), choice) for key, choice in plan.choices.items() if key.startswith(prefix)]
    names: dict[str, list[str]] = {}
    for name, choice in grouped(split):
        names.setdefault(_split_text(str(choice)), []).append(str(name))
    rows = tuple((choice, _listed(classes, limit=4)) for choice, classes in names.items())
    return Table("parameters split at rest (the others are whole)", ("split", "parameters"), rows)


def _split_text(choice: str) -> str:
    """`"tp=d0 dp=d1.2"` as `"tp: dim 0, dp: dim 1 factor 2"`."""
    return ", ".join(re.sub(r"^(\w+)=d(\d+)(?:\.(\d+))?$", _dim_text, word) for word in choice.split())


def _dim_text(match: re.Match[str]) -> str:
    axis, dim, factor = match.groups()
    return f"{axis}: dim {dim}" + (f" factor {factor}" if factor else "")


def _memory(plan: Plan) -> Table:
    limit = plan.estimate.memory_limit_bytes
    rows = [
        (row.stage, row.ranks, *(getattr(row, name) for name in MEMORY_CLASSES), row.peak, row.peak / limit)
        for row in plan.estimate.memory
    ]
    columns = ("stage", "ranks", *(f"{name}_bytes" for name in MEMORY_CLASSES), "peak_bytes", "used_part")
    return Table(f"memory of a rank, of {format_bytes(limit)}", columns, tuple(rows))


def _binding_line(plan: Plan) -> str:
    """Which limit is nearest: the stage, the moment, and what is left there."""
    row, limit = max(plan.estimate.memory, key=lambda row: row.peak), plan.estimate.memory_limit_bytes
    when = f" at {row.where}" if row.where else ""
    left = f"{format_bytes(limit - row.peak)} left" if row.peak <= limit else f"{format_bytes(row.peak - limit)} over"
    return f"nearest limit: stage {row.stage}{when}, {left}"


def _collectives(plan: Plan) -> Table:
    rows = [
        (row.axis, row.kind, row.count, row.bytes_per_call, row.bytes_per_step, row.link, row.step_s)
        for row in plan.estimate.collectives
    ]
    columns = ("axis", "collective", "calls", "per_call_bytes", "per_step_bytes", "link", "time_s")
    return Table("collectives of a rank in a step", columns, tuple(rows))


def _overlap(plan: Plan) -> Table:
    """What of the communication hides, where any does; stages next to each other that are alike share their rows."""
    estimate = plan.estimate
    by_stage: dict[int, list[Row]] = {}
    for row in estimate.overlap:
        by_stage.setdefault(row.stage, []).append((row.axis, row.hidden_s, row.exposed_s))
    rows: list[Row] = []
    for own, group in itertools.groupby(by_stage, key=by_stage.__getitem__):
        stages = list(group)
        name = str(stages[0]) if len(stages) == 1 else f"{stages[0]} to {stages[-1]}"
        rows += [(name, *row) for row in own]
    step = f"with all of it waited for the step takes {format_seconds(estimate.serial_s or estimate.objective_s)}"
    columns = ("stage", "axis", "hidden_s", "exposed_s")
    hides = any(row.hidden_s for row in estimate.overlap)
    return Table(f"communication beside computation: {step}", columns, tuple(rows) if hides else (), "overlap")


def rule_lines(plan: Plan, ops: Collection[str] | None = None) -> list[str]:
    """`"found by experiment: mylib.op: b s d, d -> b s d"`, once for each op and rule: of all ops, or of these."""
    lines = []
    for origin, rules in (("found by experiment", plan.found_rules), ("registered", plan.registered_rules)):
        for call, rule in rules.items():
            op = call.partition("(")[0].replace("::", ".")
            if ops is None or ".".join(op.split(".")[:2]) in ops:
                lines.append(f"{origin}: {op}: {rule}")
    return list(dict.fromkeys(lines))


# -- keys --------------------------------------------------------------------------------------------------------
def module_path(key: str) -> str:
    """The module path of a node key: `"blocks.0.up/linear/forward#0"`, `"blocks.0:norm/mul/forward#0"` (that runs in
    block 0), or `"param:blocks.0.up.weight"`."""
    if "/" not in key:
        return key.partition(":")[2].rpartition(".")[0]
    return key.partition("/")[0].rpartition(":")[2]


def _op(key: str) -> str:
    """The op of a node key, "mylib.op"; "" for an input of the step."""
    return key.rpartition("/")[0].rpartition("/")[2]


def _phase_rank(key: str) -> int:
    """Inputs of the step first, then its phases in their order; a key ends in `/phase#n`."""
    phase = key.rpartition("/")[2].partition("#")[0]
    return PHASES.index(phase) if phase in PHASES else -1


def is_meant(target: str, key: str) -> bool:
    """Whether a node is of the module (path or glob) `target`, or is the one node of that key."""
    return matches_any(key, [target]) or matches_module(target, module_path(key))


def _recompute(plan: Plan, key: str) -> str:
    return "recomputed" if matches_any(key, plan.recomputed) else ""


def grouped(rows: Iterable[Row]) -> list[Row]:
    """Rows whose names differ in layer numbers only, and agree in the rest, as one with their count."""
    counts = Counter((class_of(str(row[0])), *row[1:]) for row in rows)
    return [(f"{row[0]} ({count})" if count > 1 else row[0], *row[1:]) for row, count in counts.items()]


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _listed(names: Sequence[str], limit: int = 12) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f", … {more} more" if more > 0 else "")


# -- how it is shown ---------------------------------------------------------------------------------------------
def text(plan: Plan) -> str:
    """The summary as plain text."""
    return tables_text(summary(plan))


def html(plan: Plan) -> str:
    """The summary for a notebook."""
    return "\n".join(_table_html(table) for table in summary(plan) if _has_content(table))


def tables_text(tables: Sequence[Table]) -> str:
    """Tables in aligned columns, without control characters."""
    return "\n".join(line for table in tables if _has_content(table) for line in _table_lines(table))


def print_tables(tables: Sequence[Table]) -> None:
    """On a terminal with rich, otherwise as plain text."""
    if not sys.stdout.isatty():
        sys.stdout.write("".join(f"{line}\n" for line in tables_text(tables).splitlines()))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for table in filter(_has_content, tables):
        console.print(_rich_table(table) if table.columns else table.caption)


def _has_content(table: Table) -> bool:
    return bool(table.rows) or not table.columns


def _table_lines(table: Table) -> Iterator[str]:
    yield table.caption
    grid = [table.titles, *table.texts] if table.columns else []
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    for row in grid:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield f"  {'  '.join(cells)}".rstrip()


def _rich_table(table: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(title=Text(table.caption), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for title, cells in zip(table.titles, zip(*table.rows, strict=True), strict=True):
        shown.add_column(title, justify="left" if isinstance(cells[0], str) else "right")
    for row in table.texts:
        shown.add_row(*map(Text, row))
    return shown


def _table_html(table: Table) -> str:
    caption = html_module.escape(table.caption)
    if not table.columns:
        return f"<p>{caption}</p>"
    head = _row_html("th", table.titles)
    body = "".join(_row_html("td", row) for row in table.texts)
    return f"<table><caption>{caption}</caption><thead>{head}</thead><tbody>{body}</tbody></table>"


def _row_html(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html_module.escape(cell)}</{tag}>' for cell in cells)}</tr>"
