"""Four real gloo ranks agree with the virtual mesh: bit for bit when reductions are deterministic, else to 1e-6.

    python -m tests.dist.agreement                              # every model, the solver's plan and dp=2 tp=2
    python -m tests.dist.agreement --models gpt llama --steps 5

For each model the plan is made, compiled, and run on the virtual mesh in the program's own precision; then 4 ranks run
the saved program, once with `deterministic=True`, once without, from the same weights. Losses, final parameters and buffers are
compared; the table says how far apart they are.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from autopar.program.launch import run_ranks
from autopar.program.parts import Slot
from autopar.program.program import Program
from autopar.program.virtual import VirtualMesh
from tests.dist.against_eager import load
from tests.virtual.step_models import MODELS, step_of, weights_of

RANKS, MICROBATCHES = 4, 2
PINS = ("", "dp=2, tp=2")
WAYS = (True, False)
"""Whether reductions are deterministic."""
FOUND = "found.pt"

State = dict[str, Any]


def expected_state(program: Program, steps: int) -> State:
    """Losses, final parameters and buffers on the virtual mesh."""
    step, mesh = program.step, VirtualMesh(program.pipeline)
    present = {slot for stage in program.pipeline.stages for slot in stage.values}
    initial = {**weights_of(step), **zero_states(program)}
    slots = {slot: initial[slot.name] for slot in present if slot.kind in ("param", "buffer", "state")}
    mesh.load({slot: value.clone() for slot, value in slots.items()})
    losses = [float(mesh.step(step.batch_tensors(), step.capture().scalars)["loss"]) for _ in range(steps)]
    return {"losses": losses, **{str(slot): mesh.gather(slot) for slot in slots if slot.kind != "state"}}


def zero_states(program: Program) -> dict[str, torch.Tensor]:
    """Optimizers here start from zeros."""
    values = {slot: value for stage in program.pipeline.stages for slot, value in stage.values.items()}
    return {
        slot.name: torch.zeros(value.layout.global_shape, dtype=value.dtype)
        for slot, value in values.items()
        if slot.kind == "state"
    }


# -- on the ranks -------------------------------------------------------------------------------------------------
def compare(folder: Path) -> None:
    """Runs every program of the folder in both ways; rank 0 writes the greatest differences."""
    found: dict[str, list[float]] = {}
    for path in sorted(folder.glob("*.agreement")):
        expected: State = torch.load(path)
        program = path.with_suffix("")
        found[expected["title"]] = [greatest_difference(program, expected, deterministic) for deterministic in WAYS]
    if dist.get_rank() == 0:
        torch.save(found, folder / FOUND)
    dist.barrier()


def greatest_difference(program: Path, expected: State, deterministic: bool) -> float:
    """Of any loss, parameter and buffer, on any rank, and of all state through a checkpoint."""
    step = step_of(expected["model"], MICROBATCHES)
    trainer = load(program, step, deterministic=deterministic)
    losses = [float(trainer.step(step.batch)["loss"]) for _ in expected["losses"]]
    found = [abs(a - b) / abs(b) for a, b in zip(losses, expected["losses"], strict=True)]
    found += differences(trainer, expected)
    found += checkpoint_differences(trainer, program.with_suffix(f".checkpoint{deterministic}"))
    trainer.communicator.close()
    worst = torch.tensor(max(found), dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def differences(trainer: Any, expected: State) -> list[float]:
    whole = trainer.full_state_dict()
    slots = [(Slot(kind, name), value) for name, value in whole.items() for kind in ("param", "buffer")]
    pairs = [(value, expected.get(str(slot))) for slot, value in slots]
    return [_difference(got.double(), wanted.double()) for got, wanted in pairs if wanted is not None]


def checkpoint_differences(trainer: Any, folder: Path) -> list[float]:
    """What a checkpoint gives back after everything that the ranks hold was lost."""
    before = {slot: _content(trainer, slot) for slot in trainer.executor.slots}
    whole = trainer.full_state_dict()
    dcp.save(trainer.state_dict(), checkpoint_id=folder)
    for slot in before:
        trainer.executor.set(slot, torch.zeros_like(trainer.executor.get(slot)))
    state = trainer.state_dict()
    dcp.load(state, checkpoint_id=folder)
    trainer.load_state_dict(state)
    found = [_difference(_content(trainer, slot), value) for slot, value in before.items()]
    again = trainer.full_state_dict()
    return found + [_difference(again[name].double(), value.double()) for name, value in whole.items()]


def _content(trainer: Any, slot: Slot) -> torch.Tensor:
    layout = trainer.executor.stage.values[slot].layout
    local = trainer.executor.get(slot).clone()
    return layout.content(local, trainer.mesh.spmd, trainer.communicator.coordinates).double()


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)) if wanted.numel() else 0.0


# -- results ------------------------------------------------------------------------------------------------------
def save_programs(folder: Path, models: list[str], steps: int) -> None:
    """A folder of each program, and beside it what the virtual mesh makes of it."""
    from autopar.compiling import compile
    from autopar.planning import plan

    for index, (model, pins) in enumerate((model, pins) for model in models for pins in PINS):
        step = step_of(model, MICROBATCHES)
        program = compile(step, plan(step, f"{RANKS}xcpu", pin=pins or None))
        program.save(folder / str(index))
        state = {"model": model, "title": f"{model}; {pins or 'solver'}", **expected_state(program, steps)}
        torch.save(state, folder / f"{index}.agreement")


def found_differences(folder: Path) -> dict[str, list[float]]:
    """`"model; pins"` → greatest differences with deterministic reductions and without, once ranks have run."""
    found: dict[str, list[float]] = torch.load(folder / FOUND)
    return found


def agreement(models: list[str], steps: int) -> dict[str, list[float]]:
    """`found_differences` of models."""
    with tempfile.TemporaryDirectory() as name:
        save_programs(Path(name), models, steps)
        env = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
        status = run_ranks(RANKS, ["-m", "tests.dist.agreement", "--rank", name], env=env, timeout_s=600)
        if status:
            raise SystemExit(f"the ranks ended with status {status}")
        return found_differences(Path(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rank:
        dist.init_process_group("gloo")
        compare(Path(arguments.rank))
        dist.destroy_process_group()
        return
    print("| model; plan | deterministic | otherwise |\n|---|---|---|")
    for title, (exact, close) in agreement(arguments.models, arguments.steps).items():
        print(f"| {title} | {'bit for bit' if exact == 0 else f'{exact:.1e}'} | {close:.1e} |")


if __name__ == "__main__":
    main()
