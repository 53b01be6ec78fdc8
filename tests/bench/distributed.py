"""What distribution costs on 2 gloo ranks, beside DDP, FSDP2 and DTensor tensor parallelism.

    python tests/bench/distributed.py                              # both sizes, 256 and 1,024 tokens a rank
    python tests/bench/distributed.py --sizes 6x512 --tokens 256 --seconds 60 --json

One Hugging Face Llama, float32, AdamW with the same settings, one thread a rank. All systems live in the same two
processes and take turns, in an order that is shuffled anew each round; a step is timed from a barrier to its end, on
the slower rank. Beside each system runs its communication-free floor: its own code with collectives that send nothing.

- autopar: a communicator whose gathers give the own chunk for every rank, whose reductions give the own value;
- FSDP2 and DTensor: torch's `fake` process group, which does the same beneath their unchanged code;
- DDP: a communication hook that gives back the bucket (its reducer can't work with the fake group).

The excess is a step's time over that of its floor (median over rounds of the difference within a round). `DTensor TP`
splits as torchtitan's tensor parallelism without sequence parallelism (all-reduces), `DTensor TP+SP` with it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend `fake`
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
from autopar.program.launch import run_ranks

RANKS = 2
SEQUENCE = 256
VOCABULARY = 2048
LR = 1e-4
PINS = {"autopar dp2": "dp=2, zero=0", "autopar zero-3": "dp=2, zero=3", "autopar tp2": "tp=2"}
PAIRS = (
    ("autopar dp2", "DDP"),
    ("autopar zero-3", "FSDP2"),
    ("autopar tp2", "DTensor TP"),
    ("autopar tp2", "DTensor TP+SP"),
)
"""Which excess is set in relation to which."""
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


def ddp(size: Size, mesh: DeviceMesh) -> Step:
    is_floor = dist.get_backend(mesh.get_group()) == "fake"
    group = None if is_floor else mesh.get_group()
    model = nn.parallel.DistributedDataParallel(llama(size), process_group=group, gradient_as_bucket_view=True)
    if is_floor:
        model.register_comm_hook(None, _keep_bucket)  # type: ignore[arg-type]
    return torch_step(model, own_rows(size))


def _keep_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def fsdp2(size: Size, mesh: DeviceMesh) -> Step:
    model = llama(size)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)
    return torch_step(model, own_rows(size))


def dtensor_tp(size: Size, mesh: DeviceMesh) -> Step:
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
    return _with_loss_parallel(torch_step(model, batch_of(size)))


def dtensor_tp_sp(size: Size, mesh: DeviceMesh) -> Step:
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
    return _with_loss_parallel(torch_step(model, {**batch_of(size), "position_ids": positions}))


def _with_loss_parallel(step: Step) -> Step:
    def wrapped() -> float:
        with loss_parallel():
            return step()

    return wrapped


TORCH: dict[str, Callable[[Size, DeviceMesh], Step]] = {
    "DDP": ddp,
    "FSDP2": fsdp2,
    "DTensor TP": dtensor_tp,
    "DTensor TP+SP": dtensor_tp_sp,
}
SYSTEMS = (*PINS, *TORCH)


# -- measuring ----------------------------------------------------------------------------------------------------
def rank_main(names: Sequence[str], size: Size, seconds: float, folder: str) -> None:
    """One rank: builds every system and its floor, then takes turns; writes its times."""
    dist.init_process_group("gloo")
    torch.set_flush_denormal(True)
    ranks = list(range(RANKS))
    meshes = {
        is_floor: DeviceMesh.from_group(dist.new_group(ranks, backend="fake" if is_floor else "gloo"), "cpu")
        for is_floor in (False, True)
    }
    steps: dict[str, Step] = {}
    for name in names:
        for is_floor in (False, True):
            made = TORCH[name](size, meshes[is_floor]) if name in TORCH else autopar_step(name, size, folder, is_floor)
            steps[f"{name}|floor" if is_floor else name] = made
    times, losses = take_turns(steps, seconds)
    Path(f"{folder}/times{dist.get_rank()}.json").write_text(json.dumps({"times": times, "losses": losses}))
    dist.barrier()
    os._exit(0)  # groups that live in DTensors' meshes would hold up the interpreter's end


def take_turns(
    steps: dict[str, Step], seconds: float, warmup: int = 2
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Per step, its times in the rounds, and the loss after the warm-up."""
    losses = {}
    for _ in range(warmup):
        started = time.perf_counter()
        losses = {name: step() for name, step in steps.items()}
    once = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(once, dist.ReduceOp.MAX)
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, shuffle = list(steps), random.Random(0)
    for _ in range(max(5, int(seconds / float(once)))):
        shuffle.shuffle(order)
        for name in order:
            dist.barrier()
            started = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - started)
    return times, losses


def measure(names: Sequence[str], size: Size, seconds: float) -> dict[str, Any]:
    """Runs the ranks; the table's rows for one size."""
    with tempfile.TemporaryDirectory() as folder:
        save_plans(names, size, folder)
        shape = [f"{size.layers}x{size.width}", str(size.tokens), str(seconds), folder]
        status = run_ranks(RANKS, [__file__, "--rank", *shape, "--systems", *names], timeout_s=seconds * 4 + 300)
        if status:
            raise SystemExit(f"{size}: the ranks ended with status {status}")
        ranks = [json.loads(Path(f"{folder}/times{rank}.json").read_text()) for rank in range(RANKS)]
    times = {n: [max(both) for both in zip(*(r["times"][n] for r in ranks), strict=True)] for n in ranks[0]["times"]}
    rows = rows_of(names, times, ranks[0]["losses"])
    return {"size": str(size), "rounds": len(next(iter(times.values()))), "rows": rows}


def rows_of(names: Sequence[str], times: dict[str, list[float]], losses: dict[str, float]) -> list[dict[str, Any]]:
    pairs = {name: zip(times[name], times[f"{name}|floor"], strict=True) for name in names}
    excess = {name: statistics.median(a - b for a, b in pairs[name]) for name in names}
    best = min(statistics.median(times[f"{name}|floor"]) for name in names)
    rows = []
    for name in names:
        step, floor = statistics.median(times[name]), statistics.median(times[f"{name}|floor"])
        peers = [peer for own, peer in PAIRS if own == name and peer in names]
        rows.append(
            {
                "system": name,
                "step_s": step,
                "floor_s": floor,
                "excess_s": excess[name],
                "over_best_floor_s": step - best,
                "loss": losses[name],
                "excess_ratio": {peer: excess[name] / excess[peer] for peer in peers},
                "step_ratio": {peer: _median_ratio(times[name], times[peer]) for peer in peers},
            }
        )
    return rows


def _median_ratio(own: Sequence[float], peer: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(own, peer, strict=True))


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = []
    for result in results:
        lines += [
            f"**{result['size']}** ({result['rounds']} rounds)",
            "",
            "| system | step, ms | its floor, ms | excess, ms | excess against | step against |",
            "|---|---|---|---|---|---|",
        ]
        for row in result["rows"]:
            ratios = [row["excess_ratio"], row["step_ratio"]]
            excess, step = ("; ".join(f"{r:.2f} {n}" for n, r in ratio.items()) for ratio in ratios)
            ms = " | ".join(f"{row[key] * 1e3:.0f}" for key in ("step_s", "floor_s", "excess_s"))
            lines.append(f"| {row['system']} | {ms} | {excess} | {step} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["6x512", "4x256"], help="LAYERSxWIDTH")
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 1024], help="per rank, multiples of 256")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--seconds", type=float, default=60.0, help="time to spend on the rounds of each size")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    if arguments.rank:
        shape, tokens, seconds, folder = arguments.rank
        rank_main(arguments.systems, Size.parse(shape, int(tokens)), float(seconds), folder)
        return
    results = []
    for shape in arguments.sizes:
        for tokens in arguments.tokens:
            results.append(measure(arguments.systems, Size.parse(shape, tokens), arguments.seconds))
            print(table(results[-1:]), file=sys.stderr, flush=True)
    print(json.dumps(results, indent=1) if arguments.json else table(results))


if __name__ == "__main__":
    main()
