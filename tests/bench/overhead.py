"""What the emitted program costs on one rank, beside eager PyTorch: `python tests/bench/overhead.py`

A whole optimizer step (forward, backward, AdamW) of a 2-layer Hugging Face Llama, eager and as a program, taking turns
in one process. The figure is the median over pairs of the ratio of their times, so a change in the machine's load
touches both sides. Targets: at most 1.00 at 64 wide, at most 1.03 at 512 wide.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

SIZES = {64: {"batch": 4, "length": 64, "vocab": 256}, 512: {"batch": 4, "length": 128, "vocab": 1024}}
TARGETS = {64: 1.00, 512: 1.03}
LR = 1e-3


def llama(width, vocab):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 8 * 8,
        num_hidden_layers=2,
        num_attention_heads=max(4, width // 64),
        num_key_value_heads=max(2, width // 128),
        max_position_embeddings=512,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def eager_step(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def step(batch):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def program_step(model, batch):
    step = autopar.TrainStep(model, batch, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LR))
    trainer = autopar.compile(step, autopar.plan(step, "1xcpu")).start()
    return lambda batch: float(trainer.step(**batch)["loss"])


def seconds(function, batch):
    started = time.perf_counter()
    function(batch)
    return time.perf_counter() - started


def compare(width, pairs):
    """(eager seconds, program seconds) of each pair; the losses of the first steps must agree."""
    size = SIZES[width]
    model = llama(width, size["vocab"])
    tokens = torch.randint(size["vocab"], (size["batch"], size["length"]), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    program, eager = program_step(model, batch), eager_step(model)
    for _ in range(3):
        losses = eager(batch), program(batch)
        assert abs(losses[0] - losses[1]) < 1e-4 * abs(losses[0]), losses
    times = []
    for index in range(pairs):
        first, second = (eager, program) if index % 2 else (program, eager)
        pair = seconds(first, batch), seconds(second, batch)
        times.append(pair if index % 2 else pair[::-1])
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=sorted(SIZES), choices=sorted(SIZES))
    parser.add_argument("--seconds", type=float, default=20.0, help="time to spend on each width")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'width':>5} {'pairs':>5} {'eager ms':>9} {'program ms':>10} {'ratio':>6} {'quartiles':>13} {'target':>6}")
    for width in arguments.widths:
        (warm,) = compare(width, 1)
        times = compare(width, max(5, int(arguments.seconds / sum(warm))))
        ratios = [program / eager for eager, program in times]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        eager_ms, program_ms = (statistics.median(side) * 1e3 for side in zip(*times, strict=True))
        print(
            f"{width:5d} {len(times):5d} {eager_ms:9.2f} {program_ms:10.2f} {ratio:6.3f} "
            f"{low:6.3f}-{high:6.3f} {TARGETS[width]:6.2f}"
        )


if __name__ == "__main__":
    main()
