"""Calls that prove the rules of `rules/reductions.py`."""

from __future__ import annotations

import math

from autopar.rules.examples.example import Examples, aten, call, f64, index, mask, t

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
    "aten.std": [
        call(aten.std.correction, t(6, 12), [1], correction=1, keepdim=True),
        call(aten.std.correction, t(6, 12), [0], correction=0),
    ],
    "aten.std_mean": [call(aten.std_mean.correction, t(6, 12), [1], correction=0, keepdim=True)],
    "aten.nansum": [call(aten.nansum.default, t(4, 6), [1]), call(aten.nansum.default, t(4, 6), [0], True)],
    "aten.count_nonzero": [
        call(aten.count_nonzero.dim_IntList, t(4, 6), [1]),
        call(aten.count_nonzero.dim_IntList, mask(4, 6), [0, 1]),
        call(aten.count_nonzero.default, index(4, 6)),
    ],
    "aten.aminmax": [
        call(aten.aminmax.default, t(4, 6)),
        call(aten.aminmax.default, t(4, 6), dim=1, keepdim=True),
    ],
    "aten._aminmax": [call(aten._aminmax.default, t(4, 6)), call(aten._aminmax.dim, t(4, 6), 0)],
    "aten.median": [call(aten.median.dim, t(6, 5), 1), call(aten.median.default, t(6))],
    "aten.nanmedian": [call(aten.nanmedian.dim, t(6, 5), 1, True), call(aten.nanmedian.default, t(6))],
    "aten.mode": [call(aten.mode.default, t(6, 5)), call(aten.mode.default, t(5, 6), 0, True)],
    "aten.kthvalue": [call(aten.kthvalue.default, t(6, 5), 2), call(aten.kthvalue.default, t(5, 6), 3, 0, True)],
    "aten.linalg_vector_norm": [
        call(aten.linalg_vector_norm.default, t(4, 6), 2, [1]),
        call(aten.linalg_vector_norm.default, t(4, 6), math.inf, [1], True),
        call(aten.linalg_vector_norm.default, t(4, 6), -math.inf),
        call(aten.linalg_vector_norm.default, t(4, 6), 0, [0]),
        call(aten.linalg_vector_norm.default, t(4, 6), 1, [0]),
        call(aten.linalg_vector_norm.default, t(4, 6), 3.5, [0]),
    ],
    "aten.linalg__powsum": [call(aten.linalg__powsum.default, t(4, 6), 3, [1])],
    "aten.norm": [
        call(aten.norm.ScalarOpt_dim, t(4, 6), 2, [1], True),
        call(aten.norm.ScalarOpt_dim, t(4, 6), math.inf, [0]),
        call(aten.norm.ScalarOpt_dim, t(4, 6), None, [0]),
        call(aten.norm.Scalar, t(4, 6), 1),
    ],
    "aten._is_all_true": [call(aten._is_all_true.default, mask(4, 6))],
    "aten._is_any_true": [call(aten._is_any_true.default, mask(4, 6))],
    "aten.histc": [call(aten.histc.default, t(4, 6), 5, -1, 2), call(aten.histc.default, t(4, 6), 5)],
}
