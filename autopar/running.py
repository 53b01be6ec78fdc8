"""`autopar run out/`: a saved program with batches, on ranks started here or by torchrun.

    status = start_ranks("out/", ["--steps", "10"])     # one process for each rank, each running the next line
    for metrics in run_rank("out/", steps=10, seed=0): ...

Beside the program, `origin.json` says which MODEL it was built from: that file's `batches()` feeds the run; without
one, random batches of the first batch's shapes and kinds of values do.

Invariant: every rank draws the same batches.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.boundary import parse_json
from autopar.errors import Error, PlanError
from autopar.models import StepOptions, load_module, load_step

ORIGIN = "origin.json"


@dataclass(frozen=True, slots=True)
class Origin:
    """The MODEL that a program was built from, its path relative to the program's directory, with its options."""

    model: str
    options: StepOptions

    @classmethod
    def read(cls, directory: Path) -> Origin:
        """The origin of the program in `directory`; raises `PlanError` where there is none."""
        file = directory / ORIGIN
        if not file.is_file():
            raise PlanError(f"{directory}: no built program here ({ORIGIN} is missing); make one with `autopar build`")
        return parse_json(cls, file.read_text(encoding="utf-8"), str(file))

    def write(self, directory: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=2)
        (directory / ORIGIN).write_text(text + "\n", encoding="utf-8")


def origin_of(model: str, options: StepOptions, directory: Path) -> Origin:
    """`model` as it is found from `directory`."""
    path, colon, factory = model.rpartition(":") if not model.endswith(".json") else (model, "", "")
    return Origin(os.path.relpath(path, directory) + colon + factory, options)


def batches(origin: Origin, directory: Path, seed: int) -> tuple[str, Iterator[Any]]:
    """Where the batches come from, for people, and the batches."""
    model = str(directory / origin.model)
    path = model.rpartition(":")[0]
    if not model.endswith(".json"):
        function = getattr(load_module(path), "batches", None)
        if callable(function):
            return f"batches() of {Path(path).name}", iter(function())
    step = load_step(model, origin.options)
    return f"random, seed {seed}", _random_batches(step, seed)


def _random_batches(step: Any, seed: int) -> Iterator[Any]:
    """Batches like the step's own: normal floats; integers and booleans drawn from those of the first batch."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def like(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        picks = torch.randint(max(1, tensor.numel()), tensor.shape, generator=generator)
        return tensor.flatten()[picks]

    while True:
        yield step.form.rebuild({name: like(tensor) for name, tensor in step.batch_tensors().items()})


def run_rank(directory: str, steps: int, seed: int) -> Iterator[dict[str, Any]]:
    """This rank's part of a run; yields first where the batches come from, then the metrics of each step."""
    from autopar.program.program import Program

    folder = Path(directory)
    origin = Origin.read(folder)
    source, feed = batches(origin, folder, seed)
    trainer = Program.load(folder).start(seed=seed)
    yield {"batches": source}
    try:
        for _, batch in zip(range(steps), feed, strict=False):
            yield trainer.step(batch)
    finally:
        trainer.close()


def start_ranks(directory: str, arguments: list[str]) -> int:
    """Starts the program's ranks on this machine; returns the exit status of the first that fails, or 0."""
    from autopar.plans import Plan
    from autopar.program.launch import run_ranks

    folder = Path(directory)
    Origin.read(folder)
    plan = Plan.load(folder / "plan.json")
    return run_ranks(plan.mesh.num_ranks, ["-m", "autopar", "run", directory, *arguments])


def is_rank() -> bool:
    """Whether a launcher such as torchrun started this process as one of several ranks."""
    return "RANK" in os.environ


def is_first_rank() -> bool:
    """Whether this process is the one that prints."""
    return os.environ.get("RANK", "0") == "0"


def require_new(directory: Path) -> None:
    """Raises `Error` for a directory that holds anything but an earlier build."""
    if directory.is_dir() and any(directory.iterdir()) and not (directory / ORIGIN).is_file():
        raise Error(f"{directory}: isn't empty and holds no earlier build; name another directory")
