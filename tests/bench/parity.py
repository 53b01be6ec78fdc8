"""The same losses as one device: real gloo ranks against the eager single-device run.

    python tests/bench/parity.py                         # the README's table
    python tests/bench/parity.py --models llama --plans dp2 tp2 --steps 5

For each model and strategy: plan under the strategy's pins, `verify` on the virtual mesh (float64, 1e-10), train 20
optimizer steps on real ranks, and compare every loss and the final parameters with the user's model and optimizer run
eagerly on one device from the same weights and batches (float32; dropout by `autopar.reference_rng`).
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar import TrainStep, reference_rng
from autopar.compiling import compile
from autopar.planning import plan
from autopar.plans import Plan
from autopar.program.launch import run_ranks

STEPS = 20
MICROBATCHES = 2

STRATEGIES: dict[str, tuple[int, str]] = {
    "dp2": (2, "dp=2, zero=0"),
    "zero-1": (2, "dp=2, zero=1"),
    "zero-3": (2, "dp=2, zero=3"),
    "tp2": (2, "tp=2"),
    "pp2": (2, "pp=2"),
    "dp2 x tp2": (4, "dp=2, tp=2"),
    "pp2 x dp2": (4, "pp=2, dp=2"),
    "pp2 x tp2": (4, "pp=2, tp=2"),
    "solver, 2 ranks": (2, ""),
    "solver, 4 ranks": (4, ""),
}
"""Name → (ranks, pins)."""


def gpt() -> nn.Module:
    """The example's GPT, undecorated."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import train_gpt

    plain = train_gpt.GPT.__mro__[2]
    return plain(train_gpt.Config(sequence=32, layers=2, width=64))  # type: ignore[no-any-return]


def gpt2(dropout: float = 0.0) -> nn.Module:
    config = GPT2Config(
        vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=4, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = dropout
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "example GPT": gpt,
    "HF GPT-2": gpt2,
    "HF GPT-2, dropout 0.1": functools.partial(gpt2, dropout=0.1),
    "HF Llama": llama,
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def batches(name: str) -> Iterator[dict[str, Tensor] | tuple[Tensor, ...]]:
    """Random tokens with structure to learn: each row counts upwards from a random start."""
    generator = torch.Generator().manual_seed(1)
    while True:
        start = torch.randint(128, (8, 1), generator=generator)
        tokens = (start + torch.arange(33)) % 128
        ids = tokens[:, :-1].contiguous()
        yield (ids, tokens[:, 1:].contiguous()) if name == "example GPT" else {"input_ids": ids, "labels": ids}


def training_step(name: str) -> TrainStep:
    return TrainStep(built(name), next(batches(name)), optimizer=optimizer, microbatches=MICROBATCHES)


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def eager_run(name: str, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The user's own loop on one device: losses and final parameters."""
    model = built(name)
    chosen = optimizer(list(model.parameters()))
    losses = []
    for step, batch in zip(range(steps), batches(name), strict=False):
        chosen.zero_grad()
        total = 0.0
        for index in range(MICROBATCHES):
            with reference_rng(0, step, index):
                loss = _loss(model, _rows(batch, index))
                (loss / MICROBATCHES).backward()
            total += loss.item() / MICROBATCHES
        chosen.step()
        losses.append(total)
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def _rows(batch: dict[str, Tensor] | tuple[Tensor, ...], index: int) -> dict[str, Tensor] | tuple[Tensor, ...]:
    def rows(value: Tensor) -> Tensor:
        return value.chunk(MICROBATCHES)[index]

    return {n: rows(v) for n, v in batch.items()} if isinstance(batch, dict) else tuple(map(rows, batch))


def _loss(model: nn.Module, batch: dict[str, Tensor] | tuple[Tensor, ...]) -> Tensor:
    return model(**batch).loss if isinstance(batch, dict) else model(*batch)  # type: ignore[no-any-return]


def rank_main(name: str, plan_file: str, result_file: str, steps: int) -> None:
    """What each rank runs; rank 0 writes losses and gathered parameters."""
    trainer = compile(training_step(name), Plan.load(plan_file)).start()
    losses = [float(trainer.step(batch)["loss"]) for _, batch in zip(range(steps), batches(name), strict=False)]
    weights = trainer.full_state_dict()
    trainer.close()
    if weights:
        torch.save({"losses": losses, "weights": weights}, result_file)


def measured(
    name: str, strategy: str, steps: int, expected: tuple[list[float], dict[str, Tensor]]
) -> dict[str, object]:
    """One row: plan, verify, run on real ranks, compare."""
    ranks, pins = STRATEGIES[strategy]
    step = training_step(name)
    made = plan(step, f"{ranks}xcpu", pin=pins or None)
    verified = compile(step, made).verify()
    with tempfile.TemporaryDirectory() as folder:
        made.save(f"{folder}/plan.json")
        arguments = [__file__, "--rank", name, f"{folder}/plan.json", f"{folder}/result.pt", "--steps", str(steps)]
        status = run_ranks(ranks, arguments, timeout_s=300)
        if status:
            return {"model": name, "plan": strategy, "mesh": str(made.mesh), "verified": verified.ok, "failed": status}
        got = torch.load(f"{folder}/result.pt")
    losses, weights = expected
    return {
        "model": name,
        "plan": strategy,
        "mesh": str(made.mesh),
        "verified": verified.ok,
        "float64": max(d.relative for d in verified.differences if d.half.startswith("program")),
        "loss": max(abs(a - b) / abs(b) for a, b in zip(got["losses"], losses, strict=True)),
        "parameters": max(_relative(got["weights"][n], w) for n, w in weights.items()),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def table(rows: list[dict[str, object]]) -> str:
    lines = [
        "| model | plan | mesh | verify (float64) | loss, 20 steps | final parameters |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['model']} | {row['plan']} | {row['mesh']} | failed | status {row['failed']} | |")
            continue
        verdict = f"{row['float64']:.0e}" if row["verified"] else "NOT EQUAL"
        numbers = f"{verdict} | {row['loss']:.1e} | {row['parameters']:.1e}"
        lines.append(f"| {row['model']} | {row['plan']} | {row['mesh']} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--plans", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", nargs=3, metavar=("MODEL", "PLAN", "RESULT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rank:
        rank_main(*arguments.rank, arguments.steps)
        return
    rows = []
    for name in arguments.models:
        expected = eager_run(name, arguments.steps)
        for strategy in arguments.plans:
            rows.append(measured(name, strategy, arguments.steps, expected))
            print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps(rows, indent=1) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
