"""Ranks that are given their own rows alone, and ranks that clip by the norm of all gradients, are as the eager model is.

`save_programs` makes the programs, once for all ranks, and what the eager model says; `compare` is what a rank does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.program.program import start
from autopar.program.saved import load_program
from autopar.program.trainer import Trainer
from autopar.program.weights import Recipe
from tests.virtual.step_models import adamw, gpt, step_of, token_batch

OWN_ROWS = "dp=2"
CLIPPED = (("pp=2", 1), ("dp=2, zero=2", 1), ("pp=2, virtual=2", 2))
"""Pins, and how many layers the model has."""
CLIP_NORM = 0.05
STEPS = 2


def save_programs(folder: Path) -> None:
    """A folder of each program, by its pins, and beside it what the clipped eager model gives."""
    save_program(step_of("gpt, odd sizes", 2), OWN_ROWS, folder / "rows")
    made = {layers: clipped_step(layers) for _, layers in CLIPPED}
    for pins, layers in CLIPPED:
        save_program(made[layers], pins, folder / pins)
        torch.save(expected(made[layers]), folder / f"{pins}.pt")


def save_program(step: Any, pins: str, folder: Path) -> None:
    from autopar.compiling import compile
    from autopar.planning import plan

    compile(step, plan(step, "2xcpu", pin=pins)).save(folder)


def clipped_step(layers: int) -> Any:
    from autopar.capture.step import TrainStep

    torch.manual_seed(0)
    return TrainStep(gpt(layers=layers), token_batch(8), optimizer=adamw, microbatches=2, clip_norm=CLIP_NORM)


def expected(step: Any) -> dict[str, Any]:
    """The batch; each step's loss and norm; the first and the last weights."""
    from autopar.program.verify import EagerStep
    from tests.virtual.step_models import weights_of

    eager, metrics = EagerStep(step, weights_of(step), seed=0), []
    for index in range(STEPS):
        loss = float(eager.backward(index))
        norm = float(torch.nn.utils.clip_grad_norm_(eager.model.parameters(), CLIP_NORM))
        eager.optimizer.step()
        metrics.append((loss, norm))
    return {"metrics": metrics, "weights": eager.model.state_dict()}


# -- on the ranks -------------------------------------------------------------------------------------------------
def compare(folder: Path) -> None:
    own_rows(folder / "rows")
    for pins, layers in CLIPPED:
        clipped(pins, load(folder / pins, clipped_step(layers)), torch.load(folder / f"{pins}.pt"))


def load(folder: Path, step: Any, **options: Any) -> Trainer:
    """The trainer of a saved program of `step`."""
    saved = load_program(folder)
    return start(saved, step, Recipe.from_dict(saved.recipe), 0, **options)


def own_rows(folder: Path) -> None:
    """Each rank is given its own rows alone, of a batch that doesn't divide: tokens are counted over all of them."""
    step = step_of("gpt, odd sizes", 2)
    batch = {name: tensor.clone() for name, tensor in step.batch_tensors().items()}
    batch["targets"][5, 1:] = 3  # ignored
    whole = step.model(**batch).item()
    trainer = load(folder, step)
    rows = [[0, 1, 3, 4], [2, 5]][dist.get_rank()]
    got = trainer.step({name: tensor[rows] for name, tensor in batch.items()}, local=True)["loss"]
    assert abs(got - whole) < 1e-5, (got, whole)
    trainer.close()


def clipped(pins: str, trainer: Trainer, wanted: dict[str, Any]) -> None:
    """The gradients' norm, over stages and over what a rank holds of each, is that of one device; so are the weights."""
    for index, (loss, norm) in enumerate(wanted["metrics"]):
        got = trainer.step(token_batch(8))
        assert abs(got["loss"] - loss) < 1e-5, (pins, index, got, loss)
        assert abs(got["grad_norm"] - norm) < 1e-5 < norm, (pins, index, got, norm)
    trainer.load_state_dict(trainer.state_dict())
    whole = trainer.full_state_dict()
    assert bool(whole) == (dist.get_rank() == 0)
    for name, value in whole.items():
        # Adam makes of rounding what it likes where a gradient is nearly zero: keys' biases, tokens that don't occur
        assert (value - wanted["weights"][name]).abs().mean() < 1e-3, (pins, name)
    trainer.close()
