"""Rules of Fourier transforms: linear, whole along the dims that they transform."""

from __future__ import annotations

from autopar.rules.along import along
from autopar.rules.entries import Rows, by

_TRANSFORM = by(along(1, "dim", None, ((0,),)))

ROWS: Rows = {"aten._fft_c2c": _TRANSFORM, "aten._fft_r2c": _TRANSFORM, "aten._fft_c2r": _TRANSFORM}
