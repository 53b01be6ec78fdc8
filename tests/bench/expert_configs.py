"""Published training runs: what was measured, what the cost model says at their degrees, and what our plan would be.

    python -m tests.bench.expert_configs [ID…] [--free] [--results FILE]

`overlapped`: the error where communication hides behind the computation beside it, as far as the device's contention
lets it; the step that plans are compared by adds one to the other.

Each row of `published.json` is planned with its mesh, microbatches, ZeRO stage and recompute pinned; with `--free` once
more with nothing but the microbatches given. Figures of devices and links are those of the presets: nothing is fitted.
With `--results` each row is kept as soon as it is there, and a second run goes on where the first one was.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from autopar import TrainStep, plan
from autopar.errors import InfeasibleError
from autopar.plans import Plan

PUBLISHED = Path(__file__).with_name("published.json")


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


def measured(row: dict[str, Any], free: bool) -> dict[str, Any]:
    """The row with what was found."""
    step, found = step_of(row), dict(row)
    # What ran did fit, with ops fused that our programs run one by one: it is priced whatever it would hold.
    for name, pins, memory in [("pinned", pins_of(row), "10000GiB"), *([("free", None, None)] if free else [])]:
        started = time.perf_counter()
        try:
            made = plan(step, row["cluster"], pin=pins, memory=memory)
        except InfeasibleError as error:
            found[name] = {"error": str(error)}
            continue
        found[name] = facts(made) | {"planning_s": time.perf_counter() - started}
    return found


def facts(made: Plan) -> dict[str, Any]:
    estimate = made.estimate
    return {
        "step_s": estimate.objective_s,
        "overlapped_s": estimate.overlapped_s,
        "gap": estimate.gap,
        "mesh": str(made.mesh),
        "peak_bytes": max(row.peak for row in estimate.memory),
        "parts": estimate.step_s,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, and the median error."""
    degrees = "pp x dp x tp, ZeRO, recompute"
    columns = ("run", "GPUs", degrees, "measured", "model", "error", "overlapped", "peak", "our plan", "its step")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    errors, overlapped = [], []
    for row in rows:
        degrees = f"{row['pp']} x {row['dp']} x {row['tp']}, {row['zero']}, {row['recompute']}"
        pinned, free = row["pinned"], row.get("free", {})
        error = pinned["step_s"] / row["step_s"] - 1 if "step_s" in pinned else float("nan")
        beside = pinned["overlapped_s"] / row["step_s"] - 1 if "overlapped_s" in pinned else float("nan")
        errors.append(abs(error))
        overlapped.append(abs(beside))
        ours = (free.get("mesh", free.get("error", ""))[:60], f"{free['step_s']:.2f} s" if "step_s" in free else "")
        cells = (
            f"{row['name']}, {row['id'].split('_')[0]}",
            row["cluster"],
            degrees,
            f"{row['step_s']:.2f} s",
            f"{pinned.get('step_s', float('nan')):.2f} s",
            f"{error:+.0%}",
            f"{beside:+.0%}",
            f"{pinned.get('peak_bytes', 0) / 2**30:.0f} GiB",
            *ours,
        )
        lines.append(f"| {' | '.join(cells)} |")
    medians = f"median error {statistics.median(errors):.0%}, overlapped {statistics.median(overlapped):.0%}"
    return "\n".join([*lines, "", f"{medians}, over {len(errors)} runs"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--free", action="store_true")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    known = json.loads(options.results.read_text()) if options.results and options.results.exists() else {}
    for row in json.loads(PUBLISHED.read_text()):
        wanted = not options.ids or row["id"] in options.ids
        if wanted and ("free" if options.free else "pinned") not in known.get(row["id"], {}):
            known[row["id"]] = measured(row, options.free)
            print(row["id"], row["step_s"], known[row["id"]]["pinned"], known[row["id"]].get("free", ""), flush=True)
            if options.results:
                options.results.write_text(json.dumps(known, indent=1))
    print(table(list(known.values())))


if __name__ == "__main__":
    main()
