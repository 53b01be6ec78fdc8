"""A program as a directory that people can read and `autopar run` can run.

    save_program(program, "out/")
    loaded = load_program("out/")          # needs no model and no graph: functions come from the source

    out/plan.json               the plan
        program.json            format version, mesh, slots, values, transfers, batch, scalars, param groups, aliases
        schedule.txt            one line of actions per pipeline rank
        stage_0.py, …           the source of each stage, or of all the stages of the rank that has it
        constants.safetensors   tensors that the source reads (where there are any)
        recipe.json             how the initial weights are made

Invariants:
- a directory is complete or absent: it is written beside its place and renamed into it;
- only an earlier program, or an empty directory, is replaced;
- loading checks everything and raises one `PlanError` that names the file, what was got and what was expected;
- a loaded program has the hash of the one that was saved, unless a file was edited.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from autopar.boundary import parse_json
from autopar.errors import PlanError
from autopar.layout import Layout
from autopar.mesh import PIPELINE_AXIS, Mesh
from autopar.program.actions import format_schedule, parse_schedule
from autopar.program.codegen import Bound, Signature, StageCode, stage_code
from autopar.program.function_source import DTYPE_NAMES, dtype_name
from autopar.program.parts import Part, Pipeline, Slot, StageProgram, Transfer, Value

FORMAT_VERSION = 1
PLAN, PROGRAM, SCHEDULE, RECIPE = "plan.json", "program.json", "schedule.txt", "recipe.json"
CONSTANTS = "constants.safetensors"


class Savable(Protocol):
    """What is saved of a program."""

    @property
    def plan_json(self) -> str: ...
    @property
    def pipeline(self) -> Pipeline: ...
    @property
    def recipe(self) -> Mapping[str, Any]: ...  # how the initial weights are made, as JSON
    @property
    def scalars(self) -> Mapping[str, float]: ...
    @property
    def options(self) -> Mapping[str, Mapping[str, Any]]: ...
    @property
    def aliases(self) -> Mapping[str, str]: ...
    @property
    def batch_layout(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class SavedProgram:
    """A program without graphs: the parts of `pipeline` have their slots, and `codes` their source."""

    plan_json: str
    pipeline: Pipeline
    codes: tuple[StageCode, ...]
    recipe: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    batch_layout: tuple[str, ...] = ()

    @property
    def hash(self) -> str:
        """What ranks compare before they run."""
        return program_hash(self.plan_json, self.codes)

    def functions(self, stage: int, comm: Any) -> dict[str, Bound]:
        """The functions of `stage` on the rank of `comm`."""
        return self.codes[stage].bind(comm, comm.device)

    def optional(self, stage: int) -> Mapping[str, Collection[Slot]]:
        """Per function of `stage`, the accumulators for which it takes `None` as zero."""
        return {name: signature.optional for name, signature in self.codes[stage].functions.items()}


def stage_codes(pipeline: Pipeline) -> tuple[StageCode, ...]:
    """The source of every stage."""
    return tuple(stage_code(stage, pipeline.mesh) for stage in pipeline.stages)


def program_hash(plan_json: str, codes: Sequence[StageCode]) -> str:
    """SHA-256 of the plan, the source, the slots and the constants."""
    digest = hashlib.sha256(plan_json.encode())
    for code in codes:
        digest.update(code.source.encode())
        digest.update(json.dumps(dataclasses.asdict(_described(code)), sort_keys=True).encode())
        for name, constant in sorted(code.constants.items()):
            digest.update(name.encode() + constant.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


# -- the text of program.json --------------------------------------------------------------------------------------
_STRICT: Any = {"extra": "forbid"}


@dataclass(frozen=True, slots=True)
class _Function:
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    optional: tuple[str, ...]
    donated: tuple[str, ...]
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, slots=True)
class _Stage:
    index: int
    functions: dict[str, _Function]
    values: dict[str, str]
    """Slot → `"f32[(8@dp 64) 32]"`."""
    constants: tuple[str, ...]
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, slots=True)
class _Transfer:
    slot: str
    source: int
    target: int
    part: str
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, slots=True)
class _Document:
    format_version: int
    mesh: str
    microbatches: int
    batch_layout: tuple[str, ...]
    scalars: dict[str, float]
    options: dict[str, dict[str, Any]]
    aliases: dict[str, str]
    transfers: tuple[_Transfer, ...]
    stages: tuple[_Stage, ...]
    __pydantic_config__ = _STRICT


def _document(program: Savable, codes: Sequence[StageCode]) -> _Document:
    pipeline = program.pipeline
    return _Document(
        format_version=FORMAT_VERSION,
        mesh=str(pipeline.mesh),
        microbatches=pipeline.microbatches,
        batch_layout=tuple(program.batch_layout),
        scalars=dict(program.scalars),
        options={name: dict(entries) for name, entries in program.options.items()},
        aliases=dict(program.aliases),
        transfers=tuple(_Transfer(str(t.slot), t.source, t.target, t.part) for t in pipeline.transfers),
        stages=tuple(_described(code) for code in codes),
    )


def _described(code: StageCode) -> _Stage:
    functions = {
        name: _Function(*(tuple(map(str, slots)) for slots in (s.inputs, s.outputs, s.optional, s.donated)))
        for name, s in code.functions.items()
    }
    values = {str(slot): value_text(value) for slot, value in sorted(code.values.items())}
    return _Stage(code.index, functions, values, tuple(sorted(code.constants)))


def value_text(value: Value) -> str:
    """`"bf16[(8@dp 4096) 1024]"`."""
    return f"{dtype_name(value.dtype)}{value.layout}"


def parse_value(text: str, what: str) -> Value:
    """The inverse of `value_text`; raises `PlanError`."""
    name, bracket, rest = text.partition("[")
    dtype = {short: dtype for dtype, short in DTYPE_NAMES.items()}.get(name, getattr(torch, name, None))
    try:
        if not isinstance(dtype, torch.dtype) or not bracket:
            raise ValueError
        return Value(dtype, Layout.parse(bracket + rest))
    except ValueError:
        raise PlanError(f"{what}: {text!r} is not a value such as 'f32[(8@dp 64) 32]'") from None


# -- saving --------------------------------------------------------------------------------------------------------
def save_program(program: Savable, directory: str | Path, extra: Mapping[str, str] | None = None) -> None:
    """Writes the program (and `extra` files, name → text) as `directory`; all or nothing.

    Raises `PlanError` where `directory` holds something else.
    """
    target = Path(directory)
    _require_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write(program, staging, extra or {})
        staging.chmod(0o755)
        _put_in_place(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _require_replaceable(target: Path) -> None:
    is_program = (target / PROGRAM).is_file()
    if target.exists() and not (target.is_dir() and (is_program or not any(target.iterdir()))):
        raise PlanError(f"{target}: exists and is no saved program; name a new directory")


def _write(program: Savable, directory: Path, extra: Mapping[str, str]) -> None:
    codes = getattr(program, "codes", None) or stage_codes(program.pipeline)
    texts = {
        **extra,
        PLAN: program.plan_json,
        PROGRAM: _json(dataclasses.asdict(_document(program, codes))),
        SCHEDULE: format_schedule(program.pipeline.schedule),
        RECIPE: _json(dict(program.recipe)),
        **{f"stage_{code.index}.py": code.source for code in codes},
    }
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    constants = {f"{code.index}.{name}": value for code in codes for name, value in code.constants.items()}
    if constants:
        from safetensors.torch import save_file

        save_file(
            {name: value.detach().cpu().contiguous().clone() for name, value in constants.items()},
            directory / CONSTANTS,
        )


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def _put_in_place(staging: Path, target: Path) -> None:
    """Renames; an earlier program steps aside first and comes back when that fails."""
    if not target.exists():
        staging.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.replace(aside / "program")
    try:
        staging.rename(target)
    except OSError:
        (aside / "program").replace(target)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


# -- loading -------------------------------------------------------------------------------------------------------
def load_program(directory: str | Path) -> SavedProgram:
    """The program saved in `directory`; raises `PlanError` where it is missing, incomplete or malformed."""
    folder = Path(directory)
    if not (folder / PROGRAM).is_file():
        raise PlanError(f"{folder}: no saved program here ({PROGRAM} is missing); make one with `autopar build`")
    text = _read(folder / PROGRAM)
    _require_version(text, folder / PROGRAM)
    document = parse_json(_Document, text, str(folder / PROGRAM))
    constants = _constants(folder, document)
    codes = tuple(_code(stage, folder, constants) for stage in document.stages)
    return SavedProgram(
        plan_json=_read(folder / PLAN),
        pipeline=_pipeline(document, codes, folder),
        codes=codes,
        recipe=parse_json(dict[str, Any], _read(folder / RECIPE), str(folder / RECIPE)),
        scalars=document.scalars,
        options=document.options,
        aliases=document.aliases,
        batch_layout=document.batch_layout,
    )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PlanError(f"{file}: missing; the directory is not a complete program, build it again") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{file}: can't be read: {error}") from None


def _require_version(text: str, file: Path) -> None:
    """Before anything else, as another version has other fields."""
    version = parse_json(dict[str, Any], text, str(file)).get("format_version")
    if version != FORMAT_VERSION:
        raise PlanError(f"{file}: format version {version!r}, this autopar reads {FORMAT_VERSION}; build it again")


def _constants(folder: Path, document: _Document) -> dict[str, Tensor]:
    wanted = [f"{stage.index}.{name}" for stage in document.stages for name in stage.constants]
    if not wanted:
        return {}
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / CONSTANTS
    try:
        found: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise PlanError(f"{file}: can't be read: {error}; build the program again") from None
    missing = [name for name in wanted if name not in found]
    if missing:
        raise PlanError(f"{file}: has no {missing[0]!r}, which the source reads; build the program again")
    return found


def _code(stage: _Stage, folder: Path, constants: Mapping[str, Tensor]) -> StageCode:
    file = folder / f"stage_{stage.index}.py"
    source = _read(file)
    try:
        compile(source, str(file), "exec")
    except SyntaxError as error:
        raise PlanError(f"{file}: line {error.lineno}: {error.msg}") from None
    where = f"{folder / PROGRAM}: stage {stage.index}"
    return StageCode(
        index=stage.index,
        source=source,
        functions={name: Signature(*map(_slots, _fields(f))) for name, f in stage.functions.items()},
        values={Slot.parse(slot): parse_value(text, f"{where}, {slot}") for slot, text in stage.values.items()},
        constants={name: constants[f"{stage.index}.{name}"] for name in stage.constants},
    )


def _fields(function: _Function) -> tuple[tuple[str, ...], ...]:
    return function.inputs, function.outputs, function.optional, function.donated


def _slots(texts: tuple[str, ...]) -> tuple[Slot, ...]:
    return tuple(map(Slot.parse, texts))


def _pipeline(document: _Document, codes: Sequence[StageCode], folder: Path) -> Pipeline:
    """The pipeline with empty graphs, checked against itself."""
    mesh = Mesh.parse(document.mesh)
    expected = mesh.size(PIPELINE_AXIS)
    if [stage.index for stage in document.stages] != list(range(expected)):
        raise PlanError(f"{folder / PROGRAM}: {len(document.stages)} stages on mesh {mesh}, expected {expected}")
    stages = tuple(StageProgram(code.index, _parts(code, folder), dict(code.values)) for code in codes)
    transfers = tuple(Transfer(Slot.parse(t.slot), t.source, t.target, t.part) for t in document.transfers)
    for transfer in transfers:
        if not {transfer.source, transfer.target} <= set(range(len(stages))):
            raise PlanError(f"{folder / PROGRAM}: transfer of {transfer.slot} between stages that don't exist")
    schedule = parse_schedule(_read(folder / SCHEDULE))
    return Pipeline(mesh, document.microbatches, stages, transfers, schedule)


def _parts(code: StageCode, folder: Path) -> dict[str, Part]:
    for name, signature in code.functions.items():
        for slot in (*signature.inputs, *signature.outputs):
            if slot not in code.values:
                raise PlanError(f"{folder / PROGRAM}: stage {code.index}, {name}: slot {slot} has no value")
    return {name: Part(name, s.inputs, s.outputs, _no_graph()) for name, s in code.functions.items()}


def _no_graph() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(())
    return fx.GraphModule(torch.nn.Module(), graph)
