"""What distribution costs on 2 gloo ranks, beside DDP, FSDP2 and DTensor tensor parallelism.

    python tests/bench/distributed.py                              # both sizes, 256 and 1,024 tokens a rank
    python tests/bench/distributed.py --sizes 6x512 --tokens 256 --seconds 60 --json

One Hugging Face Llama, float32, AdamW with the same settings, one thread a rank. All systems and their
communication-free floors (`distributed_systems.py`) live in the same two processes and take turns, in an order that is
shuffled anew each round; a step is timed from a barrier to its end, on the slower rank.

- *excess*: a step's time over that of its own floor, the median over rounds of the difference within a round;
- *over least floor*: a step's time over the fastest floor, so that what a system spends beside sending counts, too.

Ranks and gloo's threads share the processors, so most of an excess is processor time. That is measured as well (per
rank, gloo's threads included): other load on the machine disturbs it less.

`DTensor TP` splits as torchtitan's tensor parallelism without sequence parallelism (all-reduces), `DTensor TP+SP` with
it; `autopar tp2` is what the solver makes of the pin `tp=2` (here with sequence parallelism), and in `whole norms` the
norms are pinned to be whole, as in DTensor TP.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from distributed_systems import PINS, RANKS, TORCH, Size, Step, autopar_step, save_plans
from torch.distributed.device_mesh import DeviceMesh

from autopar.program.launch import run_ranks

SYSTEMS = (*PINS, *TORCH)
PEERS = {
    "autopar dp2": ("DDP",),
    "autopar zero-3": ("FSDP2",),
    "autopar tp2": ("DTensor TP", "DTensor TP+SP"),
    "autopar tp2 whole norms": ("DTensor TP",),
}
"""What each of ours is set in relation to."""
COLUMNS = {
    "step, ms": "step_s",
    "its floor": "floor_s",
    "excess": "excess_s",
    "over least floor": "over_least_floor_s",
    "CPU, ms": "cpu_step_s",
    "CPU excess": "cpu_excess_s",
    "CPU over least floor": "cpu_over_least_floor_s",
}
RATIOS = {
    "step": "step_s",
    "excess": "excess_s",
    "over least floor": "over_least_floor_s",
    "CPU": "cpu_step_s",
    "CPU excess": "cpu_excess_s",
    "CPU over least floor": "cpu_over_least_floor_s",
}

Sample = tuple[float, float]
"""Seconds by the clock, seconds of processor time."""
Rounds = dict[str, list[float]]
"""Step → its figure in each round."""


# -- on the ranks -------------------------------------------------------------------------------------------------
def rank_main(names: Sequence[str], size: Size, seconds: float, folder: str) -> None:
    """One rank: builds every system and its floor, then takes turns; writes its times."""
    dist.init_process_group("gloo")
    torch.set_flush_denormal(True)
    mesh = DeviceMesh.from_group(dist.new_group(list(range(RANKS))), "cpu")
    steps: dict[str, Step] = {}
    for name in names:
        for is_floor in (False, True):
            made = TORCH[name](size, mesh, is_floor) if name in TORCH else autopar_step(name, size, folder, is_floor)
            steps[_floor(name) if is_floor else name] = made
    samples, losses = take_turns(steps, seconds)
    Path(f"{folder}/rank{dist.get_rank()}.json").write_text(json.dumps({"samples": samples, "losses": losses}))
    dist.barrier()
    os._exit(0)  # groups that live in DTensors' meshes would hold up the interpreter's end


def take_turns(
    steps: dict[str, Step], seconds: float, warmup: int = 2
) -> tuple[dict[str, list[Sample]], dict[str, float]]:
    """Per step, its samples in the rounds, and the loss after the warm-up."""
    losses = {}
    for _ in range(warmup):
        started = time.perf_counter()
        losses = {name: step() for name, step in steps.items()}
    once = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(once, dist.ReduceOp.MAX)
    samples: dict[str, list[Sample]] = {name: [] for name in steps}
    order, shuffle = list(steps), random.Random(0)
    for _ in range(max(5, int(seconds / float(once)))):
        shuffle.shuffle(order)
        for name in order:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            steps[name]()
            samples[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return samples, losses


def _floor(name: str) -> str:
    return f"{name}|floor"


# -- results ------------------------------------------------------------------------------------------------------
def measure(names: Sequence[str], size: Size, seconds: float) -> dict[str, Any]:
    """Runs the ranks; one size's rows."""
    with tempfile.TemporaryDirectory() as folder:
        save_plans(names, size, folder)
        shape = [f"{size.layers}x{size.width}", str(size.tokens), str(seconds), folder]
        status = run_ranks(RANKS, [__file__, "--rank", *shape, "--systems", *names], timeout_s=seconds * 4 + 300)
        if status:
            raise SystemExit(f"{size}: the ranks ended with status {status}")
        ranks = [json.loads(Path(f"{folder}/rank{rank}.json").read_text()) for rank in range(RANKS)]
    wall, cpu = _rounds(ranks, 0, max), _rounds(ranks, 1, statistics.mean)
    rows = [
        {"system": name, "loss": ranks[0]["losses"][name], **figures(name, wall, ""), **figures(name, cpu, "cpu_")}
        for name in names
    ]
    return {"size": str(size), "rounds": len(next(iter(wall.values()))), "rows": rows, "ratios": ratios_of(rows)}


def _rounds(ranks: Sequence[dict[str, Any]], index: int, combine: Any) -> Rounds:
    samples = {name: zip(*(rank["samples"][name] for rank in ranks), strict=True) for name in ranks[0]["samples"]}
    return {name: [combine([rank[index] for rank in both]) for both in rounds] for name, rounds in samples.items()}


def figures(name: str, times: Rounds, prefix: str) -> dict[str, float]:
    """A system's step, floor and excesses in seconds."""
    step, floor = statistics.median(times[name]), statistics.median(times[_floor(name)])
    least = min(statistics.median(values) for other, values in times.items() if other.endswith(_floor("")))
    excess = statistics.median(a - b for a, b in zip(times[name], times[_floor(name)], strict=True))
    named = {"step_s": step, "floor_s": floor, "excess_s": excess, "over_least_floor_s": step - least}
    return {prefix + key: value for key, value in named.items()}


def ratios_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    by_name = {row["system"]: row for row in rows}
    pairs = [(name, peer) for name in by_name for peer in PEERS.get(name, ()) if peer in by_name]
    return [
        {"system": name, "peer": peer, **{k: by_name[name][k] / by_name[peer][k] for k in RATIOS.values()}}
        for name, peer in pairs
    ]


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = []
    for result in results:
        lines += [f"**{result['size']}** ({result['rounds']} rounds)", "", *_head("system", COLUMNS)]
        for row in result["rows"]:
            lines.append(_line([row["system"], *(f"{row[key] * 1e3:.0f}" for key in COLUMNS.values())]))
        lines += ["", *_head("ratio", RATIOS)]
        for row in result["ratios"]:
            lines.append(_line([f"{row['system']} / {row['peer']}", *(f"{row[key]:.2f}" for key in RATIOS.values())]))
        lines.append("")
    return "\n".join(lines)


def _head(first: str, columns: dict[str, str]) -> list[str]:
    return [_line([first, *columns]), "|---" * (len(columns) + 1) + "|"]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["6x512", "4x256"], help="LAYERSxWIDTH")
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 1024], help="per rank, multiples of 256")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--seconds", type=float, default=60.0, help="time to spend on the rounds of each size")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
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
