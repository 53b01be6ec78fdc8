"""What units take at least bounds every plan of a pipeline, however many stages its ranks have."""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from autopar import plan
from autopar.capture.step import TrainStep
from autopar.cluster import parse_cluster
from autopar.memory_bounds import MemoryBounds
from autopar.mesh import Mesh
from autopar.pins import Pins, parse_pins
from autopar.pipeline_bounds import PipelineBounds
from autopar.planning import _Search
from autopar.relaxed import units_of_nodes
from autopar.skeletons import Skeletons
from autopar.solve.in_flight import fullest
from autopar.trials import Trials
from autopar.unit_bounds import STACKED, Least, Prices
from tests.virtual.step_models import GPT, momentum, token_batch

CLUSTER = "4xcpu"


def step() -> TrainStep:
    return TrainStep(GPT(width=16, layers=8, tied=False), token_batch(8), microbatches=4)


@functools.cache
def trials() -> Trials:
    return _Search(step(), parse_cluster(CLUSTER), Pins(), 1e9, print)._trials(4)


@functools.cache
def bounds() -> dict[int, float]:
    """By the number of ranks in a pipeline, the least of all meshes."""
    found: dict[int, float] = {}
    for mesh in _Search(step(), parse_cluster(CLUSTER), Pins(), 1e9, print)._meshes(trials()):
        if mesh.num_stages > 1:
            found[mesh.num_stages] = min(found.get(mesh.num_stages, 1e9), trials().units_s(mesh))
    return found


@pytest.mark.parametrize(("ranks", "virtual"), [(2, 1), (4, 2)])
def test_no_plan_beats_what_its_units_take_at_least(ranks: int, virtual: int) -> None:
    found = plan(step(), CLUSTER, pin=f"pp={ranks}, virtual={virtual}")
    assert found.mesh.virtual == virtual
    assert 0.5 * found.estimate.objective_s < bounds()[ranks] <= found.estimate.objective_s


def test_a_pipeline_takes_no_less_than_its_slowest_stage_in_the_best_cut() -> None:
    """Against all cuts, with what cuts cost and what neighbours have in common."""
    rng, size, ranks, microbatches = random.Random(0), 6, 3, 5
    for _ in range(20):
        least = Least(tuple(rng.random() for _ in range(size)), tuple(0.2 * rng.random() for _ in range(size - 1)))
        cuts_s = [(0.3 * rng.random(), 0.3 * rng.random()) for _ in range(size - 1)]
        slowest = []
        for at in itertools.combinations(range(1, size), ranks - 1):
            spans = list(itertools.pairwise((0, *at, size)))
            own = [sum(least.seconds[a:b]) + sum(least.joined[a : b - 1]) for a, b in spans]
            own = [each + (a > 0) * cuts_s[a - 1][0] for each, (a, _) in zip(own, spans, strict=True)]
            own = [each + (b < size and cuts_s[b - 1][1]) for each, (_, b) in zip(own, spans, strict=True)]
            slowest.append(max(own))
        found = PipelineBounds(ranks, microbatches, cuts_s, 1.0, {1: ()}).least_s(least)
        filled = 1.0 + (ranks - 1) * min(map(sum, cuts_s))
        assert found == pytest.approx((microbatches - 1) * min(slowest) + filled)


def test_what_the_ends_of_stages_cannot_hide_counts_where_it_is_sure_to() -> None:
    """In full from `STACKED` like units on, in part for fewer; not at the model's ends, or beside what is joined."""
    size = 2 * STACKED + 3
    kinds = (0, *(1,) * (size - 2), 2)
    least = Least((1.0,) * size, (0.0,) * (size - 1), (), (0.6,) * size, kinds)
    for count in range(1, size - 1):
        assert least.of(1, 1 + count) == pytest.approx(count + 0.6 * min(1.0, count / STACKED))
    assert least.of(0, STACKED + 1) == STACKED + 1 and least.of(1, size) == size - 1 and least.of(0, size) == size
    joined = replace(least, joined=(0.5,) * (size - 1))
    assert joined.of(1, 2) == pytest.approx(1 + 0.6 / STACKED)
    assert joined.of(1, 4) == pytest.approx(3 + max(2 * 0.5, 0.6))


def test_no_stage_of_like_layers_takes_less_than_with_its_ends() -> None:
    """Where weights are gathered block by block, the first gather of a stage is waited for: the bound says so, and no
    plan beats it."""
    cluster = parse_cluster("4xh100")
    cluster = replace(cluster, device=replace(cluster.device, contention=0.0))
    model = GPT(width=192, heads=2, layers=8, tied=False)  # gathered block by block
    step = TrainStep(model, token_batch(16), optimizer=momentum, microbatches=4)
    pins = parse_pins("pp=2, dp=2, zero=3, virtual=1")
    trials = Trials(step, Skeletons(step.fold(), 4, {}), cluster, pins, 1e10)
    mesh = Mesh.parse("pp=2 dp=2 tp=1")
    relaxed = trials.relaxed(mesh)
    found = trials.planned(mesh, relaxed)
    assert found is not None
    least = trials._least[mesh]
    assert max(least.ends) > 0.0
    assert trials.units_s(mesh) <= found.solution.objective


def test_what_is_after_the_layers_is_of_the_last_unit_in_all_phases() -> None:
    """The gradient of a head is summed late in the backward, after that of the first layer."""
    nodes, units = [node for node in trials().whole.graph.nodes if "key" in node.meta], trials().whole.cut.units
    unit_of = units_of_nodes(nodes, units)
    head = [node for node in nodes if node.meta.get("path", "").startswith("head")]
    assert {node.meta["phase"] for node in head} >= {"forward", "backward", "update"}
    assert {unit_of[node] for node in head} == {len(units) - 1}


# -- within the memory ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("share", [10.0, 0.7])
def test_no_plan_beats_the_bound_within_the_memory(share: float) -> None:
    """What fits in less of the memory that the free plan needs takes longer, and its bound rises with it."""
    free = plan(step(), CLUSTER, pin="pp=2, virtual=2")
    peak = max(row.peak for row in free.estimate.memory)
    found = plan(step(), CLUSTER, pin="pp=2, virtual=2", memory=share * peak)
    search = _Search(step(), parse_cluster(CLUSTER), parse_pins("pp=2, virtual=2"), share * peak, print)
    tight = search._trials(4)
    meshes = [mesh for mesh in search._meshes(tight) if mesh.num_stages > 1]
    alone = min(map(tight.units_s, meshes))
    bound = min(tight.within_s(mesh, math.inf) for mesh in meshes)
    assert alone * 0.99 <= bound <= found.estimate.objective_s * (1 + 1e-9)
    if share < 0.8:
        assert bound > alone * 1.005


def test_prices_prove_no_more_than_the_best_points_on_stages() -> None:
    """Two stages on one rank each hold what their units' points hold; every choice of points that fits is tried."""
    rng, microbatches = random.Random(1), 4
    for _ in range(10):
        points = [[(rng.uniform(1, 2), rng.uniform(2, 4)), (rng.uniform(2, 3), rng.uniform(0, 2))] for _ in range(4)]

        def least(prices: Prices, points: list[list[tuple[float, float]]] = points) -> Least:
            return Least(tuple(min(prices.seconds * s + prices.kept * k for s, k in own) for own in points))

        cut, held = (
            MemoryBounds(2, microbatches, 14.0, [(0.0, 0.0)] * 3, {2: (1, 1, 1, 1)}),
            fullest(2, microbatches, 2),
        )
        best = math.inf
        for picked in itertools.product(*points):
            kept = [(picked[rank][1], picked[rank + 2][1]) for rank in (0, 1)]
            fits = all(np.dot(moment.kept, kept[rank]) <= 14.0 for rank in (0, 1) for moment in held[rank])
            rounds = max(picked[0][0], picked[1][0]) + max(picked[2][0], picked[3][0])
            seconds = (microbatches - 1 / 2) * rounds + sum(s for s, _ in picked) / 2
            best = min(best, seconds if fits else math.inf)
        known = [(prices, least(prices)) for prices in (Prices(), *(Prices(kept=k / 4) for k in range(1, 9)))]
        found = cut._least(known, [-1] * 4)
        free = cut._least(known[:1], [-1] * 4)
        assert free.seconds <= found.seconds * (1 + 1e-9) and found.seconds <= best * (1 + 1e-9)
