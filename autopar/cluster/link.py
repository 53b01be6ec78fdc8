"""What one group of a mesh axis gets of the links that it uses, level by level, all groups communicating at once.

    link = axis_link(parse_cluster("2x8xh100"), Mesh.parse("dp=16"), "dp")
    str(link)            # "nvlink 364 GB/s 2.04 us": the level that bounds a ring, its rate, the mean of a hop
    link.tiers           # network: 2 nodes, a ring through 8 ports of each; nvlink: 8 devices

Invariant: tiers stand outermost first, and the product of their extents is the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tier:
    """One level that the group spans."""

    level: str
    extent: int
    """Units of the level in the group."""
    bytes_per_s: float
    """Of a ring through the group: what it carries into a unit, and out of it, in one direction."""
    peer_bytes_per_s: float
    """Of one rank that sends to a rank of another unit by itself: point to point, all-to-all."""
    latency_s: float
    """Of one hop."""
    base_s: float = 0.0
    """Fixed time of one collective call."""
    sharing: int = 1
    """How many groups share one port."""
    direct: bool = False
    """Whether a small all-reduce goes straight from each rank to all others, as ours on gloo does."""
    nccl: str = ""
    """The kind of link to NCCL's cost model, where that one is used."""
    switch_bytes_per_s: float = 0.0
    """Bytes of tensor per second of an all-reduce that the switch sums; 0 where it can't."""
    switch_s: float = 0.0
    """Fixed time of such an all-reduce."""


@dataclass(frozen=True, slots=True)
class Link:
    """The tiers of one group."""

    tiers: tuple[Tier, ...]

    def __str__(self) -> str:
        return f"{self.level} {self.bytes_per_s / 1e9:.4g} GB/s {self.latency_s * 1e6:.3g} us"

    @property
    def num_ranks(self) -> int:
        return math.prod(tier.extent for tier in self.tiers)

    @property
    def slowest(self) -> Tier:
        """The tier that bounds a ring's bandwidth."""
        return min(self.tiers, key=lambda tier: tier.bytes_per_s)

    @property
    def level(self) -> str:
        return self.slowest.level

    @property
    def sharing(self) -> int:
        return self.slowest.sharing

    @property
    def bytes_per_s(self) -> float:
        """Of a ring: what each rank sends and receives, in one direction."""
        return self.slowest.bytes_per_s

    @property
    def peer_bytes_per_s(self) -> float:
        """Of one rank that sends to a rank at the other end of the outermost level."""
        return min(tier.peer_bytes_per_s for tier in self.tiers)

    @property
    def hops(self) -> Iterator[tuple[int, Tier]]:
        """How many hops of the way around the ring, from the first rank to the last, each tier has."""
        outer = 1
        for tier in self.tiers:
            yield outer * (tier.extent - 1), tier
            outer *= tier.extent

    @property
    def latency_s(self) -> float:
        """Mean over those hops, so that (ranks − 1) · latency_s is the way around the ring."""
        return sum(count * tier.latency_s for count, tier in self.hops) / max(1, self.num_ranks - 1)

    @property
    def base_s(self) -> float:
        return max(tier.base_s for tier in self.tiers)

    @property
    def direct(self) -> bool:
        return all(tier.direct for tier in self.tiers)

    @property
    def has_nccl(self) -> bool:
        """Whether NCCL's cost model says what collectives take."""
        return all(tier.nccl for tier in self.tiers)
