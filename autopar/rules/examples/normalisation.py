"""Calls that prove the rules of `rules/normalisation.py`."""

from __future__ import annotations

import math

from torch import Tensor

from autopar.rules.examples.example import Example, Examples, Shape, aten, call, drawn, t
from autopar.rules.prove import random_value


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


def _four(channels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return t(channels), t(channels), t(channels), t(channels)


def _group_norm_backward(x: Shape, groups: int, outputs: list[bool], affine: bool = True) -> Example:
    samples, channels, *spatial = x
    statistic = (samples, groups)
    weight = t(channels) if affine else None
    sizes = (samples, channels, math.prod(spatial), groups)
    args = (t(*x), t(*x), t(*statistic), t(*statistic), weight, *sizes, outputs)
    return call(aten.native_group_norm_backward.default, *args)


def _batch_norm_backward(trains: bool, outputs: list[bool]) -> Example:
    saved = (t(6), t(6)) if trains else (t(0), t(0))
    args = (t(4, 6, 5), t(4, 6, 5), t(6), t(6), t(6), *saved, trains, 1e-5, outputs)
    return call(aten.native_batch_norm_backward.default, *args)


EXAMPLES: Examples = {
    "aten.native_layer_norm": [_layer_norm((4, 6, 3), 1), _layer_norm((4, 6, 3), 2), _layer_norm((4, 6), 1, False)],
    "aten.native_layer_norm_backward": [
        _layer_norm_backward((4, 6, 3), 1, [True, True, True]),
        _layer_norm_backward((4, 6, 3), 2, [True, True, False]),
        _layer_norm_backward((4, 6), 1, [False, True, True]),
        _layer_norm_backward((4, 6), 1, [True, False, False], affine=False),
    ],
    "aten._fused_rms_norm": [
        call(aten._fused_rms_norm.default, t(4, 6, 3), [3], t(3), 1e-5),
        call(aten._fused_rms_norm.default, t(4, 6, 3), [6, 3], None, None),
    ],
    "aten.native_group_norm": [
        call(aten.native_group_norm.default, t(4, 12, 5), t(12), t(12), 4, 12, 5, 6, 1e-5),
        call(aten.native_group_norm.default, t(4, 12, 2, 3), None, None, 4, 12, 6, 1, 1e-5),
        call(aten.native_group_norm.default, t(4, 12, 5), t(12), None, 4, 12, 5, 12, 1e-5),
    ],
    "aten.native_group_norm_backward": [
        _group_norm_backward((4, 12, 5), 6, [True, True, True]),
        _group_norm_backward((4, 12, 2, 3), 4, [True, False, False], affine=False),
        _group_norm_backward((4, 12, 5), 2, [False, True, True]),
    ],
    "aten._native_batch_norm_legit": [
        call(aten._native_batch_norm_legit.no_stats, t(4, 6, 5), t(6), t(6), True, 0.1, 1e-5),
    ],
    "aten._native_batch_norm_legit_functional": [
        call(aten._native_batch_norm_legit_functional.default, t(4, 6, 5), *_four(6), training, 0.1, 1e-5)
        for training in (True, False)
    ],
    "aten._native_batch_norm_legit_no_training": [
        call(aten._native_batch_norm_legit_no_training.default, t(4, 6, 5), *_four(6), 0.1, 1e-5),
        call(aten._native_batch_norm_legit_no_training.default, t(4, 6), None, None, t(6), t(6), 0.1, 1e-5),
    ],
    "aten.native_batch_norm_backward": [
        _batch_norm_backward(True, [True, True, True]),
        _batch_norm_backward(False, [True, True, True]),
        _batch_norm_backward(True, [False, True, True]),
        _batch_norm_backward(False, [True, False, False]),
    ],
    "aten._weight_norm_interface": [
        call(aten._weight_norm_interface.default, t(6, 4, 3), t(6, 1, 1)),
        call(aten._weight_norm_interface.default, t(4, 3, 6), t(1, 1, 6), 2),
    ],
    "aten._weight_norm_interface_backward": [
        drawn(
            random_value,
            aten._weight_norm_interface_backward.default,
            *(t(6, 4, 3), t(6, 4, 3), t(6, 1, 1), t(6, 1, 1), 0),
        ),
        drawn(
            random_value,
            aten._weight_norm_interface_backward.default,
            *(t(4, 3, 6), t(4, 3, 6), t(1, 1, 6), t(1, 1, 6), 2),
        ),
    ],
}
