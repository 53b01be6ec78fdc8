"""Calls that prove the rules of `rules/convolution.py`."""

from __future__ import annotations

from autopar.rules.examples.example import Example, Examples, Shape, aten, call, t


def _convolution_backward(
    x: Shape, w: Shape, y: Shape, groups: int, outs: list[bool], transposed: bool = False
) -> Example:
    rank = len(x) - 2
    bias = [y[1]] if outs[2] else None
    rest = ([1] * rank, [0] * rank, [1] * rank, transposed, [0] * rank, groups, outs)
    return call(aten.convolution_backward.default, t(*y), t(*x), t(*w), bias, *rest)


EXAMPLES: Examples = {
    "aten.convolution": [
        call(aten.convolution.default, t(6, 12, 5, 4), t(18, 12, 3, 2), None, [1, 1], [1, 0], [1, 1], False, [0, 0], 1),
        call(aten.convolution.default, t(6, 12, 5), t(18, 12, 3), t(18), [2], [1], [1], False, [0], 1),
        call(aten.convolution.default, t(6, 12, 5), t(12, 18, 3), None, [2], [1], [1], True, [1], 1),
        call(aten.convolution.default, t(6, 12, 5), t(12, 1, 3), t(12), [1], [1], [1], False, [0], 12),
        call(aten.convolution.default, t(2, 8, 5), t(24, 2, 3), t(24), [1], [1], [1], False, [0], 4),
        call(aten.convolution.default, t(2, 12, 5), t(12, 4, 3), None, [2], [1], [1], True, [1], 6),
    ],
    "aten.convolution_backward": [
        _convolution_backward((6, 12, 5, 4), (18, 12, 3, 2), (6, 18, 3, 3), 1, [True, True, False]),
        _convolution_backward((6, 12, 5), (18, 12, 3), (6, 18, 3), 1, [True, True, True]),
        _convolution_backward((6, 12, 5), (18, 12, 3), (6, 18, 3), 1, [False, True, False]),
        _convolution_backward((6, 12, 5), (12, 1, 3), (6, 12, 3), 12, [True, True, True]),
        _convolution_backward((2, 8, 5), (24, 2, 3), (2, 24, 3), 4, [True, True, True]),
        _convolution_backward((2, 12, 5), (12, 4, 3), (2, 24, 7), 6, [True, True, True], transposed=True),
        _convolution_backward((6, 12, 5), (12, 18, 3), (6, 18, 7), 1, [True, True, True], transposed=True),
        _convolution_backward((6, 12, 5), (12, 18, 3), (6, 18, 7), 1, [True, True, False], transposed=True),
    ],
    "aten.conv_tbc": [call(aten.conv_tbc.default, t(5, 2, 4), t(3, 4, 6), t(6), 1)],
}
