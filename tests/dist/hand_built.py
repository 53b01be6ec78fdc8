"""Pipelines whose part graphs are written by hand, and the same training in plain autograd.

`two_stages`: x → relu(x W1ᵀ) → W2 → mean squared error, W1 on stage 0 and W2 on stage 1, both split over tp; SGD with
momentum. `zero3`: one linear layer, its weight split over dp, gathered in the prologue, its gradient reduce-scattered.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from autopar import collectives as c
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.program.parts import Part, Pipeline, Slot, StageProgram, Transfer, Value

aten = torch.ops.aten
MICROBATCHES, ROWS, WIDTH, HIDDEN, OUT = 4, 4, 6, 8, 12
SCHEDULE_1F1B = (
    ("0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"),
    ("1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"),
)


class Writer:
    """Writes one part: `read` inputs, `call`, `part`."""

    def __init__(self, name: str) -> None:
        self.name, self.graph, self.inputs = name, fx.Graph(), []

    def read(self, *texts: str) -> list[fx.Node]:
        self.inputs += map(Slot.parse, texts)
        return [self.graph.placeholder(text.replace(":", "_").replace(".", "_")) for text in texts]

    def call(self, target, *args) -> fx.Node:
        return self.graph.call_function(target, args)

    def part(self, **outputs: fx.Node) -> Part:
        self.graph.output(tuple(outputs.values()))
        slots = tuple(Slot(*name.split("__", 1)) for name in outputs)
        return Part(self.name, tuple(self.inputs), slots, fx.GraphModule(torch.nn.Module(), self.graph))


def update(name: str) -> Part:
    w = Writer("update")
    old, gradient, momentum, lr = w.read(f"param:{name}", f"accumulator:{name}", f"state:{name}.m", "scalar:group0.lr")
    new = w.call(aten.add.Tensor, w.call(aten.mul.Tensor, momentum, 0.9), gradient)
    moved = w.call(aten.sub.Tensor, old, w.call(aten.mul.Tensor, new, lr))
    return w.part(**{f"param__{name}": moved, f"state__{name}.m": new})


def stage_0() -> StageProgram:
    w = Writer("forward")
    x, weight = w.read("batch:x", "param:w1")
    h = w.call(aten.mm.default, x, w.call(aten.t.default, weight))
    started = w.call(c.all_gather_start, w.call(aten.relu.default, h), "tp", 1)
    forward = w.part(saved__h=h, saved__a=w.call(c.wait, started))
    w = Writer("backward")
    x, h, da, total = w.read("batch:x", "saved:h", "received:da", "accumulator:w1")
    dh = w.call(aten.mul.Tensor, w.call(c.shard, da, "tp", 1), w.call(aten.gt.Scalar, h, 0))
    gradient = w.call(aten.mm.default, w.call(aten.t.default, dh), x)
    backward = w.part(accumulator__w1=w.call(aten.add.Tensor, total, gradient))
    values = {
        "batch:x": "[4 6]",
        "param:w1": "[8@tp 6]",
        "state:w1.m": "[8@tp 6]",
        "accumulator:w1": "[8@tp 6]",
        "saved:h": "[4 8@tp]",
        "saved:a": "[4 8]",
        "received:da": "[4 8]",
        "scalar:group0.lr": "[]",
    }
    return stage(0, values, forward, backward, update("w1"))


def stage_1() -> StageProgram:
    w = Writer("forward")
    a, target, weight = w.read("received:a", "batch:y", "param:w2")
    mine = w.call(c.shard, a, "tp", 1)
    out = w.call(c.all_reduce, w.call(aten.mm.default, mine, w.call(aten.t.default, weight)), "tp")
    error = w.call(aten.sub.Tensor, out, target)
    mean = w.call(aten.mean.default, w.call(aten.mul.Tensor, error, error))
    loss = w.call(aten.div.Scalar, mean, MICROBATCHES)
    forward = w.part(output__loss=loss, saved__error=error, saved__mine=mine, output__out=out)
    w = Writer("backward")
    error, mine, weight, total = w.read("saved:error", "saved:mine", "param:w2", "accumulator:w2")
    d = w.call(aten.mul.Tensor, error, 2 / (ROWS * OUT) / MICROBATCHES)
    gradient = w.call(aten.mm.default, w.call(aten.t.default, d), mine)
    da = w.call(c.all_gather, w.call(aten.mm.default, d, weight), "tp", 1)
    backward = w.part(saved__da=da, accumulator__w2=w.call(aten.add.Tensor, total, gradient))
    values = {
        "received:a": "[4 8]",
        "batch:y": "[4 12]",
        "param:w2": "[12 8@tp]",
        "state:w2.m": "[12 8@tp]",
        "accumulator:w2": "[12 8@tp]",
        "output:loss": "[]",
        "output:out": "[4 12]",
        "saved:error": "[4 12]",
        "saved:mine": "[4 8@tp]",
        "saved:da": "[4 8]",
        "scalar:group0.lr": "[]",
    }
    return stage(1, values, forward, backward, update("w2"))


def stage(index: int, values: dict[str, str], *parts: Part) -> StageProgram:
    described = {Slot.parse(slot): Value(torch.float32, Layout.parse(text)) for slot, text in values.items()}
    return StageProgram(index, {part.name: part for part in parts}, described)


def two_stages(schedule=SCHEDULE_1F1B) -> Pipeline:
    transfers = (Transfer(Slot("saved", "a"), 0, 1, "forward"), Transfer(Slot("saved", "da"), 1, 0, "backward"))
    return Pipeline(Mesh.parse("pp=2 tp=2"), MICROBATCHES, (stage_0(), stage_1()), transfers, schedule)


def zero3() -> Pipeline:
    """`w` [12 6] as a strided split: its layout splits a middle factor of dim 0."""
    w = Writer("prologue")
    (weight,) = w.read("param:w")
    viewed = w.call(aten.view.default, weight, [3, 2, 6])
    whole = w.call(c.all_gather, viewed, "dp", 1)
    prologue = w.part(gathered__w=w.call(aten.reshape.default, whole, [12, 6]))
    w = Writer("forward")
    x, target, weight = w.read("batch:x", "batch:y", "gathered:w")
    error = w.call(aten.sub.Tensor, w.call(aten.mm.default, x, w.call(aten.t.default, weight)), target)
    total = w.call(aten.sum.default, w.call(aten.mul.Tensor, error, error))
    partial = w.call(aten.div.Scalar, total, ROWS * OUT * MICROBATCHES)
    forward = w.part(output__loss=w.call(c.all_reduce, partial, "dp"), saved__error=error)
    w = Writer("backward")
    x, error, total = w.read("batch:x", "saved:error", "accumulator:w")
    d = w.call(aten.mul.Tensor, error, 2 / (ROWS * OUT) / MICROBATCHES)
    gradient = w.call(aten.view.default, w.call(aten.mm.default, w.call(aten.t.default, d), x), [3, 4, 6])
    started = w.call(c.reduce_scatter_start, gradient, "dp", 1)
    local = w.call(aten.view.default, w.call(c.wait, started), [6, 6])
    backward = w.part(accumulator__w=w.call(aten.add.Tensor, total, local))
    values = {
        "param:w": "[(3 4@dp) 6]",
        "state:w.m": "[(3 4@dp) 6]",
        "accumulator:w": "[(3 4@dp) 6]",
        "gathered:w": "[12 6]",
        "batch:x": "[4@dp 6]",
        "batch:y": "[4@dp 12]",
        "saved:error": "[4@dp 12]",
        "output:loss": "[]",
        "scalar:group0.lr": "[]",
    }
    return Pipeline(Mesh.parse("dp=2"), MICROBATCHES, (stage(0, values, prologue, forward, backward, update("w")),), ())


# -- the same on one device ---------------------------------------------------------------------------------------
@dataclass
class Reference:
    """Plain autograd and SGD with momentum, microbatch by microbatch."""

    weights: list[Tensor]
    momenta: list[Tensor] = field(default_factory=list)
    outputs: Tensor | None = None

    def step(self, x: Tensor, y: Tensor, lr: float) -> float:
        self.momenta = self.momenta or [torch.zeros_like(w) for w in self.weights]
        weights = [w.detach().requires_grad_() for w in self.weights]
        outputs = [self.predict(piece, weights) for piece in x.chunk(MICROBATCHES)]
        losses = [F.mse_loss(out, piece) for out, piece in zip(outputs, y.chunk(MICROBATCHES), strict=True)]
        loss = torch.stack(losses).mean()
        loss.backward()
        self.outputs = torch.cat(outputs).detach()
        self.momenta = [0.9 * m + w.grad for m, w in zip(self.momenta, weights, strict=True)]
        self.weights = [(w - lr * m).detach() for m, w in zip(self.momenta, weights, strict=True)]
        return loss.item()

    def predict(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        return x @ weights[0].T if len(weights) == 1 else F.relu(x @ weights[0].T) @ weights[1].T


def weights(*shapes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) / 2 for shape in shapes]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    rows = ROWS * MICROBATCHES
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, OUT, generator=generator)


@dataclass
class HandBuilt:
    """A pipeline as the trainer's `Program`."""

    pipeline: Pipeline
    hash: str = "hand-built"
    scalars: dict[str, float] = field(default_factory=lambda: {"group0.lr": 0.1})
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    batch_layout: tuple[str, ...] = ("x", "y")

    def functions(self, stage: int, comm) -> dict:
        return {name: part.graph for name, part in self.pipeline.stages[stage].parts.items()}
