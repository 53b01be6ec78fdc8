"""Program: the executable that a plan compiles to.

    program = autopar.compile(step, plan)
    program.verify()                    # proven equal to the single-device step
    print(program.source(stage=0))      # readable Python
    program.save("out/")                # … and Program.load("out/") on any rank
    trainer = program.start()           # under torchrun

Invariant: whoever loads a saved program runs the same functions on the same slots (`hash` says so).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autopar.capture.step import ForwardStep
from autopar.errors import PlanError
from autopar.plans import Plan
from autopar.program.codegen import StageCode
from autopar.program.parts import Pipeline, Slot
from autopar.program.saved import SavedProgram, load_program, program_hash, save_program, stage_codes
from autopar.program.weights import Recipe, put_initial_values, whole_weights

if TYPE_CHECKING:
    from autopar.program.trainer import Trainer
    from autopar.program.verify import VerifyReport


class Program:
    """A compiled step: its plan, its parts, their source, and how the initial values are made."""

    def __init__(self, step: ForwardStep, plan: Plan, pipeline: Pipeline) -> None:
        captured = step.capture()
        self.step: ForwardStep | None = step
        self.plan, self.pipeline = plan, pipeline
        self.scalars: Mapping[str, float] = captured.scalars
        self.options: Mapping[str, Mapping[str, Any]] = captured.options
        self.aliases: Mapping[str, str] = step.aliases
        self.batch_layout: Sequence[str] = tuple(step.batch_tensors())
        self._recipe = Recipe.of(captured)

    # -- what is saved and compared ------------------------------------------------------------------------------
    @property
    def plan_json(self) -> str:
        return self.plan.to_json()

    @functools.cached_property
    def codes(self) -> tuple[StageCode, ...]:
        """The source of every stage, with what running it needs."""
        return stage_codes(self.pipeline)

    @functools.cached_property
    def hash(self) -> str:
        """What ranks compare before they run: the plan's decisions, source, slots and constants."""
        return program_hash(self.plan.fingerprint, self.codes)

    @property
    def recipe(self) -> Mapping[str, Any]:
        """How the initial values are made, as JSON."""
        return self._recipe.to_dict()

    def source(self, stage: int = 0) -> str:
        """The Python module of a stage (of several a rank, of its rank's); raises `PlanError` where there is no such
        stage."""
        if not 0 <= stage < self.pipeline.mesh.num_stages:
            raise PlanError(f"stage {stage}: the program has stages 0 to {self.pipeline.mesh.num_stages - 1}")
        return self.codes[stage % len(self.codes)].source

    def save(self, directory: str | Path, extra: Mapping[str, str] | None = None) -> None:
        """Writes the program's directory, whole or not at all; `extra` are further files by name."""
        save_program(self, directory, extra)

    @classmethod
    def load(cls, directory: str | Path) -> LoadedProgram:
        """The program in a directory that `save` wrote."""
        return LoadedProgram(load_program(directory), Path(directory))

    # -- what it does --------------------------------------------------------------------------------------------
    def functions(self, stage: int, comm: Any) -> dict[str, Callable[..., Any]]:
        """The functions of `stage` on the rank of `comm`."""
        return dict(self.codes[stage].bind(comm, comm.device))

    def optional(self, stage: int) -> Mapping[str, Collection[Slot]]:
        """Per function of `stage`, the accumulators for which it takes `None` as zero."""
        return {name: signature.optional for name, signature in self.codes[stage].functions.items()}

    def verify(self, num_steps: int = 3, seed: int = 0) -> VerifyReport:
        """Both halves of DESIGN section 1, on a virtual mesh; weights and random numbers are those of `seed`."""
        from autopar.program.verify import verify

        assert self.step is not None
        return verify(self.step, self.pipeline, whole_weights(self.step, seed), num_steps, seed)

    def start(self, seed: int = 0, device: Any = None, deterministic: bool = False) -> Trainer:
        """This rank's trainer, its state filled tensor by tensor; raises `PlanError` for another number of ranks.

        `seed`: of the initial weights where a factory makes the model, and of the step's random ops.
        """
        assert self.step is not None
        return start(self, self.step, self._recipe, seed, device, deterministic)


class LoadedProgram:
    """A program read from a directory: runs without the model's graph; the model's file makes the weights."""

    def __init__(self, saved: SavedProgram, directory: Path) -> None:
        self.saved, self.directory = saved, directory
        self.plan = Plan.from_json(saved.plan_json, str(directory / "plan.json"))

    @functools.cached_property
    def hash(self) -> str:
        """The hash of the program that was saved, unless a file was edited."""
        return program_hash(self.plan.fingerprint, self.saved.codes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.saved, name)

    def source(self, stage: int = 0) -> str:
        """The Python module of a stage."""
        return self.saved.codes[stage % len(self.saved.codes)].source

    def start(self, seed: int = 0, device: Any = None, deterministic: bool = False) -> Trainer:
        """This rank's trainer; raises `PlanError` when the directory doesn't say where the weights come from."""
        from autopar.models import load_step
        from autopar.running import read_origin

        origin = read_origin(self.directory)
        if origin is None:
            raise PlanError(
                f"{self.directory}: no origin.json, so nothing says how the weights are made; use `autopar build`"
            )
        step = load_step(str(self.directory / origin.model), origin.options)
        return start(self, step, Recipe.from_dict(dict(self.saved.recipe)), seed, device, deterministic)


def start(
    program: Any, step: ForwardStep, recipe: Recipe, seed: int, device: Any = None, deterministic: bool = False
) -> Trainer:
    """A trainer of `program` whose state is filled from `step`'s model, one whole tensor at a time."""
    from autopar.program.trainer import Trainer

    unsaved = {name for name, _ in step.model.named_buffers()} - set(step.model.state_dict()) | set(recipe.constants)
    options: dict[str, Any] = {"device": device, "deterministic": deterministic, "seed": seed}
    trainer = Trainer(program, optional=program.optional, unsaved=unsaved, **options)
    wanted = set(trainer.executor.slots)

    def put(slot: Slot, value: Tensor) -> None:
        if slot in wanted:
            trainer.state.load(slot, value)

    put_initial_values(step, recipe, seed, put)
    return trainer
