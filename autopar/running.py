"""`autopar run out/`: a saved program with batches, on ranks started here or by torchrun.

    status = start_ranks("out/", ["--steps", "10"])     # one process for each rank, each running the next line
    for metrics in run_rank("out/", steps=10, seed=0): ...

`autopar build` leaves `origin.json` beside the program: the MODEL that it was built from. That file's `batches()` feeds
the run; without one, random batches like the step's own do.

Invariant: every rank draws the same batches.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.boundary import parse_json
from autopar.errors import PlanError
from autopar.models import StepOptions, load_module, load_step
from autopar.plans import Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ORIGIN = "origin.json"


@dataclass(frozen=True, slots=True)
class Origin:
    """The MODEL that a program was built from, its path relative to the program's directory, with its options."""

    model: str
    options: StepOptions

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def origin_of(model: str, options: StepOptions, directory: Path) -> Origin:
    """`model` as it is found from `directory`."""
    path, colon, factory = model.rpartition(":") if not model.endswith(".json") else (model, "", "")
    return Origin(os.path.relpath(path, directory) + colon + factory, options)


def read_origin(directory: Path) -> Origin | None:
    """The origin of the program in `directory`, if `autopar build` left one."""
    file = directory / ORIGIN
    return parse_json(Origin, file.read_text(encoding="utf-8"), str(file)) if file.is_file() else None


# -- batches -----------------------------------------------------------------------------------------------------
def batches(directory: Path, seed: int) -> tuple[str, Iterator[Any]]:
    """Where the batches of the program in `directory` come from, for people, and the batches."""
    origin = read_origin(directory)
    if origin is None:
        raise PlanError(f"{directory}: no {ORIGIN}, which says what feeds the program; build with `autopar build`")
    model = str(directory / origin.model)
    if not model.endswith(".json"):
        path = model.rpartition(":")[0]
        function = getattr(load_module(path), "batches", None)
        if callable(function):
            return f"batches() of {Path(path).name}", iter(function())
    step = load_step(model, origin.options)
    return f"random, seed {seed}", _random_batches(step.batch_tensors(), step.form.rebuild, seed)


def _random_batches(like: dict[str, Tensor], build: Callable[[dict[str, Tensor]], Any], seed: int) -> Iterator[Any]:
    """Normal floats; integers and booleans drawn from those of the tensors in `like`."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    while True:
        yield build({name: _random_like(tensor, generator) for name, tensor in like.items()})


def _random_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    import torch

    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    picks = torch.randint(max(1, tensor.numel()), tensor.shape, generator=generator)
    return tensor.flatten()[picks]


# -- ranks -------------------------------------------------------------------------------------------------------
def run_rank(directory: str, steps: int, seed: int) -> Iterator[dict[str, Any]]:
    """This rank's part of a run; yields first where the batches come from, then the metrics of each step."""
    from autopar.program.program import Program

    folder = Path(directory)
    source, feed = batches(folder, seed)
    trainer = Program.load(folder).start(seed=seed)
    yield {"batches": source}
    try:
        for _, batch in zip(range(steps), feed, strict=False):
            yield trainer.step(batch)
    finally:
        trainer.close()


def start_ranks(directory: str, arguments: list[str]) -> int:
    """Starts the program's ranks on this machine; returns the exit status of the first that fails, or 0."""
    from autopar.program.launch import run_ranks

    file = Path(directory) / "plan.json"
    if not file.is_file():
        raise PlanError(f"{directory}: no built program here ({file.name} is missing); make one with `autopar build`")
    plan = Plan.load(file)
    return run_ranks(plan.mesh.num_ranks, ["-m", "autopar", "run", directory, *arguments])


def is_rank() -> bool:
    """Whether a launcher such as torchrun started this process as one of several ranks."""
    return "RANK" in os.environ


def is_first_rank() -> bool:
    """Whether this process is the one that prints."""
    return os.environ.get("RANK", "0") == "0"
