"""Calls that prove the rules of `rules/indexing.py`."""

from __future__ import annotations

from autopar.rules.examples.example import Example, Examples, aten, call, i32, index, mask, t


def _embedding_backward(*rows: int, padding: int = -1, by_frequency: bool = False) -> Example:
    return call(aten.embedding_dense_backward.default, t(*rows, 4), index(*rows), 12, padding, by_frequency)


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
    "aten.embedding_dense_backward": [
        _embedding_backward(2, 6),
        _embedding_backward(24, padding=3),
        _embedding_backward(24, by_frequency=True),
    ],
    "aten.gather": [
        call(aten.gather.default, t(4, 12), 1, index(4, 6)),
        call(aten.gather.default, t(4, 6), -1, index(2, 3)),
        call(aten.gather.default, t(6, 4), 0, index(8, 4)),
        call(aten.gather.default, index(4, 12), 1, index(4, 1)),
        call(aten.gather.default, mask(4, 12), 1, index(4, 2)),
    ],
    "aten.scatter_add": [
        call(aten.scatter_add.default, t(4, 12), 1, index(4, 6), t(4, 6)),
        call(aten.scatter_add.default, t(12, 4), 0, index(6, 2), t(6, 2)),
        call(aten.scatter_add.default, t(12, 4), -2, index(8, 4), t(8, 4)),
    ],
}
