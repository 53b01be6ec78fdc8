"""What an op costs on one device: the roofline.

    compute_s(device, flops=2 * m * n * k, num_bytes=..., dtype="bfloat16")

Source: Williams, Waterman, Patterson, Roofline, CACM 52(4), 2009: an op takes the longer of its arithmetic at the
peak and its memory traffic at the bandwidth. Here both peaks are scaled by what large ops reach, and the fixed time
of a launch is added.
"""

from __future__ import annotations

from autopar.cluster.cluster import Device


def compute_s(device: Device, flops: float, num_bytes: float, dtype: str) -> float:
    """Seconds of one op that does `flops` in `dtype` and moves `num_bytes` to and from memory; 0 for views."""
    if flops == 0 and num_bytes == 0:
        return 0.0
    arithmetic_s = flops / (device.peak_flops_per_s(dtype) * device.matmul_efficiency)
    memory_s = num_bytes / (device.bytes_per_s * device.memory_efficiency)
    return max(arithmetic_s, memory_s) + device.launch_s
