"""What a collective costs: bytes that a rank sends, and seconds, by the alpha-beta model of a ring.

    link = axis_link(cluster, mesh, "tp")
    collective_s("all_gather", 64 << 20, 8, link)       # base + 7 · alpha + 7/8 · 64 MiB / beta

One meaning of `num_bytes` for all kinds: the size of the whole tensor, with the axis in question not splitting it.

| kind           | num_bytes              | bytes sent by a rank  | hops in sequence |
|----------------|------------------------|-----------------------|------------------|
| all_gather     | the gathered result    | S (n−1)/n             | n−1              |
| reduce_scatter | the unreduced operand  | S (n−1)/n             | n−1              |
| all_reduce     | the operand            | 2 S (n−1)/n           | 2 (n−1)          |
| all_to_all     | all n shards together  | S/n (n−1)/n           | n−1              |
| broadcast      | the tensor             | S                     | n−1              |
| p2p            | the tensor             | S                     | 1                |

Sources: ring volumes, github.com/NVIDIA/nccl-tests doc/PERFORMANCE.md; time = latency + bytes / bandwidth with one
latency per hop, github.com/NVIDIA/nccl src/graph/tuning.cc; Thakur et al., Optimization of Collective Communication
Operations in MPICH, 2005.

Where links are `direct`, an all-reduce takes n−1 messages of S instead, if that is faster (latency counts half).

Invariants:
- one rank alone sends nothing and takes no time;
- a ring's all-reduce costs what a reduce-scatter and an all-gather of the same tensor cost, but for one base time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from autopar.cluster.mesh_layout import Link


@dataclass(frozen=True, slots=True)
class _Kind:
    sent: Callable[[int], Fraction]
    """Bytes that a rank sends per byte of the whole tensor, from the number of ranks."""
    hops: Callable[[int], int]
    crosses: bool = False
    """Whether each rank sends to far ranks itself, instead of to its neighbour in the ring."""


KINDS = {
    "all_gather": _Kind(lambda n: Fraction(n - 1, n), lambda n: n - 1),
    "reduce_scatter": _Kind(lambda n: Fraction(n - 1, n), lambda n: n - 1),
    "all_reduce": _Kind(lambda n: Fraction(2 * (n - 1), n), lambda n: 2 * (n - 1)),
    "all_to_all": _Kind(lambda n: Fraction(n - 1, n * n), lambda n: n - 1, crosses=True),
    "broadcast": _Kind(lambda n: Fraction(1), lambda n: n - 1),
    "p2p": _Kind(lambda n: Fraction(1), lambda n: 1, crosses=True),
}
"""The kinds of collective, by the name of the function that runs them."""


def collective_bytes_sent(kind: str, num_bytes: int, num_ranks: int) -> int:
    """Bytes that one rank sends (rounded up where the shards aren't equal)."""
    if num_ranks == 1:
        return 0
    sent = _kind(kind).sent(num_ranks) * num_bytes
    return -(-sent.numerator // sent.denominator)


def collective_s(kind: str, num_bytes: int, num_ranks: int, link: Link) -> float:
    """Seconds of one call over a group of `num_ranks` on `link`, nothing else running."""
    if num_ranks == 1:
        return 0.0
    entry = _kind(kind)
    bytes_per_s = link.peer_bytes_per_s if entry.crosses else link.bytes_per_s
    sent_s = float(entry.sent(num_ranks)) * num_bytes / bytes_per_s
    ring_s = link.base_s + entry.hops(num_ranks) * link.latency_s + sent_s
    if kind != "all_reduce" or not link.direct:
        return ring_s
    direct_s = (num_ranks - 1) * (link.latency_s + num_bytes / link.peer_bytes_per_s)
    return min(ring_s, link.base_s + direct_s)


def _kind(kind: str) -> _Kind:
    assert kind in KINDS, f"collective {kind!r}; one of {', '.join(KINDS)}"
    return KINDS[kind]
