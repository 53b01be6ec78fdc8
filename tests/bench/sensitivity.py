"""What the plan hangs on: sweeps that change one thing of a base case, and show where the plan switches.

    python -m tests.bench.sensitivity [bandwidth latency memory batch sequence] [--svg FILE]

The base case is four layers of a Llama on two nodes of two H100s, nothing pinned. With `--microbatches auto` their
number is left to the search, too, which then takes several times as long. Bandwidth is that between nodes, as a
multiple of the preset's; with a latency, each hop of a ring takes so long, instead of what NCCL's own model says.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import warnings
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from autopar import TrainStep, plan
from autopar.cluster import parse_cluster
from autopar.cluster.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.plans import Plan
from tests.bench.expert_configs import model_of

LLAMA = {"kind": "llama", "layers": 4, "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 5632, "vocab": 32000}


@dataclass(frozen=True)
class Case:
    """The base case, and what a sweep changes of it."""

    batch: int = 32
    sequence: int = 2048
    memory: float = 76.0
    """GiB of a device."""
    bandwidth: float = 1.0
    latency: float = 0.0
    """Microseconds of a hop on every link; 0 for the preset's latencies."""
    microbatches: int | Literal["auto"] = 4

    @property
    def cluster(self) -> Cluster:
        base = parse_cluster("2x2xh100")
        slowed = {"latency_s": self.latency * 1e-6, "base_s": 0.0, "nccl": ""} if self.latency else {}
        levels = []
        for level in base.levels:
            bytes_per_s = level.bytes_per_s * (self.bandwidth if level.name == "network" else 1.0)
            levels.append(dataclasses.replace(level, bytes_per_s=bytes_per_s, **slowed))
        return dataclasses.replace(base, levels=tuple(levels))

    def planned(self) -> Plan:
        tokens = torch.zeros(self.batch, self.sequence, dtype=torch.long)
        batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
        row = {"model": {**LLAMA, "seq": self.sequence}}
        count = self.microbatches if self.microbatches == "auto" else min(self.microbatches, self.batch)
        step = TrainStep(functools.partial(model_of, row), batch, microbatches=count, precision="mixed")
        return plan(step, self.cluster, memory=f"{self.memory}GiB")


SWEEPS: dict[str, tuple[str, tuple[float, ...]]] = {
    "bandwidth": ("bandwidth between nodes, times 50 GB/s a GPU", (1 / 256, 1 / 64, 1 / 16, 1 / 4, 1)),
    "latency": ("latency of a hop, microseconds", (1, 10, 100, 1000)),
    "memory": ("memory of a device, GiB", (3, 4, 6, 76)),
    "batch": ("samples of a step", (2, 8, 32, 128)),
    "sequence": ("tokens of a sample", (256, 2048, 8192, 32768)),
}
"""Field of the case → what it is, and its values."""


# -- what a plan is called -----------------------------------------------------------------------------------------
ROLES = {"d0": "batch", "d1": "sequence", "o": "tensor", "i": "tensor"}
"""The letter of a linear's rule → what is split."""


def name_of(made: Plan) -> str:
    """`"pp 2, batch 4, ZeRO-1, 2 microbatches"`: an axis is called by what it splits in most of the linears that it
    splits; "copies" where it splits none, its ranks doing the same."""
    roles = {axis: _role(made, axis) for axis, size in made.mesh.axes if axis != "pp" and size > 1}
    words = [f"pp {made.mesh.num_stages}"] if made.mesh.num_stages > 1 else []
    for role in ("batch", "sequence", "tensor", "copies"):
        size = math.prod(made.mesh.size(axis) for axis in roles if roles[axis] == role)
        words += [f"{role} {size}"] if size > 1 else []
    zero = _zero(made, [axis for axis in roles if roles[axis] in ("batch", "sequence")])
    words += [f"ZeRO-{zero}"] if zero else []
    words += [f"{made.microbatches} microbatches"] if made.microbatches > 1 else []
    words += ["recompute"] if made.recomputed else []
    return ", ".join(words)


def _role(made: Plan, axis: str) -> str:
    linears = [text for key, text in made.choices.items() if "/autopar.linear/forward" in key]
    found = Counter(ROLES.get(letter, "copies") for text in linears for letter in re.findall(rf"\b{axis}=(\w+)", text))
    return max(found, key=found.__getitem__, default="copies")


def _zero(made: Plan, axes: list[str]) -> int:
    """The highest stage whose tensors are split over `axes`, most of them."""
    kinds = {3: r"^param:", 2: r"/accumulate/", 1: r"^state:.*\.exp_avg$"}
    num_parameters = sum(bool(re.search(kinds[1], key)) for key in made.choices)
    for stage, pattern in kinds.items():
        texts = [text for key, text in made.choices.items() if re.search(pattern, key)]
        split = sum(any(re.search(rf"\b{axis}=[a-z]", text) for axis in axes) for text in texts)
        if 2 * split > num_parameters > 0:
            return stage
    return 0


# -- sweeps ------------------------------------------------------------------------------------------------------------
def measured(base: Case, factor: str, value: float) -> dict[str, Any]:
    """Step time, name and peak of the plan at one value of a factor."""
    case = dataclasses.replace(base, **{factor: type(getattr(base, factor))(value)})
    try:
        made = case.planned()
    except InfeasibleError:
        return {"value": value, "step_s": None, "name": "nothing fits"}
    estimate = made.estimate
    peak = max(row.peak for row in estimate.memory)
    found = {"step_s": estimate.objective_s, "gap": estimate.gap, "peak_bytes": peak, "name": name_of(made)}
    return {"value": value, **found}


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """All sweeps as Markdown; where the plan differs from the line before, it is written out."""
    lines = []
    for factor, rows in found.items():
        lines += [f"| {SWEEPS[factor][0]} | step | peak | plan |", "|---|---|---|---|"]
        before = ""
        for row in rows:
            step = f"{row['step_s'] * 1e3:.1f} ms | {row['peak_bytes'] / 2**30:.1f} GiB" if row["step_s"] else "-|-"
            lines.append(f"| {row['value']:g} | {step} | {row['name'] if row['name'] != before else 'the same'} |")
            before = row["name"]
        lines.append("")
    return "\n".join(lines)


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """One picture of all sweeps: step time over the factor, a colour for each plan, a line where it switches."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "autopar", "font.size": 8})
    from matplotlib import pyplot, ticker

    size = (9, 2.6 * len(found))
    figure, all_axes = pyplot.subplots(len(found), 1, figsize=size, layout="constrained", squeeze=False)
    names = dict.fromkeys(row["name"] for rows in found.values() for row in rows)
    color_of = {name: f"C{i}" for i, name in enumerate(names)}
    plain = ticker.FuncFormatter(lambda value, _: f"{value:g}")
    for (factor, rows), axes in zip(found.items(), all_axes[:, 0], strict=True):
        rows = [row for row in rows if row["step_s"]]
        axes.plot([r["value"] for r in rows], [r["step_s"] * 1e3 for r in rows], color="0.8", zorder=1)
        for name in dict.fromkeys(row["name"] for row in rows):
            own = [(row["value"], row["step_s"] * 1e3) for row in rows if row["name"] == name]
            axes.plot(*zip(*own, strict=True), "o", label=name, color=color_of[name], zorder=2)
        for one, other in pairwise(rows):
            if one["name"] != other["name"]:
                axes.axvline(math.sqrt(one["value"] * other["value"]), color="0.6", linestyle=":", linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel=SWEEPS[factor][0], ylabel="step, ms")
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_formatter(plain)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("factors", nargs="*", help=f"Of {', '.join(SWEEPS)}; by default all.")
    parser.add_argument("--microbatches", default="4", help="A number, or auto.")
    parser.add_argument("--results", type=Path, help="Keeps each point as soon as it is there, for a second run.")
    parser.add_argument("--svg", type=Path, help="Where the picture goes.")
    options = parser.parse_args()
    if unknown := set(options.factors) - set(SWEEPS):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(SWEEPS)}")
    warnings.simplefilter("ignore")
    base = Case(microbatches="auto" if options.microbatches == "auto" else int(options.microbatches))
    known = json.loads(options.results.read_text()) if options.results and options.results.exists() else {}
    found: dict[str, list[dict[str, Any]]] = {}
    for factor in options.factors or SWEEPS:
        for value in SWEEPS[factor][1]:
            key = "base" if getattr(base, factor) == value else f"{factor} {value:g}"
            if key not in known:
                known[key] = measured(base, factor, value)
                print(key, known[key], flush=True)
                if options.results:
                    options.results.write_text(json.dumps(known, indent=1))
            found.setdefault(factor, []).append(known[key] | {"value": value})
    print(table(found))
    if options.svg:
        draw(found, options.svg)


if __name__ == "__main__":
    main()
