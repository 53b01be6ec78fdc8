"""The best step with overlap beside trying everything, where computation lasts and where it doesn't."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from autopar.capture.step import TrainStep
from autopar.cluster import parse_cluster
from autopar.compiling import annotated
from autopar.layers import Cut, units_of
from autopar.mesh import Mesh
from autopar.planning import plan
from autopar.reshard import Resharder
from autopar.solve.beside import solve_beside, step_s
from autopar.solve.build import BuiltProblem, build_problem
from autopar.solve.held import least_memory
from autopar.solve.layers_apart import restricted
from autopar.solve.modes import Mode
from autopar.solve.problem import evaluate
from autopar.solve.search import solve
from tests.bench.expert_configs import model_of
from tests.solve.test_exhaustive import free_nodes, spread, with_budget
from tests.solve.test_overlapped import step_of
from tests.solve.test_recompute import setting_of
from tests.virtual.step_models import momentum

DRAWS = 14
"""Problems drawn of each graph."""


@functools.cache
def built(mesh: str, byte_s: float, contention: float = 0.6, recompute: str = "none") -> BuiltProblem:
    """A small GPT's; `byte_s`: what the links take for a byte, computation 1e-8 seconds."""
    step, laid_out = step_of(2), Mesh.parse(mesh)
    units, stages = units_of(step.capture().gradient.graph)[0], laid_out.num_stages
    cut = Cut.from_boundaries(units, [round(i * len(units) / stages) for i in range(stages)])
    setting = replace(
        setting_of(step, laid_out, recompute),
        resharder=Resharder(laid_out, lambda kind, axis, num_bytes: 1e-7 + num_bytes * byte_s),
        contention=contention,
        is_pipelined=stages > 1,
    )
    return build_problem(annotated(step.capture(), 2, cut), setting)


def part_of(made: BuiltProblem, kept: list[np.ndarray]) -> BuiltProblem:
    """With only the strategies `kept` of each node."""
    moves = []
    for edge, moved in zip(made.problem.edges, made.moves, strict=True):
        (sources, of_source), (targets, of_target) = moved.source, moved.target
        ends = kept[edge.source], kept[edge.target]
        hideable = None if moved.hideable is None else moved.hideable[np.ix_(*ends)]
        own = {"source": (sources, of_source[ends[0]]), "target": (targets, of_target[ends[1]])}
        moves.append(replace(moved, hideable=hideable, **own))
    strategies = [[options[k] for k in left] for options, left in zip(made.strategies, kept, strict=True)]
    problem = restricted(made.problem, kept)
    return replace(made, problem=problem, plain=problem.nodes, strategies=strategies, moves=tuple(moves))


def drawn(made: BuiltProblem, base: Sequence[int], seed: int) -> tuple[BuiltProblem, list[int]]:
    """The problem with few nodes free, around a weight, within a drawn budget; and those nodes."""
    draw = random.Random(seed)
    free: list[int] = []
    while not any(made.moves[i].hideable is not None for i in touching(made, free)):
        free = free_nodes(made.problem, draw)
    kept = [np.arange(n.num_strategies) if i in free else np.array([base[i]]) for i, n in enumerate(made.problem.nodes)]
    part = part_of(made, kept)
    return replace(part, problem=with_budget(part.problem, free, draw)), free


def leanest(made: BuiltProblem) -> tuple[int, ...]:
    """The choice that holds least: every weight is split, and gathered in each microbatch."""
    return solve(least_memory(made.problem, 1.0), gap=1e-2).choice


def touching(made: BuiltProblem, nodes: Sequence[int]) -> list[int]:
    return [number for number, edge in enumerate(made.problem.edges) if {edge.source, edge.target} & {*nodes}]


def exhaustive(made: BuiltProblem, free: Sequence[int]) -> float:
    """The least step of all choices that fit, each tried: every window takes max(C + kH, H + kC)."""
    problem, k = made.problem, made.setting.contention
    on_grid = functools.partial(spread, problem, free)
    sizes = [problem.nodes[node].num_strategies for node in free]
    rows = [np.zeros(sizes) for _ in range(problem.num_rows)]
    usage = [np.zeros(sizes) for _ in problem.limits]
    computing, hiding = ([np.zeros(sizes) for _ in made.windows.windows] for _ in range(2))
    for number, (node, of) in enumerate(zip(problem.nodes, made.nodes, strict=True)):
        rows[node.row] = rows[node.row] + on_grid(node.cost, [number])
        for limit, memory in node.memory.items():
            usage[limit] = usage[limit] + on_grid(memory, [number])
        again = np.array([0.5 * (option.mode is Mode.AGAIN) for option in made.strategies[number]])
        for window, cost in (
            (made.windows.of.get(of), (1 - again) * node.cost),
            (made.windows.again(of), again * node.cost),
        ):
            if window is not None and cost.any():
                computing[window] = computing[window] + on_grid(cost, [number])
                rows[node.row] = rows[node.row] - on_grid(cost, [number])
    for edge, moved in zip(problem.edges, made.moves, strict=True):
        ends = [edge.source, edge.target]
        rows[edge.row] = rows[edge.row] + on_grid(edge.cost, ends)
        for window, part in moved.hiding.shares:
            assert moved.hideable is not None
            hiding[window] = hiding[window] + on_grid(part * moved.hideable, ends)
            rows[edge.row] = rows[edge.row] - k * on_grid(part * moved.hideable, ends)
    for window, c, h in zip(made.windows.windows, computing, hiding, strict=True):
        rows[window.stage] = rows[window.stage] + np.maximum(c + k * h, h + k * c)
    forbidden = ~np.all([np.isfinite(row) for row in rows], axis=0)
    for bound, used in zip(problem.limits, usage, strict=True):
        forbidden = forbidden | (used > bound.threshold)
    terms = [term for term in problem.objective if term.weight > 0]
    total = sum(term.weight * np.max([rows[row] for row in term.rows], axis=0) for term in terms)
    return float(np.min(np.where(forbidden, np.inf, total)))


@pytest.mark.parametrize(
    ("mesh", "byte_s", "contention", "recompute", "is_late"),
    [
        ("dp=2", 1e-9, 0.6, "none", False),
        ("dp=2 tp=2", 1e-9, 0.0, "none", False),
        ("dp=2", 2e-7, 0.6, "none", True),
        ("dp=2", 1e-7, 0.0, "none", True),
        ("dp=2", 1e-7, 0.0, "auto", True),
        ("dp=2 tp=2", 1e-7, 0.0, "none", True),
        ("pp=2 dp=2", 1e-7, 0.0, "none", True),
    ],
)
def test_the_best_step_is_found_or_the_gap_is_told(
    mesh: str, byte_s: float, contention: float, recompute: str, is_late: bool
) -> None:
    """Where nothing of a choice is late, its problem says all; otherwise other prices lead to a better one."""
    made = built(mesh, byte_s, contention, recompute)
    base, fitting, exact, better, late = leanest(made), 0, 0, 0, 0
    for seed in range(DRAWS):
        part, free = drawn(made, base, seed)
        best = exhaustive(part, free)
        found = solve_beside(part, part.problem, functools.partial(solve, gap=0.0), gap=1e-9)
        assert bool(found.choice) == math.isfinite(best), seed
        if not found.choice:
            continue
        assert evaluate(part.problem, found.choice).feasible, seed
        assert found.objective == pytest.approx(step_s(part, found.choice), rel=1e-9), seed
        assert found.bound <= best * (1 + 1e-7) and best <= found.objective * (1 + 1e-7), seed
        fitting, exact = fitting + 1, exact + (found.objective <= best * (1 + 1e-7))
        first = solve(part.problem, gap=0.0)
        better += found.objective < step_s(part, first.choice) * (1 - 1e-6)
        late += first.objective < step_s(part, first.choice) * (1 - 1e-7)
    assert fitting >= DRAWS // 2 and exact >= 0.9 * fitting
    assert bool(late) == is_late
    assert bool(better) == (is_late and contention == 0.0)


@functools.cache
def wide_step() -> TrainStep:
    size = {"kind": "gpt2", "vocab": 1024, "seq": 2048, "layers": 4, "hidden": 4096, "heads": 32, "ffn": 4 * 4096}
    tokens = torch.zeros(32, 2048, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    model = functools.partial(model_of, {"model": size})
    return TrainStep(model, batch, microbatches=1, precision="mixed", optimizer=momentum)


@pytest.mark.parametrize("contention", [0.6, 1.0])
def test_data_parallelism_wins_where_its_gathers_hide(contention: float) -> None:
    """ZeRO-3 over all devices of a node communicates more than beside tensor parallelism, and hides more of it."""
    cluster = parse_cluster("8xh100")
    cluster = replace(cluster, device=replace(cluster.device, contention=contention))
    pins = ("dp=8 tp=1 pp=1 zero=3", "dp=4 tp=2 pp=1 zero=3")
    alone, both = (plan(wide_step(), cluster, pin=pin, memory="1000GiB").estimate for pin in pins)
    assert (alone.objective_s < both.objective_s) == (contention < 1)
    assert alone.serial_s is not None and both.serial_s is not None and alone.serial_s > both.serial_s
    for estimate in (alone, both):
        hidden = sum(row.hidden_s for row in estimate.overlap)
        assert estimate.objective_s == pytest.approx(estimate.serial_s - hidden)
        assert bool(hidden) == (contention < 1)
        assert estimate.gap < 0.01
