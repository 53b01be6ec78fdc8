"""`split_stages`: parts, slots and transfers of each pipeline stage."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch

import passes
from autopar import collectives, markers
from autopar.compiling import annotated
from autopar.mesh import Mesh
from autopar.program.parts import Pipeline, Slot
from passes.context import Context
from passes.split_stages import PARTS
from tests.virtual.random_plans import even_cut, random_pipeline, resharder_of
from tests.virtual.step_models import step_of


@functools.cache
def replicated(model: str, mesh_text: str, microbatches: int = 1) -> Pipeline:
    """A pipeline in which no tensor is split."""
    step, mesh = step_of(model, microbatches), Mesh.parse(mesh_text)
    graph = annotated(step.capture(), microbatches, even_cut(step, mesh.num_stages))
    choices = {node.meta["key"]: () for node in graph.graph.nodes if "rule" in node.meta}
    return passes.lower(graph.graph, Context(mesh, microbatches, choices, graph.state_pairs, resharder_of(mesh)), ())


MODELS = [("gpt", "pp=1", 1), ("gpt", "pp=1", 2), ("gpt, 3 layers", "pp=3", 2), ("convnet", "pp=1", 1)]


@pytest.mark.parametrize(("model", "mesh", "microbatches"), MODELS)
def test_each_part_takes_its_inputs_and_returns_its_outputs(model: str, mesh: str, microbatches: int) -> None:
    for stage in replicated(model, mesh, microbatches).stages:
        assert list(stage.parts) == [name for name in PARTS if name in stage.parts]
        for part in stage.parts.values():
            part.graph.graph.lint()
            places = [node for node in part.graph.graph.nodes if node.op == "placeholder"]
            assert tuple(node.meta["slot"] for node in places) == part.inputs
            (values,) = next(n for n in part.graph.graph.nodes if n.op == "output").args
            assert len(values) == len(part.outputs) == len(set(part.outputs))
            assert {*part.inputs, *part.outputs} <= set(stage.values)


@pytest.mark.parametrize(("model", "mesh", "microbatches"), MODELS)
def test_every_value_is_written_before_it_is_read(model: str, mesh: str, microbatches: int) -> None:
    """In the order prologue, forward, backward, update; accumulators and state come from before."""
    pipeline = replicated(model, mesh, microbatches)
    given = {"param", "buffer", "state", "scalar", "batch", "whole", "accumulator"}
    for stage in pipeline.stages:
        written = {Slot("received", t.slot.name) for t in pipeline.transfers if t.target == stage.index}
        for name in PARTS:
            if name in stage.parts:
                missing = [s for s in stage.parts[name].inputs if s.kind not in given and s not in written]
                assert not missing, (stage.index, name, missing)
                written |= set(stage.parts[name].outputs)


def test_layouts_and_dtypes_of_slots_are_those_of_the_values() -> None:
    pipeline = random_pipeline(step_of("gpt", 2), Mesh.parse("dp=2"), 3, ())
    (stage,) = pipeline.stages
    for part in stage.parts.values():
        (values,) = next(n for n in part.graph.graph.nodes if n.op == "output").args
        for slot, node in zip(part.outputs, values, strict=True):
            local = node.meta["local_val"]
            assert stage.values[slot].dtype == local.dtype
            assert stage.values[slot].layout.local_shape(pipeline.mesh) == tuple(local.shape), slot


# -- microbatches ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_are_in_accumulators(microbatches: int) -> None:
    (stage,) = replicated("gpt", "pp=1", microbatches).stages
    made = {slot.name for slot in stage.parts["backward"].outputs if slot.kind == "accumulator"}
    assert made == set(step_of("gpt").trainable_names)
    read = {slot.name for slot in stage.parts["backward"].inputs if slot.kind == "accumulator"}
    assert read == (made if microbatches > 1 else set())
    sums = [n for n in stage.parts["backward"].graph.graph.nodes if n.target is torch.ops.aten.add.Tensor]
    accumulating = [n for n in sums if n.args[0].op == "placeholder" and n.args[0].meta["slot"].kind == "accumulator"]
    assert len(accumulating) == len(read)
    assert not any(node.target is markers.accumulate for node in stage.parts["backward"].graph.graph.nodes)


# -- stages ------------------------------------------------------------------------------------------------------
def test_activations_go_up_gradients_come_down_and_the_tied_weight_goes_once() -> None:
    pipeline = replicated("gpt, 3 layers", "pp=3", 2)
    crossing = Counter((t.source, t.target, t.part, t.slot.kind) for t in pipeline.transfers)
    assert crossing == {
        (0, 1, "forward", "saved"): 1,
        (1, 2, "forward", "saved"): 1,
        (2, 1, "backward", "saved"): 1,
        (1, 0, "backward", "saved"): 1,
        (0, 2, "prologue", "param"): 1,  # the tied embedding, for the head
        (2, 0, "backward", "accumulator"): 1,  # and its gradient
    }
    shapes = {t.slot.kind: pipeline.stages[t.source].values[t.slot].layout.global_shape for t in pipeline.transfers}
    assert shapes == {"saved": (2, 6, 8), "param": (24, 8), "accumulator": (24, 8)}


def test_what_is_sent_has_one_layout_at_both_ends() -> None:
    pipeline = random_pipeline(step_of("gpt, 3 layers", 2), Mesh.parse("pp=3 tp=2"), 0, ())
    for transfer in pipeline.transfers:
        sent = pipeline.stages[transfer.source].values[transfer.slot]
        received = pipeline.stages[transfer.target].values[Slot("received", transfer.slot.name)]
        assert sent == received


def test_state_lives_on_the_stage_of_its_parameter_only() -> None:
    pipeline = replicated("gpt, 3 layers", "pp=3", 2)
    homes: dict[str, set[int]] = {}
    for stage in pipeline.stages:
        for slot in stage.values:
            if slot.kind in ("param", "state"):
                homes.setdefault(slot.name, set()).add(stage.index)
    assert all(len(stages) == 1 for stages in homes.values())
    assert homes["blocks.1.up.weight"] == homes["blocks.1.up.weight.exp_avg"] == {1}
    assert {role for role in homes if role.startswith("tokens.weight")} >= {"tokens.weight", "tokens.weight.exp_avg_sq"}


def test_no_stage_runs_another_s_nodes() -> None:
    seen: set[str] = set()
    for stage in replicated("gpt, 3 layers", "pp=3", 2).stages:
        nodes = [node for part in stage.parts.values() for node in part.graph.graph.nodes if node.op == "call_function"]
        keys = {node.meta["key"] for node in nodes if "key" in node.meta}
        assert keys and not keys & seen
        seen |= keys


@pytest.mark.parametrize("seed", [0, 1])
def test_an_accumulator_has_the_dims_of_its_parameter(seed: int) -> None:
    """A reduction that runs in the backward once left its value viewed into factors: [3 2 4] for a bias of [24]."""
    (stage,) = random_pipeline(step_of("gpt", 1), Mesh.parse("dp=2 tp=2"), seed, ()).stages
    shapes = {name: tuple(p.shape) for name, p in step_of("gpt").model.named_parameters()}
    made = {slot.name: v.layout.global_shape for slot, v in stage.values.items() if slot.kind == "accumulator"}
    assert made == shapes


def test_a_rank_s_place_is_computed_by_each_part_that_needs_it() -> None:
    """The first index of a rank's range is a number, which no slot holds."""
    for seed in range(6):
        pipeline = random_pipeline(step_of("gpt", 1), Mesh.parse("dp=2"), seed, ())
        parts = pipeline.stages[0].parts.values()
        knowing = [p.name for p in parts if any(n.target is collectives.first for n in p.graph.graph.nodes)]
        if len(knowing) > 1:
            return
    raise AssertionError("no plan has a rank's place in two parts")
