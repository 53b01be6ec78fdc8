"""What units take at least bounds every plan of a pipeline, however many stages its ranks have."""

from __future__ import annotations

import functools
import itertools
import random

import pytest

from autopar import plan
from autopar.capture.step import TrainStep
from autopar.cluster import parse_cluster
from autopar.pins import Pins
from autopar.pipeline_bounds import PipelineBounds
from autopar.planning import _Search
from autopar.trials import Trials
from autopar.unit_bounds import Least
from tests.virtual.step_models import GPT, token_batch

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
