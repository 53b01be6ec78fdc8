"""Calls that prove the rules of `rules/pooling.py`."""

from __future__ import annotations

from autopar.rules.examples.example import Examples, aten, call, index, t

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
}
