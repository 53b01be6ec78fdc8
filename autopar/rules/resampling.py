"""Rules of ops on images: padding by what is there, resampling, sampling at points. Batch and channels are free."""

from __future__ import annotations

from autopar.rules.entries import Rows, texts

_SPATIAL = {1: "[w] -> [x]", 2: "[h] [w] -> [y] [x]", 3: "[d] [h] [w] -> [z] [y] [x]"}


def _forward(num_spatial: int) -> str:
    """`... [h] [w] -> ... [y] [x]`"""
    image, _, result = _SPATIAL[num_spatial].partition(" -> ")
    return f"... {image} -> ... {result}"


def _backward(num_spatial: int, with_image: bool) -> str:
    """`... [y] [x], ... [h] [w] -> ... [h] [w]`, the image itself being an operand or not."""
    image, _, result = _SPATIAL[num_spatial].partition(" -> ")
    return f"... {result}, ... {image} -> ... {image}" if with_image else f"... {result} -> ... {image}"


def _padding(kind: str) -> Rows:
    return {
        f"aten.{kind}_pad{n}d{suffix}": texts("0", text)
        for n in _SPATIAL
        for suffix, text in (("", _forward(n)), ("_backward", _backward(n, with_image=True)))
    }


def _upsampling(name: str, num_spatial: int) -> Rows:
    return {
        f"aten.{name}": texts("0", _forward(num_spatial)),
        f"aten.{name}_backward": texts("0", _backward(num_spatial, with_image=False)),
    }


UPSAMPLING = {
    **{f"{kind}{n}d": n for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in _SPATIAL},
    "upsample_linear1d": 1,
    "upsample_bilinear2d": 2,
    "upsample_bicubic2d": 2,
    "upsample_trilinear3d": 3,
    "_upsample_bilinear2d_aa": 2,
    "_upsample_bicubic2d_aa": 2,
}
"""Ops that resample images, by how many spatial dims they have."""

ROWS: Rows = {
    **_padding("reflection"),
    **_padding("replication"),
    **{op: entry for name, n in UPSAMPLING.items() for op, entry in _upsampling(name, n).items()},
    # points of the grid are free, and sum up in the image's gradient; so do channels in the grid's
    "aten.grid_sampler_2d": texts("0", "n c [h] [w], n y x [g] -> n c y x"),
    "aten.grid_sampler_2d_backward": texts("0", "n c y x, n c [h] [w], n y x [g] -> n c [h] [w], n y x [g]"),
    "aten.grid_sampler_3d": texts("0", "n c [d] [h] [w], n z y x [g] -> n c z y x"),
    "aten.grid_sampler_3d_backward": texts(
        "0", "n c z y x, n c [d] [h] [w], n z y x [g] -> n c [d] [h] [w], n z y x [g]"
    ),
    "aten.affine_grid_generator": texts("0", "n [a] [b] -> n [h] [w] [g]", "n [a] [b] -> n [d] [h] [w] [g]"),
}
