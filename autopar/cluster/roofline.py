"""What an op costs on one device: the roofline.

    compute_s(device, flops=2 * m * n * k, num_bytes=..., dtype="bfloat16")

Source: Williams, Waterman, Patterson, Roofline, CACM 52(4), 2009: an op takes the longer of its arithmetic at the
peak and its memory traffic at the bandwidth. Here both peaks are scaled by what ops reach, of arithmetic by their size
where the device has a curve, and the fixed time of a launch is added.

Invariants, which the planner's bounds rest on:
- more work never takes less time;
- a part of an op never takes less than that part of the whole op's time.
"""

from __future__ import annotations

from autopar.cluster.cluster import Curve, Device


def compute_s(device: Device, flops: float, num_bytes: float, dtype: str) -> float:
    """Seconds of one op that does `flops` in `dtype` and moves `num_bytes` to and from memory; 0 for views."""
    if flops == 0 and num_bytes == 0:
        return 0.0
    dtype = device.rated_dtype(dtype)
    curve = device.efficiency_curves.get(dtype)
    at_peak = _operations_at_peak(curve, flops) if curve else flops / device.matmul_efficiency
    memory_s = num_bytes / (device.bytes_per_s * device.memory_efficiency)
    return max(at_peak / device.flops_per_s[dtype], memory_s) + device.launch_s


def _operations_at_peak(curve: Curve, flops: float) -> float:
    """The operations that the peak would do meanwhile: linear between the points of the curve, so that efficiency and
    time both rise from each point to the next, and at constant efficiency beside them."""
    small, low = curve[0]
    if flops <= small:
        return flops / low
    for large, high in curve[1:]:
        if flops <= large:
            part = (flops - small) / (large - small)
            return (1 - part) * small / low + part * large / high
        small, low = large, high
    return flops / low
