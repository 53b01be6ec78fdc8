"""Calls that prove the rules of `rules/fft.py`."""

from __future__ import annotations

from autopar.rules.examples.example import Examples, aten, c64, call, t

EXAMPLES: Examples = {
    "aten._fft_c2c": [
        call(aten._fft_c2c.default, t(4, 6, 3, dtype=c64), [1], 0, True),
        call(aten._fft_c2c.default, t(4, 6, 3, dtype=c64), [0, 2], 2, False),
    ],
    "aten._fft_r2c": [
        call(aten._fft_r2c.default, t(4, 6, 3), [1], 0, True),
        call(aten._fft_r2c.default, t(4, 6, 3), [0, 1], 1, False),
    ],
    "aten._fft_c2r": [call(aten._fft_c2r.default, t(4, 6, dtype=c64), [1], 2, 10)],
}
