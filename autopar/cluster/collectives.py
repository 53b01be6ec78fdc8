"""What a collective costs: bytes that a rank sends, and seconds, by the cheapest algorithm for its size.

    link = axis_link(cluster, mesh, "tp")
    collective_s("all_gather", 64 << 20, 8, link)       # of a ring: base + 7 · alpha + 7/8 · 64 MiB / beta

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

Links with NCCL's constants are priced by `autopar.cluster.nccl`: rings, trees and switches, under three protocols.
Other links have the ring above; where they are `direct`, an all-reduce takes n−1 messages of S instead, if that is
faster (latency counts half), and where a switch sums, what that takes. In an all-to-all, each level carries
what goes to the peers that it joins.

Invariants:
- one rank alone sends nothing and takes no time;
- seconds are the least of a few rising lines in the bytes, found once for each kind and link: a call is a few products;
- without NCCL's constants, a ring's all-reduce costs what a reduce-scatter and an all-gather of the same tensor cost,
  but for one base time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from autopar.cluster.link import Link
from autopar.cluster.nccl import Line, nccl_lines


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


def collective_s(kind: str, num_bytes: float, num_ranks: int, link: Link) -> float:
    """Seconds of one call over a group of `num_ranks` on `link`, nothing else running."""
    return least_s(cost_lines(kind, num_ranks, link), num_bytes)


def least_s(lines: tuple[Line, ...], num_bytes: float) -> float:
    """Seconds by the cheapest of `lines`; 0 where there is none."""
    return min([fixed_s + byte_s * num_bytes for fixed_s, byte_s in lines], default=0.0)


def _cheapest_somewhere(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Those of `lines` that are the cheapest at some size, from small messages to large ones."""
    kept: list[Line] = []
    for line in sorted(lines):
        if kept and line[1] >= kept[-1][1]:
            continue
        # the last one kept is of no use where this one overtakes it before it has overtaken the one before
        while len(kept) > 1 and _crossing(kept[-1], line) <= _crossing(kept[-2], kept[-1]):
            kept.pop()
        kept.append(line)
    return tuple(kept)


def _crossing(small: Line, large: Line) -> float:
    """The size from which `large`, of the lower slope, is the cheaper one."""
    return (large[0] - small[0]) / (small[1] - large[1])


@functools.lru_cache(maxsize=4096)
def cost_lines(kind: str, num_ranks: int, link: Link) -> tuple[Line, ...]:
    """What algorithms cost, as lines in the bytes of the whole tensor: each is the cheapest at some size. None for one
    rank alone."""
    return _cheapest_somewhere(_lines(kind, num_ranks, link)) if num_ranks > 1 else ()


def _lines(kind: str, num_ranks: int, link: Link) -> Sequence[Line]:
    entry = _kind(kind)
    if link.has_nccl and kind != "all_to_all":
        assert kind == "p2p" or link.num_ranks == num_ranks, (num_ranks, link)
        return nccl_lines(kind, entry.hops(num_ranks), link)
    sent = float(entry.sent(num_ranks))
    if kind == "all_to_all":
        byte_s = _all_to_all_byte_s(num_ranks, link)
    else:
        byte_s = sent / (link.peer_bytes_per_s if entry.crosses else link.bytes_per_s)
    base_s = link.base_s if kind != "p2p" else 0.0
    lines = [(base_s + entry.hops(num_ranks) * link.latency_s, byte_s)]
    if kind == "all_reduce" and link.direct:
        lines.append((link.base_s + (num_ranks - 1) * link.latency_s, (num_ranks - 1) / link.peer_bytes_per_s))
    if kind == "all_reduce" and len(link.tiers) == 1 and link.tiers[0].switch_bytes_per_s:
        lines.append((link.tiers[0].switch_s, 1 / link.tiers[0].switch_bytes_per_s))
    return lines


def _all_to_all_byte_s(num_ranks: int, link: Link) -> float:
    """Seconds of an all-to-all per byte of all shards: of the tier that takes longest for what crosses it."""
    inside, slowest_s = 1, 0.0
    for tier in reversed(link.tiers):
        peers = (tier.extent - 1) * inside
        slowest_s = max(slowest_s, peers / num_ranks**2 / tier.peer_bytes_per_s)
        inside *= tier.extent
    return slowest_s


def _kind(kind: str) -> _Kind:
    assert kind in KINDS, f"collective {kind!r}; one of {', '.join(KINDS)}"
    return KINDS[kind]
