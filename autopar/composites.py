"""Composite ops: what one node of the captured graph stands for, lowered per device when the program is built.

    y        = autopar::linear(x, weight, bias)                     # x [..., i], weight [o, i] -> [..., o]
    dx, dw   = autopar::linear_dx(dy, weight), autopar::linear_dw(x, dy)
    out, lse = autopar::attention(q, k, v, mask, is_causal, scale)  # q [b, h, s, d], k [b, g, t, d], v [b, g, t, e]
    y        = autopar::expert_mm(x, weight, expert)                # see `experts`

A linear layer traced in primitive ops is eleven nodes, most of them views; as a composite it is one forward and two
backward nodes, each with a one-line sharding rule.

Invariants:
- every op is functional, has a fake implementation (so it can be traced) and runs on every device;
- `LOWERED` maps each overload to a plain function: what generated code calls, without our dispatcher entry;
- `attention`'s output and gradients lie in memory as [b, s, h, d], so that `transpose(1, 2)` and a view follow free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar import experts
from autopar.private import OpOverload

_ops = torch.ops.aten

# -- linear ----------------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., i], weight [o, i], bias [o] → [..., o]."""
    return torch.nn.functional.linear(x, weight, bias)


def linear_dx(dy: Tensor, weight: Tensor) -> Tensor:
    """The input's gradient: dy [..., o], weight [o, i] → [..., i]."""
    return torch.matmul(dy, weight)


def linear_dw(x: Tensor, dy: Tensor) -> Tensor:
    """The weight's gradient: x [..., i], dy [..., o] → [o, i]."""
    return torch.mm(dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1]))


# -- attention -------------------------------------------------------------------------------------------------------


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ scale + mask) v, and the log-sum-exp of each row's scores, which the backward needs.

    A group's keys and values serve h / g heads. `mask` is additive, or boolean (True attends), and broadcasts to
    [b, h, s, t]; `is_causal` aligns at the upper left.
    """
    wide = _equally_wide(q, k, v)
    if q.device.type == "cpu":
        bias = _additive(mask, q.dtype)
        result = _ops._scaled_dot_product_flash_attention_for_cpu(*wide, 0.0, is_causal, attn_mask=bias, scale=scale)
        return _sequence_major(result[0][..., : v.shape[-1]]), result[1]
    if _fits_flash(wide[0], mask):
        result = _ops._scaled_dot_product_flash_attention(*wide, 0.0, is_causal, False, scale=scale)
        return _sequence_major(result[0][..., : v.shape[-1]]), result[1]
    return attention_in_plain_ops(q, k, v, mask, is_causal, scale)


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `attention`; the mask gets no gradient."""
    wide = _equally_wide(dout, q, k, v, out)
    if q.device.type == "cpu":
        bias = _additive(mask, q.dtype)
        grads = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            *wide, lse, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    elif _fits_flash(wide[1], mask):
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        grads = _ops._scaled_dot_product_flash_attention_backward(
            *wide, lse, *lengths, 0.0, is_causal, seed, seed, scale=scale
        )
    else:
        grads = attention_backward_in_plain_ops(dout, q, k, v, mask, out, lse, is_causal, scale)
    dq, dk, dv = (_sequence_major(grad[..., : x.shape[-1]]) for grad, x in zip(grads, (q, k, v), strict=False))
    return dq, dk, dv


def attention_in_plain_ops(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """`attention` by its definition, for devices and dtypes without a fused kernel; quadratic in memory."""
    scores = attention_scores(q, k, mask, is_causal, scale)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    out = torch.matmul(weights.to(v.dtype), ungrouped(v, q.shape[1]))
    return _sequence_major(out), lse


def attention_backward_in_plain_ops(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_backward` by its definition (FlashAttention, arXiv:2205.14135, appendix B.4)."""
    shift = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
    weights = torch.exp(attention_scores(q, k, mask, is_causal, scale) - shift).to(q.dtype)
    dv = torch.matmul(weights.mT, dout)
    dweights = torch.matmul(dout, ungrouped(v, q.shape[1]).mT)
    dscores = weights * (dweights - (dout * out).sum(-1, keepdim=True))
    dq = torch.matmul(dscores, ungrouped(k, q.shape[1])) * scale
    dk = torch.matmul(dscores.mT, q) * scale
    return dq, _grouped_sum(dk, k.shape[1]), _grouped_sum(dv, v.shape[1])


def attention_scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """q kᵀ scale + mask, [b, h, s, t], in float32 at least."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = torch.matmul(q, ungrouped(k, q.shape[1]).mT).to(wide) * scale
    if is_causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, -torch.inf)
    bias = _additive(mask, scores.dtype)
    return scores if bias is None else scores + bias


def ungrouped(kv: Tensor, heads: int) -> Tensor:
    """Keys or values [b, g, t, d] as [b, h, t, d]: each head has its group's."""
    return kv if kv.shape[1] == heads else kv.repeat_interleave(heads // kv.shape[1], dim=1)


def _grouped_sum(grad: Tensor, groups: int) -> Tensor:
    return grad if grad.shape[1] == groups else grad.view(grad.shape[0], groups, -1, *grad.shape[2:]).sum(2)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def _equally_wide(*tensors: Tensor) -> list[Tensor]:
    """All as wide as the widest, filled with zeros: no score changes, and the columns that more values give are cut
    off. Fused kernels take one width; with latent attention queries and keys are wider than values."""
    width = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in tensors]


def _fits_flash(q: Tensor, mask: Tensor | None) -> bool:
    half = q.dtype in (torch.float16, torch.bfloat16)
    return q.device.type == "cuda" and half and mask is None and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _sequence_major(x: Tensor) -> Tensor:
    """`x` [b, h, s, d] with memory in the order [b, s, h, d]; a copy only when it isn't already."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# -- registration ----------------------------------------------------------------------------------------------------

_SCHEMAS = (
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    "linear_dx(Tensor dy, Tensor weight) -> Tensor",
    "linear_dw(Tensor x, Tensor dy) -> Tensor",
    *experts.SCHEMAS,
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float scale) -> (Tensor, Tensor)",
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse,"
    " bool is_causal, float scale) -> (Tensor, Tensor, Tensor)",
)


def _fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_linear_dx(dy: Tensor, weight: Tensor) -> Tensor:
    return dy.new_empty((*dy.shape[:-1], weight.shape[1]))


def _fake_linear_dw(x: Tensor, dy: Tensor) -> Tensor:
    return x.new_empty((dy.shape[-1], x.shape[-1]))


def _fake_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, length, _ = q.shape
    out = q.new_empty((batch, length, heads, v.shape[-1])).transpose(1, 2)
    return out, q.new_empty((batch, length, heads), dtype=wide).transpose(1, 2)


def _fake_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    def like(x: Tensor) -> Tensor:
        return x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2)

    return like(q), like(k), like(v)


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


def _linear_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    need_x, need_weight, need_bias = ctx.needs_input_grad
    dx = torch.ops.autopar.linear_dx(dy, weight) if need_x else None
    dw = torch.ops.autopar.linear_dw(x, dy) if need_weight else None
    db = dy.sum(tuple(range(dy.dim() - 1))) if need_bias and dy.dim() > 1 else dy if need_bias else None
    return dx, dw, db


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, mask, *output)


def _attention_gradient(ctx: Any, dout: Tensor, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = torch.ops.autopar.attention_backward(dout, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
    return (*grads, None, None, None)


def _second_gradient(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
    raise NotImplementedError("second derivatives of autopar's composite ops are not supported")


def _register() -> Any:
    library: Any = torch.library.Library("autopar", "DEF")  # type: ignore[no-untyped-call]
    table: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "linear": (linear, _fake_linear),
        "linear_dx": (linear_dx, _fake_linear_dx),
        "linear_dw": (linear_dw, _fake_linear_dw),
        **experts.IMPLEMENTATIONS,
        "attention": (attention, _fake_attention),
        "attention_backward": (attention_backward, _fake_attention_backward),
    }
    for schema in _SCHEMAS:
        library.define(schema)
    for name, (implementation, fake) in table.items():
        library.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"autopar::{name}", fake, lib=library)
    register = torch.library.register_autograd
    register("autopar::linear", _linear_gradient, setup_context=_save_linear, lib=library)
    register("autopar::expert_mm", experts.expert_mm_gradient, setup_context=experts.save, lib=library)
    register("autopar::grouped_mm", experts.grouped_mm_gradient, setup_context=experts.save, lib=library)
    register("autopar::attention", _attention_gradient, setup_context=_save_attention, lib=library)
    backwards = [f"{name}_{part}" for name in ("linear", "expert_mm", "grouped_mm") for part in ("dx", "dw")]
    for name in (*backwards, "attention_backward"):
        register(f"autopar::{name}", _second_gradient, lib=library)
    return library


_LIBRARY = _register()
"""Kept alive: dropping it would unregister the ops."""

LOWERED: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.autopar.linear.default: linear,
    torch.ops.autopar.linear_dx.default: linear_dx,
    torch.ops.autopar.linear_dw.default: linear_dw,
    **{getattr(torch.ops.autopar, name).default: run for name, (run, _) in experts.IMPLEMENTATIONS.items()},
    torch.ops.autopar.attention.default: attention,
    torch.ops.autopar.attention_backward.default: attention_backward,
}
"""What generated code calls in place of each composite op: same arguments, plain torch calls."""
