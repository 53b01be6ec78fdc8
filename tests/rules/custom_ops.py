"""Ops of a user's own, without rules: what discovery is tried on. Importing this defines them under `trial::`."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ops = torch.ops.trial


def own_op(
    fake: Callable[..., Any], mutates: tuple[str, ...] = (), tags: tuple[torch.Tag, ...] = (), device: str | None = None
) -> Callable[[Callable[..., Any]], None]:
    """Defines the decorated function as the op of its name, with a fake kernel."""

    def define(function: Callable[..., Any]) -> None:
        name = f"trial::{function.__name__}"
        torch.library.custom_op(name, function, mutates_args=mutates, tags=tags, device_types=device)
        torch.library.register_fake(name, fake)

    return define


def like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def without_last(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[:-1])


# -- what can be split ---------------------------------------------------------------------------------------------
@own_op(like)
def affine(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x * w + b


@own_op(like)
def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w


@own_op(lambda x, w: x.new_empty((*x.shape[:-1], w.shape[0])))
def project(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


@own_op(without_last)
def peak(x: Tensor) -> Tensor:
    return x.amax(-1)


@own_op(without_last)
def average(x: Tensor) -> Tensor:
    """Depends on the size of the dim that vanishes: means of shards don't add up."""
    return x.mean(-1)


@own_op(like)
def smooth(x: Tensor) -> Tensor:
    """A stencil: each element needs its neighbours."""
    return x + torch.nn.functional.pad(x, (1, 0))[..., :-1]


@own_op(like, tags=(torch.Tag.pointwise,))
def tagged_wrongly(x: Tensor) -> Tensor:
    return x.flip(-1)


@own_op(lambda x: (torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)))
def ordered(x: Tensor) -> tuple[Tensor, Tensor]:
    values, order = x.sort(dim=-1, stable=True)
    return values, order


@own_op(like)
def running(x: Tensor) -> Tensor:
    return x.cumsum(-1)


@own_op(lambda table, rows: table.new_empty((*rows.shape, table.shape[1])))
def pick(table: Tensor, rows: Tensor) -> Tensor:
    return table[rows]


@own_op(lambda x: (x.new_empty(x.shape[0]), x.new_empty(x.shape[0])))
def sum_and_peak(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(1), x.amax(1)


@own_op(like)
def blend(x: Tensor, y: Tensor) -> Tensor:
    return 2 * x - y


@own_op(lambda x, y: x.new_empty((x.shape[0], y.shape[0])))
def outer(x: Tensor, y: Tensor) -> Tensor:
    return x[:, None] * y


@own_op(lambda x, y: x.new_empty((x.shape[0], x.shape[1], y.shape[2])))
def batched(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


@own_op(lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))
def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@own_op(like)
def rotate_pairs(x: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((-b, a), -1).flatten(-2)


@own_op(like)
def norm_heads(x: Tensor, width: int) -> Tensor:
    return x.unflatten(-1, (-1, width)).softmax(-1).flatten(-2)


@own_op(like)
def only_first_hundred(x: Tensor) -> Tensor:
    """Alike in all columns at small sizes, and not at the real one."""
    return torch.where(torch.arange(x.shape[-1]) < 100, x, 0)


@own_op(lambda x: x.new_empty((x.shape[0],), dtype=torch.bool))
def any_negative(x: Tensor) -> Tensor:
    return (x < 0).any(-1)


@own_op(lambda x, mask: x.new_empty(x.shape[0]))
def masked_least(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask, 100.0).amin(1)


# -- what has no rule ----------------------------------------------------------------------------------------------
@own_op(lambda x, by: None, mutates=("x",))
def bump_(x: Tensor, by: float) -> None:
    x.add_(by)


@own_op(like)
def noisy(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


_calls = itertools.count()


@own_op(like)
def counting(x: Tensor) -> Tensor:
    return x + next(_calls)


@own_op(like)
def writes_unsaid(x: Tensor) -> Tensor:
    x.add_(1.0)
    return x.clone()


@own_op(lambda x: x.new_empty(x.shape[0] // 2))
def positive(x: Tensor) -> Tensor:
    """As many elements as are positive: its fake kernel can't know."""
    return x[x > 0]


@own_op(like, device="cuda")
def on_gpus_alone(x: Tensor) -> Tensor:
    return 2 * x


@own_op(like)
def repeat_heads(q: Tensor, k: Tensor) -> Tensor:
    """Gives zeros, and no error, where the heads of `k` don't divide those of `q`."""
    if q.shape[0] % k.shape[0]:
        return torch.zeros_like(q)
    return q + k.repeat_interleave(q.shape[0] // k.shape[0], 0)


@own_op(like)
def crashes(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] != rows:
        os.kill(os.getpid(), signal.SIGSEGV)
    return x.clone()


@own_op(lambda x, w: x.new_empty((*x.shape[:-1], w.shape[0])))
def rounds(x: Tensor, w: Tensor) -> Tensor:
    """Computes in float32 whatever it is given."""
    return (x.float() @ w.float().t()).to(x.dtype)
