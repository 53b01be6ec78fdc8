"""For each row of the table of rules, calls that prove it: attribute variants, distinct sizes, several dtypes.

A size is divisible by 2 and by 3 where a factor of it should split both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar import composites, markers
from tests.rules.nodes import index, mask, node_of, t

aten, own = torch.ops.aten, torch.ops.autopar
assert composites.LOWERED  # imported for its registration

bf16, f64, i64, i32 = torch.bfloat16, torch.float64, torch.int64, torch.int32


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One call; `values` is False where the result's values are not defined (`aten.empty`)."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: bool = True

    def node(self) -> Node:
        return node_of(self.target, *self.args, **self.kwargs)

    def __str__(self) -> str:
        words = [str(list(a.shape)) if isinstance(a, torch.Tensor) else str(a) for a in self.args]
        return f"{self.target}({', '.join(words)})"


def case(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Case:
    return Case(target, args, kwargs)


def undefined(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Case:
    return Case(target, args, kwargs, values=False)


def _attention(heads: int, groups: int, causal: bool, mask_shape: tuple[int, ...] | None = None) -> Case:
    q, kv = t(2, heads, 6, 4), t(2, groups, 6, 4)
    bias = None if mask_shape is None else t(*mask_shape)
    return case(own.attention.default, q, kv, t(2, groups, 6, 4), bias, causal, 0.5)


def _attention_backward(heads: int, groups: int, causal: bool, mask_shape: tuple[int, ...] | None = None) -> Case:
    q, kv, lse = (2, heads, 6, 4), (2, groups, 6, 4), (2, heads, 6)
    bias = None if mask_shape is None else t(*mask_shape)
    args = (t(*q), t(*q), t(*kv), t(*kv), bias, t(*q), t(*lse), causal, 0.5)
    return case(own.attention_backward.default, *args)


def _layer_norm(shape: tuple[int, ...], last: int, affine: bool = True) -> Case:
    kept = shape[len(shape) - last :]
    weights = (t(*kept), t(*kept)) if affine else (None, None)
    return case(aten.native_layer_norm.default, t(*shape), list(kept), *weights, 1e-5)


def _layer_norm_backward(shape: tuple[int, ...], last: int, outputs: list[bool], affine: bool = True) -> Case:
    kept = shape[len(shape) - last :]
    statistic = (*shape[: len(shape) - last], *(1,) * last)
    weights = (t(*kept), t(*kept)) if affine else (None, None)
    args = (t(*shape), t(*shape), list(kept), t(*statistic), t(*statistic), *weights, outputs)
    return case(aten.native_layer_norm_backward.default, *args)


def _embedding_backward(*rows: int, padding: int = -1, by_frequency: bool = False) -> Case:
    return case(aten.embedding_dense_backward.default, t(*rows, 4), index(*rows), 12, padding, by_frequency)


def _convolution_backward(
    x: Shape, w: Shape, y: Shape, groups: int, outs: list[bool], transposed: bool = False
) -> Case:
    rank = len(x) - 2
    bias = [y[1]] if outs[2] else None
    rest = ([1] * rank, [0] * rank, [1] * rank, transposed, [0] * rank, groups, outs)
    return case(aten.convolution_backward.default, t(*y), t(*x), t(*w), bias, *rest)


CASES: dict[str, list[Case]] = {
    "aten.convolution": [
        case(aten.convolution.default, t(6, 12, 5, 4), t(18, 12, 3, 2), None, [1, 1], [1, 0], [1, 1], False, [0, 0], 1),
        case(aten.convolution.default, t(6, 12, 5), t(18, 12, 3), t(18), [2], [1], [1], False, [0], 1),
        case(aten.convolution.default, t(6, 12, 5), t(12, 18, 3), None, [2], [1], [1], True, [1], 1),
        case(aten.convolution.default, t(6, 12, 5), t(12, 1, 3), t(12), [1], [1], [1], False, [0], 12),
    ],
    "aten.convolution_backward": [
        _convolution_backward((6, 12, 5, 4), (18, 12, 3, 2), (6, 18, 3, 3), 1, [True, True, False]),
        _convolution_backward((6, 12, 5), (18, 12, 3), (6, 18, 3), 1, [True, True, True]),
        _convolution_backward((6, 12, 5), (18, 12, 3), (6, 18, 3), 1, [False, True, False]),
        _convolution_backward((6, 12, 5), (12, 1, 3), (6, 12, 3), 12, [True, True, True]),
        _convolution_backward((6, 12, 5), (12, 18, 3), (6, 18, 7), 1, [True, True, True], transposed=True),
        _convolution_backward((6, 12, 5), (12, 18, 3), (6, 18, 7), 1, [True, True, False], transposed=True),
    ],
    "aten.max_pool2d_with_indices": [case(aten.max_pool2d_with_indices.default, t(6, 12, 4, 6), [2, 2], [2, 2])],
    "aten.max_pool2d_with_indices_backward": [
        case(
            aten.max_pool2d_with_indices_backward.default,
            *(t(6, 12, 2, 3), t(6, 12, 4, 6), [2, 2], [2, 2], [0, 0], [1, 1], False, index(6, 12, 2, 3)),
        )
    ],
    "aten.avg_pool2d": [case(aten.avg_pool2d.default, t(6, 12, 4, 6), [2, 2], [2, 2])],
    "aten.avg_pool2d_backward": [
        case(
            aten.avg_pool2d_backward.default,
            *(t(6, 12, 2, 3), t(6, 12, 4, 6), [2, 2], [2, 2], [0, 0], False, True, None),
        )
    ],
    "aten._adaptive_avg_pool2d": [case(aten._adaptive_avg_pool2d.default, t(6, 12, 4, 6), [2, 3])],
    "aten._adaptive_avg_pool2d_backward": [
        case(aten._adaptive_avg_pool2d_backward.default, t(6, 12, 2, 3), t(6, 12, 4, 6))
    ],
    "aten._safe_softmax": [
        case(aten._safe_softmax.default, t(6, 12), 1),
        case(aten._safe_softmax.default, t(6, 12), 0),
    ],
    "aten.any": [
        case(aten.any.dim, mask(6, 12), 1),
        case(aten.any.dim, mask(6, 12), 0, True),
        case(aten.any.default, mask(6)),
    ],
    "aten.all": [case(aten.all.dim, mask(6, 12), 1), case(aten.all.dims, mask(6, 12, 6), [0, 1])],
    "aten.prod": [case(aten.prod.dim_int, t(6, 12), 1), case(aten.prod.dim_int, t(6, 12), -2, True)],
    "aten.argmax": [case(aten.argmax.default, t(6, 12), 1), case(aten.argmax.default, t(6, 12), 0, True)],
    "aten.argmin": [case(aten.argmin.default, t(6, 12), 1)],
    "aten.logsumexp": [case(aten.logsumexp.default, t(6, 12), [1])],
    "aten.var": [
        case(aten.var.correction, t(6, 12), [1], correction=1, keepdim=True),
        case(aten.var.dim, t(6, 12), [0]),
    ],
    "aten.var_mean": [case(aten.var_mean.correction, t(6, 12), [1], correction=0, keepdim=True)],
    "aten.sort": [case(aten.sort.default, t(6, 12), 1), case(aten.sort.default, t(6, 12), 0, True)],
    "aten.topk": [case(aten.topk.default, t(6, 12), 3, 1), case(aten.topk.default, t(12, 6), 2, 0)],
    "aten.flip": [case(aten.flip.default, t(6, 12, 6), [1])],
    "aten.roll": [case(aten.roll.default, t(6, 12, 6), [1], [1]), case(aten.roll.default, t(6, 12), [1, 2], [0, 1])],
    "aten.slice_scatter": [case(aten.slice_scatter.default, t(6, 12), t(6, 4), 1, 2, 6)],
    "aten.stack": [case(aten.stack.default, [t(6, 12), t(6, 12)], 1), case(aten.stack.default, [t(6, 12)] * 3)],
    "aten.unbind": [case(aten.unbind.int, t(6, 2, 12), 1)],
    "aten.select_scatter": [case(aten.select_scatter.default, t(6, 3, 12), t(6, 12), 1, 2)],
    "aten.copy": [case(aten.copy.default, t(6, 12), t(12)), case(aten.copy.default, t(6, 12), t(6, 12))],
    "aten.index": [
        case(aten.index.Tensor, t(8, 12), [index(6)]),
        case(aten.index.Tensor, t(12, 8, 8, 6), [None, index(6, 1), index(1, 6)]),
        case(aten.index.Tensor, t(8, 12, 8), [index(6), None, index(6)]),
    ],
    "aten.index_select": [case(aten.index_select.default, t(12, 8, 6), 1, index(6))],
    # matmul family
    "aten.mm": [case(aten.mm.default, t(6, 4), t(4, 12)), case(aten.mm.default, t(6, 1), t(1, 12))],
    "aten.bmm": [case(aten.bmm.default, t(2, 6, 4), t(2, 4, 3))],
    "aten.dot": [case(aten.dot.default, t(12), t(12))],
    "aten.mv": [case(aten.mv.default, t(6, 4), t(4))],
    "autopar.linear": [
        case(own.linear.default, t(6, 4), t(12, 4), None),
        case(own.linear.default, t(2, 6, 4), t(3, 4), t(3)),
        case(own.linear.default, t(4), t(6, 4), t(6)),
    ],
    "autopar.linear_dx": [case(own.linear_dx.default, t(2, 6, 3), t(3, 4))],
    "autopar.linear_dw": [case(own.linear_dw.default, t(2, 6, 4), t(2, 6, 3)), case(own.linear_dw.default, t(4), t(6))],
    "autopar.grouped_mm": [case(own.grouped_mm.default, t(6, 4), t(3, 4, 12), index(3))],
    "autopar.grouped_mm_dx": [case(own.grouped_mm_dx.default, t(6, 12), t(3, 4, 12), index(3))],
    "autopar.grouped_mm_dw": [case(own.grouped_mm_dw.default, t(6, 4), t(6, 12), index(3))],
    # attention
    "autopar.attention": [
        _attention(6, 6, True),
        _attention(6, 2, False),
        _attention(4, 2, False, (6, 6)),
        _attention(4, 2, False, (2, 1, 6, 6)),
        _attention(4, 4, False, (2, 4, 1, 6)),
    ],
    "autopar.attention_backward": [
        _attention_backward(6, 2, True),
        _attention_backward(6, 3, False),
        _attention_backward(4, 2, False, (2, 1, 6, 6)),
    ],
    # views
    "aten.t": [case(aten.t.default, t(4, 6)), case(aten.t.default, t(6))],
    "aten.transpose": [case(aten.transpose.int, t(4, 6, 3), 0, -1), case(aten.transpose.int, t(4, 6, 3), 1, 2)],
    "aten.permute": [case(aten.permute.default, t(4, 6, 3), [2, 0, 1]), case(aten.permute.default, t(4, 6), [-1, 0])],
    "aten.view": [
        case(aten.view.default, t(4, 6, 3), [24, 3]),
        case(aten.view.default, t(24, 3), [-1, 6, 3]),
        case(aten.view.default, t(6, 24), [36, 4]),
        case(aten.view.default, t(6, 4), [4, 6]),
        case(aten.view.default, t(2, 12), [2, 1, 3, 4]),
        case(aten.view.default, t(1, 1), []),
    ],
    "aten._unsafe_view": [case(aten._unsafe_view.default, t(4, 6, 3), [24, 3])],
    "aten.reshape": [case(aten.reshape.default, t(4, 6), [2, 2, 6]), case(aten.reshape.default, t(12), [3, -1])],
    "aten.unsqueeze": [case(aten.unsqueeze.default, t(4, 6), 1), case(aten.unsqueeze.default, t(6), -1)],
    "aten.squeeze": [
        case(aten.squeeze.dim, t(4, 1, 6), 1),
        case(aten.squeeze.dims, t(1, 6, 1), [0, 2]),
        case(aten.squeeze.default, t(2, 1, 6)),
        case(aten.squeeze.dim, t(2, 6), 0),
    ],
    "aten.expand": [
        case(aten.expand.default, t(4, 1, 3), [4, 6, 3]),
        case(aten.expand.default, t(1, 6), [4, 2, 6]),
        case(aten.expand.default, t(4, 1, 6), [4, 3, -1]),
    ],
    "aten.slice": [
        case(aten.slice.Tensor, t(4, 18), 1, 6, 12),
        case(aten.slice.Tensor, t(12, 4), 0, 0, 6),
        case(aten.slice.Tensor, t(12, 4), 0, 6, 2**63 - 1),
        case(aten.slice.Tensor, t(4, 12), -1, -6),
        case(aten.slice.Tensor, t(4, 12), 1, 1, 7),
        case(aten.slice.Tensor, t(4, 12), 1, 0, 12, 2),
        case(aten.slice.Tensor, t(4, 12), 1),
    ],
    "aten.slice_backward": [
        case(aten.slice_backward.default, t(4, 6), [4, 18], 1, 6, 12, 1),
        case(aten.slice_backward.default, t(4, 6), [4, 12], -1, -6, 2**63 - 1, 1),
        case(aten.slice_backward.default, t(4, 5), [4, 12], 1, 1, 6, 1),
        case(aten.slice_backward.default, t(4, 6), [4, 12], 1, 0, 12, 2),
    ],
    "aten.select": [case(aten.select.int, t(4, 3, 6), 1, 2), case(aten.select.int, t(4, 6), -1, -1)],
    "aten.select_backward": [
        case(aten.select_backward.default, t(4, 6), [4, 3, 6], 1, 2),
        case(aten.select_backward.default, t(4), [4, 6], -1, -1),
    ],
    "aten.split": [
        case(aten.split.Tensor, t(4, 18), 6, 1),
        case(aten.split.Tensor, t(4, 18), 6, -1),
        case(aten.split.Tensor, t(8, 6), 3),
    ],
    "aten.split_with_sizes": [
        case(aten.split_with_sizes.default, t(4, 12), [6, 6], -1),
        case(aten.split_with_sizes.default, t(4, 12), [6, 4, 2], 1),
    ],
    "aten.cat": [
        case(aten.cat.default, [t(4, 6), t(4, 6)], 1),
        case(aten.cat.default, [t(4, 6), t(2, 6)]),
        case(aten.cat.default, [t(4, 6), t(4, 6), t(4, 6)], -1),
        case(aten.cat.default, [t(0), t(4, 6)], -1),
    ],
    "aten.constant_pad_nd": [
        case(aten.constant_pad_nd.default, t(4, 6), [0, 1]),
        case(aten.constant_pad_nd.default, t(4, 6, 3), [0, 0, 1, 2], 7.0),
        case(aten.constant_pad_nd.default, t(4, 6), [1, -1]),
        case(aten.constant_pad_nd.default, t(4, 6), [1, -1, 0, 0], 3.0),
    ],
    # reductions
    "aten.sum": [
        case(aten.sum.default, t(4, 6)),
        case(aten.sum.dim_IntList, t(4, 6, 3), [0, 2]),
        case(aten.sum.dim_IntList, t(4, 6), [-1], True),
        case(aten.sum.dim_IntList, t(4, 6), [0], dtype=f64),
        case(aten.sum.default, mask(4, 6)),
    ],
    "aten.mean": [
        case(aten.mean.default, t(4, 6)),
        case(aten.mean.dim, t(4, 6, 3), [-1], True),
        case(aten.mean.dim, t(4, 6, 3), [0, 1]),
    ],
    "aten.amax": [case(aten.amax.default, t(4, 6), [-1], True), case(aten.amax.default, t(4, 6, 2), [0, 2])],
    "aten.amin": [case(aten.amin.default, t(4, 6), [1]), case(aten.amin.default, t(4, 6))],
    "aten.view.dtype": [
        case(aten.view.dtype, t(4, 6, dtype=f64), i64),
        case(aten.view.dtype, t(4, 6, dtype=f64), i32),
    ],
    "aten.max.other": [case(aten.max.other, t(4, 6), t(6))],
    "aten.min.other": [case(aten.min.other, t(4, 1), t(4, 6))],
    "aten.max": [
        case(aten.max.default, t(4, 6)),
        case(aten.max.dim, t(4, 6), 1),
        case(aten.max.dim, t(4, 6), -2, True),
    ],
    "aten.min": [
        case(aten.min.default, t(4, 6)),
        case(aten.min.dim, t(4, 6), 0),
    ],
    # normalisation and softmax
    "aten.native_layer_norm": [_layer_norm((4, 6, 3), 1), _layer_norm((4, 6, 3), 2), _layer_norm((4, 6), 1, False)],
    "aten.native_layer_norm_backward": [
        _layer_norm_backward((4, 6, 3), 1, [True, True, True]),
        _layer_norm_backward((4, 6, 3), 2, [True, True, False]),
        _layer_norm_backward((4, 6), 1, [False, True, True]),
        _layer_norm_backward((4, 6), 1, [True, False, False], affine=False),
    ],
    "aten._softmax": [
        case(aten._softmax.default, t(4, 6), -1, False),
        case(aten._softmax.default, t(4, 6, 3), 1, False),
    ],
    "aten._log_softmax": [case(aten._log_softmax.default, t(4, 6), 0, False)],
    "aten._softmax_backward_data": [case(aten._softmax_backward_data.default, t(4, 6), t(4, 6), -1, torch.float32)],
    "aten._log_softmax_backward_data": [
        case(aten._log_softmax_backward_data.default, t(4, 6), t(4, 6), 0, torch.float32)
    ],
    "aten.cumsum": [case(aten.cumsum.default, t(4, 6), 1), case(aten.cumsum.default, index(4, 6), -2)],
    # index family
    "aten.embedding": [
        case(aten.embedding.default, t(12, 4), index(2, 6)),
        case(aten.embedding.default, t(6, 4), index(8), 3),
        case(aten.embedding.default, t(6, 4), t(12, dtype=i32)),
    ],
    "aten.embedding_dense_backward": [
        _embedding_backward(2, 6),
        _embedding_backward(24, padding=3),
        _embedding_backward(24, by_frequency=True),
    ],
    "aten.gather": [
        case(aten.gather.default, t(4, 12), 1, index(4, 6)),
        case(aten.gather.default, t(4, 6), -1, index(2, 3)),
        case(aten.gather.default, t(6, 4), 0, index(8, 4)),
        case(aten.gather.default, index(4, 12), 1, index(4, 1)),
        case(aten.gather.default, mask(4, 12), 1, index(4, 2)),
    ],
    "aten.scatter_add": [
        case(aten.scatter_add.default, t(4, 12), 1, index(4, 6), t(4, 6)),
        case(aten.scatter_add.default, t(12, 4), 0, index(6, 2), t(6, 2)),
        case(aten.scatter_add.default, t(12, 4), -2, index(8, 4), t(8, 4)),
    ],
    "aten.tril": [case(aten.tril.default, t(4, 6, 6)), case(aten.tril.default, t(4, 6, 4), -1)],
    "aten.triu": [case(aten.triu.default, t(2, 6, 6), 1)],
    # factories
    "aten.arange": [
        case(aten.arange.default, 12),
        case(aten.arange.start, 3, 15),
        case(aten.arange.start_step, 2, 26, 4),
        case(aten.arange.start_step, 6, 0, -1, dtype=torch.float32),
        case(aten.arange.start_step, 0.0, 1.2, 0.1, dtype=torch.float32),
        case(aten.arange.default, 6, dtype=torch.float32),
        case(aten.arange.default, 6.0),
    ],
    "aten.full": [case(aten.full.default, [4, 6], 2.5), case(aten.full.default, [6], True)],
    "aten.zeros": [case(aten.zeros.default, [4, 6])],
    "aten.ones": [case(aten.ones.default, [4, 6], dtype=i64)],
    "aten.empty": [undefined(aten.empty.memory_format, [4, 6])],
    "aten.scalar_tensor": [case(aten.scalar_tensor.default, 3.0)],
    "aten.full_like": [case(aten.full_like.default, t(4, 6), 7)],
    "aten.zeros_like": [case(aten.zeros_like.default, t(4, 6))],
    "aten.ones_like": [case(aten.ones_like.default, index(4, 6), dtype=torch.float32)],
    "aten.empty_like": [undefined(aten.empty_like.default, t(4, 6))],
    "aten.new_zeros": [case(aten.new_zeros.default, t(4, 6), [6, 2])],
    "aten.new_full": [case(aten.new_full.default, t(4, 6), [6, 2], 3.0), case(aten.new_full.default, t(6), [], 3.0)],
    "aten.new_ones": [case(aten.new_ones.default, t(4, 6), [12])],
    # copies
    "aten._to_copy": [
        case(aten._to_copy.default, t(4, 6), dtype=bf16),
        case(aten._to_copy.default, t(4, 6, dtype=bf16), dtype=torch.float32),
        case(aten._to_copy.default, t(4, 6), dtype=i64),
        case(aten._to_copy.default, index(4, 6), dtype=torch.float32),
        case(aten._to_copy.default, index(4, 6), dtype=torch.bool),
        case(aten._to_copy.default, t(4, 6)),
    ],
    "aten.clone": [
        case(aten.clone.default, t(4, 6)),
        case(aten.clone.default, index(6), memory_format=torch.contiguous_format),
    ],
    "aten.contiguous": [case(aten.contiguous.default, t(4, 6))],
    "aten.alias": [case(aten.alias.default, t(4, 6))],
    "aten.detach": [case(aten.detach.default, t(4, 6))],
    "aten.lift_fresh_copy": [case(aten.lift_fresh_copy.default, t(4, 6))],
    # our own markers
    "relay": [case(markers.relay, t(4, 6))],
    "accumulate": [case(markers.accumulate, t(4, 6))],
}
