"""Calls that prove the rules of `rules/pointwise.py`."""

from __future__ import annotations

from autopar.rules.examples.example import Examples, aten, call, t

EXAMPLES: Examples = {
    "aten.max.other": [call(aten.max.other, t(4, 6), t(6))],
    "aten.min.other": [call(aten.min.other, t(4, 1), t(4, 6))],
}
