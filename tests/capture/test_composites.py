"""Composite ops against torch's own, forward and backward, fused and by definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autopar import composites

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def operands(
    dtype: torch.dtype, groups: int, mask: str, width: int = 8
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    torch.manual_seed(0)
    shapes = ((4, 8), (groups, 8), (groups, width))
    q, k, v = (torch.randn(2, h, 6, d, dtype=dtype, requires_grad=True) for h, d in shapes)
    masks = {
        "bool": torch.rand(2, 1, 6, 6) > 0.3,
        "float": torch.randn(6, 6, dtype=dtype),
        "row without keys": torch.ones(6, 6, dtype=torch.bool).tril(-1),
    }
    return q, k, v, masks.get(mask)


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "row without keys"])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_equals_torch(dtype: torch.dtype, groups: int, mask: str) -> None:
    q, k, v, m = operands(dtype, groups, mask)
    causal, scale = mask == "causal", 1 / math.sqrt(8)
    out, lse = torch.ops.autopar.attention(q, k, v, m, causal, scale)
    want = F.scaled_dot_product_attention(q, k, v, m, is_causal=causal, enable_gqa=groups < 4)
    dout = torch.randn_like(want)
    got_grads, want_grads = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, want))
    for got, wanted in zip((out, *got_grads), (want, *want_grads), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    assert lse.shape == (2, 4, 6)
    assert out.transpose(1, 2).is_contiguous() and got_grads[0].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("width", [5, 8, 11])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("groups", [4, 2])
def test_attention_by_definition(groups: int, mask: str, width: int) -> None:
    q, k, v, m = operands(torch.float64, groups, mask, width)
    causal, scale = mask == "causal", 0.3
    with torch.no_grad():
        out, lse = composites.attention(q, k, v, m, causal, scale)
        plain_out, plain_lse = composites.attention_in_plain_ops(q, k, v, m, causal, scale)
        dout = torch.randn_like(out)
        grads = composites.attention_backward(dout, q, k, v, m, out, lse, causal, scale)
        plain = composites.attention_backward_in_plain_ops(dout, q, k, v, m, out, lse, causal, scale)
    for a, b in zip((out, lse, *grads), (plain_out, plain_lse, *plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("width", [5, 11])
def test_values_may_be_narrower_or_wider_than_keys(width: int) -> None:
    q, k, v, _ = operands(torch.float64, 4, "causal", width)
    out, _ = torch.ops.autopar.attention(q, k, v, None, True, 0.3)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    assert out.shape == (2, 4, 6, width) and out.transpose(1, 2).is_contiguous()
    got_grads, want_grads = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, want))
    for got, wanted in zip((out, *got_grads), (want, *want_grads), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 5, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_equals_torch(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    b = torch.randn(4, requires_grad=True) if bias else None
    leaves = [t for t in (x, weight, b) if t is not None]
    got, want = torch.ops.autopar.linear(x, weight, b), F.linear(x, weight, b)
    dy = torch.randn_like(want)
    pairs = zip(torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, leaves, dy), strict=True)
    for mine, theirs in ((got, want), *pairs):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ends", [[2, 2, 6, 9], [0, 4, 4, 7]], ids=str)
def test_grouped_mm_equals_a_matmul_for_each_group(dtype: torch.dtype, ends: list[int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 4, 8, dtype=dtype, requires_grad=True)
    got = torch.ops.autopar.grouped_mm(x, weight, torch.tensor(ends, dtype=torch.int32))
    group = torch.bucketize(torch.arange(9), torch.tensor(ends), right=True)
    chosen = weight[group.clamp(max=3)] * (group < 4).view(-1, 1, 1)  # rows past the last end are zero
    want = torch.einsum("si,sio->so", x, chosen)
    dy = torch.randn_like(want)
    pairs = zip(*(torch.autograd.grad(y, (x, weight), dy) for y in (got, want)), strict=True)
    tolerance = 1e-12 if dtype == torch.float64 else 5e-2
    for mine, theirs in ((got, want), *pairs):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_expert_mm_equals_a_matmul_for_each_row(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 4, 8, dtype=dtype, requires_grad=True)
    expert = torch.tensor([3, 0, -1, 2, 4, 0, 3, 3, 7])
    got = torch.ops.autopar.expert_mm(x, weight, expert)
    known = (expert >= 0) & (expert < 4)  # what has another expert is zero
    want = torch.einsum("si,sio->so", x, weight[expert.clamp(0, 3)] * known.view(-1, 1, 1))
    dy = torch.randn_like(want)
    pairs = zip(*(torch.autograd.grad(y, (x, weight), dy) for y in (got, want)), strict=True)
    tolerance = 1e-12 if dtype == torch.float64 else 5e-2
    for mine, theirs in ((got, want), *pairs):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_every_op_has_a_lowering() -> None:
    linear = [f"{name}{part}" for name in ("linear", "expert_mm", "grouped_mm") for part in ("", "_dx", "_dw")]
    lowered = {op.overloadpacket.__name__ for op in composites.LOWERED}
    assert lowered == {*linear, "attention", "attention_backward"}


@pytest.mark.parametrize("op", ["attention", "linear"])
def test_fake_values_match_real_ones(op: str) -> None:
    q, k, v, _ = operands(torch.float32, 2, "none")
    arguments = (q, k, v, None, True, 0.5) if op == "attention" else (q, torch.randn(3, 8), None)
    torch.library.opcheck(
        getattr(torch.ops.autopar, op).default, arguments, test_utils=("test_schema", "test_faketensor")
    )
