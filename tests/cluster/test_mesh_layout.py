"""Meshes on levels: which are allowed, and the link that an axis gets."""

import dataclasses
import math
import re

import pytest

from autopar.cluster import (
    Cluster,
    Level,
    Link,
    Tier,
    axis_link,
    candidate_meshes,
    distinct_meshes,
    parse_cluster,
    preset_device,
)
from autopar.errors import PlanError
from autopar.mesh import Mesh


def cluster_of(*sizes, **first):
    """Levels of these sizes: 10, 100, … GB/s from the outside in, hops of 8, 4, … us."""
    rows = [(f"l{i}", size, 10.0 ** (10 + i), 8e-6 / 2**i) for i, size in enumerate(sizes)]
    levels = [Level(*rows[0], **first), *(Level(*row) for row in rows[1:])]
    return Cluster("x".join(map(str, sizes)), preset_device("h100"), tuple(levels))


def texts(meshes):
    return [str(mesh) for mesh in meshes]


def test_one_level_allows_all_factorizations():
    meshes = candidate_meshes(parse_cluster("8xh100"), {})
    assert len(meshes) == len(set(meshes)) == 10  # 2³ over three axes: C(5, 2)
    assert all(mesh.names == ("pp", "dp", "tp") and mesh.num_ranks == 8 for mesh in meshes)


def test_pins_fix_sizes():
    assert texts(candidate_meshes(parse_cluster("2x8xh100"), {"tp": 4})) == [
        "pp=1 dp=4 tp=4", "pp=2 dp=2 tp=4", "pp=4 dp=1 tp=4"]  # fmt: skip
    assert texts(candidate_meshes(parse_cluster("8xcpu"), {"pp": 2, "dp": 2})) == ["pp=2 dp=2 tp=2"]


def test_an_axis_takes_a_whole_part_of_each_level():
    meshes = candidate_meshes(cluster_of(2, 12), {"pp": 1})
    assert texts(meshes) == [f"pp=1 dp={24 // tp} tp={tp}" for tp in (24, 12, 6, 4, 3, 2, 1)]  # 8 neither divides 12
    for mesh in candidate_meshes(cluster_of(3, 4, 6), {}):
        for axis in mesh.names:
            assert axis_link(cluster_of(3, 4, 6), mesh, axis).bytes_per_s > 0


def test_other_axes():
    assert texts(candidate_meshes(parse_cluster("2xcpu"), {}, ("cp", "ep"))) == ["cp=1 ep=2", "cp=2 ep=1"]


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"tp": 3}, "tp=3: doesn't divide the 8 devices of 8xh100; use one of 1, 2, 4, 8"),
        ({"tp": 0}, "tp=0: doesn't divide the 8 devices of 8xh100; use one of 1, 2, 4, 8"),
        ({"tp": 16}, "tp=16: doesn't divide the 8 devices"),
        ({"ep": 2}, "ep=2: no axis 'ep'; the axes are pp, dp, tp"),
        ({"dp": 4, "tp": 4}, "dp=4 tp=4: 16 ranks don't divide the 8 devices of 8xh100; choose smaller sizes"),
        ({"pp": 1, "dp": 2, "tp": 2}, "pp=1 dp=2 tp=2: 4 ranks, but 8xh100 has 8 devices; multiply a size by 2"),
    ],
)
def test_bad_pins(pins, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        candidate_meshes(parse_cluster("8xh100"), pins)


def test_pins_across_levels():
    message = (
        "tp=8: 'tp' and the axes inside it take 8 devices, which neither divides nor is a multiple of the 12 devices "
        "that 'l1' joins (l0=2 l1=12); choose sizes that do"
    )
    with pytest.raises(PlanError, match=re.escape(message)):
        candidate_meshes(cluster_of(2, 12), {"tp": 8})


def test_distinct_meshes():
    cluster = parse_cluster("8xh100")
    meshes = candidate_meshes(cluster, {"pp": 1})
    assert len(meshes) == 4
    assert texts(distinct_meshes(cluster, meshes)) == ["pp=1 dp=1 tp=8", "pp=1 dp=2 tp=4"]
    assert distinct_meshes(cluster, meshes, ["tp"]) == meshes
    two_nodes = parse_cluster("2x8xh100")
    distinct = texts(distinct_meshes(two_nodes, candidate_meshes(two_nodes, {"pp": 1})))
    assert distinct == ["pp=1 dp=1 tp=16", "pp=1 dp=2 tp=8", "pp=1 dp=4 tp=4", "pp=1 dp=8 tp=2"]


def test_link_inside_a_level():
    link = axis_link(cluster_of(2, 8), Mesh.parse("pp=2 dp=2 tp=4"), "tp")
    assert link == Link((Tier("l1", 4, 1e11, 1e11, 4e-6),))
    assert str(link) == "l1 100 GB/s 4 us"


def test_link_across_nodes_with_a_port_per_device():
    # tp fills the node: each dp ring has one rank in a node, and that rank's port.
    link = axis_link(cluster_of(2, 8), Mesh.parse("pp=1 dp=2 tp=8"), "dp")
    assert link == Link((Tier("l0", 2, 1e10, 1e10, 8e-6),))
    # dp also spans 4 devices of the node: its rings use 4 ports, and 1 of 7 hops is between nodes.
    link = axis_link(cluster_of(2, 8), Mesh.parse("pp=1 dp=8 tp=2"), "dp")
    assert (link.bytes_per_s, link.level, link.peer_bytes_per_s) == (4e10, "l0", 1e10)
    assert math.isclose(link.latency_s, (1 * 8e-6 + 6 * 4e-6) / 7)


def test_link_across_nodes_with_a_shared_port():
    cluster = cluster_of(2, 8, shared=True)
    # 8 dp rings, one of each node's ranks in each: an eighth of the node's port for each.
    link = axis_link(cluster, Mesh.parse("pp=1 dp=2 tp=8"), "dp")
    assert link == Link((Tier("l0", 2, 1e10 / 8, 1e10 / 8, 8e-6, sharing=8),))
    # 2 rings of 8: half a port each; a rank that sends for itself still has an eighth.
    link = axis_link(cluster, Mesh.parse("pp=1 dp=8 tp=2"), "dp")
    assert (link.bytes_per_s, link.sharing, link.peer_bytes_per_s) == (1e10 / 2, 2, 1e10 / 8)
    # one ring through everything has the port alone
    assert axis_link(cluster, Mesh.parse("pp=1 dp=16 tp=1"), "dp").bytes_per_s == 1e10


def test_efficiency_and_base():
    cluster = cluster_of(2, 8, efficiency=0.5, base_s=1e-5)
    link = axis_link(cluster, Mesh.parse("dp=2 tp=8"), "dp")
    assert (link.bytes_per_s, link.base_s) == (5e9, 1e-5)
    assert axis_link(cluster, Mesh.parse("dp=2 tp=8"), "tp").base_s == 0


def test_unequal_links_are_as_fast_as_the_slowest():
    cluster = cluster_of(4, 2)
    unequal = dataclasses.replace(cluster.levels[0], bytes_per_s=(1e10, 4e10, 2e10, 4e10))
    cluster = dataclasses.replace(cluster, levels=(unequal, cluster.levels[1]))
    equal = cluster_of(4, 2)
    for mesh in candidate_meshes(cluster, {}):
        assert all(axis_link(cluster, mesh, axis) == axis_link(equal, mesh, axis) for axis in mesh.names)


def test_three_levels():
    cluster = cluster_of(2, 4, 8)
    link = axis_link(cluster, Mesh.parse("dp=64"), "dp")
    assert math.isclose(link.latency_s, (1 * 8e-6 + 2 * 3 * 4e-6 + 8 * 7 * 2e-6) / 63)
    assert (link.level, link.bytes_per_s) == ("l0", 32 * 1e10)
    assert [(tier.level, tier.extent) for tier in link.tiers] == [("l0", 2), ("l1", 4), ("l2", 8)]
    assert axis_link(cluster, Mesh.parse("pp=2 dp=4 tp=8"), "dp").level == "l1"


def test_an_axis_of_one_has_the_innermost_link():
    assert axis_link(cluster_of(2, 8), Mesh.parse("pp=1 dp=2 tp=8"), "pp").level == "l1"
    assert axis_link(cluster_of(2, 8), Mesh.parse("dp=2 tp=8"), "pp").level == "l1"


def test_mesh_of_another_size():
    with pytest.raises(PlanError, match="mesh dp=2: 2 ranks, but 8xh100 has 8 devices"):
        axis_link(parse_cluster("8xh100"), Mesh.parse("dp=2"), "dp")


def test_tensor_parallelism_stays_fast_on_nvl72():
    h100, gb200 = parse_cluster("9x8xh100"), parse_cluster("18x4xgb200")
    assert axis_link(h100, Mesh.parse("pp=1 dp=1 tp=72"), "tp").level == "nvlink"  # 8 rails of 47 beat 364
    assert axis_link(h100, Mesh.parse("pp=9 dp=1 tp=8"), "pp").level == "network"
    assert axis_link(gb200, Mesh.parse("pp=9 dp=1 tp=8"), "pp").level == "nvlink"
