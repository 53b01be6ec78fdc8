"""Calls that prove the rules of `rules/reductions.py`."""

from __future__ import annotations

from autopar.rules.examples.example import Examples, aten, call, f64, mask, t

EXAMPLES: Examples = {
    "aten.sum": [
        call(aten.sum.default, t(4, 6)),
        call(aten.sum.dim_IntList, t(4, 6, 3), [0, 2]),
        call(aten.sum.dim_IntList, t(4, 6), [-1], True),
        call(aten.sum.dim_IntList, t(4, 6), [0], dtype=f64),
        call(aten.sum.default, mask(4, 6)),
    ],
    "aten.mean": [
        call(aten.mean.default, t(4, 6)),
        call(aten.mean.dim, t(4, 6, 3), [-1], True),
        call(aten.mean.dim, t(4, 6, 3), [0, 1]),
    ],
    "aten.amax": [call(aten.amax.default, t(4, 6), [-1], True), call(aten.amax.default, t(4, 6, 2), [0, 2])],
    "aten.amin": [call(aten.amin.default, t(4, 6), [1]), call(aten.amin.default, t(4, 6))],
    "aten.max": [
        call(aten.max.default, t(4, 6)),
        call(aten.max.dim, t(4, 6), 1),
        call(aten.max.dim, t(4, 6), -2, True),
    ],
    "aten.min": [
        call(aten.min.default, t(4, 6)),
        call(aten.min.dim, t(4, 6), 0),
    ],
    "aten.any": [
        call(aten.any.dim, mask(6, 12), 1),
        call(aten.any.dim, mask(6, 12), 0, True),
        call(aten.any.default, mask(6)),
    ],
    "aten.all": [call(aten.all.dim, mask(6, 12), 1), call(aten.all.dims, mask(6, 12, 6), [0, 1])],
    "aten.prod": [call(aten.prod.dim_int, t(6, 12), 1), call(aten.prod.dim_int, t(6, 12), -2, True)],
    "aten.argmax": [call(aten.argmax.default, t(6, 12), 1), call(aten.argmax.default, t(6, 12), 0, True)],
    "aten.argmin": [call(aten.argmin.default, t(6, 12), 1)],
    "aten.logsumexp": [call(aten.logsumexp.default, t(6, 12), [1])],
    "aten.var": [
        call(aten.var.correction, t(6, 12), [1], correction=1, keepdim=True),
        call(aten.var.dim, t(6, 12), [0]),
    ],
    "aten.var_mean": [call(aten.var_mean.correction, t(6, 12), [1], correction=0, keepdim=True)],
}
