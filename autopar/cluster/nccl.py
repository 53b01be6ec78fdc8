"""What NCCL's collectives take by the model that NCCL itself chooses by: algorithms, protocols, and their constants.

    nccl_lines("all_reduce", axis_link(parse_cluster("4x8xh100"), Mesh.parse("dp=32"), "dp"))

| algorithm    | of                  | latency beside the base              | bytes/s of the whole tensor    |
|--------------|---------------------|--------------------------------------|--------------------------------|
| ring         | every kind          | a hop for each step around the ring  | ring's rate · n / steps        |
| tree         | all_reduce          | 2 · (g−1 inside + log2 N between)    | half of 0.92 of the rate       |
| switch       | all_reduce, 1 node  | measured                             | what the switch sums           |
| hierarchical | all_reduce, N nodes | the switch's + 2 · log2 N between    | the slower of switch and trees |
| message      | p2p                 | the longest hop between two ranks    | one rank's own rate            |

(g ranks of a group in each of N nodes; NCCL calls the two with switches NVLS and NVLSTree, and its model has no row for
messages: one is taken as a step of a ring.) All but those with switches run under three protocols: LL (quick, a quarter
of the bandwidth), LL128 (NVLink only), Simple (all the bandwidth, slow to start).

Source: github.com/NVIDIA/nccl src/graph/tuning.cc @b647562: baseLat, hwLat, llMaxBws of Intel hosts, netOverhead, the
refinements of busBw in ncclTopoTuneModel and, in ncclTopoGetAlgoTime, the ring's plateau and treeCorrectionFactor. Of
that table by size the least factor stands for all sizes: by the table itself, some larger messages would take less time
(and large trees, which the rest makes optimistic, come out nearer to what was measured). Left out: the caps per
channel, since channels aren't modelled. The switch's time and rate are the level's own, from measurements: with NCCL's
23 us, 8 H100 would take a third less time than they do for 16 MiB.

Invariant: all lines rise, so the cheapest of them rises too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.cluster.link import Link, Tier

Line = tuple[float, float]
"""(seconds, seconds per byte of the whole tensor)."""

NETWORK = "network"


@dataclass(frozen=True, slots=True)
class _Protocol:
    ring_base_s: float
    tree_base_s: float
    hop_s: Mapping[str, tuple[float, float]]
    """By kind of link, where the protocol runs on it: seconds of a hop of the ring, of the tree."""
    post_s: float
    """What each step around a ring takes at least where the ring crosses the network."""
    tree_part: float
    """What a tree reaches of its rate at the size where that is least."""
    plateau: float = 1.0
    """By how much the ring's latency grows in a large all-reduce across the network."""


PROTOCOLS = {
    "LL": _Protocol(
        6.6e-6, 6.8e-6, {"nvlink": (0.6e-6, 0.6e-6), "pcie": (1e-6, 1e-6), NETWORK: (2.7e-6, 5e-6)}, 1e-6, 0.4
    ),
    "LL128": _Protocol(14e-6, 14e-6, {"nvlink": (1.9e-6, 1.25e-6), NETWORK: (4e-6, 8.5e-6)}, 1e-6, 0.6),
    "Simple": _Protocol(
        8.4e-6, 0, {"nvlink": (3.4e-6, 28e-6), "pcie": (5.7e-6, 28e-6), NETWORK: (14e-6, 28e-6)}, 3e-6, 0.5, plateau=1.4
    ),
}
LL_BYTES_PER_S = (87.7e9, 39e9, 20.4e9)
"""What LL reaches at most on one, two, and more nodes."""
SWITCH_TREE_HOP_S = 14e-6
SWITCH_TREE_PART = 5 / 6
"""Of the network's rate, under the trees that join switches."""
TREE_PART = 0.92
LL_TREE_PART = 1 / 3.8


@dataclass(frozen=True, slots=True)
class _Group:
    """The ranks of a link: `inside` in each of `nodes` nodes."""

    link: Link
    inside: int
    nodes: int

    @property
    def inner(self) -> list[Tier]:
        return [tier for tier in self.link.tiers if tier.nccl != NETWORK]

    @property
    def network_bytes_per_s(self) -> float:
        return min((tier.bytes_per_s for tier in self.link.tiers if tier.nccl == NETWORK), default=math.inf)

    @property
    def inside_bytes_per_s(self) -> float:
        return min((tier.bytes_per_s for tier in self.inner), default=math.inf)


def nccl_lines(kind: str, steps: int, link: Link) -> tuple[Line, ...]:
    """The cost of each algorithm under each protocol; `steps`: of the ring around the link's ranks."""
    sizes = [(tier.nccl == NETWORK, tier.extent) for tier in link.tiers]
    nodes = math.prod(extent for is_network, extent in sizes if is_network)
    group = _Group(link, link.num_ranks // nodes, nodes)
    if kind == "p2p":
        return tuple(_messages(group))
    lines = list(_rings(kind, steps, group))
    if kind == "all_reduce":
        lines += [*_trees(group), *_switches(group)]
    return tuple(lines)


def _protocols(group: _Group) -> Iterator[tuple[str, _Protocol]]:
    """Those that run on all of the group's links."""
    for name, protocol in PROTOCOLS.items():
        if all(tier.nccl in protocol.hop_s for tier in group.link.tiers):
            yield name, protocol


def _rings(kind: str, steps: int, group: _Group) -> Iterator[Line]:
    link, between = group.link, group.nodes > 1
    for name, protocol in _protocols(group):
        least_s = protocol.post_s if between else 0.0
        around_s = sum(n * max(least_s, protocol.hop_s[tier.nccl][0]) for n, tier in link.hops)
        plateau = protocol.plateau if between and kind == "all_reduce" else 1.0
        fixed_s = (protocol.ring_base_s + around_s * steps / (link.num_ranks - 1)) * plateau
        rate = _protocol_bytes_per_s(name, link.bytes_per_s, kind, group)
        sent = 1.0 if kind == "broadcast" else steps / link.num_ranks
        yield fixed_s, sent / rate


def _messages(group: _Group) -> Iterator[Line]:
    for name, protocol in _protocols(group):
        hop_s = max(protocol.hop_s[tier.nccl][0] for tier in group.link.tiers)
        rate = _protocol_bytes_per_s(name, group.link.peer_bytes_per_s, "p2p", group)
        yield protocol.ring_base_s + hop_s, 1 / rate


def _protocol_bytes_per_s(protocol: str, rate: float, kind: str, group: _Group) -> float:
    """What a ring or a message reaches of the `rate` of its links."""
    between = group.nodes > 1
    match protocol:
        case "LL":
            return min(_ll_bytes_per_s(group), rate / (4 if between or kind == "all_reduce" else 3))
        case "LL128":
            return rate * (0.7 if between and group.inside == 1 else 0.92)
        case _:
            return rate


def _trees(group: _Group) -> Iterator[Line]:
    """A chain through each node, and two binary trees across them. With two nodes each byte crosses only once."""
    between = group.nodes > 1
    across = group.network_bytes_per_s * (1.0 if group.nodes <= 2 else TREE_PART / 2)
    full = min(TREE_PART / 2 * group.inside_bytes_per_s, across)
    parts = {"LL": LL_TREE_PART, "LL128": 120 / 128 if between else 7 / 9, "Simple": 1.0}
    for name, protocol in _protocols(group):
        chain_s = max((protocol.hop_s[tier.nccl][1] for tier in group.inner), default=0.0)
        hops_s = (group.inside - 1) * chain_s + math.log2(group.nodes) * protocol.hop_s[NETWORK][1]
        rate = full * parts[name]
        if name == "LL":
            rate = min(rate, _ll_bytes_per_s(group) / 2)
        yield protocol.tree_base_s + 2 * hops_s, 1 / (rate * protocol.tree_part)


def _switches(group: _Group) -> Iterator[Line]:
    """The switch of each node sums what its ranks hold; across nodes, trees over the switches sum that."""
    if len(group.inner) != 1 or group.inner[0].switch_bytes_per_s == 0:
        return
    across = group.network_bytes_per_s * SWITCH_TREE_PART * (1.0 if group.nodes <= 2 else 0.5)
    (switch,) = group.inner
    fixed_s = switch.switch_s + 2 * math.log2(group.nodes) * SWITCH_TREE_HOP_S
    yield fixed_s, 1 / min(switch.switch_bytes_per_s, across)


def _ll_bytes_per_s(group: _Group) -> float:
    return LL_BYTES_PER_S[min(group.nodes, 3) - 1]


def hop_s(links: str) -> float:
    """Of a message between two ranks."""
    return _one_way(links)[1]


def base_s(links: str) -> float:
    """Of a call that sends messages between two ranks, however many."""
    return _one_way(links)[0]


def _one_way(links: str) -> tuple[float, float]:
    protocol = PROTOCOLS["LL128" if links in PROTOCOLS["LL128"].hop_s else "Simple"]
    return protocol.ring_base_s, protocol.hop_s[links][0]
