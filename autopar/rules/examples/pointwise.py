"""Calls that prove the rules of `rules/pointwise.py`."""

from __future__ import annotations

from autopar.rules.examples.example import Examples, aten, call, drawn, index, mask, t, unit

EXAMPLES: Examples = {
    "aten.max.other": [call(aten.max.other, t(4, 6), t(6))],
    "aten.min.other": [call(aten.min.other, t(4, 1), t(4, 6))],
    "aten.copy": [call(aten.copy.default, t(6, 12), t(12)), call(aten.copy.default, t(6, 12), t(6, 12))],
    "aten._add_relu": [call(aten._add_relu.Tensor, t(4, 6), t(4, 6))],
    "aten._prelu_kernel": [call(aten._prelu_kernel.default, t(4, 6), t(1, 6))],
    "aten._prelu_kernel_backward": [call(aten._prelu_kernel_backward.default, t(4, 6), t(4, 6), t(1, 6))],
    "aten.complex": [call(aten.complex.default, t(4, 6), t(6))],
    "aten.elu_backward": [
        call(aten.elu_backward.default, t(4, 6), 1.0, 1.0, 1.0, False, t(4, 6)),
        call(aten.elu_backward.default, t(4, 6), 0.5, 1.0, 1.0, True, t(4, 6)),
    ],
    "aten.fill": [call(aten.fill.Scalar, t(4, 6), 2.0), call(aten.fill.Tensor, t(4, 6), t())],
    "aten.floor_divide": [call(aten.floor_divide.default, t(4, 6), t(6)), call(aten.floor_divide.Scalar, index(6), 2)],
    "aten.hardshrink_backward": [call(aten.hardshrink_backward.default, t(4, 6), t(4, 6), 0.9)],
    "aten.hardsigmoid_backward": [call(aten.hardsigmoid_backward.default, t(4, 6), t(4, 6))],
    "aten.hardswish": [call(aten.hardswish.default, t(4, 6))],
    "aten.hardswish_backward": [call(aten.hardswish_backward.default, t(4, 6), t(4, 6))],
    "aten.hardtanh_backward": [call(aten.hardtanh_backward.default, t(4, 6), t(4, 6), -1.0, 1.0)],
    "aten.leaky_relu_backward": [call(aten.leaky_relu_backward.default, t(4, 6), t(4, 6), 0.1, False)],
    "aten.log_sigmoid_backward": [drawn(unit, aten.log_sigmoid_backward.default, t(4, 6), t(4, 6), t(4, 6))],
    "aten.log_sigmoid_forward": [call(aten.log_sigmoid_forward.default, t(4, 6))],
    "aten.masked_fill.Tensor": [call(aten.masked_fill.Tensor, t(4, 6), mask(6), t())],
    "aten.mish_backward": [call(aten.mish_backward.default, t(4, 6), t(4, 6))],
    "aten.polar": [call(aten.polar.default, t(4, 6), t(4, 6))],
    "aten.rrelu_with_noise_backward": [
        call(aten.rrelu_with_noise_backward.default, t(4, 6), t(4, 6), t(4, 6), 0.1, 0.3, True, False),
    ],
    "aten.rsub.Tensor": [call(aten.rsub.Tensor, t(4, 6), t(4, 6), alpha=2)],
    "aten.softplus_backward": [call(aten.softplus_backward.default, t(4, 6), t(4, 6), 1.0, 20.0)],
    "aten.softshrink_backward": [call(aten.softshrink_backward.default, t(4, 6), t(4, 6), 0.9)],
    "aten.zero": [call(aten.zero.default, t(4, 6))],
    "aten._standard_gamma_grad": [call(aten._standard_gamma_grad.default, t(4, 6), t(4, 6))],
}
