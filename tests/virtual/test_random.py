"""Dropout draws the same masks under every plan: those of the eager step, by the element's global index."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.step import TrainStep
from autopar.capture.symbolic import BATCH as BATCH_SIZE
from autopar.capture.symbolic import SEQUENCE
from autopar.compiling import compile
from autopar.mesh import Mesh
from autopar.planning import plan
from autopar.program.parts import Pipeline
from autopar.program.verify import initial_values, verify
from autopar.program.virtual import VirtualMesh, Wide, whole_value
from autopar.randomness import random_keys
from tests.virtual.random_plans import random_pipeline, wrong
from tests.virtual.step_models import VOCAB, hf_batch, momentum, step_of, token_batch, weights_of
from tests.virtual.test_models import verified

local_indices: Any = importlib.import_module("passes.local_indices")
MASK = torch.ops.autopar.random_mask.default

PLANS = [
    (1, "2xcpu", "dp=2"),
    (1, "2xcpu", "tp=2"),
    (2, "2xcpu", "pp=2"),
    (1, "4xcpu", "dp=2, tp=2"),
    (2, "4xcpu", "pp=2, tp=2"),
    (2, "2xcpu", "dp=2, recompute=full"),
    (1, "2xcpu", "*: tp=seq"),
    (1, "4xcpu", ""),
]


@functools.cache
def expected_masks(microbatches: int, num_steps: int) -> list[dict[tuple[str, int | None], Tensor]]:
    """Per step: the captured step's mask for each (name of the draw, microbatch)."""
    step = step_of("gpt, dropout", microbatches)
    found = []
    for index in range(num_steps):
        masks: dict[tuple[str, int | None], Tensor] = {}
        for microbatch, key in enumerate(random_keys(0, index, microbatches)):
            for node in step.capture().gradient.graph.nodes:
                if node.target is MASK:
                    masks[node.args[1], microbatch] = MASK(key, *node.args[1:])
        found.append(masks)
    return found


def drawn_masks(step: TrainStep, pipeline: Pipeline, num_steps: int) -> list[dict[tuple[str, int | None], Tensor]]:
    """Per step: the masks that all ranks drew, put together."""
    found: list[dict[tuple[str, int | None], Tensor]] = []

    def observe(stage: int, part: str, microbatch: int | None, node: Any, wide: Wide) -> None:
        if node.target is MASK:
            whole = whole_value(wide, node.meta["layout"], virtual.mesh, str(node))
            seen = found[-1].setdefault((node.args[1], microbatch), whole)
            assert torch.equal(seen, whole), "run again, it must draw the same"

    virtual = VirtualMesh(pipeline, observe)
    present = {slot for stage in pipeline.stages for slot in stage.values}
    values = initial_values(step, step.capture(), weights_of(step))
    virtual.load({slot: value for slot, value in values.items() if slot in present})
    for index in range(num_steps):
        found.append({})
        virtual.step(step.batch_tensors(), step.capture().scalars, random_keys(0, index, step.microbatches))
    return found


@pytest.mark.parametrize(("microbatches", "cluster", "pins"), PLANS)
def test_every_plan_draws_the_masks_of_one_device(microbatches: int, cluster: str, pins: str) -> None:
    step = step_of("gpt, dropout", microbatches)
    program = compile(step, plan(step, cluster, pin=pins or None))
    report = verify(step, program.pipeline, weights_of(step), 1)
    assert report.ok, str(report)
    drawn = drawn_masks(step, program.pipeline, 2)
    for got, expected in zip(drawn, expected_masks(microbatches, 2), strict=True):
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[place], mask) for place, mask in expected.items())


def test_masks_differ_by_op_microbatch_and_step() -> None:
    masks = [mask for step in expected_masks(2, 2) for mask in step.values() if mask.shape == (2, 6, 8)]
    assert len(masks) == 8  # two a block, two microbatches, two steps
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks)


def test_any_layout_of_a_mask_is_right() -> None:
    """Random plans split masks along every factor, minor ones too."""
    torch.manual_seed(0)
    step = TrainStep(Dropping(), token_batch(), optimizer=momentum)
    split = set()
    for seed in range(4):
        pipeline = random_pipeline(step, Mesh.parse("dp=2"), seed)
        nodes = [node for part in pipeline.stages[0].parts.values() for node in part.graph.graph.nodes]
        split |= {str(node.meta["layout"]) for node in nodes if node.target is MASK}
        assert wrong(step, pipeline, 1) == []
    assert len(split) > 1


@pytest.mark.parametrize("argument", ["offset", "strides"])
def test_a_mask_drawn_by_the_local_index_is_caught(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = local_indices.HANDLERS["autopar.random_mask"]
    struck = []

    def local(localiser: Any, node: Any) -> None:
        right(localiser, node)
        wrong_value = {"offset": 0, "strides": [1] * len(node.kwargs["strides"])}[argument]
        struck.append(node.kwargs[argument] != wrong_value)
        node.kwargs = {**node.kwargs, argument: wrong_value}

    step = step_of("gpt, dropout", 1)
    monkeypatch.setitem(local_indices.HANDLERS, "autopar.random_mask", local)
    program = compile(step, plan(step, "2xcpu", pin="dp=2" if argument == "offset" else "tp=2"))
    assert any(struck)
    assert not verify(step, program.pipeline, weights_of(step), 1).ok


# -- other random ops ------------------------------------------------------------------------------------------------
class Noisy(nn.Module):
    """Noise, samples that skip a layer, dropped channels, a random choice, a shuffle."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tokens, self.gate = nn.Embedding(VOCAB, width), nn.Linear(width, 2)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x + 0.1 * torch.randn_like(x)
        kept = x.new_empty(x.shape[0], 1, 1).bernoulli_(0.75).div_(0.75)
        x = x + kept * self.down(F.alpha_dropout(F.dropout1d(self.up(x), 0.25), 0.2, self.training))
        x = x * F.gumbel_softmax(self.gate(x), tau=2.0)[..., :1]
        choice = torch.multinomial(torch.rand(x.shape[0], 4), 1).unsqueeze(-1)
        x = x * (1 + choice) + torch.randint(3, (x.shape[-1],))
        x = x + x[:, torch.randperm(x.shape[1])]
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), targets.flatten())


@functools.cache
def noisy() -> TrainStep:
    torch.manual_seed(0)
    return TrainStep(Noisy(), token_batch(), optimizer=momentum, microbatches=2)


def test_numbers_drawn_in_place_into_a_fresh_tensor_are_the_tensor() -> None:
    names = {node.target for node in noisy().capture().gradient.graph.nodes}
    assert torch.ops.aten.copy.default not in names and torch.ops.aten.empty_like.default not in names


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
@pytest.mark.parametrize("pins", ["dp=2", "tp=2"])
def test_other_random_ops(pins: str) -> None:
    report = verified(noisy(), "2xcpu", pins, 1)
    assert report.ok, str(report)


class Dropping(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tokens, self.layer = nn.Embedding(VOCAB, width), nn.Linear(width, width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = F.dropout(self.layer(self.tokens(tokens)), 0.2)
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), targets.flatten())


def test_mixed_precision_and_symbolic_sizes() -> None:
    torch.manual_seed(0)
    step = TrainStep(Dropping(), token_batch(), optimizer=momentum, precision="mixed")
    program = compile(step, plan(step, "2xcpu", pin="tp=2"))
    assert wrong(step, program.pipeline, 1) == []
    assert step.symbolic_shapes()["random_mask"] == (BATCH_SIZE, SEQUENCE, 8)


# -- Hugging Face ------------------------------------------------------------------------------------------------------
def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=2, n_head=2, n_positions=8))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    return BertForMaskedLM(BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=8))


@functools.cache
def hugging_face(name: str) -> TrainStep:
    torch.manual_seed(0)
    model = {"gpt2": gpt2, "bert": bert}[name]()
    return TrainStep(model.train(), hf_batch(), optimizer=momentum, microbatches=2)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
@pytest.mark.parametrize("pins", ["tp=2", "pp=2"])
def test_hugging_face_models_in_training(name: str, pins: str) -> None:
    """Their configurations drop a tenth of embeddings, attention weights and residuals."""
    step = hugging_face(name)
    draws = [node for node in step.capture().gradient.graph.nodes if node.target is MASK]
    assert len(draws) == 1 + 2 * 3  # the embeddings'; attention's and two residuals' of each layer
    report = verified(step, "2xcpu", pins, 1)
    assert report.ok, str(report)


@pytest.mark.parametrize("pins", ["tp=2", "pp=2"])
def test_checkpointed_hugging_face_model(pins: str) -> None:
    """Its own gradient checkpointing draws the same masks when it runs a layer again."""
    torch.manual_seed(0)
    model = gpt2().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    step = TrainStep(model, hf_batch(), optimizer=momentum, microbatches=2)
    report = verified(step, "2xcpu", pins, 1)
    assert report.ok, str(report)
