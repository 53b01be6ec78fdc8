"""One cell of the matrix: a model, and what is asked of it.

    run_cell("llama", "tp2")      # Result("llama", "tp2", "", {"capture": 0.6, "plan": 0.9, "verify": 1.1}, 1.0)

| cell       | what must hold                                                                                     |
|------------|----------------------------------------------------------------------------------------------------|
| `capture`  | the step is captured, and equal to the eager step in native precision                              |
| `solver2`… | the plan that the solver picks for so many ranks equals the captured step in float64               |
| `dp2`      | so does one with dp=2 in which at least `SHARE` of the matmul operations are really split          |
| `tp2`      | so does one with tp=2 in which as many are                                                         |
| `pp2`      | so does one of two stages and two microbatches                                                     |
| `dp2tp2pp2`| so does one of three axes                                                                          |
"""

from __future__ import annotations

import functools
import time
import warnings
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from autopar.capture.step import TrainStep
from autopar.cluster import parse_cluster
from autopar.cluster.cluster import Cluster
from autopar.compiling import annotated, compile, parsed_choices
from autopar.errors import Error
from autopar.layers import Cut, units_of
from autopar.planning import plan
from autopar.plans import Plan, stage_of
from autopar.program.verify import HALVES, verify
from autopar.solve.costs import flops
from tests.matrix.models import build
from tests.virtual.step_models import weights_of

SHARE = 0.9
"""Of the operations of matmuls and convolutions, what a pinned axis must split."""

CELLS: dict[str, tuple[int, str, int]] = {
    "capture": (1, "", 1),
    "solver2": (2, "", 1),
    "solver4": (4, "", 1),
    "solver8": (8, "", 1),
    "dp2": (2, "dp=2", 1),
    "tp2": (2, "tp=2", 1),
    "pp2": (2, "pp=2", 2),
    "dp2tp2pp2": (8, "dp=2 tp=2 pp=2", 2),
}
"""cell → ranks, pins, microbatches."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a cell; `problem` is empty where it passed."""

    model: str
    cell: str
    problem: str
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage: build, capture, plan, verify."""
    share: float | None = None
    """Of the matmul operations, what the pinned axes split, the one that splits least; None without one."""
    missing: tuple[str, ...] = ()
    """Ops that ran whole for want of a rule."""

    @property
    def ok(self) -> bool:
        return not self.problem


def run_cell(model: str, cell: str) -> Result:
    """Runs one cell in this process; what goes wrong is in the result."""
    seconds: dict[str, float] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            problem, share = _run(model, cell, seconds)
        except Exception as error:  # a cell reports whatever stops it
            kind = "" if isinstance(error, Error) else f"{type(error).__name__}: "
            problem, share = kind + _one_line(str(error)), None
    texts = [str(w.message) for w in caught if "no sharding rule" in str(w.message)]
    return Result(model, cell, problem, seconds, share, tuple(sorted({t.split(" ")[0] for t in texts})))


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return (lines or ["(no message)"])[0][:400]


def _run(model: str, cell: str, seconds: dict[str, float]) -> tuple[str, float | None]:
    ranks, pins, microbatches = CELLS[cell]
    with _timed(seconds, "build"):
        step = _step(model, microbatches)
    with _timed(seconds, "capture"):
        step.capture()
    with _timed(seconds, "plan"):
        found = plan(step, fast_cluster(ranks), pin=pins or None)
        program = compile(step, found)
    with _timed(seconds, "verify"):
        report = verify(step, program.pipeline, weights_of(step), 1)
    wanted = HALVES if cell == "capture" else HALVES[1:]
    wrong = [d for d in report.differences if not d.ok and d.half in wanted]
    if wrong:
        return str(wrong[0]), None
    shares = {axis: split_share(step, found, axis) for axis in ("dp", "tp") if f"{axis}=2" in pins}
    poor = [f"{axis} splits {share:.0%}" for axis, share in shares.items() if share < SHARE]
    problem = f"not split: {', '.join(poor)} of the matmul operations" if poor else ""
    return problem, min(shares.values(), default=None)


@functools.lru_cache(maxsize=2)
def _step(model: str, microbatches: int) -> TrainStep:
    """The cells of a model share what is captured."""
    module, batch = build(model)
    return TrainStep(module, dict(batch), optimizer=_momentum, microbatches=microbatches)


def _momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def fast_cluster(ranks: int) -> Cluster:
    """CPUs whose links and ops have no latency: at tiny sizes, too, it pays to split."""
    cluster = parse_cluster(f"{ranks}xcpu")
    device = replace(cluster.device, launch_s=0.0)
    levels = tuple(
        replace(level, latency_s=0.0, base_s=0.0, bytes_per_s=100 * level.bytes_per_s) for level in cluster.levels
    )
    return Cluster(f"{ranks} fast CPUs", device, levels)


def split_share(step: TrainStep, found: Plan, axis: str) -> float:
    """The share of the matmul operations of forward and backward that `axis` splits."""
    captured = step.capture()
    units, _ = units_of(captured.gradient.graph)
    cut = Cut(units, tuple(stage_of(found.node_stage, unit) for unit in units))
    graph = annotated(captured, found.microbatches, cut, found.rules)
    choices = parsed_choices(graph, found.choices)
    total = split = 0.0
    for node in graph.graph.nodes:
        work = flops(node) if node.op == "call_function" and "rule" in node.meta else 0.0
        total += work
        if any(s.axis == axis and s.factor >= 0 for s in choices.get(node.meta.get("key", ""), ())):
            split += work
    return split / total if total else 1.0


class _timed:
    """Adds the seconds of a `with` block to `seconds[stage]`."""

    def __init__(self, seconds: dict[str, float], stage: str) -> None:
        self.seconds, self.stage = seconds, stage

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds[self.stage] = time.perf_counter() - self.started
