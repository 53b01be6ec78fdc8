"""Several stages a rank: whole steps against those of one device, what ranks hold against the accountant, the plan."""

import dataclasses
import functools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar import TrainStep, compile, plan
from autopar.errors import PlanError
from autopar.plans import Plan
from autopar.program.memory import stage_peak
from autopar.repriced import reprice
from autopar.solve.problem import evaluate
from tests.virtual.step_models import adamw, gpt, hf_batch, token_batch


def tied_llama(layers):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))


class Shared(nn.Module):
    """Its first and last layers have one weight, on two stages of one rank (the last stage has the loss alone)."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.mse_loss(x, torch.zeros_like(x))


CASES = {
    "gpt": (functools.partial(gpt, layers=8), token_batch, "4xcpu", "pp=2, dp=2, virtual=2, microbatches=2"),
    "llama": (functools.partial(tied_llama, 3), hf_batch, "2xcpu", "pp=2, virtual=2, microbatches=2"),
    "shared": (Shared, lambda: {"x": torch.linspace(-1, 1, 32).view(4, 8)}, "2xcpu", "pp=2, virtual=2, microbatches=2"),
}


@functools.cache
def step_of(name):
    torch.manual_seed(0)
    factory, batch, _, _ = CASES[name]
    return TrainStep(factory(), batch(), optimizer=adamw, clip_norm=0.5)


@functools.cache
def planned(name):
    _, _, cluster, pins = CASES[name]
    return plan(step_of(name), cluster, pin=pins)


@functools.cache
def program(name):
    return compile(step_of(name), planned(name))


@pytest.mark.parametrize("name", CASES)
def test_same_numbers_as_one_device(name):
    report = program(name).verify(num_steps=2)
    assert report.ok, report


@pytest.mark.parametrize("name", CASES)
def test_ranks_hold_what_the_plan_says(name):
    """Also where few stages and layers were looked at (those of the GPT between the first and the last are alike)."""
    rows = planned(name).estimate.memory
    assert [stage_peak(program(name).pipeline, rank).peak for rank in range(2)] == [row.peak for row in rows]


def test_weights_shared_within_a_rank_stay_there():
    first, second = program("shared").pipeline.stages
    assert {"accumulator:layers.0.weight", "accumulator:layers.0.weight@2"} <= set(map(str, first.values))
    assert not any("layers.0.weight" in str(slot) for slot in second.values)
    assert {transfer.slot.kind for transfer in program("shared").pipeline.transfers} == {"saved"}


def test_the_plan_says_where_stages_are():
    found = planned("gpt")
    assert (str(found.mesh), found.schedule) == ("pp=2 dp=2 tp=1 virtual=2", "interleaved_1f1b")
    assert [stage.rank for stage in found.stages] == [0, 1, 0, 1]
    assert Plan.from_json(found.to_json()) == found
    assert re.search(r"stage  pp  modules\n  0      0   tokens, blocks.0, blocks.1\n  1      1   blocks.2", str(found))
    assert program("gpt").source(stage=2).startswith('"""Stages 0, 2 of 4 on mesh pp=2 dp=2 tp=1 virtual=2: ')


def test_the_estimate_is_the_price_of_the_plan():
    priced = reprice(step_of("gpt"), planned("gpt"))
    objective = evaluate(priced.built.problem, priced.choice).objective
    assert objective == pytest.approx(planned("gpt").estimate.objective_s, rel=1e-6)


def test_a_saved_program_is_the_same(tmp_path):
    made = program("shared")
    made.save(tmp_path / "out")
    loaded = type(made).load(tmp_path / "out")
    assert loaded.hash == made.hash and loaded.pipeline.mesh == made.pipeline.mesh
    assert sorted(path.name for path in (tmp_path / "out").glob("stage_*")) == ["stage_0.py", "stage_1.py"]


class Perceptron(nn.Module):
    """As much work in each layer as makes what is sent between stages cheap."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(10))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def test_the_search_finds_how_many_stages_a_rank_are_best():
    step = TrainStep(Perceptron(), {"x": torch.zeros(4096, 256)}, microbatches=4)
    free, once = (plan(step, "2xcpu", pin=f"pp=2{more}") for more in ("", ", virtual=1"))
    assert free.mesh.virtual > 1 and free.estimate.objective_s < 0.97 * once.estimate.objective_s
    assert free.estimate.bubble_fraction < 0.7 * once.estimate.bubble_fraction
    assert free.estimate.bound_s <= once.estimate.bound_s  # it holds for one stage a rank, too
    assert [str(row.mesh) for row in free.candidates if row.status == "chosen"] == [str(free.mesh)]


@pytest.mark.parametrize(("pins", "message"), [
    ("pp=1, virtual=2", "a pin asks for 2 stages a rank, but the mesh has no pipeline"),
    ("pp=2, virtual=3, microbatches=2", "6 stages, but 5 units to cut between"),
    ("pp=2, virtual=2, microbatches=2, layers.0: stage=0", "and another puts modules on stages"),
])  # fmt: skip
def test_what_cannot_be(pins, message):
    with pytest.raises(PlanError, match=message):
        plan(step_of("shared"), "2xcpu", pin=pins)


def test_microbatches_that_make_no_rounds():
    step = TrainStep(Shared(), {"x": torch.ones(7, 8)}, optimizer=adamw, microbatches=7)
    with pytest.raises(PlanError, match="but 7 microbatches can't go through 2 ranks in equal rounds; use a multiple"):
        plan(step, "2xcpu", pin="pp=2, virtual=2")


def test_a_plan_whose_schedule_is_for_one_stage_a_rank_is_refused():
    with pytest.raises(PlanError, match="schedule '1f1b', but 4 stages on pp=2; 'interleaved_1f1b' is for several"):
        dataclasses.replace(planned("shared"), schedule="1f1b")
