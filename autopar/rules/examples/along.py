"""Calls that prove the rules of `rules/along.py`."""

from __future__ import annotations

import torch

from autopar.rules.examples.example import Examples, aten, call, index, t

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
}
