"""How a mesh lies on the levels of a cluster: which meshes are allowed, and which link an axis gets.

    cluster = parse_cluster("2x8xh100")                     # network=2 nvlink=8
    candidate_meshes(cluster, {"tp": 4})                    # pp=1 dp=4 tp=4, pp=2 dp=2 tp=4, pp=4 dp=1 tp=4
    axis_link(cluster, Mesh.parse("dp=4 tp=4"), "dp")       # spans both levels: its rings cross the network

Ranks are numbered row-major over the axes and devices row-major over the levels, so each axis is a contiguous
segment of the levels, the last axis the innermost.

Invariants:
- in a mesh that fits, of each two boundaries (between axes, between levels) one divides the other, counted in
  devices inside it; so an axis takes a whole-numbered part of each level that it spans;
- all groups of an axis communicate at the same time, as in an SPMD program: that is what `sharing` counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cluster import nccl
from autopar.cluster.cluster import Cluster, Level
from autopar.cluster.link import Link, Tier
from autopar.errors import PlanError
from autopar.mesh import Mesh

AXES = ("pp", "dp", "tp")
"""The axes of a searched mesh, outermost first: pipeline traffic is the smallest, tensor traffic the largest."""


def candidate_meshes(cluster: Cluster, pins: Mapping[str, int], axes: Sequence[str] = AXES) -> list[Mesh]:
    """Every mesh of all the cluster's devices over `axes` (all of them named, sizes of 1 too) that keeps the pins.

    Raises `PlanError` when there is none: it names what was got and what divides.
    """
    _check_pins(cluster, pins, axes)
    shapes = [shape for shape in _factorizations(cluster.num_devices, len(axes)) if _keeps(axes, shape, pins)]
    meshes = [Mesh(tuple(zip(axes, shape, strict=True))) for shape in shapes]
    fitting = [mesh for mesh in meshes if _misfit(cluster, mesh) is None]
    if not fitting:
        raise PlanError(f"{_pins_text(pins)}: {_misfit(cluster, meshes[0])}")
    return fitting


def distinct_meshes(cluster: Cluster, meshes: Iterable[Mesh], named: Iterable[str] = ()) -> list[Mesh]:
    """`meshes` without those that differ from an earlier one only by the names of SPMD axes with equal links.

    To a solver that gives any axis any factor such meshes are one problem. Axes in `named` (pinned ones) count as
    different. Of `dp=8 tp=1` and `dp=1 tp=8` the first that stands in `meshes` stays.
    """
    kept = set(named) | {"pp"}

    def signature(mesh: Mesh) -> tuple[object, ...]:
        rows = [
            (name if name in kept else "", size, axis_link(cluster, mesh, name) if size > 1 else None)
            for name, size in mesh.axes
            if size > 1 or name in kept
        ]
        return tuple(sorted(rows, key=repr))

    first: dict[tuple[object, ...], Mesh] = {}
    for mesh in meshes:
        first.setdefault(signature(mesh), mesh)
    return list(first.values())


def axis_link(cluster: Cluster, mesh: Mesh, axis: str) -> Link:
    """The link that one group of `axis` gets, on the levels that the axis spans.

    A ring through a group leaves each unit (a node, say) once in each direction. Where every device has a port of
    its own, the ring uses those of all its ranks inside the unit (NCCL's rails); a shared port is divided among
    the groups that have ranks in the unit. The ring is as fast as its slowest level.
    """
    if misfit := _misfit(cluster, mesh):
        raise PlanError(f"mesh {mesh}: {misfit}")
    return Link(tuple(_tier(span) for span in _spans(cluster, mesh, axis)))


@dataclass(frozen=True, slots=True)
class _Span:
    """An axis on one level: `extent` units of the level, each with `inside` devices, `own` of them in one group."""

    level: Level
    extent: int
    inside: int
    own: int


def _spans(cluster: Cluster, mesh: Mesh, axis: str) -> list[_Span]:
    """The levels that `axis` spans, outermost first; the innermost level for an axis of size 1."""
    position = mesh.names.index(axis) if axis in mesh.names else len(mesh.names)
    low = math.prod(size for _, size in mesh.axes[position + 1 :])
    high = low * mesh.size(axis)
    spans: list[_Span] = []
    inside = own = 1
    for level in reversed(cluster.levels):
        start, end = max(low, inside), min(high, inside * level.size)
        if end > start:
            spans.append(_Span(level, end // start, inside, own))
            own *= end // start
        inside *= level.size
    return spans[::-1] or [_Span(cluster.levels[-1], 1, 1, 1)]


def _tier(span: _Span) -> Tier:
    level, groups = span.level, span.inside // span.own
    rate = level.reached_bytes_per_s
    ring, peer = (rate / groups, rate / span.inside) if level.shared else (rate * span.own, rate)
    return Tier(
        level=level.name,
        extent=span.extent,
        bytes_per_s=ring,
        peer_bytes_per_s=peer,
        latency_s=level.latency_s if level.latency_s is not None else nccl.hop_s(level.nccl),
        base_s=nccl.base_s(level.nccl) if level.nccl else level.base_s,
        sharing=groups if level.shared else 1,
        direct=level.direct,
        nccl=level.nccl,
        switch_bytes_per_s=level.switch_bytes_per_s,
        switch_s=level.switch_s,
    )


def _misfit(cluster: Cluster, mesh: Mesh) -> str | None:
    """Why `mesh` doesn't lie on the cluster's levels, or None."""
    if mesh.num_ranks != cluster.num_devices:
        return f"{mesh.num_ranks} ranks, but {cluster} has {cluster.num_devices} devices"
    levels = list(_boundaries([level.size for level in cluster.levels]))
    for (name, _), inside in zip(mesh.axes, _boundaries([size for _, size in mesh.axes]), strict=True):
        for level, within in zip(cluster.levels, levels, strict=True):
            if inside % within and within % inside:
                return (
                    f"'{name}' and the axes inside it take {inside} devices, which neither divides nor is a multiple "
                    f"of the {within} devices that '{level.name}' joins ({cluster.levels_text}); choose sizes that do"
                )
    return None


def _boundaries(sizes: Sequence[int]) -> Iterator[int]:
    """For each entry of `sizes` (outermost first): how many devices lie in one unit of it, itself included."""
    for i in range(len(sizes)):
        yield math.prod(sizes[i:])


def _check_pins(cluster: Cluster, pins: Mapping[str, int], axes: Sequence[str]) -> None:
    devices = cluster.num_devices
    for axis, size in pins.items():
        if axis not in axes:
            raise PlanError(f"{axis}={size}: no axis {axis!r}; the axes are {', '.join(axes)}")
        if size < 1 or devices % size:
            allowed = ", ".join(map(str, _divisors(devices)))
            raise PlanError(f"{axis}={size}: doesn't divide the {devices} devices of {cluster}; use one of {allowed}")
    got = math.prod(pins.values())
    if devices % got:
        raise PlanError(
            f"{_pins_text(pins)}: {got} ranks don't divide the {devices} devices of {cluster}; choose smaller sizes"
        )
    if len(pins) == len(axes) and got != devices:
        raise PlanError(
            f"{_pins_text(pins)}: {got} ranks, but {cluster} has {devices} devices; multiply a size by {devices // got}"
        )


def _keeps(axes: Sequence[str], shape: Sequence[int], pins: Mapping[str, int]) -> bool:
    return all(pins.get(axis, size) == size for axis, size in zip(axes, shape, strict=True))


def _pins_text(pins: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in pins.items()) or "no pins"


def _factorizations(number: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    for head in itertools.product(_divisors(number), repeat=num_factors - 1):
        last, rest = divmod(number, math.prod(head))
        if rest == 0:
            yield (*head, last)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
