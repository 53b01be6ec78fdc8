"""Random layouts on a mesh, for property tests."""

from __future__ import annotations

import random

from autopar.layout import Factor, Layout, is_worth_splitting
from autopar.mesh import Mesh

SHAPES: list[tuple[tuple[int, ...], ...]] = [
    ((12,),),
    ((12,), (6,)),
    ((4, 6), (12,)),
    ((12, 2), (), (6,)),
    ((2, 12), (6, 2)),
    ((24,), (), (4, 3)),
    ((7,), (3, 5)),
    ((11, 2), (), (9,)),
]
"""Factor sizes of values: products, dims of size 1, sizes that two and three divide, and sizes that neither does."""


def random_layout(sizes: tuple[tuple[int, ...], ...], mesh: Mesh, rng: random.Random, partial: bool = True) -> Layout:
    """Each axis (in random order) splits a factor, is partial, or neither."""
    layout = Layout.whole(sizes)
    axes = list(mesh.spmd.names)
    rng.shuffle(axes)
    for axis in axes:
        room = [at for at, factor in layout.positions() if _may_split(factor, axis, mesh)]
        kind = rng.choice(["split", "split", "partial", "none"])
        if kind == "split" and room:
            layout = layout.split(axis, rng.choice(room))
        elif kind == "partial" and partial:
            layout = layout.add_partial(axis)
    return layout


def _may_split(factor: Factor, axis: str, mesh: Mesh) -> bool:
    return is_worth_splitting(factor.size, [mesh.size(name) for name in (*factor.axes, axis)])
