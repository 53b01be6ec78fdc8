"""Calls that prove the rules of `rules/normalisation.py`."""

from __future__ import annotations

from autopar.rules.examples.example import Example, Examples, aten, call, t


def _layer_norm(shape: tuple[int, ...], last: int, affine: bool = True) -> Example:
    kept = shape[len(shape) - last :]
    weights = (t(*kept), t(*kept)) if affine else (None, None)
    return call(aten.native_layer_norm.default, t(*shape), list(kept), *weights, 1e-5)


def _layer_norm_backward(shape: tuple[int, ...], last: int, outputs: list[bool], affine: bool = True) -> Example:
    kept = shape[len(shape) - last :]
    statistic = (*shape[: len(shape) - last], *(1,) * last)
    weights = (t(*kept), t(*kept)) if affine else (None, None)
    args = (t(*shape), t(*shape), list(kept), t(*statistic), t(*statistic), *weights, outputs)
    return call(aten.native_layer_norm_backward.default, *args)


EXAMPLES: Examples = {
    "aten.native_layer_norm": [_layer_norm((4, 6, 3), 1), _layer_norm((4, 6, 3), 2), _layer_norm((4, 6), 1, False)],
    "aten.native_layer_norm_backward": [
        _layer_norm_backward((4, 6, 3), 1, [True, True, True]),
        _layer_norm_backward((4, 6, 3), 2, [True, True, False]),
        _layer_norm_backward((4, 6), 1, [False, True, True]),
        _layer_norm_backward((4, 6), 1, [True, False, False], affine=False),
    ],
}
