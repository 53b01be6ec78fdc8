"""Pointwise ops get one rule from ATen's tag; proven on a broad list, and what the tag doesn't promise is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Node

from autopar.mesh import Mesh
from autopar.rules.examples import index, mask, node_of, t
from autopar.rules.examples.tagged import tagged_examples, tagged_name, tagged_ops
from autopar.rules.prove import prove, random_value, ties
from autopar.rules.table import has_rule, rule_of

aten = torch.ops.aten


TAGGED = tagged_examples()

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


def faults(node: Node, mesh: str) -> list[str]:
    executed, wrong = prove(node, Mesh.parse(mesh), sample=(random_value, ties))
    assert executed > 2, "more than the choice that splits nothing"
    return list(map(str, wrong))


@pytest.mark.parametrize("name", TAGGED)
def test_tagged(name: str) -> None:
    (example,) = TAGGED[name]
    node = example.node()
    assert has_rule(node)
    assert not faults(node, "x=2")


@pytest.mark.parametrize("call", OTHERS, ids=lambda call: f"{call[0]}/{len(call[1])}")
def test_variant(call: tuple[str, tuple[Any, ...], dict[str, Any]]) -> None:
    name, args, kwargs = call
    assert torch.Tag.pointwise in overload(name).tags
    node = node_of(overload(name), *args, **kwargs)
    assert not [*faults(node, "x=3"), *faults(node, "x=2 y=2")]


def test_no_tagged_op_is_left_out() -> None:
    assert {tagged_name(op) for op in tagged_ops()} == set(TAGGED)
    assert len(TAGGED) >= 200


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
