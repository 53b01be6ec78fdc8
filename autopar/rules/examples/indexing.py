"""Calls that prove the rules of `rules/indexing.py`."""

from __future__ import annotations

from autopar.rules.examples.example import Examples, ascending, aten, call, drawn, i32, index, mask, t
from autopar.rules.prove import ties

EXAMPLES: Examples = {
    "aten.index": [
        call(aten.index.Tensor, t(8, 12), [index(6)]),
        call(aten.index.Tensor, t(12, 8, 8, 6), [None, index(6, 1), index(1, 6)]),
        call(aten.index.Tensor, t(8, 12, 8), [index(6), None, index(6)]),
    ],
    "aten.index_select": [call(aten.index_select.default, t(12, 8, 6), 1, index(6))],
    "aten.embedding": [
        call(aten.embedding.default, t(12, 4), index(2, 6)),
        call(aten.embedding.default, t(6, 4), index(8), 3),
        call(aten.embedding.default, t(6, 4), t(12, dtype=i32)),
    ],
    "aten.gather": [
        call(aten.gather.default, t(4, 12), 1, index(4, 6)),
        call(aten.gather.default, t(4, 6), -1, index(2, 3)),
        call(aten.gather.default, t(6, 4), 0, index(8, 4)),
        call(aten.gather.default, index(4, 12), 1, index(4, 1)),
        call(aten.gather.default, mask(4, 12), 1, index(4, 2)),
    ],
    "aten._unsafe_index": [call(aten._unsafe_index.Tensor, t(12, 8, 6), [None, index(6, 1)])],
    "aten._embedding_bag": [
        call(aten._embedding_bag.default, t(12, 6), index(8), index(4), False, 1),
        call(aten._embedding_bag.default, t(12, 6), index(8), index(4), False, 2),
    ],
    "aten._embedding_bag_forward_only": [
        call(aten._embedding_bag_forward_only.default, t(12, 6), index(8), index(4), False, 1),
    ],
    "aten.take": [call(aten.take.default, t(4, 12), index(6, 2))],
    "aten.bucketize": [
        drawn(ascending, aten.bucketize.Tensor, t(4, 6), t(12)),
        drawn(ascending, aten.bucketize.Tensor, t(6), t(8), out_int32=True, right=True),
    ],
    "aten.searchsorted": [
        drawn(ascending, aten.searchsorted.Tensor, t(12), t(4, 6)),
        drawn(ascending, aten.searchsorted.Tensor, t(4, 8), t(4, 6), right=True),
        drawn(ascending, aten.searchsorted.Tensor, t(4, 8), t(4, 6), sorter=index(4, 8)),
    ],
    "aten.isin": [
        drawn(ties, aten.isin.Tensor_Tensor, t(4, 6), t(4)),
        call(aten.isin.Tensor_Scalar, index(4, 6), 1),
    ],
}
