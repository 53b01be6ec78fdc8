"""What the backward computes again: placement of the copies on a small graph, exactness on random sets."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch.fx import Graph, Node

import passes
from autopar.compiling import annotated
from autopar.mesh import Mesh
from autopar.program.generators import one_f_one_b
from autopar.program.parts import Pipeline
from passes.context import Context
from passes.recompute import recompute
from tests.virtual.random_plans import even_cut, random_choices, resharder_of, wrong
from tests.virtual.step_models import step_of

aten = torch.ops.aten
NOTHING = Context(Mesh.parse("dp=1"), 1, {}, (), resharder_of(Mesh.parse("dp=1")))


class Builder:
    """A local step graph: each call with its key, phase and module path."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.x = self.graph.placeholder("x")
        self.x.meta.update(phase="prologue", stage=0)

    def call(self, target, args, phase, path, key=None) -> Node:
        node = self.graph.call_function(target, args)
        node.meta.update(phase=phase, stage=0, path=path, **({"key": key} if key else {}))
        return node

    def names(self, phase: str) -> list[str]:
        return [n.name for n in self.graph.nodes if n.op == "call_function" and n.meta["phase"] == phase]


def two_layers() -> tuple[Builder, dict[str, Node]]:
    b = Builder()
    a = b.call(aten.relu.default, (b.x,), "forward", "h.0", "a")
    moved = b.call(aten.neg.default, (a,), "forward", "h.0")  # stands for a move: no key
    c = b.call(aten.exp.default, (moved,), "forward", "h.0", "c")
    d = b.call(aten.sin.default, (c,), "forward", "h.1", "d")
    late = b.call(aten.mul.Tensor, (d, d), "backward", "h.1")
    middle = b.call(aten.mul.Tensor, (late, late), "backward", "h.1")
    early = b.call(aten.mul.Tensor, (middle, c), "backward", "h.0")
    again = b.call(aten.mul.Tensor, (early, c), "backward", "h.0")
    b.graph.output((again,))
    return b, {"a": a, "moved": moved, "c": c, "d": d, "middle": middle, "early": early, "again": again}


def test_copies_stand_right_before_their_first_reader_with_what_has_no_key() -> None:
    b, nodes = two_layers()
    recompute(b.graph, replace(NOTHING, recomputed=frozenset({"c"})))
    copied = ["neg_default_1", "exp_default_1"]
    assert b.names("backward") == ["mul_tensor", "mul_tensor_1", *copied, "mul_tensor_2", "mul_tensor_3"]
    copy = nodes["early"].args[1]
    assert copy is nodes["again"].args[1] and copy is not nodes["c"]  # one copy serves both readers of the block
    assert copy.args[0].args[0] is nodes["a"]  # what is kept is read as it is
    assert copy.meta["phase"] == "backward" and nodes["c"].meta["phase"] == "forward"
    b.graph.lint()


def test_each_block_has_copies_of_its_own() -> None:
    b, _ = two_layers()
    recompute(b.graph, replace(NOTHING, recomputed=frozenset({"a", "c", "d"})))
    names = ["relu_default_1", "neg_default_1", "exp_default_1", "sin_default_1", "mul_tensor"]
    assert b.names("backward")[:5] == names
    assert b.names("backward")[6:10] == ["relu_default_2", "neg_default_2", "exp_default_2", "mul_tensor_2"]
    b.graph.lint()


def test_random_ops_are_kept() -> None:
    b = Builder()
    noise = b.call(aten.bernoulli.default, (b.x,), "forward", "h.0", "noise")
    y = b.call(aten.mul.Tensor, (b.x, noise), "forward", "h.0", "y")
    grad = b.call(aten.mul.Tensor, (y, noise), "backward", "h.0")
    b.graph.output((grad,))
    recompute(b.graph, replace(NOTHING, recomputed=frozenset({"noise", "y"})))
    assert grad.args[1] is noise
    assert grad.args[0] is not y and grad.args[0].args[1] is noise


def test_another_stages_value_is_kept_where_it_was_received() -> None:
    b, nodes = two_layers()
    for name in ("d", "middle"):
        nodes[name].meta["stage"] = 1
    nodes["middle"].args = (nodes["c"], nodes["d"])
    recompute(b.graph, replace(NOTHING, recomputed=frozenset({"a", "c", "d"})))
    assert nodes["middle"].args[0] is nodes["c"]
    assert nodes["middle"].args[1].args[0] is nodes["c"]


def pipeline_with(model: str, mesh_text: str, microbatches: int, seed: int, share: float) -> tuple[object, Pipeline]:
    """A random plan in which a random share of the forward nodes is computed again."""
    step, mesh, rng = step_of(model, microbatches), Mesh.parse(mesh_text), random.Random(seed)
    graph = annotated(step.capture(), microbatches, even_cut(step, mesh.num_stages))
    choices = random_choices(graph.graph, mesh, rng)
    forward = [n.meta["key"] for n in graph.graph.nodes if n.meta.get("phase") == "forward"]
    again = frozenset(key for key in forward if rng.random() < share)
    context = Context(mesh, microbatches, choices, graph.state_pairs, resharder_of(mesh), again)
    pipeline = passes.lower(graph.graph, context)
    return step, replace(pipeline, schedule=one_f_one_b(mesh.num_stages, microbatches))


CASES = [
    ("gpt", "dp=2 tp=2", 2, 0, 0.5),
    ("gpt, 3 layers", "pp=3 dp=2", 2, 1, 0.7),
    ("llama, 2 layers", "pp=2 tp=2", 2, 2, 0.5),
    ("llama, 2 layers", "tp=4", 1, 3, 1.0),
    ("gpt2", "dp=2 tp=2", 1, 4, 0.3),
    ("convnet", "dp=2", 2, 5, 1.0),
]


@pytest.mark.parametrize(("model", "mesh", "microbatches", "seed", "share"), CASES)
def test_any_set_may_be_computed_again(model: str, mesh: str, microbatches: int, seed: int, share: float) -> None:
    step, pipeline = pipeline_with(model, mesh, microbatches, seed, share)
    assert wrong(step, pipeline) == []
    backward = [n for s in pipeline.stages for n in s.parts["backward"].graph.graph.nodes]
    assert any(n.meta.get("recomputed") for n in backward)
