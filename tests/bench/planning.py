"""How planning time grows with the number of layers: Llama-3-8B widths with few and with many layers, interleaved.

    python -m tests.bench.planning [--layers 8 126] [--repeats 1]

Each mesh is pinned: one axis, two, and a pipeline of two stages with two more. Times are wall-clock seconds of capture
and of the search, from fresh steps; the ratio is that of the whole.
"""

from __future__ import annotations

import argparse
import functools
import time
import warnings
from typing import Any

import torch
import transformers

from autopar import TrainStep, plan

MESHES = {
    "1 axis": ("8xh100", "dp=8"),
    "2 axes": ("2x8xh100", "dp=2, tp=8"),
    "3 axes": ("4x8xh100", "pp=2, dp=2, tp=8"),
}


def model(layers: int) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def seconds(layers: int, cluster: str, pins: str) -> tuple[float, float, float]:
    """(capture, search, both) of one plan whose memory doesn't bind."""
    tokens = torch.zeros(64, 8192, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    step = TrainStep(functools.partial(model, layers), batch, microbatches=4, precision="mixed")
    started = time.perf_counter()
    made = plan(step, cluster, pin=pins, memory="100000GiB")
    return made.estimate.capture_s, made.estimate.solve_s, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs=2, default=[8, 126])
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    few, many = options.layers
    seconds(few, *MESHES["1 axis"])  # imports, tables of rules
    print(f"| mesh | {few} layers: capture + search, s | {many} layers | ratio |\n|---|---|---|---|")
    for name, (cluster, pins) in MESHES.items():
        runs = [(seconds(few, cluster, pins), seconds(many, cluster, pins)) for _ in range(options.repeats)]
        (a, b), *_ = sorted(runs, key=lambda pair: pair[0][2])
        print(f"| {name}: {pins} | {a[0]:.1f} + {a[1]:.1f} | {b[0]:.1f} + {b[1]:.1f} | {b[2] / a[2]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
