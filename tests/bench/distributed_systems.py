"""The systems of `distributed.py`: one step of each on two ranks, and of its communication-free floor.

A floor is the system's own code with collectives that send nothing and give right-shaped local tensors at once: a
gather the own chunk for every rank, a reduction the own value.
- autopar: what its communicator does along an axis is replaced;
- FSDP2 and DTensor: the functions of torch.distributed that they call are replaced while the step runs;
- DDP: a communication hook gives back the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

from autopar import TrainStep
from autopar.compiling import compile
from autopar.planning import plan
from autopar.plans import Plan

RANKS = 2
SEQUENCE = 256
VOCABULARY = 2048
LR = 1e-4
PINS = {
    "autopar dp2": "dp=2, zero=0",
    "autopar zero-3": "dp=2, zero=3",
    "autopar tp2": "tp=2",
    "autopar tp2 whole norms": "tp=2, *norm*: tp=none",
}
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
"""The linear layers whose outputs, and whose inputs, tensor parallelism splits."""

Step = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Size:
    """A model and a number of tokens per rank."""

    layers: int
    width: int
    tokens: int

    @classmethod
    def parse(cls, text: str, tokens: int) -> Size:
        layers, width = text.split("x")
        return cls(int(layers), int(width), tokens)

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.width}, {self.tokens} tokens a rank"


def llama(size: Size) -> nn.Module:
    torch.manual_seed(0)
    heads = size.width // 64
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=size.width,
            intermediate_size=size.width * 8 // 3 // 16 * 16,
            num_hidden_layers=size.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=SEQUENCE,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


def batch_of(size: Size) -> dict[str, Tensor]:
    """The global batch."""
    rows = RANKS * size.tokens // SEQUENCE
    tokens = torch.randint(VOCABULARY, (rows, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR)


# -- autopar ------------------------------------------------------------------------------------------------------
class Silent:
    """What a communicator does along an axis, without sending: right-shaped local tensors at once."""

    def all_gather(self, x: Tensor, dim: int) -> Any:
        return _Done(torch.cat([x] * RANKS, dim))

    def reduce_scatter(self, x: Tensor, dim: int, op: str) -> Any:
        return _Done(x.chunk(RANKS, dim)[dist.get_rank()].contiguous())

    def all_reduce(self, x: Tensor, op: str, deterministic: bool, inplace: bool) -> Any:
        return _Done(x)

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Any:
        return _Done(torch.cat([x.chunk(RANKS, split_dim)[dist.get_rank()]] * RANKS, concat_dim))


@dataclass(frozen=True, slots=True)
class _Done:
    value: Any

    def wait(self) -> Any:
        return self.value


def autopar_step(name: str, size: Size, folder: str, is_floor: bool) -> Step:
    batch = batch_of(size)
    program = compile(TrainStep(llama(size), batch, optimizer=optimizer_of), Plan.load(f"{folder}/{name}.json"))
    trainer = program.start()
    if is_floor:
        trainer.communicator._axes = {axis: Silent() for axis in trainer.communicator._axes}
    return lambda: float(trainer.step(batch)["loss"])


def save_plans(names: Sequence[str], size: Size, folder: str) -> None:
    """Plans of the autopar systems among `names`, for the ranks to load."""
    for name in names:
        if name in PINS:
            step = TrainStep(llama(size), batch_of(size), optimizer=optimizer_of)
            plan(step, f"{RANKS}xcpu", pin=PINS[name]).save(f"{folder}/{name}.json")


# -- torch --------------------------------------------------------------------------------------------------------
def torch_step(model: nn.Module, batch: dict[str, Tensor]) -> Step:
    optimizer = optimizer_of(model.parameters())

    def step() -> float:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def own_rows(size: Size) -> dict[str, Tensor]:
    return {name: value.chunk(RANKS)[dist.get_rank()].contiguous() for name, value in batch_of(size).items()}


def ddp(size: Size, mesh: DeviceMesh, is_floor: bool) -> Step:
    group = mesh.get_group()
    model = nn.parallel.DistributedDataParallel(llama(size), process_group=group, gradient_as_bucket_view=True)
    if is_floor:
        model.register_comm_hook(None, _keep_bucket)  # type: ignore[arg-type]
    return torch_step(model, own_rows(size))


def _keep_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def fsdp2(size: Size, mesh: DeviceMesh, is_floor: bool) -> Step:
    model = llama(size)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)
    return _maybe_silent(torch_step(model, own_rows(size)), is_floor)


def dtensor_tp(size: Size, mesh: DeviceMesh, is_floor: bool) -> Step:
    """Columns, then rows: two all-reduces per layer forward and two backward; the vocabulary split at both ends."""
    model = llama(size)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    inner = {n: ColwiseParallel() for n in COLUMNS} | {n: RowwiseParallel() for n in ROWS}
    parallelize_module(model, mesh, ends)
    for layer in model.model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, inner)
    return _maybe_silent(_with_loss_parallel(torch_step(model, batch_of(size))), is_floor)


def dtensor_tp_sp(size: Size, mesh: DeviceMesh, is_floor: bool) -> Step:
    """torchtitan's plan for Llama: activations between the blocks split along the sequence."""
    model = llama(size)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    gathers = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    )
    inner = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": gathers,
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{n: ColwiseParallel() for n in COLUMNS},
        **{n: RowwiseParallel(output_layouts=Shard(1)) for n in ROWS},
    }
    parallelize_module(model, mesh, ends)
    for layer in model.model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, inner)
    positions = torch.arange(SEQUENCE).unsqueeze(0)  # else HF counts the rank's own positions
    step = _with_loss_parallel(torch_step(model, {**batch_of(size), "position_ids": positions}))
    return _maybe_silent(step, is_floor)


def _with_loss_parallel(step: Step) -> Step:
    def wrapped() -> float:
        with loss_parallel():
            return step()

    return wrapped


TORCH: dict[str, Callable[[Size, DeviceMesh, bool], Step]] = {
    "DDP": ddp,
    "FSDP2": fsdp2,
    "DTensor TP": dtensor_tp,
    "DTensor TP+SP": dtensor_tp_sp,
}
"""Name → what builds its step, or that of its floor."""


# -- floors of torch's systems -------------------------------------------------------------------------------------
def _maybe_silent(step: Step, is_floor: bool) -> Step:
    """`step`, if it is a floor with torch's collectives replaced while it runs."""

    def silent() -> float:
        with ExitStack() as stack:
            for module, replacements in ((dist, C10D), (functional, FUNCTIONAL)):
                for name, replacement in replacements.items():
                    if hasattr(module, name):  # torch 2.13 renamed some
                        stack.enter_context(mock.patch.object(module, name, replacement))
            return step()

    return silent if is_floor else step


def _gather_into(output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> None:
    for chunk in output.view(RANKS, -1):
        if chunk.data_ptr() != input.data_ptr():  # FSDP2 has the input lie in the output
            chunk.copy_(input.view(-1))


def _scatter_into(output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> None:
    output.view(-1).copy_(input.view(RANKS, -1)[dist.get_rank()])


def _gathered(x: Tensor, gather_dim: int, *_: Any, **__: Any) -> Tensor:
    return functional._maybe_wrap_tensor(torch.cat([x] * RANKS, gather_dim))  # type: ignore[no-any-return]


def _scattered(x: Tensor, reduceOp: str, scatter_dim: int, *_: Any, **__: Any) -> Tensor:
    own = x.chunk(RANKS, scatter_dim)[dist.get_rank()].contiguous()
    return functional._maybe_wrap_tensor(own)  # type: ignore[no-any-return]


def _reduced(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return functional._maybe_wrap_tensor(x.clone())  # type: ignore[no-any-return]


C10D = {
    **dict.fromkeys(("all_gather_single", "all_gather_into_tensor"), _gather_into),
    **dict.fromkeys(("reduce_scatter_single", "reduce_scatter_tensor"), _scatter_into),
}
FUNCTIONAL = {
    **dict.fromkeys(("all_gather_single", "all_gather_tensor"), _gathered),
    **dict.fromkeys(("reduce_scatter_single", "reduce_scatter_tensor"), _scattered),
    "all_reduce": _reduced,
}
"""What FSDP2 and DTensor call, by name → the same without sending."""
