"""The table as people read it, and its proof: what each op's rule is, and the choices of it that were executed.

    for row in listed("aten.m*"):
        print(row.op, row.rule, proof_of(row).counterexamples)

A row is proven on its examples: each choice on two-way and three-way meshes, that of the first on two axes, too.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.mesh import Mesh
from autopar.rules.examples import EXAMPLES, Example, Examples
from autopar.rules.examples.tagged import tagged_examples
from autopar.rules.notation import bound_text, linear_text
from autopar.rules.prove import prove
from autopar.rules.table import rule_of
from autopar.show import Table

MESHES = ("x=2", "x=3", "x=5")
"""Five divides hardly any size of the examples: their chunks are padded."""
TWO_AXES = "x=2 y=2"


@dataclass(frozen=True, slots=True)
class Row:
    """An op's rule in the notation, at its first example, and the sets of operands through which partial sums pass."""

    op: str
    rule: str
    linear: str
    source: str
    examples: tuple[Example, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """How often choices were executed, how often one that splits something, what differed, and how long it took."""

    executed: int
    divided: int
    counterexamples: tuple[str, ...]
    seconds: float


def listed(pattern: str = "*") -> list[Row]:
    """The rows whose op matches the glob: those of the table, then the ops that bear the pointwise tag."""
    table = {op: calls for op, calls in EXAMPLES.items() if fnmatch.fnmatchcase(op, pattern)}
    return [*_rows("table", table), *_rows("pointwise tag", tagged_examples(pattern))]


def table_row(op: str) -> Row:
    """The row of one op of the table."""
    (row,) = _rows("table", {op: EXAMPLES[op]})
    return row


def _rows(source: str, examples: Examples) -> list[Row]:
    rows = []
    for op, calls in examples.items():
        rule = rule_of(calls[0].node())
        rows.append(Row(op, bound_text(rule), linear_text(rule.linear), source, tuple(calls)))
    return rows


def tables(rows: Sequence[Row], proofs: Sequence[Proof] = ()) -> list[Table]:
    """The rows as a table, with their proofs where there are any."""
    columns: tuple[str, ...] = ("op", "rule", "linear", "from", "examples")
    cells: list[tuple[str | int | float, ...]] = [
        (row.op, row.rule, row.linear or "-", row.source, len(row.examples)) for row in rows
    ]
    caption = f"{len(rows)} rules"
    if proofs:
        columns = (*columns, "executed", "counterexamples", "proof_s")
        cells = [(*c, p.executed, len(p.counterexamples), p.seconds) for c, p in zip(cells, proofs, strict=True)]
        wrong = sum(len(p.counterexamples) for p in proofs)
        caption += f", {sum(p.executed for p in proofs)} executions of their choices, {wrong} counterexamples"
    return [Table(caption, columns, tuple(cells), name="rules")]


def proof_of(row: Row) -> Proof:
    """Executes all choices of the row's examples."""
    start = time.perf_counter()
    executed, divided, wrong = 0, 0, list[str]()
    for i, example in enumerate(row.examples):
        for mesh in (*MESHES, TWO_AXES) if i == 0 else MESHES:
            samples = example.samples[:1] if mesh == TWO_AXES else example.samples
            count, found = prove(example.node(), Mesh.parse(mesh), sample=samples)
            executed += count
            divided += max(0, count - len(samples))  # all but the choice that splits nothing
            wrong += [f"{example} on {mesh}: {c}" for c in found if example.has_values or c.error]
    return Proof(executed, divided, tuple(wrong), time.perf_counter() - start)
