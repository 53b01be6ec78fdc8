"""Calls that prove the rules of `rules/pieces.py`."""

from __future__ import annotations

from autopar.rules.examples.example import Examples, aten, call, t

EXAMPLES: Examples = {
    "aten.slice": [
        call(aten.slice.Tensor, t(4, 18), 1, 6, 12),
        call(aten.slice.Tensor, t(12, 4), 0, 0, 6),
        call(aten.slice.Tensor, t(12, 4), 0, 6, 2**63 - 1),
        call(aten.slice.Tensor, t(4, 12), -1, -6),
        call(aten.slice.Tensor, t(4, 12), 1, 1, 7),
        call(aten.slice.Tensor, t(4, 12), 1, 0, 12, 2),
        call(aten.slice.Tensor, t(4, 12), 1),
    ],
    "aten.slice_backward": [
        call(aten.slice_backward.default, t(4, 6), [4, 18], 1, 6, 12, 1),
        call(aten.slice_backward.default, t(4, 6), [4, 12], -1, -6, 2**63 - 1, 1),
        call(aten.slice_backward.default, t(4, 5), [4, 12], 1, 1, 6, 1),
        call(aten.slice_backward.default, t(4, 6), [4, 12], 1, 0, 12, 2),
    ],
    "aten.select": [call(aten.select.int, t(4, 3, 6), 1, 2), call(aten.select.int, t(4, 6), -1, -1)],
    "aten.select_backward": [
        call(aten.select_backward.default, t(4, 6), [4, 3, 6], 1, 2),
        call(aten.select_backward.default, t(4), [4, 6], -1, -1),
    ],
    "aten.split": [
        call(aten.split.Tensor, t(4, 18), 6, 1),
        call(aten.split.Tensor, t(4, 18), 6, -1),
        call(aten.split.Tensor, t(8, 6), 3),
    ],
    "aten.split_with_sizes": [
        call(aten.split_with_sizes.default, t(4, 12), [6, 6], -1),
        call(aten.split_with_sizes.default, t(4, 12), [6, 4, 2], 1),
    ],
    "aten.cat": [
        call(aten.cat.default, [t(4, 6), t(4, 6)], 1),
        call(aten.cat.default, [t(4, 6), t(2, 6)]),
        call(aten.cat.default, [t(4, 6), t(4, 6), t(4, 6)], -1),
        call(aten.cat.default, [t(0), t(4, 6)], -1),
    ],
    "aten.constant_pad_nd": [
        call(aten.constant_pad_nd.default, t(4, 6), [0, 1]),
        call(aten.constant_pad_nd.default, t(4, 6, 3), [0, 0, 1, 2], 7.0),
        call(aten.constant_pad_nd.default, t(4, 6), [1, -1]),
        call(aten.constant_pad_nd.default, t(4, 6), [1, -1, 0, 0], 3.0),
    ],
    "aten.stack": [call(aten.stack.default, [t(6, 12), t(6, 12)], 1), call(aten.stack.default, [t(6, 12)] * 3)],
    "aten.unbind": [call(aten.unbind.int, t(6, 2, 12), 1)],
    "aten.select_scatter": [call(aten.select_scatter.default, t(6, 3, 12), t(6, 12), 1, 2)],
    "aten.slice_scatter": [call(aten.slice_scatter.default, t(6, 12), t(6, 4), 1, 2, 6)],
    "aten.unsafe_split": [
        call(aten.unsafe_split.Tensor, t(4, 18), 6, 1),
        call(aten.unsafe_split.Tensor, t(8, 6), 3),
    ],
    "aten.unsafe_split_with_sizes": [
        call(aten.unsafe_split_with_sizes.default, t(4, 12), [6, 6], -1),
        call(aten.unsafe_split_with_sizes.default, t(4, 12), [6, 4, 2], 1),
    ],
    "aten.narrow_copy": [
        call(aten.narrow_copy.default, t(4, 18), 1, 6, 6),
        call(aten.narrow_copy.default, t(4, 12), -1, -6, 6),
        call(aten.narrow_copy.default, t(4, 12), 1, 1, 6),
    ],
    "aten._stack": [call(aten._stack.default, [t(6, 12), t(6, 12)], 1)],
}
