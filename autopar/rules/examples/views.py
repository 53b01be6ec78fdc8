"""Calls that prove the rules of `rules/views.py`."""

from __future__ import annotations

from autopar.rules.examples.example import Examples, aten, c64, call, f64, i32, i64, t

EXAMPLES: Examples = {
    "aten.t": [call(aten.t.default, t(4, 6)), call(aten.t.default, t(6))],
    "aten.transpose": [call(aten.transpose.int, t(4, 6, 3), 0, -1), call(aten.transpose.int, t(4, 6, 3), 1, 2)],
    "aten.permute": [call(aten.permute.default, t(4, 6, 3), [2, 0, 1]), call(aten.permute.default, t(4, 6), [-1, 0])],
    "aten.view": [
        call(aten.view.default, t(4, 6, 3), [24, 3]),
        call(aten.view.default, t(24, 3), [-1, 6, 3]),
        call(aten.view.default, t(6, 24), [36, 4]),
        call(aten.view.default, t(6, 4), [4, 6]),
        call(aten.view.default, t(2, 12), [2, 1, 3, 4]),
        call(aten.view.default, t(1, 1), []),
    ],
    "aten.view.dtype": [
        call(aten.view.dtype, t(4, 6, dtype=f64), i64),
        call(aten.view.dtype, t(4, 6, dtype=f64), i32),
    ],
    "aten._unsafe_view": [call(aten._unsafe_view.default, t(4, 6, 3), [24, 3])],
    "aten.reshape": [call(aten.reshape.default, t(4, 6), [2, 2, 6]), call(aten.reshape.default, t(12), [3, -1])],
    "aten.unsqueeze": [call(aten.unsqueeze.default, t(4, 6), 1), call(aten.unsqueeze.default, t(6), -1)],
    "aten.squeeze": [
        call(aten.squeeze.dim, t(4, 1, 6), 1),
        call(aten.squeeze.dims, t(1, 6, 1), [0, 2]),
        call(aten.squeeze.default, t(2, 1, 6)),
        call(aten.squeeze.dim, t(2, 6), 0),
    ],
    "aten.expand": [
        call(aten.expand.default, t(4, 1, 3), [4, 6, 3]),
        call(aten.expand.default, t(1, 6), [4, 2, 6]),
        call(aten.expand.default, t(4, 1, 6), [4, 3, -1]),
    ],
    "aten._reshape_alias": [call(aten._reshape_alias.default, t(4, 6, 3), [24, 3], [3, 1])],
    "aten.as_strided": [
        call(aten.as_strided.default, t(4, 6), [6, 4], [1, 6]),
        call(aten.as_strided.default, t(4, 6), [2, 6, 2], [12, 1, 6], 0),
        call(aten.as_strided.default, t(24), [4, 1, 6], [6, 6, 1]),
        call(aten.as_strided.default, t(4, 6), [3, 4], [2, 6], 1),
        call(aten.as_strided.default, t(4, 6), [4, 6, 2], [6, 1, 0]),
    ],
    "aten._conj": [call(aten._conj.default, t(4, 6, dtype=c64))],
    "aten._neg_view": [call(aten._neg_view.default, t(4, 6))],
}
