"""Calls that prove the rules of `rules/copies.py`."""

from __future__ import annotations

import torch

from autopar import markers
from autopar.rules.examples.example import Examples, aten, bf16, call, i64, index, t

EXAMPLES: Examples = {
    "aten._to_copy": [
        call(aten._to_copy.default, t(4, 6), dtype=bf16),
        call(aten._to_copy.default, t(4, 6, dtype=bf16), dtype=torch.float32),
        call(aten._to_copy.default, t(4, 6), dtype=i64),
        call(aten._to_copy.default, index(4, 6), dtype=torch.float32),
        call(aten._to_copy.default, index(4, 6), dtype=torch.bool),
        call(aten._to_copy.default, t(4, 6)),
    ],
    "aten.clone": [
        call(aten.clone.default, t(4, 6)),
        call(aten.clone.default, index(6), memory_format=torch.contiguous_format),
    ],
    "aten.contiguous": [call(aten.contiguous.default, t(4, 6))],
    "aten.alias": [call(aten.alias.default, t(4, 6))],
    "aten.detach": [call(aten.detach.default, t(4, 6))],
    "aten.lift_fresh_copy": [call(aten.lift_fresh_copy.default, t(4, 6))],
    "relay": [call(markers.relay, t(4, 6))],
    "accumulate": [call(markers.accumulate, t(4, 6))],
    "plus": [call(markers.plus, t(), t())],
}
