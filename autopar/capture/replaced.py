"""Torch functions that capture traces as something else: composites, and losses in primitive ops.

Each entry of `replacements()` takes the arguments of the function that it stands for and returns its value, or
`NotImplemented` to let the function itself be traced.

Invariants:
- a replacement's value and gradients equal the function's to rounding;
- a vocabulary-split cross entropy follows from the rules of amax, exp, sum, gather: so the loss stays in those.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.capture.drawing import Draws
from autopar.capture.statistics import batch_norm
from autopar.composites import attention_scores, ungrouped


def replacements(draws: Draws, *, mixed: bool = False) -> dict[Any, Callable[..., Any]]:
    """The table for `CallMode`; random numbers come from `draws`.

    `mixed`: linear layers cast their input to the weight's dtype.
    """
    table: dict[Any, Callable[..., Any]] = {
        F.linear: functools.partial(_linear, mixed=mixed),
        F.scaled_dot_product_attention: functools.partial(_attention, draws),
        F.multi_head_attention_forward: functools.partial(_multi_head_attention, draws, mixed=mixed),
        F.cross_entropy: _cross_entropy,
        F.nll_loss: _nll_loss,
        F.mse_loss: _mse_loss,
        F.batch_norm: batch_norm,
        F.pad: _pad,
        torch.lstm: _lstm,
    }
    for grouped in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)):
        table[grouped] = _grouped_mm  # the one of two names that this torch has
    for dropout in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout):
        table[dropout] = _no_dropout
    return {**table, F.dropout: functools.partial(_dropout, draws)}


# -- composites ------------------------------------------------------------------------------------------------------


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, mixed: bool) -> Any:
    if weight.dim() != 2 or input.dim() == 0:
        return NotImplemented
    dtype = _autocast_dtype() or (weight.dtype if mixed else input.dtype)
    if dtype != weight.dtype and _autocast_dtype() is None:
        return NotImplemented  # torch's own error is the clearest
    cast = [x if x is None or x.dtype == dtype else x.to(dtype) for x in (input, weight, bias)]
    return torch.ops.autopar.linear(*cast)


def _attention(
    draws: Draws,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    grouped = enable_gqa or query.shape[1] == key.shape[1]
    plain = query.dim() == key.dim() == 4 and query.shape[-1] == key.shape[-1] and query.shape[0] == key.shape[0]
    needs_mask_gradient = attn_mask is not None and attn_mask.requires_grad
    if not plain or not grouped or needs_mask_gradient or (is_causal and attn_mask is not None):
        return NotImplemented
    if attn_mask is not None and attn_mask.dim() not in (2, 4):
        return NotImplemented
    dtype = _autocast_dtype() or query.dtype
    q, k, v = (x if x.dtype == dtype else x.to(dtype) for x in (query, key, value))
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if dropout_p > 0:
        return _attention_with_dropout(draws, q, k, v, attn_mask, is_causal, factor, dropout_p)
    return torch.ops.autopar.attention(q, k, v, attn_mask, is_causal, factor)[0]


def _attention_with_dropout(
    draws: Draws, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float, p: float
) -> Any:
    """In plain ops, as the weights that are dropped must be had: quadratic in memory, as torch's own is."""
    scores = attention_scores(q, k, mask, is_causal, scale)
    weights = scores.softmax(-1) if mask is None else torch.ops.aten._safe_softmax(scores, -1)
    kept = _dropout(draws, weights.to(v.dtype), p)
    return kept if kept is NotImplemented else torch.matmul(kept, ungrouped(v, q.shape[1]))


def _grouped_mm(x: Tensor, weight: Tensor, offs: Tensor | None = None, *others: Any, **named: Any) -> Any:
    if offs is None or x.dim() != 2 or weight.dim() != 3 or others or any(v is not None for v in named.values()):
        return NotImplemented
    return torch.ops.autopar.grouped_mm(x, weight, offs)


def _multi_head_attention(
    draws: Draws,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    is_causal: bool = False,
    mixed: bool = False,
    **others: Any,
) -> Any:
    """`nn.MultiheadAttention` [s, b, w] in its usual form; torch's own code would hide its layers from this table."""
    if in_proj_weight is None or bias_k is not None or add_zero_attn or need_weights or use_separate_proj_weight:
        return NotImplemented
    if key_padding_mask is not None or others.get("static_k") is not None:
        return NotImplemented
    if query.dim() != 3 or key is not value:
        return NotImplemented
    linear = functools.partial(_linear, mixed=mixed)
    if query is key:
        parts = linear(query, in_proj_weight, in_proj_bias).chunk(3, -1)
    else:
        width = query.shape[-1]
        to_q, to_kv = in_proj_weight[:width], in_proj_weight[width:]
        q_bias, kv_bias = (None, None) if in_proj_bias is None else (in_proj_bias[:width], in_proj_bias[width:])
        parts = (linear(query, to_q, q_bias), *linear(key, to_kv, kv_bias).chunk(2, -1))
    q, k, v = (x.view(*x.shape[:2], num_heads, -1).permute(1, 2, 0, 3) for x in parts)
    mask = None if is_causal else attn_mask
    if mask is not None and mask.dim() == 3:
        mask = mask.view(-1, num_heads, *mask.shape[1:])
    attended = _attention(draws, q, k, v, mask, dropout_p if training else 0.0, is_causal)
    if attended is NotImplemented:
        return NotImplemented
    merged = attended.permute(2, 0, 1, 3).reshape(query.shape)
    return linear(merged, out_proj_weight, out_proj_bias), None


def _autocast_dtype() -> torch.dtype | None:
    """Custom ops bypass autocast: their operands are cast by hand."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def _lstm(*arguments: Any) -> Any:
    """In primitive ops, step by step: oneDNN's whole layer can't be split, nor traced backward (torch 2.13)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of another vendor's devices, whenever oneDNN's flags are set
        with torch.backends.mkldnn.flags(enabled=False):
            return torch.lstm(*arguments)


# -- losses ----------------------------------------------------------------------------------------------------------


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if target.is_floating_point() or size_average is not None or reduce is not None or not 0 <= label_smoothing <= 1:
        return NotImplemented  # torch's own error is the clearest
    dim = 1 if input.dim() > 1 else 0
    logits = input if input.dtype == torch.float64 else input.float()
    shifted = logits - logits.detach().amax(dim, keepdim=True)
    log_total = shifted.exp().sum(dim).log()
    index = target.masked_fill(target == ignore_index, 0)
    losses = log_total - shifted.gather(dim, index.unsqueeze(dim)).squeeze(dim)
    scales = _scales(index, target == ignore_index, weight, losses.dtype)
    if weight is not None:
        losses = losses * scales
    if label_smoothing:
        spread = _of_all_classes(log_total, shifted, weight, dim) * (label_smoothing / input.shape[dim])
        losses = losses * (1 - label_smoothing) + spread
    return _reduce(losses, scales, target == ignore_index, reduction)


def _of_all_classes(log_total: Tensor, shifted: Tensor, weight: Tensor | None, dim: int) -> Tensor:
    """-sum over classes of weight times log-probability: what smoothed labels add for each class."""
    if weight is None:
        return log_total * shifted.shape[dim] - shifted.sum(dim)
    by_class = weight.view([-1 if d == dim else 1 for d in range(shifted.dim())])
    return log_total * weight.sum() - (shifted * by_class).sum(dim)


def _nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None:
        return NotImplemented
    dim = 1 if input.dim() > 1 else 0
    index = target.masked_fill(target == ignore_index, 0)
    losses = -input.gather(dim, index.unsqueeze(dim)).squeeze(dim)
    scales = _scales(index, target == ignore_index, weight, losses.dtype)
    return _reduce(losses if weight is None else losses * scales, scales, target == ignore_index, reduction)


def _mse_loss(input: Tensor, target: Tensor, *legacy: Any, reduction: str = "mean", **others: Any) -> Any:
    has_others = any(value is not None for value in (*legacy, *others.values()))
    if has_others or input.shape != target.shape or input.dtype != target.dtype:
        return NotImplemented
    squares = (input - target).square()
    return squares if reduction == "none" else squares.sum() if reduction == "sum" else squares.mean()


def _scales(index: Tensor, ignored: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What each position counts for: the weight of its class, and nothing where it is ignored."""
    return (~ignored if weight is None else weight[index].masked_fill(ignored, 0.0)).to(dtype)


def _reduce(losses: Tensor, scales: Tensor, ignored: Tensor, reduction: str) -> Any:
    """Ignored positions count for nothing, in the sum and in the mean's divisor."""
    kept = losses.masked_fill(ignored, 0.0)
    if reduction == "none":
        return kept
    return kept.sum() if reduction == "sum" else kept.sum() / scales.sum()


# -- others ----------------------------------------------------------------------------------------------------------


def _no_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return input if p == 0 or not training else NotImplemented


def _dropout(draws: Draws, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """The backward needs the mask alone, a byte an element; torch's own code would keep a float of noise."""
    if p == 0 or not training:
        return input
    if inplace or not 0.0 < p < 1.0 or input.numel() == 0:
        return NotImplemented
    return input * draws.mask(input.shape, 1 - p) * (1 / (1 - p))


def _pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """Constant padding as concatenation: `constant_pad_nd` would fix symbolic sizes (the label shift uses it)."""
    if mode != "constant" or any(isinstance(n, int) and n < 0 for n in pad):
        return NotImplemented
    for i in range(len(pad) // 2):
        dim = input.dim() - 1 - i
        parts = [_filled(input, dim, pad[2 * i], value), input, _filled(input, dim, pad[2 * i + 1], value)]
        input = torch.cat([part for part in parts if part is not None], dim)
    return input


def _filled(like: Tensor, dim: int, size: int, value: float | None) -> Tensor | None:
    if isinstance(size, int) and size == 0:
        return None
    shape = [size if d == dim else n for d, n in enumerate(like.shape)]
    return like.new_full(shape, 0 if value is None else value)
