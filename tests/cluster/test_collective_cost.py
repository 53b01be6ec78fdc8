"""Volumes and seconds of collectives: exact formulas, NCCL's model, and published measurements."""

import dataclasses
import itertools
import math

import pytest

from autopar.cluster import (
    Link,
    Tier,
    axis_link,
    candidate_meshes,
    collective_bytes_sent,
    collective_s,
    known_kinds,
    parse_cluster,
)
from autopar.cluster.collectives import KINDS, cost_lines, least_s
from autopar.cluster.nccl import nccl_lines
from autopar.mesh import Mesh

TIER = Tier("l", 4, bytes_per_s=1e9, peer_bytes_per_s=1e8, latency_s=1e-6, base_s=1e-5)


def link_of(num_ranks, **changes):
    return Link((dataclasses.replace(TIER, extent=num_ranks, **changes),))


LINK = link_of(4)
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
    base_s = 0 if kind == "p2p" else 1e-5
    assert math.isclose(collective_s(kind, S, 4, LINK), base_s + hops * 1e-6 + sent / bytes_per_s)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_is_free(kind):
    assert collective_bytes_sent(kind, S, 1) == 0
    assert collective_s(kind, S, 1, LINK) == 0


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 1024])
def test_all_reduce_is_reduce_scatter_and_all_gather(num_ranks):
    link = link_of(num_ranks)
    parts = [collective_s(kind, S, num_ranks, link) for kind in ("reduce_scatter", "all_gather")]
    assert math.isclose(collective_s("all_reduce", S, num_ranks, link), sum(parts) - link.base_s)


def test_uneven_shards_round_up():
    assert collective_bytes_sent("all_gather", 10, 4) == 8  # 7.5
    assert collective_bytes_sent("all_reduce", 4 * 3, 3) == 16


def test_unknown_kind():
    with pytest.raises(AssertionError, match="collective 'gather'; one of all_gather"):
        collective_bytes_sent("gather", S, 2)


def test_an_all_to_all_takes_what_its_slowest_level_carries():
    """2 nodes of 4: a rank sends to 4 of 8 over the network, and to 3 of them inside."""
    outer, inner = dataclasses.replace(TIER, extent=2), dataclasses.replace(TIER, level="in", peer_bytes_per_s=4e8)
    fixed_s = 1e-5 + 7e-6
    assert math.isclose(collective_s("all_to_all", S, 8, Link((outer, inner))), fixed_s + 4 * S / 64 / 1e8)
    slow = dataclasses.replace(inner, peer_bytes_per_s=1e7)
    assert math.isclose(collective_s("all_to_all", S, 8, Link((outer, slow))), fixed_s + 3 * S / 64 / 1e7)


def test_a_direct_all_reduce_saves_latency_where_it_is_small():
    for num_ranks in (2, 4):
        direct = link_of(num_ranks, direct=True)
        small = (num_ranks - 1) * (1e-6 + 8 / 1e8)
        assert math.isclose(collective_s("all_reduce", 8, num_ranks, direct), 1e-5 + small)
    assert collective_s("all_reduce", 1 << 30, 4, direct) == collective_s("all_reduce", 1 << 30, 4, LINK)
    assert collective_s("all_gather", 8, 4, direct) == collective_s("all_gather", 8, 4, LINK)


# -- NCCL's model ----------------------------------------------------------------------------------------------------
def over_all(cluster_text, kind, num_bytes):
    """Seconds of a collective over all devices."""
    cluster = parse_cluster(cluster_text)
    n = cluster.num_devices
    return collective_s(kind, num_bytes, n, axis_link(cluster, Mesh((("dp", n),)), "dp"))


RING_H100, RING_A100, PORT = 450e9 * 0.81, 300e9 * 0.78, 50e9 * 0.94


@pytest.mark.parametrize(
    ("cluster", "kind", "num_bytes", "seconds"),
    [
        ("8xh100", "all_reduce", 0, 6.6e-6 + 14 * 0.6e-6),  # ring, LL
        ("8xh100", "all_gather", 1 << 23, 14e-6 + 7 * 1.9e-6 + 7 / 8 * 2**23 / (0.92 * RING_H100)),  # ring, LL128
        ("8xh100", "all_gather", 1 << 32, 8.4e-6 + 7 * 3.4e-6 + 7 / 8 * 2**32 / RING_H100),  # ring, Simple
        ("8xa100", "all_reduce", 1 << 32, 8.4e-6 + 14 * 3.4e-6 + 14 / 8 * 2**32 / RING_A100),
        ("8xh100", "all_reduce", 1 << 32, 80e-6 + 2**32 / 274e9),  # the switch
        ("2x8xh100", "all_reduce", 1 << 32, 80e-6 + 28e-6 + 2**32 / 274e9),  # switches, and a tree across
        ("64x8xa100", "all_reduce", 0, 6.8e-6 + 2 * (7 * 0.6e-6 + 6 * 5e-6)),  # tree, LL
        ("64x8xh100", "all_gather", 0, 6.6e-6 + 63 * 2.7e-6 + 448 * 1e-6),  # a post for each step
        ("16x1xh100", "all_gather", 1 << 24, 14e-6 + 15 * 4e-6 + 15 / 16 * 2**24 / (0.7 * PORT)),  # one rank a node
        ("8xl40s", "all_gather", 1 << 20, 8.4e-6 + 7 * 5.7e-6 + 7 / 8 * 2**20 / (31e9 * 0.8)),  # no LL128 on PCIe
    ],
)
def test_algorithms_and_protocols(cluster, kind, num_bytes, seconds):
    assert math.isclose(over_all(cluster, kind, num_bytes), seconds, rel_tol=1e-9)


def test_messages_are_a_step_of_a_ring():
    cluster = parse_cluster("2x8xh100")
    link = axis_link(cluster, Mesh.parse("pp=2 tp=8"), "pp")
    assert math.isclose(collective_s("p2p", 0, 2, link), 6.6e-6 + 2.7e-6)
    assert math.isclose(collective_s("p2p", 1 << 30, 2, link), 8.4e-6 + 14e-6 + 2**30 / PORT)


def test_a_small_all_reduce_grows_with_the_logarithm_of_the_nodes():
    seconds = [over_all(f"{nodes}x8xh100", "all_reduce", 64) for nodes in (4, 16, 64, 256)]
    assert all(math.isclose(after - before, 4 * 5e-6, rel_tol=1e-3) for before, after in itertools.pairwise(seconds))


@pytest.mark.parametrize("kind", known_kinds())
def test_more_bytes_never_take_less_and_a_part_never_less_than_its_part(kind):
    cluster = parse_cluster(f"8x4x{kind}")
    sizes = [2**e for e in range(6, 34)]
    for mesh in candidate_meshes(cluster, {"pp": 1}):
        link = axis_link(cluster, mesh, "dp")
        for collective in KINDS:
            seconds = [collective_s(collective, size, mesh.size("dp"), link) for size in sizes]
            assert all(before <= after <= 2 * before for before, after in itertools.pairwise(seconds))


def test_costs_are_a_few_lines():
    """So that a price is a few products, however often it is asked for."""
    link = axis_link(parse_cluster("16x8xh100"), Mesh.parse("dp=128"), "dp")
    lines, every = cost_lines("all_reduce", 128, link), nccl_lines("all_reduce", 254, link)
    assert len(every) == 7  # 3 rings, 3 trees, the switches
    assert len(lines) < 7 and lines is cost_lines("all_reduce", 128, link)
    for num_bytes in (2.0**e for e in range(40)):
        assert least_s(lines, num_bytes) == least_s(every, num_bytes)


# -- measurements ----------------------------------------------------------------------------------------------------
def bus_bytes_per_s(cluster_text, num_bytes):
    """nccl-tests' bus bandwidth of an all-reduce over all devices."""
    n = parse_cluster(cluster_text).num_devices
    return 2 * (n - 1) / n * num_bytes / over_all(cluster_text, "all_reduce", num_bytes)


@pytest.mark.parametrize(
    ("cluster", "num_bytes", "measured"),
    [
        ("4x8xb200", 16 << 30, 376.71e9),  # stas00/ml-engineering network/benchmarks/README.md @0cc3de5
        ("8xh200", 16 << 30, 480.7e9),  # the same; presets have the switch's figure from another page
        ("8xh200", 256 << 20, 442.3e9),
        ("8xa100", 16 << 30, 235e9),  # stas00/ml-engineering network/README.md @0030e63
    ],
)
def test_published_bus_bandwidth(cluster, num_bytes, measured):
    assert abs(bus_bytes_per_s(cluster, num_bytes) / measured - 1) < (0.02 if num_bytes > 1 << 30 else 0.1)


@pytest.mark.parametrize(
    ("num_bytes", "measured_s"),
    [
        (8, 13.67e-6),
        (16 << 10, 17.93e-6),
        (256 << 10, 20.43e-6),
        (4 << 20, 54.19e-6),
        (16 << 20, 123.8e-6),
        (64 << 20, 324.7e-6),
        (256 << 20, 1112.5e-6),
        (1 << 30, 4029.4e-6),
    ],
)
def test_published_times_on_8xh100(num_bytes, measured_s):
    """NVIDIA/dgxc-benchmarking nccl/README.md @46e4201; more: `python -m tests.bench.collectives`."""
    assert abs(over_all("8xh100", "all_reduce", num_bytes) / measured_s - 1) < 0.18
