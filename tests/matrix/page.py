"""The matrix as a page: a table of models and cells, totals, failures by cause, the slowest stages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from tests.matrix.cells import Result

_HEAD = """# Model matrix

Architectures with random weights from their own libraries, at tiny sizes. Each cell captures the step, plans it, and
compares loss, gradients, new parameters and state with the single-device step in float64, on a virtual mesh.
What the cells ask is in `cells.py`; the models are the table of `models.py`. Made by

    python -m tests.matrix.run --cells "{cells}" --markdown tests/matrix/README.md
"""


def page(results: Sequence[Result]) -> str:
    """Markdown."""
    cells = _cells(results)
    parts = [
        _HEAD.format(cells=";".join(cells)),
        *_totals(results),
        "",
        *_table(results, cells),
        "",
        *_failures(results),
        *_times(results),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _totals(results: Sequence[Result]) -> Iterator[str]:
    passed = sum(result.ok for result in results)
    models = {result.model for result in results}
    whole = models - {result.model for result in results if not result.ok}
    yield f"{len(models)} models, {len(whole)} of them pass in every cell; {passed} of {len(results)} cells pass."


def _cells(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(result.cell for result in results))


def _table(results: Sequence[Result], cells: Sequence[str]) -> Iterator[str]:
    rows: dict[str, dict[str, str]] = defaultdict(dict)
    for result in results:
        share = "" if result.share is None else f" {result.share:.0%}"
        rows[result.model][result.cell] = ("passed" if result.ok else "**failed**") + share
    yield "| model | " + " | ".join(cells) + " |"
    yield "|---" * (len(cells) + 1) + "|"
    for model, row in rows.items():
        yield f"| {model} | " + " | ".join(row.get(cell, "") for cell in cells) + " |"


def _failures(results: Sequence[Result]) -> Iterator[str]:
    causes: dict[str, list[str]] = defaultdict(list)
    for result in results:
        if not result.ok:
            causes[result.problem].append(f"{result.model} / {result.cell}")
    if causes:
        yield "## Failures\n"
        for problem, where in sorted(causes.items(), key=lambda pair: -len(pair[1])):
            yield f"- {', '.join(where)}: {problem}"
        yield ""
    whole = Counter(op for model, op in {(r.model, op) for r in results for op in r.missing})
    if whole:
        yield "## Ops that run whole for want of a rule\n"
        yield ", ".join(f"{op} ({count} models)" for op, count in whole.most_common()) + "\n"


def _times(results: Sequence[Result]) -> Iterator[str]:
    yield "## Slowest\n"
    timed = [(seconds, stage, r) for r in results for stage, seconds in r.seconds.items()]
    for stage in dict.fromkeys(stage for _, stage, _ in timed):
        of_stage = sorted(((s, r) for s, name, r in timed if name == stage), key=lambda pair: -pair[0])
        mean = sum(s for s, _ in of_stage) / len(of_stage)
        slowest = ", ".join(f"{r.model} / {r.cell} {s:.1f} s" for s, r in of_stage[:3])
        yield f"- {stage}: {mean:.1f} s on average; {slowest}"
