"""Published training runs: what was measured, what the cost model says at their degrees, and what our plan would be.

    python -m tests.bench.expert_configs [ID…] [--free] [--time-limit SECONDS] [--results FILE]

`serial`: the error if all communication were waited for; the model lets it hide behind the computation that runs beside
it, as far as the device's contention lets it.

Each row of `published.json` is planned with its mesh, microbatches, ZeRO stage and recompute pinned; with `--free` once
more with nothing but the microbatches given, within the memory of the devices: what that plan spends more, or less, is
told by kind, and each plan that is slower than the published one, where that fits, is named with the reason. Figures of
devices and links are those of the presets: nothing is fitted. With `--results` each row is kept as soon as it is there,
and a second run goes on where the first one was.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from autopar import TrainStep, plan
from autopar.cluster import parse_cluster
from autopar.errors import InfeasibleError
from autopar.planning import MARGIN
from autopar.plans import Plan

PUBLISHED = Path(__file__).with_name("published.json")

MOST_KINDS = 2
"""Of what a plan spends more or less, told beside it."""


def model_of(row: dict[str, Any]) -> Any:
    """The published model, built on meta: dropout off, since the runs' cost of it isn't known."""
    size = row["model"]
    if size["kind"] == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=size["vocab"],
            n_positions=size["seq"],
            n_embd=size["hidden"],
            n_layer=size["layers"],
            n_head=size["heads"],
            n_inner=size["ffn"],
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        )
        return transformers.GPT2LMHeadModel(config)
    make, config_of = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
        "nemotron": (transformers.NemotronForCausalLM, transformers.NemotronConfig),
    }[size["kind"]]
    config = config_of(
        vocab_size=size["vocab"],
        hidden_size=size["hidden"],
        intermediate_size=size["ffn"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv_heads"],
        max_position_embeddings=size["seq"],
        use_cache=False,
    )
    return make(config)


def step_of(row: dict[str, Any]) -> TrainStep:
    tokens = torch.zeros(row["batch"], row["model"]["seq"], dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    microbatches = row["batch"] // (row["dp"] * row["micro_batch"])
    return TrainStep(functools.partial(model_of, row), batch, microbatches=microbatches, precision="mixed")


def pins_of(row: dict[str, Any]) -> list[str]:
    """The published degrees; "selective" recompute is left to the solver."""
    pins = [f"{axis}={row[axis]}" for axis in ("pp", "dp", "tp")]
    pins += [f"zero={row['zero']}"] if row["dp"] > 1 else []
    pins += [f"virtual={row['virtual_stages']}"] if row["pp"] > 1 else []
    return pins + ([] if row["recompute"] == "selective" else [f"recompute={row['recompute']}"])


def measured(row: dict[str, Any], free: bool, time_limit_s: float | None) -> dict[str, Any]:
    """The row with what was found."""
    step, found = step_of(row), dict(row)
    # What ran did fit, with ops fused that our programs run one by one: it is priced whatever it would hold.
    asked: dict[str, dict[str, Any]] = {"pinned": {"pin": pins_of(row), "memory": "10000GiB"}}
    asked |= {"free": {"time_limit_s": time_limit_s}} if free else {}
    for name, arguments in asked.items():
        started = time.perf_counter()
        try:
            made = plan(step, row["cluster"], **arguments)
        except InfeasibleError as error:
            found[name] = {"error": str(error)}
            continue
        found[name] = facts(made) | {"planning_s": time.perf_counter() - started}
    return found


def facts(made: Plan) -> dict[str, Any]:
    estimate, sizes = made.estimate, [made.mesh.size(axis) for axis in ("pp", "dp", "tp")]
    virtual = f", {made.mesh.virtual} stages a rank" if made.mesh.virtual > 1 else ""
    return {
        "step_s": estimate.objective_s,
        "serial_s": estimate.serial_s,
        "gap": estimate.gap,
        "mesh": " x ".join(map(str, sizes)) + virtual,
        "peak_bytes": max(row.peak for row in estimate.memory),
        "parts": estimate.step_s,
        "spent": spent(made),
        "is_late": any(candidate.reason == "time ran out" for candidate in made.candidates),
    }


def spent(made: Plan) -> dict[str, float]:
    """Seconds of a step by what they are for; collectives of all axes together."""
    found: dict[str, float] = {}
    for row in made.estimate.modules:
        for what, seconds in row.seconds.items():
            kind = what.rpartition(" ")[2].replace("_", "-")
            found[kind] = found.get(kind, 0.0) + seconds
    return found


def why(pinned: dict[str, Any], free: dict[str, Any]) -> str:
    """What the free plan spends more, or less, by kind: the greatest ones, from a hundredth of the step on."""
    kinds = {**pinned["spent"], **free["spent"]}
    more = {kind: free["spent"].get(kind, 0.0) - pinned["spent"].get(kind, 0.0) for kind in kinds}
    greatest = sorted(more.items(), key=lambda entry: -abs(entry[1]))[:MOST_KINDS]
    told = [f"{kind} {seconds:+.2f} s" for kind, seconds in greatest if abs(seconds) >= pinned["step_s"] / 100]
    return ", ".join(told) or "much the same"


def fits(row: dict[str, Any]) -> bool:
    """Whether the published plan fits the devices by what our program of it holds."""
    return "peak_bytes" in row["pinned"] and row["pinned"]["peak_bytes"] <= capacity(row)


def capacity(row: dict[str, Any]) -> float:
    return parse_cluster(row["cluster"]).device.memory_bytes * (1 - MARGIN)


def complaints(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each free plan that is slower than the published one, where that fits."""
    lines = []
    for row in rows:
        pinned, free = row["pinned"], row.get("free")
        if free is None or not fits(row) or free.get("step_s", math.inf) <= pinned["step_s"]:
            continue
        if "step_s" not in free:
            lines.append(f"{row['id']}: no plan found, though the published one fits: {free['error']}")
            continue
        slower, gap = free["step_s"] / pinned["step_s"] - 1, free["gap"]
        reason = f"within its gap of {gap:.1%}" + (", the search ran out of time" if free["is_late"] else "")
        if free["step_s"] * (1 - gap) > pinned["step_s"] * (1 + 1e-9):
            reason = "its bound is wrong, by which nothing is faster"
        lines.append(f"{row['id']}: {slower:.2%} slower than the published plan: {reason}")
    return lines


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, and the median error."""
    degrees = "pp x dp x tp, ZeRO, recompute"
    ours = ("our plan", "its step", "gap", "what that spends more")
    columns = ("run", "devices", degrees, "measured", "model", "error", "serial", "holds", *ours)
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    errors, serial = [], []
    for row in rows:
        degrees = f"{row['pp']} x {row['dp']} x {row['tp']}, {row['zero']}, {row['recompute']}"
        pinned, free = row["pinned"], row.get("free", {})
        error = pinned["step_s"] / row["step_s"] - 1 if "step_s" in pinned else float("nan")
        in_turn = pinned["serial_s"] / row["step_s"] - 1 if "serial_s" in pinned else float("nan")
        errors.append(abs(error))
        serial.append(abs(in_turn))
        ours = (free.get("error", "")[:60], "", "", "")
        if "step_s" in free:
            ours = (free["mesh"], f"{free['step_s']:.2f} s", f"{free['gap']:.1%}", why(pinned, free))
        cells = (
            f"{row['name']}, {row['id'].split('_')[0]}",
            row["cluster"],
            degrees,
            f"{row['step_s']:.2f} s",
            f"{pinned.get('step_s', float('nan')):.2f} s",
            f"{error:+.0%}",
            f"{in_turn:+.0%}",
            f"{pinned.get('peak_bytes', 0) / 2**30:.1f} of {capacity(row) / 2**30:.1f} GiB",
            *ours,
        )
        lines.append(f"| {' | '.join(cells)} |")
    medians = f"median error {statistics.median(errors):.0%}, serial {statistics.median(serial):.0%}"
    return "\n".join([*lines, "", f"{medians}, over {len(errors)} runs", *complaints(rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--free", action="store_true")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="for each free plan")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    known = json.loads(options.results.read_text()) if options.results and options.results.exists() else {}
    for row in json.loads(PUBLISHED.read_text()):
        wanted = not options.ids or row["id"] in options.ids
        if wanted and ("free" if options.free else "pinned") not in known.get(row["id"], {}):
            known[row["id"]] = measured(row, options.free, options.time_limit)
            print(row["id"], row["step_s"], known[row["id"]]["pinned"], known[row["id"]].get("free", ""), flush=True)
            if options.results:
                options.results.write_text(json.dumps(known, indent=1))
    print(table(list(known.values())))


if __name__ == "__main__":
    main()
