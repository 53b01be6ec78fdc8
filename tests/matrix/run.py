"""The model matrix by command: each model in each cell, passed or why not.

    python -m tests.matrix.run --models "llama;bert" --cells tp2
    python -m tests.matrix.run --part 1/4 --json > part1.json
    python -m tests.matrix.run --results matrix.json --markdown tests/matrix/README.md

Each model runs in a process of its own, each cell under a limit of time. With `--results`, a model whose cells the file
holds isn't run again, so that a run may be interrupted and go on. Exits 1 where a cell failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tests.matrix.cells import CELLS, Result, run_cell
from tests.matrix.models import TABLE, import_all
from tests.matrix.page import page


def main() -> int:
    asked = _parser().parse_args()
    cells, models = asked.cells or list(CELLS), _models(asked)
    known = _known(asked.results, cells)
    for result in run_all([m for m in models if m not in known], cells, asked.timeout, asked.jobs):
        known.setdefault(result.model, []).append(result)
        print(_line(result), file=sys.stderr if asked.json else sys.stdout, flush=True)
        if asked.results and len(known[result.model]) == len(cells):
            _save(asked.results, known)
    results = [result for model in models for result in known[model]]
    failed = [result for result in results if not result.ok]
    if asked.json:
        print(_as_json(results))
    else:
        print(f"{len(results) - len(failed)} of {len(results)} cells passed")
    if asked.markdown:
        asked.markdown.write_text(page(results), encoding="utf-8")
    return 1 if failed else 0


def _known(path: Path | None, cells: list[str]) -> dict[str, list[Result]]:
    """Model → the results of its cells, of the models for which the file holds them all."""
    found: dict[str, dict[str, Result]] = {}
    for entry in json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else ():
        result = Result(**{**entry, "missing": tuple(entry["missing"])})
        found.setdefault(result.model, {})[result.cell] = result
    return {model: [held[c] for c in cells] for model, held in found.items() if held.keys() >= set(cells)}


def _save(path: Path, known: dict[str, list[Result]]) -> None:
    partial = path.with_suffix(".part")
    partial.write_text(_as_json(result for results in known.values() for result in results), encoding="utf-8")
    partial.replace(path)


def _as_json(results: Iterable[Result]) -> str:
    return json.dumps([dataclasses.asdict(result) for result in results])


def run_all(models: list[str], cells: list[str], timeout_s: float, jobs: int = 1) -> Iterator[Result]:
    """The results in the order of models and cells; a process of its own for each model."""
    torch.set_num_threads(1)
    import_all(models)
    with ThreadPoolExecutor(jobs) as pool:
        for results in pool.map(lambda model: _run_model(model, cells, timeout_s), models):
            yield from results


def _run_model(model: str, cells: list[str], timeout_s: float) -> list[Result]:
    """All cells of a model; one that takes over `timeout_s` seconds, or ends its process, costs the others nothing."""
    results: list[Result] = []
    while len(results) < len(cells):
        results.extend(_run_apart(model, cells[len(results) :], timeout_s))
    return results


def _run_apart(model: str, cells: list[str], timeout_s: float) -> Iterator[Result]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, model, cells))
    process.start()
    sender.close()
    try:
        for cell in cells:
            if not receiver.poll(timeout_s):
                yield Result(model, cell, f"took over {timeout_s:.0f} s")
                return
            yield receiver.recv()
    except EOFError:
        process.join()
        yield Result(model, cell, f"its process ended with exit status {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _send(sender: Connection, model: str, cells: list[str]) -> None:
    for cell in cells:
        sender.send(run_cell(model, cell))


def _line(result: Result) -> str:
    seconds = " ".join(f"{stage} {value:.1f} s" for stage, value in result.seconds.items())
    share = "" if result.share is None else f", {result.share:.0%} split"
    return f"{result.model} / {result.cell}: {result.problem or 'passed'} ({seconds}{share})"


def _models(asked: argparse.Namespace) -> list[str]:
    index, count = asked.part
    return (asked.models or list(TABLE))[index - 1 :: count]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix.run", description="Runs the model matrix.")
    parser.add_argument("--models", type=_names(TABLE), help="names separated by semicolons; all by default")
    parser.add_argument("--cells", type=_names(CELLS), help="names separated by semicolons; all by default")
    parser.add_argument("--part", type=_part, default=(1, 1), help="i/n: every n-th model, starting at the i-th")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a cell may take")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    parser.add_argument("--markdown", type=Path, help="the page to write")
    parser.add_argument("--results", type=Path, help="a JSON file of results: read first, and kept up to date")
    parser.add_argument("--json", action="store_true", help="results as JSON on stdout, progress on stderr")
    return parser


def _names(known: dict[str, object]) -> object:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(";")]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return names

    return parse


def _part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected i/n with 1 <= i <= n")
    return int(index), int(count)


if __name__ == "__main__":
    sys.exit(main())
