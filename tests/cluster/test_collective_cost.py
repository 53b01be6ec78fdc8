"""Volumes and seconds of collectives: exact formulas, and published measurements."""

import dataclasses
import math

import pytest

from autopar.cluster import Link, axis_link, collective_bytes_sent, collective_s, parse_cluster
from autopar.cluster.collectives import KINDS
from autopar.mesh import Mesh

LINK = Link(bytes_per_s=1e9, latency_s=1e-6, base_s=1e-5, level="l", sharing=1, peer_bytes_per_s=1e8)
S = 1 << 20


@pytest.mark.parametrize(
    ("kind", "sent", "hops", "bytes_per_s"),
    [
        ("all_gather", S * 3 // 4, 3, 1e9),
        ("reduce_scatter", S * 3 // 4, 3, 1e9),
        ("all_reduce", S * 3 // 2, 6, 1e9),
        ("all_to_all", S * 3 // 16, 3, 1e8),
        ("broadcast", S, 3, 1e9),
        ("p2p", S, 1, 1e8),
    ],
)
def test_formulas_for_four_ranks(kind, sent, hops, bytes_per_s):
    assert collective_bytes_sent(kind, S, 4) == sent
    assert math.isclose(collective_s(kind, S, 4, LINK), 1e-5 + hops * 1e-6 + sent / bytes_per_s)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_is_free(kind):
    assert collective_bytes_sent(kind, S, 1) == 0
    assert collective_s(kind, S, 1, LINK) == 0


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 1024])
def test_all_reduce_is_reduce_scatter_and_all_gather(num_ranks):
    parts = [collective_s(kind, S, num_ranks, LINK) for kind in ("reduce_scatter", "all_gather")]
    assert math.isclose(collective_s("all_reduce", S, num_ranks, LINK), sum(parts) - LINK.base_s)


def test_uneven_shards_round_up():
    assert collective_bytes_sent("all_gather", 10, 4) == 8  # 7.5
    assert collective_bytes_sent("all_reduce", 4 * 3, 3) == 16


def test_unknown_kind():
    with pytest.raises(AssertionError, match="collective 'gather'; one of all_gather"):
        collective_bytes_sent("gather", S, 2)


def bus_bytes_per_s(cluster_text, num_bytes):
    """nccl-tests' bus bandwidth of an all-reduce over all devices."""
    cluster = parse_cluster(cluster_text)
    n = cluster.num_devices
    link = axis_link(cluster, Mesh((("dp", n),)), "dp")
    return 2 * (n - 1) / n * num_bytes / collective_s("all_reduce", num_bytes, n, link)


@pytest.mark.parametrize(
    ("cluster", "num_bytes", "measured"),
    [
        ("4x8xb200", 16 << 30, 376.71e9),  # stas00/ml-engineering network/benchmarks/README.md @0cc3de5
        ("8xa100", 16 << 30, 235e9),  # stas00/ml-engineering network/README.md @0030e63
    ],
)
def test_published_bus_bandwidth(cluster, num_bytes, measured):
    assert abs(bus_bytes_per_s(cluster, num_bytes) / measured - 1) < 0.01


@pytest.mark.parametrize(("num_bytes", "measured_s"), [(16 << 20, 123.8e-6), (64 << 20, 324.7e-6)])
def test_published_times_on_8xh100(num_bytes, measured_s):
    """NVIDIA/dgxc-benchmarking nccl/README.md @46e4201; its NVLink SHARP isn't modelled, hence the tolerance."""
    cluster = parse_cluster("8xh100")
    seconds = collective_s("all_reduce", num_bytes, 8, axis_link(cluster, Mesh.parse("dp=8"), "dp"))
    assert abs(seconds / measured_s - 1) < 0.15


def test_a_direct_all_reduce_saves_latency_where_it_is_small():
    direct = dataclasses.replace(LINK, direct=True)
    for num_ranks in (2, 4):
        small = (num_ranks - 1) * (LINK.latency_s + 8 / LINK.peer_bytes_per_s)
        assert math.isclose(collective_s("all_reduce", 8, num_ranks, direct), LINK.base_s + small)
    assert collective_s("all_reduce", 1 << 30, 4, direct) == collective_s("all_reduce", 1 << 30, 4, LINK)
    assert collective_s("all_gather", 8, 4, direct) == collective_s("all_gather", 8, 4, LINK)
