"""The parts of a stage's program and the slots through which values flow between them.

One optimizer step on a stage is: `prologue` once (step-level gathers), then per microbatch `forward` and
`backward` (or `input_grad` and `weight_grad`), then `update` once, and before it, where gradients are clipped on
several stages, `norm`.

| slot kind     | lives                                   | written by              | read by                    |
|---------------|-----------------------------------------|-------------------------|----------------------------|
| `param`       | across steps                            | update                  | prologue, any part         |
| `buffer`      | across steps                            | forward                 | any part                   |
| `state`       | across steps (optimizer state)          | update                  | update                     |
| `scalar`      | one step (learning rate, …)             | the caller              | update                     |
| `gathered`    | one step                                | prologue                | forward, backward          |
| `whole`       | one step (the batch of all microbatches) | the caller             | prologue                   |
| `batch`       | one microbatch                          | the caller              | forward, backward          |
| `random`      | one microbatch (the key of its random ops, on the CPU) | the caller | forward, backward       |
| `saved`       | one microbatch (what `norm` makes: step) | forward, input_grad    | backward, weight_grad      |
| `received`    | one microbatch, or one step (prologue, update) | another stage    | any part                   |
| `accumulator` | one step, zero at its start             | backward, weight_grad   | backward, update           |
| `output`      | one microbatch (scalars: summed over them) | forward, update      | the caller                 |

Invariants:
- a part's graph is a flat FX graph of local tensors: placeholders in the order of `inputs`, one output tuple in the
  order of `outputs`;
- every slot of a stage has one `Value` (dtype and layout over the stage's SPMD mesh).

Where a rank has several stages, `interleaved` makes one of these programs of them: what is said of a stage here then
holds for all the stages of a rank together, whose parts are told apart by name (`forward_2`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autopar.layout import Layout
from autopar.mesh import Mesh

if TYPE_CHECKING:
    from torch import dtype
    from torch.fx import GraphModule


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A named place for one tensor in a stage's store."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"

    @classmethod
    def parse(cls, text: str) -> Slot:
        kind, _, name = text.partition(":")
        return cls(kind, name)


@dataclass(frozen=True, slots=True)
class Value:
    """What a slot holds: `layout` has the global sizes; the local tensor has `layout.local_shape(mesh)`."""

    dtype: dtype
    layout: Layout


def part_name(phase: str, stage: int, mesh: Mesh) -> str:
    """What a stage's part is called in the program of its rank: `forward`, or of several stages `forward_2`."""
    return f"{phase}_{stage}" if mesh.virtual > 1 else phase


def phase_of(part: str) -> str:
    """`forward` of `forward_2`."""
    return part.rstrip("0123456789").removesuffix("_")


@dataclass(frozen=True, slots=True)
class Part:
    """One function of a stage, as a graph from input slots to output slots."""

    name: str
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    graph: GraphModule


@dataclass(frozen=True, slots=True)
class Transfer:
    """After `source` has run `part`, its slot (`saved`, `param`, …) goes to `received:name` of `target`."""

    slot: Slot
    source: int
    target: int
    part: str
    """The part of the source stage that makes the value; microbatch-level for forward/backward/…, else step-level."""


@dataclass(frozen=True, slots=True)
class StageProgram:
    """All parts of one pipeline stage, or of the stages of one pipeline rank; all that are at `pp` = `index` run it."""

    index: int
    parts: dict[str, Part]
    values: dict[Slot, Value]
    memo: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What was derived from the parts, once they are lowered and no longer change."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The whole executable program as graphs: what code is generated from, and what the virtual mesh runs."""

    mesh: Mesh
    microbatches: int
    stages: tuple[StageProgram, ...]
    transfers: tuple[Transfer, ...]
    schedule: tuple[tuple[str, ...], ...] = field(default=())
    """Per pipeline rank, the actions of a step in order: `("0F0", "0F1", "0B0", …)`."""
