"""`auto`: the machine that this runs on, measured. Every other cluster text gives the same cluster everywhere.

One device per rank of the running job (`WORLD_SIZE`, nodes of `LOCAL_WORLD_SIZE`), else per GPU, else per CPU core.

Invariants:
- a known GPU gets its preset, with the memory that it really has; CPUs and unknown GPUs are measured;
- measured rates are rounded to two digits: two runs on one machine mostly agree.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cluster.cluster import Cluster, Device, Level
from autopar.cluster.presets import known_kinds, preset_cluster, preset_device
from autopar.errors import PlanError

if TYPE_CHECKING:
    import torch

MATMUL_SIZE = {"cpu": 768, "cuda": 8192}
COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
MEMORY_SHARE = 0.9
"""Part of the machine's memory that the ranks may use together; the rest is the system's and the allocator's."""


def auto_cluster() -> Cluster:
    """The cluster of the running job, or of this machine where there is no job."""
    import torch

    on_gpu = torch.cuda.is_available()
    nodes, devices = _counts(torch.cuda.device_count() if on_gpu else _num_cpus())
    kind = _gpu_kind(torch.cuda.get_device_name()) if on_gpu else "cpu"
    levels = preset_cluster(nodes, devices, kind).levels if kind else _unknown_levels(nodes, devices)
    device = _gpu(kind) if on_gpu else _cpu(devices)
    return Cluster(f"auto:{nodes}x{devices}x{device.kind}", device, levels)


def _counts(local: int) -> tuple[int, int]:
    """(nodes, ranks of a node) from the launcher's environment; `local` ranks on one node where there is none."""
    world = _environment_count("WORLD_SIZE")
    if world is None:
        return 1, local
    per_node = _environment_count("LOCAL_WORLD_SIZE") or world
    if world % per_node:
        raise PlanError(f"cluster 'auto': WORLD_SIZE={world} is not a multiple of LOCAL_WORLD_SIZE={per_node}")
    return world // per_node, per_node


def _environment_count(name: str) -> int | None:
    text = os.environ.get(name, "")
    if text and not re.fullmatch(r"[1-9]\d*", text):
        raise PlanError(f"cluster 'auto': {name}={text!r} in the environment; expected a positive number")
    return int(text) if text else None


def _gpu_kind(name: str) -> str | None:
    """The preset of a GPU by the name that its driver gives: the longest kind that the name contains."""
    words = name.lower().replace(" ", "")
    found = [kind for kind in known_kinds() if kind != "cpu" and kind in words]
    return max(found, key=len, default=None)


def _unknown_levels(nodes: int, devices: int) -> tuple[Level, ...]:
    """Links of a GPU that has no preset: PCIe inside a node, one Ethernet port a node."""
    pcie, network = preset_cluster(1, 1, "l40s").levels[-1], preset_cluster(2, 1, "cpu").levels[0]
    inside = dataclasses.replace(pcie, size=devices)
    return (dataclasses.replace(network, size=nodes), inside) if nodes > 1 else (inside,)


def _gpu(kind: str | None) -> Device:
    import torch

    properties = torch.cuda.get_device_properties(0)
    if kind:
        return dataclasses.replace(preset_device(kind), memory_bytes=properties.total_memory)
    name = re.sub(r"\W+", "-", torch.cuda.get_device_name().lower())
    return _measured(name, int(properties.total_memory * MEMORY_SHARE), torch.device("cuda"), 3.8e-6)


def _cpu(ranks: int) -> Device:
    """One rank's share of this machine's cores and memory."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, _num_cpus() // ranks))
    try:
        memory_bytes = int(_memory_bytes() * MEMORY_SHARE) // ranks
        return _measured("cpu", memory_bytes, torch.device("cpu"), preset_device("cpu").launch_s)
    finally:
        torch.set_num_threads(threads)


def _measured(kind: str, memory_bytes: int, device: torch.device, launch_s: float) -> Device:
    import torch

    dtypes = (torch.float32, torch.bfloat16)
    rates = {str(dtype).removeprefix("torch."): _matmul_flops_per_s(device, dtype) for dtype in dtypes}
    sources = dict.fromkeys(("memory_bytes", "flops_per_s", "bytes_per_s"), "measured on this machine")
    return Device(kind, memory_bytes, rates, _copy_bytes_per_s(device), launch_s, sources=sources)


def _matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    import torch

    size = MATMUL_SIZE[device.type]
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return _two_digits(2 * size**3 / _best_s(lambda: left @ right, device))


def _copy_bytes_per_s(device: torch.device) -> float:
    """A copy reads and writes each byte once."""
    import torch

    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _two_digits(2 * source.numel() / _best_s(lambda: target.copy_(source), device))


def _best_s(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Seconds of the fastest run of `work`: noise only adds time."""
    import torch

    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def _num_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes() -> int:
    """Memory of this machine, or of the container that it is."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(physical, int(text)) if text.isdigit() else physical
