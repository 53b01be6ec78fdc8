"""From the command line's MODEL to a training step.

    load_step("train.py:step", StepOptions())                       # a function that returns a TrainStep
    load_step("config.json", StepOptions(batch=8, seq=128))         # a Hugging Face config; nothing is downloaded

Invariants:
- what a user's file raises is reported with that file's line, as `autopar.Error`;
- a Hugging Face model is built on meta: its weights come module by module from the seed when ranks start;
- an option that a factory doesn't take is refused, not ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autopar.errors import Error

if TYPE_CHECKING:
    from autopar.capture import ForwardStep, TrainStep

EXPECTED = "MODEL is file.py:factory, a function that returns an autopar.TrainStep, or a Hugging Face config.json"


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What the command line says about the step; None leaves it to the factory."""

    batch: int | None = None
    seq: int | None = None
    microbatches: int | str | None = None
    """A number, or "auto"."""
    precision: str | None = None
    clip_norm: float | None = None


def load_step(model: str, options: StepOptions) -> TrainStep | ForwardStep:
    """The step that MODEL names; raises `Error` when there is none."""
    if model.endswith(".json"):
        return _step_of_config(_existing(model), options)
    path, colon, name = model.rpartition(":")
    if not colon or not name:
        raise Error(f"model {model!r}: names no factory; {EXPECTED}")
    return _call_factory(load_module(path), name, options)


def load_module(path: str) -> ModuleType:
    """The user's file as a module, its folder importable as under `python FILE`."""
    file = _existing(path)
    name = f"autopar_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise Error(f"model {path!r}: is not a Python file; {EXPECTED}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickle look a class's module up
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    _guarded(lambda: spec.loader.exec_module(module), file, "import")  # type: ignore[union-attr]
    return module


def _existing(path: str) -> Path:
    file = Path(path).resolve()
    if not file.is_file():
        raise Error(f"model {path!r}: no such file; {EXPECTED}")
    return file


def _call_factory(module: ModuleType, name: str, options: StepOptions) -> TrainStep | ForwardStep:
    factory = getattr(module, name, None)
    file = Path(str(module.__file__))
    if not callable(factory):
        found = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        raise Error(f"{file.name}: has no function {name!r}; it has {', '.join(found) or 'none'}; {EXPECTED}")
    arguments = _accepted(factory, f"{file.name}:{name}", options)
    return _checked(_guarded(lambda: factory(**arguments), file, f"{name}()"), f"{file.name}:{name}")


def _accepted(factory: Callable[..., Any], label: str, options: StepOptions) -> dict[str, int | str | float]:
    given = {key: value for key, value in dataclasses.asdict(options).items() if value is not None}
    known = inspect.signature(factory).parameters
    for key in given:
        if key not in known:
            option = f"--{key.replace('_', '-')}"
            raise Error(f"{option}: {label} takes no argument {key!r}; add it to the factory, or leave {option} out")
    return given


def _checked(step: object, label: str) -> TrainStep | ForwardStep:
    from autopar.capture import ForwardStep, TrainStep

    if not isinstance(step, TrainStep | ForwardStep):
        raise Error(f"{label}: returned {type(step).__name__}; expected an autopar.TrainStep or autopar.ForwardStep")
    return step


def _guarded(run: Callable[[], Any], file: Path, doing: str) -> Any:
    """Runs the user's code; what it raises becomes one line that names theirs."""
    try:
        return run()
    except Error:
        raise
    except SyntaxError as error:
        raise Error(f"{file.name}:{error.lineno}: {error.msg}; mend the file and try again") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f.lineno for f in reversed(frames) if f.filename == str(file)), "?")
        raise Error(f"{file.name}:{line}: {doing} raised {type(error).__name__}: {error}") from error


# -- Hugging Face ------------------------------------------------------------------------------------------------
def _step_of_config(file: Path, options: StepOptions) -> TrainStep:
    import torch

    from autopar.capture import TrainStep

    config = _read_config(file)
    seq = options.seq or min(128, getattr(config, "max_position_embeddings", 128))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (options.batch or 8, seq), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens}
    factory = functools.partial(_model_of, config)
    microbatches: Any = options.microbatches or 1
    precision = options.precision or "fp32"
    clip_norm = options.clip_norm
    return _guarded(  # type: ignore[no-any-return]
        lambda: TrainStep(factory, batch, microbatches=microbatches, precision=precision, clip_norm=clip_norm),
        file,
        "building the model",
    )


def _read_config(file: Path) -> Any:
    try:
        fields = json.loads(file.read_text())
    except ValueError as error:
        raise Error(f"model {file.name!r}: is not JSON ({error}); {EXPECTED}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise Error(f'model {file.name!r}: has no "model_type", so it is no Hugging Face config; {EXPECTED}')
    try:
        from transformers import AutoConfig
    except ImportError:
        raise Error("a Hugging Face config needs transformers; pip install 'autopar[hf]'") from None
    kind = fields.pop("model_type")
    return _guarded(lambda: AutoConfig.for_model(kind, **fields, use_cache=False), file, "reading the config")


def _model_of(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config)
