"""The roofline: exact, at both slopes."""

import math

from autopar.cluster import Device, compute_s, parse_cluster

DEVICE = Device("x", 1, {"float32": 1e12, "bfloat16": 4e12}, 1e11, 1e-6, matmul_efficiency=0.5, memory_efficiency=0.8)


def test_arithmetic_bound():
    assert math.isclose(compute_s(DEVICE, 1e9, 8, "float32"), 1e9 / 0.5e12 + 1e-6)
    assert math.isclose(compute_s(DEVICE, 1e9, 8, "torch.bfloat16"), 1e9 / 2e12 + 1e-6)


def test_memory_bound():
    assert math.isclose(compute_s(DEVICE, 8, 1e9, "float32"), 1e9 / 0.8e11 + 1e-6)


def test_views_are_free():
    assert compute_s(DEVICE, 0, 0, "float32") == 0


def test_cpu_matmul():
    cpu = parse_cluster("1xcpu").device
    assert math.isclose(compute_s(cpu, 2 * 512**3, 3 * 512 * 512 * 4, "float32"), 2 * 512**3 / 50e9 + cpu.launch_s)
