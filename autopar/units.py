"""Quantities as people write and read them.

    parse_bytes("60GiB") == 60 * 2**30          format_bytes(3 * 2**20) == "3.00 MiB"
    parse_bytes("80GB") == 80 * 10**9           format_seconds(0.00125) == "1.25 ms"

Invariant: bytes are shown in powers of 1024, and both kinds of unit are read.
"""

from __future__ import annotations

import re

from autopar.errors import PlanError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("KB", "MB", "GB", "TB")
_UNITS = {"": 1, **{u: 1024**n for n, u in enumerate(_BINARY)}, **{u: 1000**n for n, u in enumerate(_DECIMAL, 1)}}
_BY_NAME = {unit.lower(): size for unit, size in _UNITS.items()}


def parse_bytes(text: str | float) -> int:
    """`"60GiB"`, `"80GB"` or a plain number as bytes; raises `PlanError` when malformed."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if not match or match[2].lower() not in _BY_NAME or not float(match[1]):
        raise PlanError(
            f"memory {text!r}: expected a positive number of bytes, or one with a unit such as '60GiB', '80GB'"
        )
    return int(float(match[1]) * _BY_NAME[match[2].lower()])


def format_bytes(value: float) -> str:
    """Three digits and a unit: `"1.50 GiB"`."""
    for unit in _BINARY:
        if abs(value) < 1000 or unit == _BINARY[-1]:
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{_three_digits(value)} {unit}"


def format_seconds(value: float) -> str:
    """Three digits and a unit: `"12.3 ms"`."""
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= scale:
            return f"{_three_digits(value / scale)} {unit}"
    return f"{_three_digits(value * 1e9)} ns" if value else "0 s"


def signed_seconds(value: float) -> str:
    """A difference: `"+12.3 ms"`, `"-1.00 s"`."""
    return f"+{format_seconds(value)}" if value > 0 else format_seconds(value)


def signed_bytes(value: float) -> str:
    """A difference: `"+1.50 GiB"`, `"-12 B"`."""
    return f"+{format_bytes(value)}" if value > 0 else format_bytes(value)


def _three_digits(value: float) -> str:
    digits = max(0, 2 - max(0, len(str(int(abs(value)))) - 1))
    return f"{value:.{digits}f}"
