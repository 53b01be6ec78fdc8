"""The matmuls of mixtures of experts: rows that each meet one of several weights. Registered by `composites`.

    y = autopar::expert_mm(x, weight, expert)       # x [s, i], weight [e, i, o], expert [s] -> [s, o]
    y = autopar::grouped_mm(x, weight, ends)        # the same with rows sorted by expert; ends [e]

`expert_mm` sorts within: each row's result depends on that row alone, so that tokens may be split among ranks as in any
linear layer, and so may experts: a row whose expert isn't among the weights is zero, and the ranks' results add up.
Rows that are sorted all together (`grouped_mm`, torch's own form) can't be split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def expert_mm(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """x [s, i], weight [e, i, o] → [s, o]: row r is `x[r] @ weight[expert[r]]`, zero without such a weight."""
    order, ends = _sorted(expert, weight.shape[0])
    return _unsorted(grouped_mm(x[order], weight, ends), order)


def expert_mm_dx(dy: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """The input's gradient: dy [s, o], weight [e, i, o] → [s, i]."""
    return expert_mm(dy, weight.mT, expert)


def expert_mm_dw(x: Tensor, dy: Tensor, expert: Tensor, experts: int) -> Tensor:
    """The weight's gradient: x [s, i], dy [s, o] → [e, i, o] with e = `experts`."""
    order, ends = _sorted(expert, experts)
    return grouped_mm_dw(x[order], dy[order], ends)


def _sorted(expert: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The order of rows by expert, those of no expert last; and where the rows of each expert end."""
    known = torch.where((expert >= 0) & (expert < experts), expert, experts)
    ordered, order = known.sort(stable=True)
    return order, torch.searchsorted(ordered, torch.arange(experts, device=expert.device), right=True)


def _unsorted(rows: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(rows).index_copy_(0, order, rows)


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [s, i], weight [e, i, o] → [s, o]: rows up to `ends[j]` that no group before j has meet `weight[j]`.

    Rows past the last end are zero. Any floating dtype; torch's own op takes bfloat16 alone on some devices.
    """
    out = x.new_zeros((x.shape[0], weight.shape[2]))
    for j, (start, end) in enumerate(_spans(ends, x.shape[0])):
        torch.mm(x[start:end], weight[j], out=out[start:end])
    return out


def grouped_mm_dx(dy: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The input's gradient: dy [s, o], weight [e, i, o] → [s, i]."""
    return grouped_mm(dy, weight.mT, ends)


def grouped_mm_dw(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    """The weight's gradient: x [s, i], dy [s, o] → [e, i, o]."""
    return torch.stack([torch.mm(x[start:end].t(), dy[start:end]) for start, end in _spans(ends, x.shape[0])])


def _spans(ends: Tensor, rows: int) -> list[tuple[int, int]]:
    """(first row, last row + 1) of each group; an end before the last one, or past the rows, is moved there."""
    stops: list[int] = ends.clamp(0, rows).cummax(0).values.tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


# -- a whole layer ---------------------------------------------------------------------------------------------------


def experts_forward(module: Any, x: Tensor, expert: Tensor, weights: Tensor) -> Tensor:
    """What Hugging Face's modules of experts compute, for x [t, d] and the k experts and weights [t, k] of each token.

    An implementation for `transformers.integrations.moe`: its attributes of `module` say which weights there are.
    """
    (tokens, width), k = x.shape, expert.shape[1]
    ids = expert.reshape(-1)
    rows = x.unsqueeze(1).expand(tokens, k, width).reshape(tokens * k, width)
    name = "gate_up_proj" if module.has_gate else "up_proj"
    hidden = _expert_linear(module, name, rows, ids)
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    out = _expert_linear(module, "down_proj", hidden, ids)
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    weighted = out * weights.reshape(-1, 1)
    return weighted.view(tokens, k, width).sum(1).to(x.dtype)


def _expert_linear(module: Any, name: str, rows: Tensor, ids: Tensor) -> Tensor:
    weight = getattr(module, name)
    out: Tensor = torch.ops.autopar.expert_mm(
        rows.to(weight.dtype), weight if module.is_transposed else weight.transpose(1, 2), ids
    )
    return out + getattr(module, f"{name}_bias")[ids] if module.has_bias else out


# -- registration ----------------------------------------------------------------------------------------------------

SCHEMAS = (
    "expert_mm(Tensor x, Tensor weight, Tensor expert) -> Tensor",
    "expert_mm_dx(Tensor dy, Tensor weight, Tensor expert) -> Tensor",
    "expert_mm_dw(Tensor x, Tensor dy, Tensor expert, int experts) -> Tensor",
    "grouped_mm(Tensor x, Tensor weight, Tensor ends) -> Tensor",
    "grouped_mm_dx(Tensor dy, Tensor weight, Tensor ends) -> Tensor",
    "grouped_mm_dw(Tensor x, Tensor dy, Tensor ends) -> Tensor",
)


def _fake(x: Tensor, weight: Tensor, which: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[2]))


def _fake_dx(dy: Tensor, weight: Tensor, which: Tensor) -> Tensor:
    return dy.new_empty((dy.shape[0], weight.shape[1]))


def _fake_expert_mm_dw(x: Tensor, dy: Tensor, expert: Tensor, experts: int) -> Tensor:
    return x.new_empty((experts, x.shape[1], dy.shape[1]))


def _fake_grouped_mm_dw(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty((ends.shape[0], x.shape[1], dy.shape[1]))


IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "expert_mm": (expert_mm, _fake),
    "expert_mm_dx": (expert_mm_dx, _fake_dx),
    "expert_mm_dw": (expert_mm_dw, _fake_expert_mm_dw),
    "grouped_mm": (grouped_mm, _fake),
    "grouped_mm_dx": (grouped_mm_dx, _fake_dx),
    "grouped_mm_dw": (grouped_mm_dw, _fake_grouped_mm_dw),
}
"""Name of an op → how it is computed, and its result's shape."""


def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """What both ops keep for their backward."""
    ctx.save_for_backward(*inputs)


def expert_mm_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of input and weight."""
    num_experts = ctx.saved_tensors[1].shape[0]
    return _gradient(ctx, dy, "expert_mm", num_experts)


def grouped_mm_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of input and weight."""
    return _gradient(ctx, dy, "grouped_mm")


def _gradient(ctx: Any, dy: Tensor, name: str, *more: int) -> tuple[Tensor | None, ...]:
    """By the ops `NAME_dx` and `NAME_dw`; the latter is also given `more`."""
    x, weight, which = ctx.saved_tensors
    need_x, need_weight, _ = ctx.needs_input_grad
    to_x, to_weight = (getattr(torch.ops.autopar, f"{name}_{part}") for part in ("dx", "dw"))
    return to_x(dy, weight, which) if need_x else None, to_weight(x, dy, which, *more) if need_weight else None, None
