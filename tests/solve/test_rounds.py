"""Several stages a rank: step times against the schedule's simulation, what ranks hold, cuts against all of them."""

import itertools
import math
import random

import pytest

from autopar.mesh import Mesh
from autopar.program.actions import Action
from autopar.program.generators import interleaved_1f1b, make_schedule
from autopar.program.schedule import simulate
from autopar.solve.ranks import Owned, in_flight_of, ranks_of
from autopar.solve.rounds import RoundCuts, fit_rounds, least_s, step_s
from autopar.solve.stages import Layer, Point, fastest_seconds
from autopar.solve.waiting import waited_s

SIZES = [(2, 1, 4), (2, 2, 4), (4, 2, 16), (4, 3, 12), (8, 4, 32)]
"""(ranks, stages of each, microbatches)"""


def modelled_s(stage_s, num_ranks, virtual, microbatches):
    """The step by the formula, each stage standing for itself."""
    ranks = ranks_of(Mesh((("pp", num_ranks),), virtual), microbatches, range(len(stage_s)))
    steady = sum(times * max(stage_s[s] for s in stages) for stages, times in ranks.steady(microbatches).items())
    return steady + sum(stage_s) / virtual


def simulated_s(stage_s, num_ranks, virtual, microbatches):
    name = "1f1b" if virtual == 1 else "interleaved_1f1b"
    durations = {
        f"{s}{kind}": each * part for s, each in enumerate(stage_s) for kind, part in (("F", 1 / 3), ("B", 2 / 3))
    }
    return simulate(make_schedule(name, num_ranks, microbatches, virtual), durations).span_s


@pytest.mark.parametrize(("p", "v", "m"), SIZES)
def test_equal_stages_take_what_the_simulation_says(p, v, m):
    equal = [1.0] * (p * v)
    assert math.isclose(modelled_s(equal, p, v, m), m * v + p - 1)
    assert math.isclose(modelled_s(equal, p, v, m), simulated_s(equal, p, v, m))


@pytest.mark.parametrize(("p", "v", "m"), SIZES)
def test_a_head_that_takes_longer(p, v, m):
    with_head = [1.0] * (p * v - 1) + [1.5]
    assert math.isclose(modelled_s(with_head, p, v, m), simulated_s(with_head, p, v, m))


@pytest.mark.parametrize(("p", "v", "m"), [sizes for sizes in SIZES if sizes[1] > 1])
def test_unequal_stages_take_no_more_than_rounds_of_the_slowest(p, v, m):
    """Ranks that are slow in different rounds make up for each other in part."""
    rng = random.Random(p * v * m)
    for _ in range(5):
        stage_s = [rng.choice([0.6, 1.0, 1.2]) for _ in range(p * v)]
        simulated = simulated_s(stage_s, p, v, m)
        assert 0.95 * simulated <= modelled_s(stage_s, p, v, m) <= 1.35 * simulated


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (2, 7, 6), (4, 3, 32), (8, 4, 64), (3, 2, 8)])
def test_waiting_action_by_action_is_what_the_simulation_says(p, v, m):
    rng = random.Random(p * v * m)
    for _ in range(3):
        stage_s = [rng.choice([2.0, 3.0]) for _ in range(p * v)]
        simulated = simulated_s(stage_s, p, v, m)
        assert waited_s(stage_s, p, m) == pytest.approx(simulated, rel=1e-9 if m <= 3 * p else 0.02)


def test_unlike_rounds_wait_for_each_other_which_a_sum_over_rounds_does_not_see():
    stage_s = [2.0] * 8 + [3.0] * 24
    waited = waited_s(stage_s, 8, 64)
    assert modelled_s(stage_s, 8, 4, 64) < 0.97 * waited and waited == pytest.approx(simulated_s(stage_s, 8, 4, 64))
    alike = [2.0, 2.0, *[3.0] * 6] * 4
    assert modelled_s(alike, 8, 4, 64) == pytest.approx(waited_s(alike, 8, 64))


@pytest.mark.parametrize(("p", "v", "m"), SIZES)
def test_what_stages_hold_when_their_rank_holds_most(p, v, m):
    """Counted along the rows of the schedule."""
    held = in_flight_of(p, m, v)
    for rank, row in enumerate(make_schedule("1f1b" if v == 1 else "interleaved_1f1b", p, m, v)):
        now, most = [0] * (p * v), [0] * (p * v)
        for action in map(Action.parse, row):
            now[action.stage] += {"F": 1, "B": -1}[action.kind]
            most = list(now) if sum(now) > sum(most) else most
        assert [held[stage] for stage in range(rank, p * v, p)] == most[rank::p]


def test_ranks_of_stages_that_stand_for_others():
    """Six stages on two ranks, of which the second stands for those between the first and the last."""
    ranks = ranks_of(Mesh.parse("pp=2 virtual=3"), 4, (0, 1, 1, 1, 1, 2))
    assert [kind.rank for kind in ranks.kinds] == [0, 1] and ranks.like == (0, 1)
    assert ranks.kinds[0].stages == {0: 1, 1: 2} and ranks.kinds[1].stages == {1: 2, 2: 1}
    first, second = (dict(reversed(kind.moments)) for kind in ranks.kinds)
    assert first[1] == {0: Owned(1, 3, 0), 1: Owned(2, 4, 0)}  # its last two stages are alike
    assert second[2] == {1: Owned(2, 4, 2), 2: Owned(1, 1, 1)}
    assert ranks.rounds == ((0, 1), (1,), (1, 2)) and ranks.times == (1, 4, 1)


# -- cuts ----------------------------------------------------------------------------------------------------------
def layers_of(seconds, cut_s=0.0):
    return [Layer((Point(each, 1.0, 2.0), Point(each * 4 / 3, 1.0, 0.5)), cut_s, cut_s / 2) for each in seconds]


@pytest.mark.parametrize("sent_s", [0.0, 0.3])
def test_no_cut_has_shorter_rounds_nor_is_below_the_bound(sent_s):
    rng = random.Random(1)
    for p, v, size in [(2, 2, 7), (2, 3, 8), (3, 2, 8)]:
        seconds = [rng.choice([0.5, 1.0, 2.0]) for _ in range(size)]
        layers, points = layers_of(seconds, sent_s), [0] * size
        found = RoundCuts(layers, p).counts(v, 6).counts
        assert len(found) == p * v and min(found) > 0 and sum(found) == size
        best = math.inf
        for at in itertools.combinations(range(1, size), p * v - 1):
            counts = [b - a for a, b in itertools.pairwise((0, *at, size))]
            best = min(best, step_s(layers, counts, points, p, 6))
        assert best <= fit_rounds(layers, found, p, 6, math.inf).objective <= best * 1.01
        stage_s, through_s, cut_s = fastest_seconds(layers), sum(seconds), 1.5 * sent_s
        assert least_s(stage_s, through_s, cut_s, p, [v], 6) == pytest.approx(best)
        assert least_s(stage_s - 0.1, through_s, cut_s, p, [v], 6) == pytest.approx(best - 0.1 * (6 * v - 1))
        assert least_s(stage_s, through_s, cut_s, p, [1, v], 6) <= best


def test_rounds_are_alike_where_time_is_equal():
    assert RoundCuts(layers_of([1.0] * 12), 2).counts(3, 6).counts == (2,) * 6


def test_eighty_layers_and_a_head_are_cut_so_that_rounds_are_alike():
    """82 units on 32 stages: not in rounds of two layers and of three, but with the faster stages in all of them."""
    cuts = RoundCuts(layers_of([0.1, *[1.0] * 80, 1.2], 0.01), 8)
    for virtual in (2, 3, 4, 5):
        found = cuts.counts(virtual, 64)
        assert found.is_honest and sum(found.counts) == 82
    assert not RoundCuts(layers_of([1.0] * 128), 16).counts(3, 64).is_honest


def test_the_fullest_rank_has_the_faster_stages():
    """Rank 0 of four holds most microbatches."""
    counts = RoundCuts(layers_of([1.0] * 22), 4).counts(2, 16).counts
    of_ranks = [sum(counts[rank::4]) for rank in range(4)]
    assert of_ranks[0] == min(of_ranks) and max(counts) == 3


def test_what_is_faster_than_its_round_computes_again_for_nothing():
    """The first round has a layer less on rank 0, which may take both of its layers' leaner points there."""
    layers = layers_of([1.0] * 11)
    free, tight = (fit_rounds(layers, (2, 3, 3, 3), 2, 4, capacity) for capacity in (100.0, 28.0))
    assert sum(tight.points[:2]) and not any(tight.points[2:])
    more = sum(tight.points) / 3
    assert tight.objective == pytest.approx(free.objective + more / 2)  # of the microbatch that fills the pipeline


def test_leaner_points_where_a_rank_is_full():
    """Rank 0 of two holds 3 + 1 microbatches of its two stages of two layers, rank 1 the others 2 + 1."""
    layers = layers_of([1.0] * 8)
    held = in_flight_of(2, 4, 2)
    assert held == (3, 2, 2, 1)
    need = [sum(2 * (1.0 + held[stage] * 2.0) for stage in (rank, rank + 2)) for rank in (0, 1)]
    assert need == [24.0, 16.0]
    free, tight, none = (fit_rounds(layers, (2,) * 4, 2, 4, capacity) for capacity in (24.0, 20.0, 8.0))
    assert not any(free.points) and math.isfinite(free.objective)
    assert sum(tight.points) == 1 and tight.points.index(1) < 2 and tight.objective > free.objective
    assert none.objective == math.inf


def test_interleaved_rows_are_those_of_ranks():
    assert {Action.parse(text).stage for text in interleaved_1f1b(3, 2, 6)[1]} == {1, 4}
