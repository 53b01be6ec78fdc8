"""Calls that prove the rules of `rules/resampling.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.rules.examples.example import Example, Examples, aten, call, drawn, t, unit
from autopar.rules.resampling import UPSAMPLING

_IMAGE = (2, 6, 4, 3, 5)
_RESULT = (2, 6, 5, 4, 6)


def _op(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(aten, name).default
    return found


def _padded(n: int) -> dict[str, list[Example]]:
    """Both paddings by one at each end, of `n` spatial dims, and their backward."""
    image = _IMAGE[: 2 + n]
    result = (*image[:2], *(size + 2 for size in image[2:]))
    found = {}
    for kind in ("reflection", "replication"):
        name = f"{kind}_pad{n}d"
        found[name] = [call(_op(name), t(*image), [1] * 2 * n)]
        found[f"{name}_backward"] = [call(_op(f"{name}_backward"), t(*result), t(*image), [1] * 2 * n)]
    return found


def _upsampled(name: str, n: int) -> dict[str, list[Example]]:
    """An op that resamples, and its backward; interpolating ones say whether corners are aligned."""
    image, result = list(_IMAGE[: 2 + n]), list(_RESULT[: 2 + n])
    corners = [] if "nearest" in name else [False]
    return {
        name: [call(_op(name), t(*image), result[2:], *corners)],
        f"{name}_backward": [call(_op(f"{name}_backward"), t(*result), result[2:], image, *corners)],
    }


EXAMPLES: Examples = {
    "aten.grid_sampler_2d": [
        drawn(unit, aten.grid_sampler_2d.default, t(2, 6, 5, 4), t(2, 3, 4, 2), 0, 0, False),
        drawn(unit, aten.grid_sampler_2d.default, t(2, 6, 5, 4), t(2, 6, 4, 2), 1, 1, True),
    ],
    "aten.grid_sampler_2d_backward": [
        drawn(
            unit,
            aten.grid_sampler_2d_backward.default,
            *(t(2, 6, 3, 4), t(2, 6, 5, 4), t(2, 3, 4, 2), 0, 0, False, [True, True]),
        )
    ],
    "aten.grid_sampler_3d": [
        drawn(unit, aten.grid_sampler_3d.default, t(2, 6, 3, 5, 4), t(2, 2, 3, 4, 3), 0, 0, False)
    ],
    "aten.grid_sampler_3d_backward": [
        drawn(
            unit,
            aten.grid_sampler_3d_backward.default,
            *(t(2, 6, 2, 3, 4), t(2, 6, 3, 5, 4), t(2, 2, 3, 4, 3), 0, 0, False, [True, True]),
        )
    ],
    "aten.affine_grid_generator": [
        call(aten.affine_grid_generator.default, t(6, 2, 3), [6, 3, 4, 5], False),
        call(aten.affine_grid_generator.default, t(6, 3, 4), [6, 3, 2, 4, 5], True),
    ],
    **{f"aten.{name}": examples for n in (1, 2, 3) for name, examples in _padded(n).items()},
    **{f"aten.{name}": examples for op, n in UPSAMPLING.items() for name, examples in _upsampled(op, n).items()},
}
