"""Readable Python from a stage's graphs: one module per stage, one function per part.

    def bind(comm, device, constants):
        def forward(inputs):
            (
                weight,  # param:proj.weight f32[64 (2@tp 32)]
                batch_x,  # batch:x f32[8 64]
            ) = inputs
            inputs.clear()
            # proj
            mm = batch_x.mm(weight.t()); del batch_x  # model.py:12
            loss = comm.all_reduce(mm, "tp", "sum"); del mm
            return (loss,)
        return {"forward": forward}

Invariants:
- the source is a function of the stage and the mesh alone: equal graphs give equal text;
- a function takes a list in the order of its slots, empties it (so that what it holds is freed as soon as it is dead)
  and returns a tuple in the order of its output slots;
- an accumulator that is only added to may be passed as `None`, which means zero: the gradient itself is then kept;
- a value is dropped after the statement that reads it last; views that are used once stand inside their reader.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autopar.mesh import Mesh
from autopar.program.function_source import Writer
from autopar.program.parts import Part, Slot, StageProgram, Value
from autopar.program.spelling import Speller

Bound = Callable[[list[Any]], tuple[Any, ...]]
"""A part, bound to a rank: inputs (a list, emptied by the call) → outputs."""

INDENT = " " * 4


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function of a stage takes and gives."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    optional: tuple[Slot, ...] = ()
    """Accumulators for which `None` (zero) may be passed."""
    donated: tuple[Slot, ...] = ()
    """Outputs that are the very tensor passed in (or, for an optional one passed as `None`, a fresh one)."""


@dataclass(frozen=True, slots=True)
class StageCode:
    """A stage as source: all that running it needs, no graph."""

    index: int
    source: str
    functions: dict[str, Signature]
    values: dict[Slot, Value]
    constants: dict[str, Tensor]

    def bind(self, comm: Any, device: Any) -> dict[str, Bound]:
        """The stage's functions for one rank; `comm` has `autopar.collectives`' functions as methods."""
        filename = f"<autopar stage {self.index}>"
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(keepends=True), filename)
        namespace: dict[str, Any] = {"__name__": f"autopar_stage_{self.index}"}
        exec(compile(self.source, filename, "exec"), namespace)
        on_device = {name: constant.to(device) for name, constant in self.constants.items()}
        functions: dict[str, Bound] = namespace["bind"](comm, device, on_device)
        return functions


def stage_code(stage: StageProgram | StageCode, mesh: Mesh) -> StageCode:
    """The stage as source with its signatures and constants; a `StageCode` is given back as it is."""
    if isinstance(stage, StageCode):
        return stage
    speller = _speller()
    bodies = [Writer(part, stage.values, speller) for part in stage.parts.values()]
    constants = _constants(stage)
    texts = [body.function() for body in bodies]
    functions = {
        body.part.name: Signature(body.part.inputs, body.part.outputs, body.optional, body.donated) for body in bodies
    }
    source = _module(stage, mesh, texts, speller)
    return StageCode(stage.index, source, functions, dict(stage.values), constants)


def generate_source(stage: StageProgram, mesh: Mesh) -> str:
    """The stage's Python module."""
    return stage_code(stage, mesh).source


def _speller() -> Speller:
    from autopar import composites, random_ops

    return Speller(lowered={**composites.LOWERED, **random_ops.LOWERED})


def _constants(stage: StageProgram) -> dict[str, Tensor]:
    """The tensors that graphs read as attributes, by `part.attribute`."""
    found: dict[str, Tensor] = {}
    for part in stage.parts.values():
        for node in part.graph.graph.nodes:
            if node.op == "get_attr":
                found[constant_name(part, node.target)] = _attribute(part.graph, node.target).detach()
    return found


def constant_name(part: Part, attribute: str) -> str:
    """The key in `constants` of a tensor that a part's graph holds as an attribute."""
    return f"{part.name}.{attribute}"


def _attribute(module: Any, path: str) -> Tensor:
    for name in path.split("."):
        module = getattr(module, name)
    assert isinstance(module, Tensor), path
    return module


def _module(stage: StageProgram, mesh: Mesh, texts: list[str], speller: Speller) -> str:
    """The module's text: heading, names bound once, `bind`."""
    where = f"mesh {mesh}" if mesh.axes else "one rank"
    own = mesh.stages_at(stage.index)
    stages = f"Stage {stage.index}" if len(own) == 1 else f"Stages {', '.join(map(str, own))}"
    title = f"{stages} of {mesh.num_stages} on {where}: {', '.join(stage.parts)}."
    heading = f'"""{title} Sizes in layouts are global."""\n'
    imports = sorted({"torch", *(_module_of(expression) for expression in speller.bindings.values())})
    names = [f"{name} = {expression}" for name, expression in sorted(speller.bindings.items())]
    lines = [heading, *(f"import {module}" for module in imports), "", *names, "" if names else None, ""]
    body = "\n".join(line for line in lines if line is not None)
    functions = "\n".join(_indented(text) for text in texts)
    returned = ", ".join(f'"{name}": {name}' for name in stage.parts)
    return f"{body}\ndef bind(comm, device, constants):\n{functions}\n{INDENT}return {{{returned}}}\n"


def _module_of(expression: str) -> str:
    """What to import for `torch._C._nn.gelu` or `autopar.composites.attention`."""
    return "torch" if expression.startswith("torch.") else expression.rpartition(".")[0]


def _indented(text: str) -> str:
    return "".join(f"{INDENT}{line}" if line.strip() else line for line in text.splitlines(keepends=True))
