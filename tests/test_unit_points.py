"""What units cost and hold in given layouts, kept or computed again."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import pytest

from autopar.cluster import parse_cluster
from autopar.mesh import Mesh
from autopar.pins import parse_pins
from autopar.relaxed import Relaxed
from autopar.skeletons import Skeletons
from autopar.solve.layers_apart import of_layouts, restricted
from autopar.solve.problem import evaluate
from autopar.solve.search import solve
from autopar.trials import Trials
from autopar.unit_points import Laid, UnitPoints
from tests.solve.test_overlapped import step_of as overlapping_step_of
from tests.solve.test_share import trials_of
from tests.virtual.step_models import step_of

MESH = Mesh.parse("pp=2 dp=2 tp=1")


@functools.cache
def known() -> tuple[UnitPoints, Relaxed, Laid]:
    trials = replace(trials_of(step_of("llama, 2 layers"), "4xcpu"), capacity=1e6)  # about what the model holds
    relaxed = trials.relaxed(MESH)
    points = trials._points(MESH, relaxed)
    return points, relaxed, points.laid(relaxed.built.picked(relaxed.solution.choice))


def test_a_layer_that_is_computed_again_holds_what_the_layer_before_brings_to_it() -> None:
    points, relaxed, laid = known()
    layers = dict(zip(points.units, laid.layers, strict=True))
    node = next(n for n in relaxed.built.nodes if n.meta["key"] == "model.layers.0/aten.add/forward#1")
    residual = node.meta["val"].numel() * node.meta["val"].element_size() / 2
    everything, *_, least = layers["model.layers.0"].points
    assert residual <= least.saved_bytes < everything.saved_bytes


def test_points_hold_less_for_more_time() -> None:
    *_, laid = known()
    for layer in laid.layers:
        seconds, held = [p.seconds for p in layer.points], [p.held(2, 4) for p in layer.points]
        assert seconds == sorted(seconds) and held == sorted(held, reverse=True)
    assert max(len(layer.points) for layer in laid.layers) > 1


def test_the_fastest_points_are_what_the_solution_costs() -> None:
    _, relaxed, laid = known()
    rows = evaluate(relaxed.built.problem, relaxed.solution.choice).rows
    assert sum(layer.points[0].seconds for layer in laid.layers) == pytest.approx(rows[0])
    assert laid.once_s == pytest.approx(rows[1])


def test_no_choice_of_modes_beats_a_point_at_its_price() -> None:
    """Each point is the best of its layouts at some price: the whole problem solved at that price costs as much."""
    points, relaxed, laid = known()
    picked = relaxed.built.picked(relaxed.solution.choice)
    kept = [of_layouts(options, own) for options, own in zip(points.built.strategies, picked, strict=True)]
    small, worth = restricted(points._weighed(points.built.problem), kept), 0.47 * points.worth_s
    nodes = []
    for node, of in zip(small.nodes, restricted(points.built.problem, kept).nodes, strict=True):
        rest, gradients, saved = (of.memory.get(kind, np.zeros(of.num_strategies)) for kind in range(3))
        widest = np.maximum(of.memory.get(3, rest) - rest, 0.0) if 3 in of.memory else np.zeros(of.num_strategies)
        price = worth * ((rest + gradients - rest + widest) / points.in_flight + saved - rest)
        nodes.append(type(node)(node.name, node.cost + price))
    least = solve(type(small)(tuple(nodes), small.edges), gap=1e-4).objective
    fill, update = points.weights
    told = update * laid.once_s
    for layer in laid.layers:
        told += min(
            fill * p.seconds
            + worth * ((p.static_bytes + p.gradient_bytes + p.widest_bytes) / points.in_flight + p.saved_bytes)
            for p in layer.points
        )
    assert told == pytest.approx(least, rel=1e-2)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_cuts_cost_what_no_longer_hides(microbatches: int) -> None:
    """What is put together of units is near what the cut model takes, the ends of whose stages hide nothing."""
    cluster, step = parse_cluster("4xh100"), overlapping_step_of(microbatches)
    cluster = replace(cluster, device=replace(cluster.device, contention=0.0))
    pins = parse_pins("pp=2, dp=2, zero=3, virtual=1")
    trials = Trials(step, Skeletons(step.fold(), microbatches, {}), cluster, pins, 1e10)
    relaxed = trials.relaxed(MESH)
    found = trials.planned(MESH, relaxed)
    assert found is not None
    assert trials.guess_s(MESH, relaxed) == pytest.approx(found.solution.objective, rel=0.06)


def test_leaner_layouts_are_tried_only_below_a_cutoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they take even if memory doesn't bind is told then, and isn't kept: without the cutoff there is a guess."""
    prices: list[float] = []
    leaner = UnitPoints.leaner

    def noted(points: UnitPoints, bytes_s: float) -> Laid:
        prices.append(bytes_s)
        laid = leaner(points, bytes_s)
        layers = [
            replace(each, points=tuple(replace(p, seconds=2 * p.seconds) for p in each.points)) for each in laid.layers
        ]
        return replace(laid, layers=tuple(layers))

    monkeypatch.setattr(UnitPoints, "leaner", noted)
    trials = replace(trials_of(step_of("llama, 2 layers"), "4xcpu"), capacity=1.0, guesses={})
    relaxed = trials.relaxed(MESH)
    fastest_s = replace(trials, capacity=1e12, guesses={}).guess_s(MESH, relaxed)
    told = trials.guess_s(MESH, relaxed, cutoff=1.2 * fastest_s)
    assert len(prices) == 1 and 1.2 * fastest_s <= told < math.inf and MESH not in trials.guesses
    assert math.isinf(trials.guess_s(MESH, relaxed)) and len(prices) > 2 and MESH in trials.guesses
