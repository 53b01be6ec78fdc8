"""From timings to the figures of a cluster: efficiency curves, and the latency, base and bandwidth of a level.

    peak, curve = efficiency_curve([(2 * 64**3, 20e-6), (2 * 512**3, 4e-3)])    # flops/s, ((operations, part), …)
    level = fitted_level(Level("loopback", 4, 1.0, 0.0, direct=True), [Sample("all_gather", 1 << 20, 3e-3), …])

Invariants:
- a curve is one that `Device` takes, whatever the timings;
- a fitted level predicts a time for each kind and size by `collective_s`, the formula that plans are priced by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autopar.cluster.cluster import Curve, Level
from autopar.cluster.collectives import cost_lines
from autopar.cluster.link import Link, Tier
from autopar.cluster.measure import rounded

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

DIGITS = 3
PARTS = 10_000
"""In how many parts an efficiency is given."""
ROUNDS = 12
OUTLIER = 0.05
"""Relative errors beyond this count by their size, not its square: one disturbed timing must not bend the rest."""
SWITCH_GAIN = 1.05
"""By how much the largest all-reduce must beat the ring before a switch is taken to have summed it."""


def efficiency_curve(timings: Sequence[tuple[float, float]]) -> tuple[float, Curve]:
    """(peak operations/s, curve) of matmuls by (operations, seconds beside the launch), in any order.

    Where a smaller one was more efficient, the larger one counts: that's where the time goes.
    """
    curve: list[tuple[float, float]] = []
    peak = 0.0
    for flops, seconds in sorted(timings, reverse=True):
        rate = flops / seconds
        if not curve:
            peak = rounded(rate, DIGITS)
            curve.append((flops, 1.0))
            continue
        larger, efficiency = curve[-1]
        # It takes at most the larger one's time, and is at most as efficient.
        curve.append((flops, min(efficiency, max(_up(rate / peak), _up(efficiency * flops / larger)))))
    return peak, tuple(reversed(curve))


def _up(part: float) -> float:
    return math.ceil(part * PARTS) / PARTS


@dataclass(frozen=True, slots=True)
class Sample:
    """One collective, timed; `num_bytes` as in `autopar.cluster.collectives`."""

    kind: str
    num_bytes: int
    seconds: float


def fitted_level(level: Level, samples: Sequence[Sample]) -> Level:
    """`level` with the latency, base and bandwidth that come nearest to `samples`, by relative error.

    Each of `level.size` ranks (or groups of ranks, all at the same time) took part in each collective, of which each
    kind has at least two sizes.
    """
    switch = (0.0, 0.0)
    if not level.direct:
        rings = [sample for sample in samples if sample.kind != "all_reduce"]
        switch = _switch(_fitted(rings, level), level.size, samples)
        samples = rings if any(switch) else samples
    found = _fitted(samples, level)
    return replace(
        level,
        base_s=rounded(found.base_s, DIGITS),
        latency_s=rounded(found.latency_s, DIGITS),
        bytes_per_s=rounded(1 / found.byte_s, DIGITS),
        efficiency=1.0,
        nccl="",
        switch_s=rounded(switch[0], DIGITS),
        switch_bytes_per_s=rounded(switch[1], DIGITS),
    )


class _Fit(NamedTuple):
    base_s: float
    latency_s: float
    byte_s: float


def _fitted(samples: Sequence[Sample], level: Level) -> _Fit:
    """The figures nearest to `samples`, none of them negative.

    Where a collective has several algorithms the fit takes the one that is cheapest by the fit before it.
    """
    forms = [cost_lines(sample.kind, level.size, _unit_link(level)) for sample in samples]
    rows = [
        np.array([[sample.kind != "p2p", hops, sent * sample.num_bytes] for hops, sent in lines]) / sample.seconds
        for lines, sample in zip(forms, samples, strict=True)
    ]
    found: Floats = np.zeros(3)
    weights: Floats = np.ones(len(rows))
    for _ in range(ROUNDS):
        matrix = np.stack([row[int(np.argmin(row @ found))] for row in rows])
        found = _least_squares(matrix * weights[:, None], weights)
        weights = np.sqrt(OUTLIER / np.maximum(np.abs(matrix @ found - 1), OUTLIER))
    return _Fit(*map(float, found))


def _unit_link(level: Level) -> Link:
    """A link of the level on which a cost's fixed part counts hops, and its slope the bytes sent."""
    return Link((Tier(level.name, level.size, 1.0, 1.0, latency_s=1.0, direct=level.direct),))


def _least_squares(matrix: Floats, target: Floats) -> Floats:
    """The non-negative solution: the best of those where some unknowns are 0, seconds per byte never being one."""
    best: tuple[float, Floats] | None = None
    for used in ([2], [0, 2], [1, 2], [0, 1, 2]):
        found: Floats = np.zeros(3)
        found[used] = np.linalg.lstsq(matrix[:, used], target, rcond=None)[0]
        error = float(np.sum((matrix @ found - target) ** 2))
        if (found >= 0).all() and found[2] > 0 and (best is None or error < best[0] - 1e-9):
            best = error, found
    assert best is not None, "seconds per byte alone fit positive times"
    return best[1]


def _switch(ring: _Fit, ranks: int, samples: Sequence[Sample]) -> tuple[float, float]:
    """(seconds, bytes/s) of the two largest all-reduces, where a ring would take longer for the largest; else zeros."""
    reduced = sorted((sample for sample in samples if sample.kind == "all_reduce"), key=lambda sample: sample.num_bytes)
    smaller, largest = reduced[-2:]
    ring_s = ring.base_s + 2 * (ranks - 1) * (ring.latency_s + ring.byte_s * largest.num_bytes / ranks)
    if SWITCH_GAIN * largest.seconds >= ring_s or largest.seconds <= smaller.seconds:
        return 0.0, 0.0
    rate = (largest.num_bytes - smaller.num_bytes) / (largest.seconds - smaller.seconds)
    return max(0.0, largest.seconds - largest.num_bytes / rate), rate
