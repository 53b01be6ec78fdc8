"""Pointwise ops get one rule from ATen's tag; proven on a broad list, and what the tag doesn't promise is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.mesh import Mesh
from autopar.rules.examples import index, mask, node_of, t
from autopar.rules.prove import prove
from autopar.rules.table import has_rule, rule_of
from tests.rules.test_table import ties

aten = torch.ops.aten


def words(text: str) -> list[str]:
    return text.split()


UNARY = words(
    """abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc exp exp2 expm1 floor frac gelu hardsigmoid hardtanh
    isfinite isinf isnan leaky_relu log log10 log1p log2 logical_not logit mish nan_to_num neg reciprocal relu relu6
    round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus sqrt square tan tanh trunc erfinv digamma
    lgamma i0 elu celu hardshrink softshrink positive special_entr special_log_ndtr"""
)

BINARY = words(
    """add.Tensor sub.Tensor mul.Tensor div.Tensor maximum.default minimum.default pow.Tensor_Tensor
    atan2.default fmod.Tensor remainder.Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor
    logaddexp.default hypot.default copysign.Tensor fmax.default fmin.default heaviside.default xlogy.Tensor
    sigmoid_backward.default tanh_backward.default silu_backward.default gelu_backward.default logical_and.default
    logical_or.default nextafter.default"""
)

SCALAR = words(
    """add.Scalar sub.Scalar mul.Scalar div.Scalar rsub.Scalar pow.Tensor_Scalar eq.Scalar ne.Scalar lt.Scalar le.Scalar
    gt.Scalar ge.Scalar clamp_min.default clamp_max.default fmod.Scalar remainder.Scalar"""
)

INTEGER = ["bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor", "add.Tensor", "mul.Tensor", "gcd.default"]

OTHERS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("add.Tensor", (t(4, 6), t(4, 6)), {"alpha": -0.5}),
    ("add.Tensor", (t(4, 6), 2.0), {}),
    ("mul.Tensor", (t(4, 6), mask(4, 1)), {}),
    ("div.Tensor_mode", (t(4, 6), t(6)), {"rounding_mode": "floor"}),
    ("where.self", (mask(4, 6), t(6), t(4, 1)), {}),
    ("clamp.default", (t(4, 6), -0.5, 0.9), {}),
    ("clamp.Tensor", (t(4, 6), t(6), None), {}),
    ("masked_fill.Scalar", (t(4, 6), mask(6), -1e9), {}),
    ("addcmul.default", (t(4, 6), t(4, 6), t(6)), {"value": 0.5}),
    ("addcdiv.default", (t(4, 6), t(4, 6), t(4, 6)), {"value": -0.5}),
    ("lerp.Scalar", (t(4, 6), t(4, 6), 0.1), {}),
    ("lerp.Tensor", (t(4, 6), t(4, 6), t(4, 6)), {}),
    ("threshold_backward.default", (t(4, 6), t(4, 6), 0.8), {}),
    ("native_dropout_backward.default", (t(4, 6), mask(4, 6), 2.0), {}),
    ("gelu.default", (t(4, 6),), {"approximate": "tanh"}),
    ("frexp.Tensor", (t(4, 6),), {}),
    ("bitwise_not.default", (index(4, 6),), {}),
]


def overload(name: str) -> Any:
    packet, _, which = name.partition(".")
    return getattr(getattr(aten, packet), which or "default")


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    *((name, (t(4, 6),), {}) for name in UNARY),
    *((name, (t(4, 6), t(2, 1, 6)), {}) for name in BINARY),
    *((name, (t(4, 6), 0.75), {}) for name in SCALAR),
    *((name, (index(4, 6), index(6)), {}) for name in INTEGER),
    *OTHERS,
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]}/{len(call[1])}")
def test_pointwise(call: tuple[str, tuple[Any, ...], dict[str, Any]]) -> None:
    name, args, kwargs = call
    node = node_of(overload(name), *args, **kwargs)
    assert has_rule(node)
    for mesh in ("x=2", "x=3") if call[0] not in BINARY[:4] else ("x=2", "x=3", "x=2 y=2"):
        sample = None if mesh == "x=2" or name == "div.Tensor" else ties  # partial sums of x / 0 are inf - inf
        executed, wrong = prove(node, Mesh.parse(mesh), sample=sample)
        assert not wrong, "\n".join(map(str, wrong))
        assert executed > 1


def test_calls_are_many_and_bear_the_tag() -> None:
    assert len(CALLS) >= 125
    assert all(torch.Tag.pointwise in overload(name).tags for name, _, _ in CALLS)


def test_random_pointwise_op_is_whole() -> None:
    """`rrelu` bears the tag, but a shard would draw other numbers than the whole does."""
    node = node_of(aten.rrelu.default, t(4, 6), 0.1, 0.3, True)
    assert not has_rule(node)
    assert rule_of(node).whole


@pytest.mark.parametrize("name", ["native_dropout", "bernoulli", "rand_like", "multinomial"])
def test_other_random_ops_are_whole(name: str) -> None:
    arguments = {"native_dropout": (0.5, True), "multinomial": (2,)}.get(name, ())
    assert not has_rule(node_of(getattr(aten, name).default, t(4, 6), *arguments))


@pytest.mark.parametrize(
    ("name", "args", "linear"),
    [
        ("add.Tensor", (t(4, 6), t(4, 6)), ((0, 1),)),
        ("add.Tensor", (t(4, 6), 1.0), ()),
        ("sub.Scalar", (t(4, 6), 1.0), ()),
        ("mul.Tensor", (t(4, 6), t(6)), ((0,), (1,))),
        ("mul.Tensor", (t(4, 6), 2.0), ((0,),)),
        ("div.Tensor", (t(4, 6), t(6)), ((0,),)),
        ("div.Tensor_mode", (t(4, 6), t(6)), ()),
        ("where.self", (mask(4, 6), t(4, 6), t(6)), ((1, 2),)),
        ("relu", (t(4, 6),), ()),
        ("neg", (t(4, 6),), ((0,),)),
    ],
)
def test_through_which_operands_partial_sums_pass(
    name: str, args: tuple[Any, ...], linear: tuple[tuple[int, ...], ...]
) -> None:
    kwargs = {"rounding_mode": "trunc"} if name == "div.Tensor_mode" else {}
    assert rule_of(node_of(overload(name), *args, **kwargs)).linear == linear
