"""From timings to figures: what comes out is what went in, and noise doesn't break what bounds rest on."""

import dataclasses
import math
import random

import pytest

from autopar.cluster import Cluster, Device, Level, axis_link, collective_s, compute_s, preset_device
from autopar.cluster.fit import Sample, efficiency_curve, fitted_level
from autopar.mesh import Mesh

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p")
SIZES = [1 << e for e in range(10, 32, 3)]


def predicted(level, kind, num_bytes):
    link = axis_link(Cluster("x", preset_device("cpu"), (level,)), Mesh((("dp", level.size),)), "dp")
    return collective_s(kind, num_bytes, level.size, link)


def samples_of(level, noise=lambda: 1.0):
    return [Sample(kind, size, predicted(level, kind, size) * noise()) for kind in KINDS for size in SIZES]


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("base_s", [0.0, 2e-4])
def test_a_level_is_found_again(size, direct, base_s):
    level = Level("l", size, 2e9, 1e-4, base_s, direct=direct, source="s")
    found = fitted_level(dataclasses.replace(level, bytes_per_s=1.0, latency_s=0.0, base_s=0.0), samples_of(level))
    for kind in KINDS:
        for num_bytes in SIZES:
            assert math.isclose(predicted(found, kind, num_bytes), predicted(level, kind, num_bytes), rel_tol=0.01)
    assert math.isclose(found.bytes_per_s, 2e9, rel_tol=0.01)
    assert math.isclose(found.latency_s, 1e-4, rel_tol=0.01) and abs(found.base_s - base_s) < 2e-6


def test_disturbed_timings_hardly_count():
    draw = random.Random(0)
    level = Level("l", 4, 2e9, 1e-4, 3e-4, direct=True)
    noisy = samples_of(level, lambda: 5.0 if draw.random() < 0.2 else draw.uniform(1, 1.05))
    found = fitted_level(level, noisy)
    for kind in KINDS:
        assert all(abs(predicted(found, kind, size) / predicted(level, kind, size) - 1) < 0.15 for size in SIZES)


def test_a_switch_is_seen_by_its_all_reduce():
    level = Level("l", 8, 360e9, 2e-6, 1e-5)
    assert fitted_level(level, samples_of(level)).switch_bytes_per_s == 0
    switched = dataclasses.replace(level, switch_bytes_per_s=274e9, switch_s=8e-5)
    found = fitted_level(level, samples_of(switched))
    assert math.isclose(found.switch_bytes_per_s, 274e9, rel_tol=0.01)
    assert math.isclose(found.switch_s, 8e-5, rel_tol=0.05)
    assert math.isclose(found.bytes_per_s, 360e9, rel_tol=0.01)


def test_nccls_constants_give_way_to_what_was_measured():
    level = Level("nvlink", 8, 360e9, 2e-6, 1e-5)
    usual = Level("nvlink", 8, 450e9, efficiency=0.8, nccl="nvlink", switch_bytes_per_s=274e9)
    assert fitted_level(usual, samples_of(level)) == fitted_level(level, samples_of(level))


def test_a_curve_goes_through_its_timings():
    timings = [(1e6, 1e-4), (1e9, 2e-3), (1e8, 4e-4)]
    peak, curve = efficiency_curve(timings)
    device = Device("x", 1, {"float32": peak}, 1e12, 0.0, efficiency_curves={"float32": curve})
    assert peak == 5e11
    for flops, seconds in timings:
        assert math.isclose(compute_s(device, flops, 0, "float32"), seconds, rel_tol=0.01)


def test_large_matmuls_count_where_small_ones_are_more_efficient():
    peak, curve = efficiency_curve([(1e6, 1e-3), (1e7, 2e-3), (1e8, 1e-1), (1e9, 1.0)])
    assert peak == 1e9 and {part for _, part in curve} == {1.0}


def test_a_curve_of_noise_is_one_that_a_device_takes():
    draw = random.Random(0)
    for _ in range(200):
        timings = [(10.0**e, 10 ** (e - 11) * draw.uniform(1, 30)) for e in range(5, 12)]
        peak, curve = efficiency_curve(timings)
        Device("x", 1, {"float32": peak}, 1e12, 0.0, efficiency_curves={"float32": curve})
        assert curve[-1] == (timings[-1][0], 1.0)
