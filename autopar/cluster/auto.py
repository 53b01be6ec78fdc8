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
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cluster import measure
from autopar.cluster.cluster import Cluster, Device, Level
from autopar.cluster.presets import known_kinds, preset_cluster, preset_device
from autopar.errors import PlanError

if TYPE_CHECKING:
    import torch

MATMUL_SIZE = {"cpu": 768, "cuda": 8192}
MEMORY_SHARE = 0.9
"""Part of the machine's memory that the ranks may use together; the rest is the system's and the allocator's."""


def auto_cluster() -> Cluster:
    """The cluster of the running job, or of this machine where there is no job."""
    import torch

    on_gpu = torch.cuda.is_available()
    nodes, devices = counts(num_devices())
    kind = own_kind()
    device = _gpu(kind) if on_gpu else _cpu(devices)
    return Cluster(f"auto:{nodes}x{devices}x{device.kind}", device, usual_levels(nodes, devices, kind))


def num_devices() -> int:
    """GPUs of this machine, or the cores that this process may use where there are none."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else _num_cpus()


def own_clock(device: torch.device, ranks: int) -> measure.Clock:
    """What times the work of one of this machine's `ranks` ranks by itself."""
    return measure.own_clock(device, ranks, _num_cpus())


def own_kind() -> str | None:
    """The device kind of this machine, if it has a preset."""
    import torch

    return _gpu_kind(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"


def usual_levels(nodes: int, devices: int, kind: str | None) -> tuple[Level, ...]:
    """The levels of the preset of `kind`, or of a GPU that has none."""
    return preset_cluster(nodes, devices, kind).levels if kind else _unknown_levels(nodes, devices)


def memory_bytes(ranks: int) -> int:
    """What one of `ranks` ranks of this machine may use."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory * MEMORY_SHARE)
    return int(_memory_bytes() * MEMORY_SHARE) // ranks


def name_of(kind: str | None) -> str:
    """`kind`, or a name made of the one that the driver gives."""
    import torch

    return kind or re.sub(r"\W+", "-", torch.cuda.get_device_name().lower())


def counts(local: int) -> tuple[int, int]:
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

    if kind:
        memory = torch.cuda.get_device_properties(0).total_memory
        return dataclasses.replace(preset_device(kind), memory_bytes=memory)
    return _measured(name_of(kind), 1, torch.device("cuda"), preset_device("l40s").launch_s)


def _cpu(ranks: int) -> Device:
    """One rank's share of this machine's cores and memory."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, _num_cpus() // ranks))
    try:
        return _measured("cpu", ranks, torch.device("cpu"), preset_device("cpu").launch_s)
    finally:
        torch.set_num_threads(threads)


def _measured(kind: str, ranks: int, device: torch.device, launch_s: float) -> Device:
    import torch

    clock, rates = own_clock(device, ranks), {}
    for dtype in (torch.float32, torch.bfloat16):
        size = MATMUL_SIZE[device.type]
        seconds = measure.matmul_s(device, dtype, (size, size, size), clock)
        rates[str(dtype).removeprefix("torch.")] = measure.rounded(2 * size**3 / seconds, 2)
    bytes_per_s = measure.rounded(1 / measure.moved_byte_s(device, clock), 2)
    sources = dict.fromkeys(("memory_bytes", "flops_per_s", "bytes_per_s"), "measured on this machine")
    return Device(kind, memory_bytes(ranks), rates, bytes_per_s, launch_s, sources=sources)


def _num_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes() -> int:
    """Memory of this machine, or of the container that it is."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(physical, int(text)) if text.isdigit() else physical
