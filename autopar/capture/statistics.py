"""Batch norm in primitive ops: means over samples, which the rules sum over the ranks that split the samples.

    mean = x.mean([0, 2, 3]);  var = (x - mean).square().mean([0, 2, 3]);  y = (x - mean) * rsqrt(var + eps) * w + b

So a batch that is split has the statistics of the whole microbatch, in training and in the running buffers: what
`SyncBatchNorm` adds is then nothing. Each microbatch has its own, as where their gradients are accumulated eagerly.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
) -> Any:
    """`F.batch_norm`: input [b, c, ...], all else [c]; the running buffers are changed in place.

    `momentum` is a 0-d tensor where it depends on the number of batches so far.
    """
    dims = [d for d in range(input.dim()) if d != 1]
    count = math.prod(input.shape[d] for d in dims)
    if input.dim() < 2 or (training and count == 1) or (not training and (running_mean is None or running_var is None)):
        return NotImplemented  # torch's own error is the clearest
    x = input.float() if input.element_size() < 4 else input
    shape = [1, input.shape[1], *[1] * (input.dim() - 2)]
    if training:
        mean = x.mean(dims, keepdim=True)
        centred = x - mean
        var = centred.square().mean(dims, keepdim=True)
        _follow(running_mean, mean, momentum)
        _follow(running_var, var * (count / (count - 1)), momentum)
    else:
        assert running_mean is not None and running_var is not None
        centred, var = x - running_mean.view(shape), running_var.view(shape)
    normal = centred * torch.rsqrt(var + eps)
    scaled = normal if weight is None else normal * weight.view(shape)
    return (scaled if bias is None else scaled + bias.view(shape)).to(input.dtype)


@torch.no_grad()
def _follow(running: Tensor | None, value: Tensor, momentum: float | Tensor) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(value.detach().view(running.shape).to(running.dtype) * momentum)
