"""What units take at least bounds every plan of a pipeline, however many stages its ranks have."""

from __future__ import annotations

import functools

import pytest

from autopar import plan
from autopar.capture.step import TrainStep
from autopar.cluster import parse_cluster
from autopar.pins import Pins
from autopar.planning import _Search
from autopar.trials import Trials
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
