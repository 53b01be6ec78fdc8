"""A cluster as people read it: its device and its levels, each figure with its source.

print_tables(cluster_tables(parse_cluster("2x8xh100")))
"""

from __future__ import annotations

from autopar.cluster.cluster import Cluster, Device, Level
from autopar.cluster.nccl import base_s, hop_s
from autopar.show import Row, Table
from autopar.units import format_bytes, format_seconds


def cluster_tables(cluster: Cluster) -> list[Table]:
    """What plans are priced by: the figures of the device, and of each level of links, outermost first."""
    return [
        Table(f"{cluster}: {cluster.num_devices} devices, {cluster.levels_text}"),
        Table(f"each {cluster.device.kind}", ("figure", "value", "source"), _figures(cluster.device), "device"),
        Table(
            "levels of links",
            ("level", "size", "per", "bandwidth", "reached_part", "latency_s", "base_s", "source"),
            tuple(map(_level, cluster.levels)),
            "levels",
        ),
    ]


def _figures(device: Device) -> tuple[Row, ...]:
    values = {
        "memory_bytes": format_bytes(device.memory_bytes),
        **{f"flops_per_s.{dtype}": f"{rate / 1e12:.4g} TFLOP/s" for dtype, rate in device.flops_per_s.items()},
        "bytes_per_s": _rate(device.bytes_per_s),
        "launch_s": format_seconds(device.launch_s),
        "matmul_efficiency": f"{device.matmul_efficiency:.1%}",
        "memory_efficiency": f"{device.memory_efficiency:.1%}",
        "contention": f"{device.contention:g}",
        **{
            f"efficiency_curves.{dtype}": ", ".join(f"{part:.0%} at {flops:.2g}" for flops, part in curve)
            for dtype, curve in device.efficiency_curves.items()
        },
    }
    return tuple((name, value, _source(device, name)) for name, value in values.items())


def _source(device: Device, name: str) -> str:
    return device.sources.get(name, device.sources.get(name.partition(".")[0], ""))


def _level(level: Level) -> Row:
    ports = level.bytes_per_s if isinstance(level.bytes_per_s, tuple) else (level.bytes_per_s,)
    return (
        level.name,
        level.size,
        "unit" if level.shared else "device",
        ", ".join(map(_rate, ports)),
        level.efficiency,
        hop_s(level.nccl) if level.latency_s is None else level.latency_s,
        base_s(level.nccl) if level.nccl else level.base_s,
        level.source,
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.4g} GB/s"
