"""Calls that prove the rules of `rules/matmul.py`."""

from __future__ import annotations

from autopar.rules.examples.example import Examples, aten, call, i8, index, own, t

EXAMPLES: Examples = {
    "aten.mm": [call(aten.mm.default, t(6, 4), t(4, 12)), call(aten.mm.default, t(6, 1), t(1, 12))],
    "aten.bmm": [call(aten.bmm.default, t(2, 6, 4), t(2, 4, 3))],
    "aten.dot": [call(aten.dot.default, t(12), t(12))],
    "aten.mv": [call(aten.mv.default, t(6, 4), t(4))],
    "autopar.linear": [
        call(own.linear.default, t(6, 4), t(12, 4), None),
        call(own.linear.default, t(2, 6, 4), t(3, 4), t(3)),
        call(own.linear.default, t(4), t(6, 4), t(6)),
    ],
    "autopar.linear_dx": [call(own.linear_dx.default, t(2, 6, 3), t(3, 4))],
    "autopar.linear_dw": [call(own.linear_dw.default, t(2, 6, 4), t(2, 6, 3)), call(own.linear_dw.default, t(4), t(6))],
    "autopar.expert_mm": [call(own.expert_mm.default, t(6, 4), t(3, 4, 12), index(6))],
    "autopar.expert_mm_dx": [call(own.expert_mm_dx.default, t(6, 12), t(3, 4, 12), index(6))],
    "autopar.expert_mm_dw": [call(own.expert_mm_dw.default, t(6, 4), t(6, 12), index(6), 4)],
    "autopar.grouped_mm": [call(own.grouped_mm.default, t(6, 4), t(3, 4, 12), index(3))],
    "autopar.grouped_mm_dx": [call(own.grouped_mm_dx.default, t(6, 12), t(3, 4, 12), index(3))],
    "autopar.grouped_mm_dw": [call(own.grouped_mm_dw.default, t(6, 4), t(6, 12), index(3))],
    "aten.addmm": [
        call(aten.addmm.default, t(6, 12), t(6, 4), t(4, 12), beta=0.5, alpha=3.0),
        call(aten.addmm.default, t(12), t(6, 4), t(4, 12)),
        call(aten.addmm.default, t(6, 1), t(6, 4), t(4, 12)),
    ],
    "aten._addmm_activation": [call(aten._addmm_activation.default, t(12), t(6, 4), t(4, 12), use_gelu=True)],
    "aten.addmv": [call(aten.addmv.default, t(6), t(6, 4), t(4), beta=3), call(aten.addmv.default, t(), t(6, 4), t(4))],
    "aten.addr": [call(aten.addr.default, t(6, 4), t(6), t(4)), call(aten.addr.default, t(4), t(6), t(4), alpha=2)],
    "aten.addbmm": [call(aten.addbmm.default, t(6, 12), t(2, 6, 4), t(2, 4, 12), beta=0.5)],
    "aten.baddbmm": [
        call(aten.baddbmm.default, t(2, 6, 3), t(2, 6, 4), t(2, 4, 3), beta=0.5),
        call(aten.baddbmm.default, t(2, 1, 3), t(2, 6, 4), t(2, 4, 3), alpha=0.5),
    ],
    "aten.vdot": [call(aten.vdot.default, t(12), t(12))],
    "aten._int_mm": [call(aten._int_mm.default, t(6, 4, dtype=i8), t(4, 12, dtype=i8))],
    "aten.linalg_cross": [
        call(aten.linalg_cross.default, t(4, 3), t(4, 3)),
        call(aten.linalg_cross.default, t(3, 6), t(3, 6), dim=0),
    ],
    "aten.trace": [call(aten.trace.default, t(4, 6))],
}
