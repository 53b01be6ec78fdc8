"""Calls that prove the rules of `rules/along.py`."""

from __future__ import annotations

import torch

from autopar.rules.examples.example import Examples, aten, call, index, mask, t

EXAMPLES: Examples = {
    "aten._softmax": [
        call(aten._softmax.default, t(4, 6), -1, False),
        call(aten._softmax.default, t(4, 6, 3), 1, False),
    ],
    "aten._log_softmax": [call(aten._log_softmax.default, t(4, 6), 0, False)],
    "aten._safe_softmax": [
        call(aten._safe_softmax.default, t(6, 12), 1),
        call(aten._safe_softmax.default, t(6, 12), 0),
    ],
    "aten._softmax_backward_data": [call(aten._softmax_backward_data.default, t(4, 6), t(4, 6), -1, torch.float32)],
    "aten._log_softmax_backward_data": [
        call(aten._log_softmax_backward_data.default, t(4, 6), t(4, 6), 0, torch.float32)
    ],
    "aten.cumsum": [call(aten.cumsum.default, t(4, 6), 1), call(aten.cumsum.default, index(4, 6), -2)],
    "aten.sort": [call(aten.sort.default, t(6, 12), 1), call(aten.sort.default, t(6, 12), 0, True)],
    "aten.topk": [call(aten.topk.default, t(6, 12), 3, 1), call(aten.topk.default, t(12, 6), 2, 0)],
    "aten.flip": [call(aten.flip.default, t(6, 12, 6), [1])],
    "aten.roll": [call(aten.roll.default, t(6, 12, 6), [1], [1]), call(aten.roll.default, t(6, 12), [1, 2], [0, 1])],
    "aten.tril": [call(aten.tril.default, t(4, 6, 6)), call(aten.tril.default, t(4, 6, 4), -1)],
    "aten.triu": [call(aten.triu.default, t(2, 6, 6), 1)],
    "aten.cumprod": [call(aten.cumprod.default, t(4, 6), 1)],
    "aten.cummax": [call(aten.cummax.default, t(4, 6), 1), call(aten.cummax.default, t(4, 6), -2)],
    "aten.cummin": [call(aten.cummin.default, t(4, 6), 0)],
    "aten.logcumsumexp": [call(aten.logcumsumexp.default, t(4, 6), 1)],
    "aten._logcumsumexp": [call(aten._logcumsumexp.default, t(4, 6), 0)],
    "aten.rot90": [call(aten.rot90.default, t(4, 6, 3)), call(aten.rot90.default, t(4, 6, 3), 2, [2, 0])],
    "aten._masked_softmax": [call(aten._masked_softmax.default, t(4, 6), mask(4, 6), 1, 2)],
    "aten._masked_softmax_backward": [
        call(aten._masked_softmax_backward.default, t(4, 6), t(4, 6), mask(4, 6), 1),
    ],
    "aten.renorm": [call(aten.renorm.default, t(4, 6), 2, 1, 1.5), call(aten.renorm.default, t(4, 6, 3), 1, 0, 1.5)],
    "aten.glu": [call(aten.glu.default, t(4, 12)), call(aten.glu.default, t(12, 4), 0)],
    "aten.glu_backward": [
        call(aten.glu_backward.default, t(4, 6), t(4, 12), 1),
        call(aten.glu_backward.default, t(6, 4), t(12, 4), -2),
    ],
}
