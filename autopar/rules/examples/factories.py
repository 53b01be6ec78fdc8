"""Calls that prove the rules of `rules/factories.py`."""

from __future__ import annotations

import torch

from autopar.rules.examples.example import Examples, aten, call, f32, i64, index, own, t, undefined

_WINDOWS = ("bartlett", "blackman", "hamming", "hann", "kaiser")

EXAMPLES: Examples = {
    "aten.arange": [
        call(aten.arange.default, 12),
        call(aten.arange.start, 3, 15),
        call(aten.arange.start_step, 2, 26, 4),
        call(aten.arange.start_step, 6, 0, -1, dtype=torch.float32),
        call(aten.arange.start_step, 0.0, 1.2, 0.1, dtype=torch.float32),
        call(aten.arange.default, 6, dtype=torch.float32),
        call(aten.arange.default, 6.0),
    ],
    "aten.full": [call(aten.full.default, [4, 6], 2.5), call(aten.full.default, [6], True)],
    "aten.zeros": [call(aten.zeros.default, [4, 6])],
    "aten.ones": [call(aten.ones.default, [4, 6], dtype=i64)],
    "aten.empty": [undefined(aten.empty.memory_format, [4, 6])],
    "aten.scalar_tensor": [call(aten.scalar_tensor.default, 3.0)],
    "aten.full_like": [call(aten.full_like.default, t(4, 6), 7)],
    "aten.zeros_like": [call(aten.zeros_like.default, t(4, 6))],
    "aten.ones_like": [call(aten.ones_like.default, index(4, 6), dtype=torch.float32)],
    "aten.empty_like": [undefined(aten.empty_like.default, t(4, 6))],
    "aten.new_zeros": [call(aten.new_zeros.default, t(4, 6), [6, 2])],
    "aten.new_full": [call(aten.new_full.default, t(4, 6), [6, 2], 3.0), call(aten.new_full.default, t(6), [], 3.0)],
    "aten.new_ones": [call(aten.new_ones.default, t(4, 6), [12])],
    "autopar.random_mask": [
        call(own.random_mask.default, index(), "block#3", [4, 6], 0.7),
        call(own.random_mask.default, index(), "block#3", [6, 1, 2, 12], 0.5),
    ],
    "autopar.random_uniform": [call(own.random_uniform.default, index(), "#1", [6, 4], f32)],
    "autopar.random_normal": [call(own.random_normal.default, index(), "#2", [12], f32)],
    "autopar.random_integers": [call(own.random_integers.default, index(), "#0", [4, 6], -3, 17, i64)],
    "aten.new_empty": [undefined(aten.new_empty.default, t(4, 6), [6, 2])],
    "aten.new_empty_strided": [undefined(aten.new_empty_strided.default, t(4, 6), [6, 2], [1, 6])],
    "aten.empty_strided": [undefined(aten.empty_strided.default, [4, 6], [1, 4])],
    "aten.empty_permuted": [undefined(aten.empty_permuted.default, [4, 6], [1, 0])],
    "aten.eye": [call(aten.eye.default, 6), call(aten.eye.m, 4, 6)],
    "aten.tril_indices": [call(aten.tril_indices.default, 4, 6)],
    "aten.triu_indices": [call(aten.triu_indices.default, 4, 6, 1)],
    "aten.linspace": [call(aten.linspace.default, 0.0, 1.0, 6)],
    "aten.logspace": [call(aten.logspace.default, 0.0, 1.0, 6)],
    "aten.range": [call(aten.range.default, 1, 6)],
    "aten.fft_fftfreq": [call(aten.fft_fftfreq.default, 6)],
    "aten.fft_rfftfreq": [call(aten.fft_rfftfreq.default, 6)],
    **{f"aten.{name}_window": [call(getattr(aten, f"{name}_window").default, 6)] for name in _WINDOWS},
}
