"""Calls that prove the rules of `rules/rearrangements.py`."""

from __future__ import annotations

from autopar.rules.examples.example import Examples, aten, c64, call, t

EXAMPLES: Examples = {
    "aten.repeat": [
        call(aten.repeat.default, t(4, 6), [2, 3]),
        call(aten.repeat.default, t(6), [4, 1, 2]),
        call(aten.repeat.default, t(1, 6), [4, 1]),
    ],
    "aten.pixel_shuffle": [
        call(aten.pixel_shuffle.default, t(6, 12, 4, 3), 2),
        call(aten.pixel_shuffle.default, t(8, 4, 6), 2),
    ],
    "aten.pixel_unshuffle": [call(aten.pixel_unshuffle.default, t(6, 3, 8, 12), 2)],
    "aten.channel_shuffle": [
        call(aten.channel_shuffle.default, t(2, 12, 3), 2),
        call(aten.channel_shuffle.default, t(2, 12, 4, 3), 6),
    ],
    "aten.unfold": [
        call(aten.unfold.default, t(4, 12, 6), 1, 2, 2),
        call(aten.unfold.default, t(4, 12, 6), 1, 4, 2),
        call(aten.unfold.default, t(12), -1, 3, 3),
    ],
    "aten.unfold_backward": [
        call(aten.unfold_backward.default, t(4, 6, 6, 2), [4, 12, 6], 1, 2, 2),
        call(aten.unfold_backward.default, t(4, 5, 6, 4), [4, 12, 6], 1, 4, 2),
    ],
    "aten.im2col": [
        call(aten.im2col.default, t(2, 6, 5, 4), [2, 2], [1, 1], [0, 0], [1, 1]),
        call(aten.im2col.default, t(6, 5, 4), [3, 2], [1, 1], [1, 0], [2, 1]),
    ],
    "aten.col2im": [
        call(aten.col2im.default, t(2, 24, 12), [5, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
        call(aten.col2im.default, t(24, 12), [5, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
    ],
    "aten.diagonal": [
        call(aten.diagonal.default, t(4, 6, 3)),
        call(aten.diagonal.default, t(4, 6, 3), 1, -1, 0),
    ],
    "aten.diagonal_backward": [
        call(aten.diagonal_backward.default, t(3, 4), [4, 6, 3], 0, 0, 1),
        call(aten.diagonal_backward.default, t(6, 2), [4, 6, 3], 1, 0, 2),
    ],
    "aten.diag_embed": [call(aten.diag_embed.default, t(4, 6)), call(aten.diag_embed.default, t(4, 6), 1, 0, 2)],
    "aten.diagonal_scatter": [call(aten.diagonal_scatter.default, t(4, 6, 3), t(6, 3), 0, 0, 2)],
    "aten.view_as_real": [call(aten.view_as_real.default, t(4, 6, dtype=c64))],
    "aten.view_as_complex": [call(aten.view_as_complex.default, t(4, 6, 2))],
}
