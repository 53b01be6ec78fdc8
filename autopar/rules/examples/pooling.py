"""Calls that prove the rules of `rules/pooling.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.rules.examples.example import Example, Examples, Shape, aten, call, index, t


def _unpool(target: Callable[..., Any], shape: Shape, size: list[int], *rest: Any) -> Example:
    """One value a window: places that stand twice would be written in any order."""
    return call(target, t(*shape), index(*shape), size, *rest)


EXAMPLES: Examples = {
    "aten.max_pool2d_with_indices": [call(aten.max_pool2d_with_indices.default, t(6, 12, 4, 6), [2, 2], [2, 2])],
    "aten.max_pool2d_with_indices_backward": [
        call(
            aten.max_pool2d_with_indices_backward.default,
            *(t(6, 12, 2, 3), t(6, 12, 4, 6), [2, 2], [2, 2], [0, 0], [1, 1], False, index(6, 12, 2, 3)),
        )
    ],
    "aten.avg_pool2d": [call(aten.avg_pool2d.default, t(6, 12, 4, 6), [2, 2], [2, 2])],
    "aten.avg_pool2d_backward": [
        call(
            aten.avg_pool2d_backward.default,
            *(t(6, 12, 2, 3), t(6, 12, 4, 6), [2, 2], [2, 2], [0, 0], False, True, None),
        )
    ],
    "aten._adaptive_avg_pool2d": [call(aten._adaptive_avg_pool2d.default, t(6, 12, 4, 6), [2, 3])],
    "aten._adaptive_avg_pool2d_backward": [
        call(aten._adaptive_avg_pool2d_backward.default, t(6, 12, 2, 3), t(6, 12, 4, 6))
    ],
    "aten.max_pool3d_with_indices": [call(aten.max_pool3d_with_indices.default, t(6, 3, 2, 4, 6), [2, 2, 2])],
    "aten.max_pool3d_with_indices_backward": [
        call(
            aten.max_pool3d_with_indices_backward.default,
            *(t(6, 3, 1, 2, 3), t(6, 3, 2, 4, 6), [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, index(6, 3, 1, 2, 3)),
        )
    ],
    "aten.adaptive_max_pool2d": [call(aten.adaptive_max_pool2d.default, t(6, 12, 4, 6), [2, 3])],
    "aten.adaptive_max_pool2d_backward": [
        call(aten.adaptive_max_pool2d_backward.default, t(6, 12, 2, 3), t(6, 12, 4, 6), index(6, 12, 2, 3))
    ],
    "aten.adaptive_max_pool3d": [call(aten.adaptive_max_pool3d.default, t(6, 3, 2, 4, 6), [1, 2, 3])],
    "aten.adaptive_max_pool3d_backward": [
        call(
            aten.adaptive_max_pool3d_backward.default,
            *(t(6, 3, 1, 2, 3), t(6, 3, 2, 4, 6), index(6, 3, 1, 2, 3)),
        )
    ],
    "aten.max_unpool2d": [_unpool(aten.max_unpool2d.default, (6, 12, 1, 1), [4, 6])],
    "aten.max_unpool3d": [_unpool(aten.max_unpool3d.default, (6, 12, 1, 1, 1), [2, 4, 6], [2] * 3, [0] * 3)],
    "aten.fractional_max_pool2d": [
        call(aten.fractional_max_pool2d.default, t(6, 12, 5, 7), [2, 2], [2, 3], t(6, 12, 2)),
    ],
    "aten.fractional_max_pool2d_backward": [
        call(
            aten.fractional_max_pool2d_backward.default,
            *(t(6, 12, 2, 3), t(6, 12, 5, 7), [2, 2], [2, 3], index(6, 12, 2, 3)),
        )
    ],
    "aten.fractional_max_pool3d": [
        call(aten.fractional_max_pool3d.default, t(6, 2, 3, 5, 7), [2, 2, 2], [1, 2, 3], t(6, 2, 3)),
    ],
    "aten.fractional_max_pool3d_backward": [
        call(
            aten.fractional_max_pool3d_backward.default,
            *(t(6, 2, 1, 2, 3), t(6, 2, 3, 5, 7), [2] * 3, [1, 2, 3], index(6, 2, 1, 2, 3)),
        )
    ],
    "aten.avg_pool3d": [call(aten.avg_pool3d.default, t(6, 12, 2, 4, 6), [2, 2, 2])],
    "aten.avg_pool3d_backward": [
        call(
            aten.avg_pool3d_backward.default,
            *(t(6, 12, 1, 2, 3), t(6, 12, 2, 4, 6), [2] * 3, [2] * 3, [0] * 3, False, True, None),
        )
    ],
    "aten._adaptive_avg_pool3d": [call(aten._adaptive_avg_pool3d.default, t(6, 12, 2, 4, 6), [1, 2, 3])],
    "aten._adaptive_avg_pool3d_backward": [
        call(aten._adaptive_avg_pool3d_backward.default, t(6, 12, 1, 2, 3), t(6, 12, 2, 4, 6))
    ],
}
