"""The cut into stages against brute force over every cut and every point."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from autopar.solve.stages import CutProblem, Layer, Point, cut_layers, cut_lower_bound, evaluate_cut
from autopar.stage_pins import can_cut


def every_cut(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, num_layers), num_stages - 1)
    return [tuple(np.diff((0, *cut, num_layers)).tolist()) for cut in cuts]


def best_by_force(problem: CutProblem, cuts: list[tuple[int, ...]] | None = None) -> float:
    best = math.inf
    for counts in every_cut(len(problem.layers), problem.num_stages) if cuts is None else cuts:
        for points in itertools.product(*(range(len(layer.points)) for layer in problem.layers)):
            cut = evaluate_cut(problem, counts, points)
            if max(cut.bytes) <= problem.capacity:
                best = min(best, cut.objective)
    return best


def random_cut_problem(seed: int) -> CutProblem:
    rng = np.random.default_rng(seed)
    num_layers, num_stages = int(rng.integers(1, 7)), int(rng.integers(1, 4))

    def point() -> Point:
        return Point(float(rng.integers(1, 20)), float(rng.integers(0, 20)), float(rng.integers(0, 6)))

    layers = tuple(
        Layer(tuple(point() for _ in range(int(rng.integers(1, 4)))), *(float(cut) for cut in rng.integers(0, 6, 2)))
        for _ in range(num_layers)
    )
    in_flight = tuple(range(num_stages, 0, -1))
    return CutProblem(layers, num_stages, int(rng.integers(1, 9)), float(rng.integers(20, 90)), in_flight)


def test_equals_brute_force() -> None:
    outcomes = {True: 0, False: 0}
    for seed in range(150):
        problem = random_cut_problem(seed)
        expected, cut = best_by_force(problem), cut_layers(problem)
        outcomes[cut is not None] += 1
        assert cut_lower_bound(problem) <= expected + 1e-9, seed
        if cut is None:
            assert math.isinf(expected), seed
            continue
        assert cut.objective == pytest.approx(expected), seed
        assert max(cut.bytes) <= problem.capacity and sum(cut.counts) == len(problem.layers)
    assert min(outcomes.values()) > 20, outcomes


def test_each_stage_takes_the_set_that_is_best_for_it() -> None:
    """Against brute force over cuts and sets, with a memory limit; stages often take different ones."""
    mixed = 0
    for seed in range(60):
        one, other = random_cut_problem(seed), random_cut_problem(seed + 500)
        layers = tuple(itertools.islice(itertools.cycle(other.layers), len(one.layers)))
        once = (float(seed % 3), float(seed % 2))
        problem = replace(one, others=(layers,), once_seconds=once)
        best = math.inf
        for sets in itertools.product(range(2), repeat=one.num_stages):
            for counts in every_cut(len(one.layers), one.num_stages):
                kept = [problem.sets[which] for which, count in zip(sets, counts, strict=True) for _ in range(count)]
                own = replace(one, layers=tuple(of[i] for i, of in enumerate(kept)))
                best = min(best, best_by_force(own, [counts]) + max(once[which] for which in sets))
        cut = cut_layers(problem)
        assert (cut.objective if cut is not None else math.inf) == pytest.approx(best), seed
        mixed += cut is not None and len(set(cut.sets)) > 1
        uniform = cut_layers(replace(problem, mix_gain=1.0))
        assert cut is None or uniform is None or uniform.objective >= cut.objective - 1e-9
        assert uniform is None or len(set(uniform.sets)) == 1 or math.isinf(best_of_one(problem)), seed
    assert mixed > 5


def best_of_one(problem: CutProblem) -> float:
    """The best objective where all stages take one set."""
    alone = (cut_layers(replace(problem, layers=own, others=(), once_seconds=())) for own in problem.sets)
    return min((cut.objective for cut in alone if cut is not None), default=math.inf)


def test_pinned_layers_are_where_they_are_pinned() -> None:
    """Against brute force over the cuts that keep to the pins, with and without a memory limit."""
    outcomes = {True: 0, False: 0}
    for seed in range(120):
        rng, free = np.random.default_rng(seed + 1000), random_cut_problem(seed)
        pinned = tuple(int(rng.integers(free.num_stages)) if rng.random() < 0.3 else None for _ in free.layers)
        problem = replace(free, pinned=pinned, capacity=math.inf if seed % 2 else free.capacity)
        kept = [counts for counts in every_cut(len(free.layers), free.num_stages) if keeps(pinned, counts)]
        expected, cut = best_by_force(replace(problem, pinned=()), kept), cut_layers(problem)
        outcomes[cut is not None] += 1
        assert can_cut(pinned, free.num_stages) == bool(kept), (seed, pinned)
        assert (cut.objective if cut is not None else math.inf) == pytest.approx(expected), seed
        assert cut is None or keeps(pinned, cut.counts)
    assert min(outcomes.values()) > 20, outcomes


def keeps(pinned: tuple[int | None, ...], counts: tuple[int, ...]) -> bool:
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    return all(pin in (None, stage) for pin, stage in zip(pinned, stages, strict=True))


def test_even_layers_are_cut_evenly() -> None:
    layers = (Layer((Point(1.0, 4.0, 1.0),)),) * 8
    cut = cut_layers(CutProblem(layers, 2, 4, 30.0, (2, 1)))
    assert cut is not None and cut.counts == (4, 4) and cut.objective == 4.0 * 3 + 8.0


def test_a_heavy_head_shortens_the_last_stage() -> None:
    layers = (*(Layer((Point(1.0),)),) * 7, Layer((Point(3.0),)))
    cut = cut_layers(CutProblem(layers, 2, 16, 30.0, (2, 1)))
    assert cut is not None and cut.counts == (5, 3)


def test_memory_moves_the_cut_and_slower_points_are_taken_only_where_needed() -> None:
    fast, slow = Point(1.0, 1.0, 3.0), Point(1.4, 1.0, 0.5)
    cut = cut_layers(CutProblem((Layer((fast, slow)),) * 8, 4, 8, 10.0, (4, 3, 2, 1)))
    assert cut is not None
    assert cut.points[-1] == 0 and cut.points[0] == 1
    assert max(cut.bytes) <= 10.0


def test_eighty_layers_on_sixteen_stages() -> None:
    rng = np.random.default_rng(0)
    layers = tuple(Layer((Point(1.0 + 0.1 * float(rng.random()), 3.0, 0.25),), 0.01) for _ in range(80))
    cut = cut_layers(CutProblem(layers, 16, 64, 80.0, tuple(range(16, 0, -1))))
    assert cut is not None and cut.objective >= cut_lower_bound(
        CutProblem(layers, 16, 64, 80.0, tuple(range(16, 0, -1)))
    )


def test_without_a_limit_many_different_layers_take_their_fastest_points() -> None:
    draw = random.Random(0)
    layers = tuple(
        Layer(tuple(Point(1.0 + k + draw.random(), draw.random(), draw.random()) for k in range(3))) for _ in range(56)
    )
    found = cut_layers(CutProblem(layers, 1, 4, math.inf, (1,)))
    assert found is not None and set(found.points) == {0}
