"""The roofline: exact, at both slopes and along an efficiency curve; and what bounds of a plan rest on."""

import dataclasses
import itertools
import math
import random
import re

import pytest

from autopar.cluster import Device, compute_s, known_kinds, parse_cluster, preset_device
from autopar.errors import PlanError

DEVICE = Device("x", 1, {"float32": 1e12, "bfloat16": 4e12}, 1e11, 1e-6, matmul_efficiency=0.5, memory_efficiency=0.8)
CURVE = ((1e6, 0.1), (1e9, 0.6), (16e9, 0.9))
CURVED = dataclasses.replace(DEVICE, efficiency_curves={"bfloat16": CURVE})


def test_arithmetic_bound():
    assert math.isclose(compute_s(DEVICE, 1e9, 8, "float32"), 1e9 / 0.5e12 + 1e-6)
    assert math.isclose(compute_s(DEVICE, 1e9, 8, "torch.bfloat16"), 1e9 / 2e12 + 1e-6)


def test_memory_bound():
    assert math.isclose(compute_s(DEVICE, 8, 1e9, "float32"), 1e9 / 0.8e11 + 1e-6)
    assert compute_s(CURVED, 8, 1e9, "bfloat16") == compute_s(DEVICE, 8, 1e9, "bfloat16")


def test_views_are_free():
    assert compute_s(DEVICE, 0, 0, "float32") == 0


def test_cpu_matmul():
    cpu = parse_cluster("1xcpu").device
    assert math.isclose(compute_s(cpu, 2 * 512**3, 3 * 512 * 512 * 4, "float32"), 2 * 512**3 / 50e9 + cpu.launch_s)


def test_efficiency_curve():
    for flops, efficiency in (*CURVE, (1e3, 0.1), (1e12, 0.9)):
        assert math.isclose(compute_s(CURVED, flops, 0, "bfloat16"), flops / (4e12 * efficiency) + 1e-6)
    between = (1e6 / 0.1 + 1e9 / 0.6) / 2  # linear in time
    assert math.isclose(compute_s(CURVED, (1e6 + 1e9) / 2, 0, "bfloat16"), between / 4e12 + 1e-6)
    assert compute_s(CURVED, 1e9, 0, "float32") == compute_s(DEVICE, 1e9, 0, "float32")  # no curve of its own
    assert compute_s(CURVED, 1e9, 0, "int64") == compute_s(DEVICE, 1e9, 0, "float32")


def random_curve(draw):
    """Points that a device accepts, from the largest down: neither efficiency nor time may rise."""
    flops, efficiency = 10 ** draw.uniform(9, 13), draw.uniform(0.3, 1)
    points = [(flops, efficiency)]
    for _ in range(draw.randrange(5)):
        smaller = flops * draw.uniform(0.01, 0.99)
        flops, efficiency = smaller, draw.uniform(efficiency * smaller / flops, efficiency)
        points.append((flops, efficiency))
    return tuple(reversed(points))


def devices():
    draw = random.Random(0)
    curved = [dataclasses.replace(DEVICE, efficiency_curves={"bfloat16": random_curve(draw)}) for _ in range(50)]
    return [*curved, *map(preset_device, known_kinds())]


@pytest.mark.parametrize("num_bytes", [0, 1e7])
def test_a_part_takes_no_less_than_its_part_and_the_whole_no_less_than_it(num_bytes):
    for device in devices():
        for flops, part in itertools.product((10**e for e in range(5, 15)), (1, 0.9, 0.5, 0.1, 1e-3)):
            whole_s = compute_s(device, flops, num_bytes, "bfloat16")
            part_s = compute_s(device, part * flops, part * num_bytes, "bfloat16")
            assert part * whole_s <= part_s * (1 + 1e-9)
            assert part_s <= whole_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        ((), "efficiency_curves.bfloat16 is empty; expected at least one [operations, efficiency]"),
        (((0, 0.5),), "operations is 0; expected a positive number"),
        (((1, 1.5),), "efficiency is 1.5; expected a number above 0 and at most 1"),
        (((2, 0.5), (1, 0.6)), "is 0.5 at 2 operations, then 0.6 at 1; expected rising numbers of operations"),
        (((1, 0.6), (2, 0.5)), "is 0.6 at 1 operations, then 0.5 at 2; expected efficiencies that don't fall"),
        (((1, 0.1), (2, 0.9)), "is 0.1 at 1 operations, then 0.9 at 2; expected larger ops that take no less time"),
    ],
)
def test_curves_that_bounds_could_not_rest_on(curve, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        dataclasses.replace(DEVICE, efficiency_curves={"bfloat16": curve})


def test_a_curve_of_an_unrated_dtype():
    with pytest.raises(PlanError, match=r"efficiency_curves\.float16 is there; expected a rate in flops_per_s"):
        dataclasses.replace(DEVICE, efficiency_curves={"float16": CURVE})


@pytest.mark.parametrize(("flops", "part"), [(1e8, 0.1), (1e9, 0.6), (8e9, 0.6), (16e9, 0.869), (1e12, 0.869)])
def test_small_matmuls_on_a100(flops, part):
    """github.com/calculon-ai/calculon systems/a100_80g.json @4f81f02, under the most that was measured."""
    a100 = preset_device("a100")
    assert math.isclose(compute_s(a100, flops, 0, "bfloat16") - a100.launch_s, flops / (312e12 * part))
