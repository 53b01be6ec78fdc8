"""Published times of collectives beside what the cost model says of them.

    python -m tests.bench.collectives

Sources: `published_collectives.json`. Bandwidths of presets come from measurements of large messages, some from these
very pages; latencies and what lies between are the model's.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from autopar.cluster import axis_link, collective_s, parse_cluster
from autopar.mesh import Mesh
from autopar.units import format_bytes, format_seconds

PUBLISHED = Path(__file__).with_name("published_collectives.json")
SIZE_CLASSES = {"to 1 MiB": (0, 1 << 20), "to 64 MiB": (1 << 20, 64 << 20), "above": (64 << 20, 1 << 60)}


def ratios(row: dict[str, Any]) -> dict[int, float]:
    """The model's seconds over those measured, by bytes."""
    cluster = parse_cluster(row["cluster"])
    n = cluster.num_devices
    link = axis_link(cluster, Mesh((("dp", n),)), "dp")
    return {size: collective_s(row["kind"], size, n, link) / seconds for size, seconds in row["bytes_s"]}


def main() -> None:
    rows = json.loads(PUBLISHED.read_text())
    for row in rows:
        found, measured = ratios(row), dict(row["bytes_s"])
        print(f"{row['kind']} on {row['cluster']}")
        for size, ratio in found.items():
            shown = (format_bytes(size), format_seconds(measured[size]), format_seconds(measured[size] * ratio))
            print(f"  {shown[0]:>10}  {shown[1]:>8}  {shown[2]:>8}  {ratio - 1:+.0%}")
    print(f"| devices | {' | '.join(SIZE_CLASSES)} |")
    print("|---" * (1 + len(SIZE_CLASSES)) + "|")
    for row in rows:
        found = ratios(row)
        cells = [
            f"{statistics.median(ratio for size, ratio in found.items() if low < size <= high) - 1:+.0%}"
            for low, high in SIZE_CLASSES.values()
        ]
        print(f"| {row['cluster']} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
