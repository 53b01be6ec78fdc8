"""Calls that prove the rules of `rules/attention.py`."""

from __future__ import annotations

from autopar.rules.examples.example import Example, Examples, aten, call, own, t


def _attention(
    heads: int, groups: int, causal: bool, mask_shape: tuple[int, ...] | None = None, width: int = 4
) -> Example:
    q, kv = t(2, heads, 6, 4), t(2, groups, 6, 4)
    bias = None if mask_shape is None else t(*mask_shape)
    return call(own.attention.default, q, kv, t(2, groups, 6, width), bias, causal, 0.5)


def _attention_backward(
    heads: int, groups: int, causal: bool, mask_shape: tuple[int, ...] | None = None, width: int = 4
) -> Example:
    q, kv, lse = (2, heads, 6, 4), (2, groups, 6, 4), (2, heads, 6)
    bias = None if mask_shape is None else t(*mask_shape)
    out, values = (*q[:3], width), (*kv[:3], width)
    args = (t(*out), t(*q), t(*kv), t(*values), bias, t(*out), t(*lse), causal, 0.5)
    return call(own.attention_backward.default, *args)


def _fused_backward(causal: bool) -> Example:
    q, kv = (2, 6, 4, 8), (2, 6, 4 if causal else 3, 8)
    args = (t(*q), t(*q), t(*kv), t(*kv), t(*q), t(*q[:3]), 0.0, causal)
    return call(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, *args)


EXAMPLES: Examples = {
    "autopar.attention": [
        _attention(6, 6, True),
        _attention(6, 2, False),
        _attention(4, 2, False, (6, 6)),
        _attention(4, 2, False, (2, 1, 6, 6)),
        _attention(4, 4, False, (2, 4, 1, 6)),
        _attention(4, 2, True, width=2),
        _attention(4, 2, False, width=6),
    ],
    "autopar.attention_backward": [
        _attention_backward(6, 2, True),
        _attention_backward(6, 3, False),
        _attention_backward(4, 2, False, (2, 1, 6, 6)),
        _attention_backward(4, 2, True, width=2),
        _attention_backward(4, 2, False, width=6),
    ],
    "aten._scaled_dot_product_flash_attention_for_cpu": [
        call(aten._scaled_dot_product_flash_attention_for_cpu.default, t(2, 6, 4, 8), t(2, 6, 3, 8), t(2, 6, 3, 8)),
        call(
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            *(t(2, 6, 4, 8), t(2, 6, 4, 8), t(2, 6, 4, 8), 0.0, True),
        ),
        call(
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            *(t(2, 6, 4, 8), t(2, 6, 3, 8), t(2, 6, 3, 8)),
            attn_mask=t(2, 1, 4, 3),
        ),
    ],
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": [_fused_backward(False), _fused_backward(True)],
}
