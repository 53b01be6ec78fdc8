"""The captured gradient graph against eager: loss, gradients, buffers; labels on its nodes."""

from __future__ import annotations

import copy
import functools
import operator
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import capture_models as models
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autopar.capture import Captured, ForwardStep, Role, TrainStep, graph_hash, op_name, outputs, placeholders
from autopar.capture.clean import is_view
from autopar.private import OpOverload, schema_of
from autopar.rules.table import has_rule


def values_of(step: ForwardStep, batch: Any, index: int = 0) -> list[Tensor]:
    """The placeholders' values, from the step's model and a microbatch."""
    captured = step.capture()
    sources: dict[str, dict[str, Tensor]] = {
        "param": dict(step.model.named_parameters()),
        "buffer": {**dict(step.model.named_buffers()), **captured.constants},
        "batch": step.microbatch(batch, index),
        "total": totals_of(step, batch),
    }
    return [sources[role.kind][role.name].detach().clone() for role in placeholders(captured.gradient)]


def totals_of(step: ForwardStep, batch: Any) -> dict[str, Tensor]:
    whole, tensors = step.capture().whole, step.batch_tensors(batch)
    made = whole(*(tensors[role.name] for role in placeholders(whole))) if whole is not None else ()
    return {f"total{index}": value for index, value in enumerate(made)}


def run_captured(step: TrainStep, batch: Any, index: int = 0) -> dict[Role, Tensor]:
    results = step.capture().gradient(*values_of(step, batch, index))
    return dict(zip(step.capture().gradient_outputs, results, strict=True))


def run_eager(step: TrainStep, batch: Any, index: int = 0) -> dict[Role, Tensor]:
    model = copy.deepcopy(step.model)
    given = step.form.rebuild(step.microbatch(batch, index))
    args, kwargs = step.form.call(given)
    output = model(*args, **kwargs)
    loss = step.loss(output, given) if step.loss else output if isinstance(output, Tensor) else output.loss
    share = loss / step.microbatches  # the batches here have as many tokens in each microbatch
    share.backward()
    found = {Role("loss", "loss"): share.detach()}
    found |= {Role("grad", name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {Role("buffer", name): b for name, b in model.named_buffers()}


def image_loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1])


def make_step(name: str, microbatches: int = 1, **options: Any) -> tuple[TrainStep, Any]:
    return _made(name, microbatches, **options)


@functools.cache  # which would keep a step for each way to say the same
def _made(name: str, microbatches: int, **options: Any) -> tuple[TrainStep, Any]:
    torch.manual_seed(0)
    model: nn.Module
    if name == "gpt":
        model, batch = models.GPT(), models.token_batch()
    elif name == "frozen":
        model, batch = models.GPT(), models.token_batch()
        for parameter in (*model.blocks[0].parameters(), model.positions.weight):
            parameter.requires_grad_(False)
    elif name == "llama":
        model, batch = models.tiny_llama(), models.hf_batch()
    elif name == "gpt2":
        model, batch = models.tiny_gpt2(), models.hf_batch()
    else:
        model, batch = models.ConvNet(), (torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,)))
        options["loss"] = image_loss
    return TrainStep(model, batch, microbatches=microbatches, **options), batch


MODELS = ["gpt", "frozen", "llama", "gpt2", "conv"]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_equals_eager(name: str, microbatches: int) -> None:
    step, batch = make_step(name, microbatches)
    got, want = run_captured(step, batch, microbatches - 1), run_eager(step, batch, microbatches - 1)
    assert set(got) - {role for role in got if role.kind == "buffer"} == {r for r in want if r.kind != "buffer"}
    for role, value in got.items():
        # 2e-6 of the largest entry: the loss is summed in another order than in torch's fused kernel; a bias before a
        # batch norm has a gradient that is nothing but rounding, so that the scale has a floor
        scale = max(want[role].abs().max().item(), 5e-2) if value.is_floating_point() else 1.0
        torch.testing.assert_close(
            value, want[role], rtol=0, atol=2e-6 * scale, msg=lambda text, r=role: f"{r}: {text}"
        )


def test_buffers_that_change_come_out() -> None:
    step, _ = make_step("conv")
    changed = [role.name for role in step.capture().gradient_outputs if role.kind == "buffer"]
    assert changed == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def test_assigned_buffers_come_out() -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("average", torch.zeros(3))
            self.register_buffer("still", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            self.average = 0.9 * self.average + 0.1 * x.mean(0)
            return (self.linear(x - self.average) * self.still).square().mean()

    step = TrainStep(Averaging(), torch.randn(4, 3))
    batch = step.batch
    assert [r.name for r in step.capture().gradient_outputs if r.kind == "buffer"] == ["average"]
    torch.testing.assert_close(run_captured(step, batch)[Role("buffer", "average")], 0.1 * batch.mean(0))


@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2"])
def test_mixed_precision_is_near_bf16_eager(name: str) -> None:
    step, batch = make_step(name, precision="mixed")
    values = values_of(step, batch)
    roles = list(placeholders(step.capture().gradient))
    values = [v.bfloat16() if r.kind == "param" else v for r, v in zip(roles, values, strict=True)]
    results = dict(zip(step.capture().gradient_outputs, step.capture().gradient(*values), strict=True))
    reference = run_eager(make_step(name)[0], batch)
    assert abs(results[Role("loss", "loss")] - reference[Role("loss", "loss")]) < 0.02
    for role, value in results.items():
        if role.kind == "grad":
            assert value.dtype == torch.bfloat16
            assert (value - reference[role]).norm() <= 0.06 * reference[role].norm() + 1e-4, role


# -- structure -------------------------------------------------------------------------------------------------------


def call_nodes(captured: Captured) -> list[fx.Node]:
    return [node for node in captured.gradient.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", MODELS)
def test_graph_is_functional_and_clean(name: str) -> None:
    step, _ = make_step(name)
    for node in call_nodes(step.capture()):
        assert node.users, node
        if isinstance(node.target, OpOverload):
            assert not schema_of(node.target).is_mutable, node
        assert op_name(node) not in {"detach", "alias", "addmm", "_unsafe_view", "native_dropout", "native_batch_norm"}
        assert set(node.meta) == {"val", "path", "phase", "source", "key"}
    keys = [node.meta["key"] for node in step.capture().gradient.graph.nodes]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2"])
def test_module_paths_on_forward_and_backward(name: str) -> None:
    step, _ = make_step(name)
    nodes = call_nodes(step.capture())
    for phase in ("forward", "backward"):
        inside = [bool(node.meta["path"]) for node in nodes if node.meta["phase"] == phase]
        assert sum(inside) / len(inside) > 0.75, phase  # the rest is the loss, at the root
    modules = dict(step.model.named_modules())
    assert all(node.meta["path"] in modules for node in nodes)
    for node in nodes:
        if op_name(node) in ("linear", "linear_dx", "linear_dw"):
            weight = next((a for a in node.args if isinstance(a, fx.Node) and a.op == "placeholder"), None)
            owner = weight.meta["role"].name.rpartition(".")[0] if weight is not None else None
            tied = owner is not None and node.meta["path"] in ("head", "lm_head")
            assert owner is None or tied or owner == node.meta["path"], node


def test_linear_layers_and_attention_are_composites() -> None:
    step, _ = make_step("llama")
    counts: dict[str, int] = {}
    for node in call_nodes(step.capture()):
        counts[op_name(node)] = counts.get(op_name(node), 0) + 1
    layers = 2
    assert counts["linear"] == counts["linear_dx"] == counts["linear_dw"] == 7 * layers + 1
    assert counts["attention"] == counts["attention_backward"] == layers
    assert "mm" not in counts
    attention = next(node for node in call_nodes(step.capture()) if op_name(node) == "attention")
    q, k, _, mask, is_causal, _ = attention.args
    assert (q.meta["val"].shape[1], k.meta["val"].shape[1], mask, is_causal) == (4, 2, None, True)


def test_sources_are_the_users_lines() -> None:
    step, _ = make_step("gpt")
    lines = Path(models.__file__).read_text().splitlines()
    nodes = [node for node in call_nodes(step.capture()) if op_name(node).startswith("linear")]
    for node in nodes:
        file, _, line = node.meta["source"].partition(":")
        assert file == "capture_models.py"
        assert f"self.{node.meta['path'].rpartition('.')[2]}(" in lines[int(line) - 1]
    assert {node.meta["phase"] for node in nodes} == {"forward", "backward"}


def test_library_models_name_their_own_lines() -> None:
    step, _ = make_step("llama")
    sources = {node.meta["source"].partition(":")[0] for node in call_nodes(step.capture())}
    assert "modeling_llama.py" in sources and "" not in sources


def test_tied_frozen_and_unused_parameters() -> None:
    step, _ = make_step("frozen")
    captured = step.capture()
    params = [role.name for role in placeholders(captured.gradient) if role.kind == "param"]
    grads = [role.name for role in captured.gradient_outputs if role.kind == "grad"]
    assert params == list(step.parameter_names)
    assert step.aliases == {"head.weight": "tokens.weight"}
    assert "tokens.weight" in grads and "positions.weight" not in grads
    assert set(captured.update_of) == set(grads) == set(captured.initial_state)

    class Unused(models.GPT):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(2, 2)

    captured = TrainStep(Unused(), models.token_batch()).capture()
    assert "spare.weight" in [role.name for role in placeholders(captured.gradient)]
    assert "spare.weight" not in captured.update_of


def test_shares_of_microbatches_add_up() -> None:
    whole, batch = make_step("gpt")
    parts, _ = make_step("gpt", 4)
    want = run_captured(whole, batch)
    sums: dict[Role, Tensor] = {}
    for index in range(4):
        for role, value in run_captured(parts, batch, index).items():
            sums[role] = sums.get(role, torch.zeros_like(value)) + value
    for role, value in want.items():
        torch.testing.assert_close(sums[role], value, rtol=1e-5, atol=1e-6)
    assert len(call_nodes(parts.capture())) <= len(call_nodes(whole.capture()))  # counts are made by another graph


def test_constants_of_the_forward_become_buffers() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * torch.tensor([1.0, 2.0, 3.0]) * torch.tensor(2.0)).square().mean()

    torch.manual_seed(0)
    step = TrainStep(Weighted(), torch.randn(4, 3))
    constants = step.capture().constants
    assert {name: value.tolist() for name, value in constants.items()} == {"_constant0": [1.0, 2.0, 3.0]}
    got, want = run_captured(step, step.batch), run_eager(step, step.batch)
    torch.testing.assert_close(got[Role("grad", "linear.weight")], want[Role("grad", "linear.weight")])


def test_factory_builds_on_meta_and_captures_the_same_graph() -> None:
    built = TrainStep(models.GPT(), models.token_batch())
    step = TrainStep(models.GPT, models.token_batch())
    assert step.factory is models.GPT and all(p.is_meta for p in step.model.parameters())
    assert graph_hash(step.capture()) == graph_hash(built.capture())


def test_capture_leaves_the_model_as_it_was() -> None:
    step, _ = make_step("conv")
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    step.capture()
    assert step.capture() is step.capture()
    for name, value in step.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in step.model.modules())
    assert all(p.grad is None for p in step.model.parameters())


def test_hash_is_stable_across_processes_and_sees_changes() -> None:
    script = "import capture_models as m, autopar.capture as c; s = c.TrainStep(m.GPT, m.token_batch({}))"
    script += "; print(c.graph_hash(s.capture()))"
    here = str(Path(models.__file__).parent)

    def run(size: int, seed: str) -> str:
        paths = [here, *sys.path]
        environment = {"PYTHONPATH": ":".join(paths), "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", script.format(size)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    first = run(4, "1")
    assert first == graph_hash(TrainStep(models.GPT, models.token_batch(4)).capture())
    assert first != graph_hash(TrainStep(models.GPT, models.token_batch(2)).capture())


def test_forward_step() -> None:
    torch.manual_seed(0)
    model = models.tiny_llama()
    batch = {"input_ids": models.hf_batch()["input_ids"]}
    step = ForwardStep(model, batch)
    captured = step.capture()
    assert captured.gradient_outputs == (Role("output", "logits"),) and not captured.updates
    (logits,) = captured.gradient(*values_of(step, batch))
    torch.testing.assert_close(logits, model(**batch).logits.detach(), rtol=1e-5, atol=1e-6)
    assert len(outputs(captured.gradient)) == 1


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.cross_entropy,
    "sum": lambda x, y: F.cross_entropy(x, y, reduction="sum"),
    "none": lambda x, y: F.cross_entropy(x, y, reduction="none").square().mean(),
    "ignore": lambda x, y: F.cross_entropy(x, y, ignore_index=2),
    "weights": lambda x, y: F.cross_entropy(x, y, weight=torch.arange(1.0, 6.0)),
    "images": lambda x, y: F.cross_entropy(x.view(2, 4, 5).transpose(1, 2), y.view(2, 4)),
    "nll": lambda x, y: F.nll_loss(F.log_softmax(x, -1), y, ignore_index=2),
    "smooth": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "smooth, ignore": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.3, ignore_index=2),
    "smooth, weights": lambda x, y: F.cross_entropy(
        x, y, weight=torch.arange(1.0, 6.0), label_smoothing=0.1, ignore_index=2
    ),
    "smooth, images": lambda x, y: F.cross_entropy(
        x.view(2, 4, 5).transpose(1, 2), y.view(2, 4), label_smoothing=0.1, reduction="sum"
    ),
    "probabilities": lambda x, y: F.cross_entropy(x, F.one_hot(y, 5).float(), label_smoothing=0.1),
    "squares": lambda x, y: F.mse_loss(x, y[:, None].expand(-1, 5).float()),
    "squares, summed": lambda x, y: F.mse_loss(x, y[:, None].expand(-1, 5).float(), reduction="sum"),
    "squares, each": lambda x, y: F.mse_loss(x, y[:, None].expand(-1, 5).float(), reduction="none").sin().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_in_primitive_ops(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    batch = (torch.randn(8, 3), torch.tensor([0, 1, 2, 3, 4, 2, 2, 1]))
    step = TrainStep(model, batch, loss=lambda output, b: LOSSES[name](output, b[1]))
    got, want = run_captured(step, batch), run_eager(step, batch)
    for role in got:
        torch.testing.assert_close(got[role], want[role], rtol=1e-5, atol=1e-6)
    ops = [node for node in call_nodes(step.capture()) if node.target is not operator.getitem]
    assert all(map(has_rule, ops))


class Frozen(nn.Module):
    """The first block's input wants no gradient: a reentrant checkpoint then gives the block none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.blocks[0], x, use_reentrant=True)
        x = self.blocks[1](x)
        return checkpoint(self.blocks[2], x, use_reentrant=True).square().mean()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints() -> None:
    step, batch = TrainStep(Frozen(), {"x": torch.randn(3, 4)}), {"x": torch.randn(3, 4)}
    got, want = run_captured(step, batch), run_eager(step, batch)
    assert "blocks.0.weight" not in {role.name for role in got} and {"blocks.1.weight"} < {role.name for role in got}
    for role in got:
        torch.testing.assert_close(got[role], want[role])


def test_views_are_merged() -> None:
    step, _ = make_step("llama")
    views = [node for node in call_nodes(step.capture()) if isinstance(node.target, OpOverload) and is_view(node)]
    described = [(node.target, str(node.args)) for node in views]
    assert len(set(described)) == len(described)


class Sorted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.gather(1, y.argsort(1)) * torch.ones(6)


class SortedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sorted(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_cheap_values_are_made_anew_in_the_backward_of_each_layer() -> None:
    """A gradient of zeros that all layers shared would pass from stage to stage."""
    nodes = call_nodes(TrainStep(SortedLayers(), torch.randn(4, 6)).capture())
    zeros = [node for node in nodes if op_name(node) == "zeros"]
    assert [node.meta["path"] for node in zeros] == ["blocks.1", "blocks.0"]
    assert len([node for node in nodes if op_name(node) == "ones"]) == 1  # both layers read it


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.layer(self.embed(tokens), src_mask=mask)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def test_multihead_attention_is_made_of_composites() -> None:
    torch.manual_seed(0)
    step = TrainStep(Encoder(), models.token_batch())
    got, want = run_captured(step, step.batch), run_eager(step, step.batch)
    for role in got:
        torch.testing.assert_close(got[role], want[role], rtol=1e-5, atol=1e-6)
    names = [op_name(node) for node in call_nodes(step.capture())]
    assert names.count("linear") == 5 and names.count("attention") == 1 and "mm" not in names


def test_padding_masks_reach_attention() -> None:
    torch.manual_seed(0)
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[0, 5:] = 0
    step = TrainStep(models.tiny_llama(), {**models.hf_batch(), "attention_mask": mask})
    got, want = run_captured(step, step.batch), run_eager(step, step.batch)
    for role in got:
        torch.testing.assert_close(got[role], want[role], rtol=1e-5, atol=1e-6)
