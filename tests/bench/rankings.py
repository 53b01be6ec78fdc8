"""Which of several plans is faster: what is known from published runs, and what the cost model says.

    python -m tests.bench.rankings [NAME…]

Plans are pinned and priced by the search's relaxed problem: one stage, weighed as equal ones of a pipeline, without
what stages send each other. It takes seconds for any number of stages, and is what the search ranks meshes by. Memory
isn't limited: what ran did fit. Figures of devices and links are those of the presets: nothing is fitted. The optimizer
is plain SGD: Adam's update, which all plans of a ranking would share, would double the graph.
"""

from __future__ import annotations

import argparse
import functools
import warnings
from dataclasses import dataclass

import torch
from torch import nn

from autopar import TrainStep
from autopar.capture.folding import Folded
from autopar.cluster import parse_cluster
from autopar.mesh import Mesh
from autopar.pins import parse_pins
from autopar.rules.found import FoundRules, find_rules
from autopar.skeletons import Skeletons
from autopar.trials import Trials
from tests.bench.expert_configs import model_of

GPT = {"kind": "gpt2", "vocab": 51200, "seq": 2048}
MODELS = {
    "GPT 162B": {**GPT, "layers": 32, "hidden": 20480, "heads": 128, "ffn": 4 * 20480},
    "GPT 175B": {**GPT, "layers": 96, "hidden": 12288, "heads": 96, "ffn": 4 * 12288},
    "GPT 145B": {**GPT, "layers": 80, "hidden": 12288, "heads": 96, "ffn": 4 * 12288},
    "GPT 22B": {**GPT, "layers": 48, "hidden": 6144, "heads": 64, "ffn": 4 * 6144},
    "GPT 1.3B": {**GPT, "layers": 24, "hidden": 2048, "heads": 16, "ffn": 4 * 2048},
}
SC21 = "Narayanan et al., SC'21"
KORTHIKANTI = "Korthikanti et al. 2022"
LECTURE = "CS336 2026, lecture 8: tensor parallelism as far as NVLink reaches, data parallelism once the model fits"


@dataclass(frozen=True)
class Run:
    """One pinned plan. `measured`: whatever the source gives, in `Ranking.unit`."""

    label: str
    pins: str
    measured: float | None = None
    microbatches: int = 0
    """Where it isn't that of the ranking."""


@dataclass(frozen=True)
class Ranking:
    """Plans of one model on one cluster, the fastest first, as it is known."""

    name: str
    model: str
    cluster: str
    batch: int
    microbatches: int
    runs: tuple[Run, ...]
    source: str
    unit: str = ""


def _figure_13(batch: int, *tflops: tuple[str, float]) -> Ranking:
    """Pipeline against tensor parallelism on 64 GPUs; each microbatch is one sample."""
    runs = []
    for label, rate in sorted(tflops, key=lambda row: -row[1]):
        stages, _, ways = label.partition(" x ")
        runs.append(Run(label, f"pp={stages}, dp=1, tp={ways}, recompute=full", rate))
    name = f"figure 13, batch {batch}: pp x tp"
    return Ranking(name, "GPT 162B", "8x8xa100", batch, batch, tuple(runs), SC21, "TFLOP/s")


def _domain(name: str, cluster: str, *best: str) -> Ranking:
    runs = tuple(Run(label, "pp={}, dp=1, tp={}, recompute=full".format(*label.split(" x "))) for label in best)
    return Ranking(name, "GPT 162B", cluster, 8, 8, runs, LECTURE)


def _zero_3(devices: int, ways: int, rows: int, zero: float, pipeline: float) -> Ranking:
    """ZeRO-3 alone against tensor parallelism of 8 with 12 stages, 1,536 samples a step."""
    runs = (
        Run("pp=12 tp=8", f"pp=12, dp={ways}, tp=8, zero=0, recompute=full", pipeline, 1536 // ways),
        Run("ZeRO-3", f"pp=1, dp={devices}, tp=1, zero=3, recompute=full", zero, 1536 // devices // rows),
    )
    cluster = f"{devices // 8}x8xa100"
    return Ranking(f"ZeRO-3 on {devices} GPUs", "GPT 175B", cluster, 1536, 1, runs, f"{SC21}, table 2", "s")


RANKINGS = (
    _figure_13(32, ("2 x 32", 102), ("4 x 16", 132), ("8 x 8", 140), ("16 x 4", 111), ("32 x 2", 91)),
    _figure_13(128, ("2 x 32", 107), ("4 x 16", 146), ("8 x 8", 165), ("16 x 4", 162), ("32 x 2", 148)),
    _zero_3(384, 4, 4, 81.58, 76.78),
    _zero_3(1536, 16, 1, 66.75, 20.83),
    _domain("NVLink joins 8: pp x tp", "8x8xb200", "8 x 8", "4 x 16"),
    _domain("NVLink joins 72: pp x tp", "64xgb200", "4 x 16", "8 x 8"),
    Ranking(
        "sequence parallelism, recompute",
        "GPT 22B",
        "8xa100",
        4,
        1,
        (
            Run("sequence parallel", "tp=8, *.ln_*: tp=seq, recompute=none", 20.3),
            Run("tensor parallel", "tp=8, *.ln_*: tp=none, recompute=none", 20.9),
            Run("full recompute", "tp=8, *.ln_*: tp=none, recompute=full", 27.2),
        ),
        f"{KORTHIKANTI}, table 4, attention recomputed where ours is fused",
        "ms a layer",
    ),
    Ranking(
        "recompute at 8 samples",
        "GPT 145B",
        "16x8xa100",
        8,
        8,
        (
            Run("none", "pp=16, dp=1, tp=8, recompute=none", 3.9),
            Run("full", "pp=16, dp=1, tp=8, recompute=full", 3.0),
        ),
        f"{SC21}, activation recomputation",
        "samples/s",
    ),
    Ranking(
        "everything fits",
        "GPT 1.3B",
        "8xh100",
        64,
        8,
        (
            Run("data parallel", "pp=1, dp=8, tp=1", microbatches=1),
            Run("pp=2 dp=4", "pp=2, dp=4, tp=1"),
            Run("tp=8", "pp=1, dp=1, tp=8", microbatches=1),
        ),
        LECTURE,
    ),
)


@functools.cache
def model_named(name: str) -> nn.Module:
    """On meta."""
    with torch.device("meta"):
        model: nn.Module = model_of({"model": MODELS[name]})
    return model


def step_of(model: str, batch: int, microbatches: int) -> TrainStep:
    tokens = torch.zeros(batch, MODELS[model]["seq"], dtype=torch.long)
    arguments = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    return TrainStep(model_named(model), arguments, optimizer=sgd, microbatches=microbatches, precision="mixed")


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@functools.cache
def microbatch_of(model: str, rows: int) -> tuple[Folded, FoundRules]:
    """The captured step of one microbatch: what it costs doesn't depend on how many there are."""
    folded = step_of(model, rows, 1).fold()
    return folded, find_rules(folded.captured.graphs)


@functools.cache
def skeletons_of(model: str, rows: int, microbatches: int) -> Skeletons:
    folded, rules = microbatch_of(model, rows)
    return Skeletons(folded, microbatches, rules.all)


def seconds(ranking: Ranking, run: Run) -> float:
    """A step of one plan; pipelines have one stage a rank."""
    cluster, pins = parse_cluster(ranking.cluster), parse_pins([run.pins, "virtual=1"])
    count = run.microbatches or ranking.microbatches
    skeletons = skeletons_of(ranking.model, ranking.batch // count, count)
    mesh = Mesh(tuple((axis, pins.axes.get(axis, 1)) for axis in ("pp", "dp", "tp")))
    return (
        Trials(step_of(ranking.model, ranking.batch, count), skeletons, cluster, pins, capacity=1e16)
        .relaxed(mesh)
        .solution.objective
    )


def predicted(ranking: Ranking) -> dict[str, float]:
    """Label → seconds, in the known order."""
    return {run.label: seconds(ranking, run) for run in ranking.runs}


def comes_out(found: dict[str, float]) -> bool:
    """Whether the known order is that of the predicted seconds."""
    return list(found.values()) == sorted(found.values())


def line(ranking: Ranking, found: dict[str, float]) -> str:
    """A ranking as a row of Markdown."""
    known = " > ".join(f"{r.label} ({r.measured:g})" if r.measured else r.label for r in ranking.runs)
    known += f", {ranking.unit}" if ranking.unit else ""
    model = ", ".join(f"{step_s:.3g}" for step_s in found.values()) + " s"
    cells = (ranking.name, f"{ranking.model}, {ranking.cluster}", known, model, "yes" if comes_out(found) else "no")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="Parts of the names of rankings; by default all.")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    wanted = [r for r in RANKINGS if not options.names or any(name in r.name for name in options.names)]
    print("| ranking | model, devices | known | model | comes out |\n|---|---|---|---|---|")
    for ranking in wanted:
        print(line(ranking, predicted(ranking)), flush=True)
    for ranking in wanted:
        print(f"{ranking.name}: {ranking.source}")


if __name__ == "__main__":
    main()
