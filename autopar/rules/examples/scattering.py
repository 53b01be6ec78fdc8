"""Calls that prove the rules of `rules/scattering.py`."""

from __future__ import annotations

from autopar.rules.examples.example import Example, Examples, aten, call, index, mask, t


def _embedding_backward(*rows: int, padding: int = -1, by_frequency: bool = False) -> Example:
    return call(aten.embedding_dense_backward.default, t(*rows, 4), index(*rows), 12, padding, by_frequency)


EXAMPLES: Examples = {
    "aten.embedding_dense_backward": [
        _embedding_backward(2, 6),
        _embedding_backward(24, padding=3),
        _embedding_backward(24, by_frequency=True),
    ],
    "aten.scatter_add": [
        call(aten.scatter_add.default, t(4, 12), 1, index(4, 6), t(4, 6)),
        call(aten.scatter_add.default, t(12, 4), 0, index(6, 2), t(6, 2)),
        call(aten.scatter_add.default, t(12, 4), -2, index(8, 4), t(8, 4)),
    ],
    "aten.scatter": [
        call(aten.scatter.src, t(4, 12), 1, index(4, 6), t(4, 6)),
        call(aten.scatter.value, t(12, 4), 0, index(6, 2), 3.0),
        call(aten.scatter.reduce, t(4, 12), 1, index(4, 6), t(4, 6), reduce="add"),
    ],
    "aten.scatter_reduce": [
        call(aten.scatter_reduce.two, t(4, 12), 1, index(4, 6), t(4, 6), "amax"),
        call(aten.scatter_reduce.two, t(12, 4), 0, index(6, 4), t(6, 4), "mean", include_self=False),
    ],
    "aten.index_copy": [call(aten.index_copy.default, t(4, 12), 1, index(6), t(4, 6))],
    "aten.index_fill": [
        call(aten.index_fill.int_Scalar, t(4, 12), 1, index(6), 2.0),
        call(aten.index_fill.int_Tensor, t(12, 4), -2, index(6), t()),
    ],
    "aten.index_reduce": [call(aten.index_reduce.default, t(4, 12), 1, index(6), t(4, 6), "prod")],
    "aten.index_add": [
        call(aten.index_add.default, t(4, 12), 1, index(6), t(4, 6)),
        call(aten.index_add.default, t(8, 4), 0, index(6), t(6, 4), alpha=0.5),
    ],
    "aten.index_put": [
        call(aten.index_put.default, t(8, 12), [index(6)], t(6, 12), True),
        call(aten.index_put.default, t(8, 12), [index(6)], t(12)),
        call(aten.index_put.default, t(12, 8, 8, 6), [None, index(6, 1), index(1, 6)], t(6, 1, 6), True),
        call(aten.index_put.default, t(8, 12, 8), [index(6), None, index(6)], t(6, 12), True),
        call(aten.index_put.default, t(4, 6), [mask(4, 6)], t()),
        call(aten.index_put.default, t(4, 6, 2), [mask(4)], t(1)),
        call(aten.index_put.default, t(4, 6, 2), [None, mask(6)], t()),
    ],
    "aten._unsafe_index_put": [call(aten._unsafe_index_put.default, t(8, 12), [index(6)], t(6, 12), True)],
    "aten.as_strided_scatter": [call(aten.as_strided_scatter.default, t(4, 6), t(3, 2), [3, 2], [6, 2], 1)],
    "aten.put": [call(aten.put.default, t(4, 6), index(12), t(12), True)],
    "aten.masked_scatter": [call(aten.masked_scatter.default, t(4, 6), mask(4, 6), t(24))],
    "aten.masked_scatter_backward": [call(aten.masked_scatter_backward.default, t(4, 6), mask(4, 6), [24])],
}
