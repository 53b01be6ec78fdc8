"""Calls that prove the rules of `rules/matmul.py`."""

from __future__ import annotations

from autopar.rules.examples.example import Examples, aten, call, index, own, t

EXAMPLES: Examples = {
    "aten.mm": [call(aten.mm.default, t(6, 4), t(4, 12)), call(aten.mm.default, t(6, 1), t(1, 12))],
    "aten.bmm": [call(aten.bmm.default, t(2, 6, 4), t(2, 4, 3))],
    "aten.addmm": [
        call(aten.addmm.default, t(6, 12), t(6, 4), t(4, 12), beta=0.5, alpha=3.0),
        call(aten.addmm.default, t(12), t(6, 4), t(4, 12)),
        call(aten.addmm.default, t(6, 1), t(6, 4), t(4, 12)),
    ],
    "aten.baddbmm": [call(aten.baddbmm.default, t(1, 6, 3), t(2, 6, 4), t(2, 4, 3), beta=0.5, alpha=3.0)],
    "aten.dot": [call(aten.dot.default, t(12), t(12))],
    "aten.mv": [call(aten.mv.default, t(6, 4), t(4))],
    "autopar.linear": [
        call(own.linear.default, t(6, 4), t(12, 4), None),
        call(own.linear.default, t(2, 6, 4), t(3, 4), t(3)),
        call(own.linear.default, t(4), t(6, 4), t(6)),
    ],
    "autopar.linear_dx": [call(own.linear_dx.default, t(2, 6, 3), t(3, 4))],
    "autopar.linear_dw": [call(own.linear_dw.default, t(2, 6, 4), t(2, 6, 3)), call(own.linear_dw.default, t(4), t(6))],
    "autopar.grouped_mm": [call(own.grouped_mm.default, t(6, 4), t(3, 4, 12), index(3))],
    "autopar.grouped_mm_dx": [call(own.grouped_mm_dx.default, t(6, 12), t(3, 4, 12), index(3))],
    "autopar.grouped_mm_dw": [call(own.grouped_mm_dw.default, t(6, 4), t(6, 12), index(3))],
}
