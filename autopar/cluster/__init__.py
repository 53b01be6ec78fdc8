"""Clusters and what things cost on them: devices, links, meshes on levels, collectives, the roofline.

cluster = parse_cluster("2x8xh100")
for mesh in candidate_meshes(cluster, {"tp": 8}):
    link = axis_link(cluster, mesh, "dp")
    collective_s("all_reduce", 1 << 30, mesh.size("dp"), link)
"""

from autopar.cluster.cluster import Cluster, Device, Level
from autopar.cluster.collectives import collective_bytes_sent, collective_s
from autopar.cluster.link import Link, Tier
from autopar.cluster.mesh_layout import axis_link, candidate_meshes, distinct_meshes
from autopar.cluster.presets import cluster_schema, known_kinds, load_cluster, parse_cluster, preset_device
from autopar.cluster.roofline import compute_s

__all__ = [
    "Cluster",
    "Device",
    "Level",
    "Link",
    "Tier",
    "axis_link",
    "candidate_meshes",
    "cluster_schema",
    "collective_bytes_sent",
    "collective_s",
    "compute_s",
    "distinct_meshes",
    "known_kinds",
    "load_cluster",
    "parse_cluster",
    "preset_device",
]
