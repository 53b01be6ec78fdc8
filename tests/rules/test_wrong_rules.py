"""The prover catches wrong rules and wrong localisations of each kind: what isn't caught here isn't proven."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch
from torch.fx import Node

from autopar import composites
from autopar.mesh import Mesh
from autopar.rules import views
from autopar.rules.entries import Entry, by, texts
from autopar.rules.examples import index, node_of, t
from autopar.rules.notation import BoundRule
from autopar.rules.prove import Counterexample, prove
from autopar.rules.table import _ROWS

aten, own = torch.ops.aten, torch.ops.autopar
assert composites.LOWERED
local_indices: Any = importlib.import_module("passes.local_indices")


def counterexamples(node: Node, mesh: str = "x=2") -> list[Counterexample]:
    return prove(node, Mesh.parse(mesh))[1]


def _swapped(node: Node) -> BoundRule:
    """A view whose product is read minor to major."""
    rule = views.viewed(node)
    ((letters,),) = rule.results
    return dataclasses.replace(rule, results=((letters[::-1],),))


WRONG: dict[str, tuple[str, Entry, Node]] = {
    "missing partial": ("aten.mm", texts("", "m k, j n -> m n"), node_of(aten.mm.default, t(6, 4), t(4, 12))),
    "wrong reduction": ("aten.amax", texts("", "a b -> a"), node_of(aten.amax.default, t(4, 6), [1])),
    "maximum of a sum": ("aten.sum", texts("0", "a b -> a +max"), node_of(aten.sum.dim_IntList, t(4, 6), [1])),
    "shard of a whole dim": (
        "aten._softmax",
        texts("", "... -> ..."),
        node_of(aten._softmax.default, t(4, 6), 1, False),
    ),
    "shard of a scanned dim": ("aten.cumsum", texts("", "... -> ..."), node_of(aten.cumsum.default, t(4, 6), 1)),
    "linear in what is not": ("aten.relu", texts("0", "... -> ..."), node_of(aten.relu.default, t(4, 6))),
    "linear in a divisor": ("aten.div", texts("1", "a b, a b -> a b"), node_of(aten.div.Tensor, t(4, 6), t(4, 6))),
    "jointly, not alone": ("aten.mul", texts("01", "a b, a b -> a b"), node_of(aten.mul.Tensor, t(4, 6), t(4, 6))),
    "alone, not jointly": ("aten.add", texts("0", "a b, a b -> a b"), node_of(aten.add.Tensor, t(4, 6), t(4, 6))),
    "index not marked": (
        "aten.embedding",
        texts("0", "v d, ... -> ... d"),
        node_of(aten.embedding.default, t(12, 4), index(2, 6)),
    ),
    "transposed wrongly": ("aten.t", texts("0", "a b -> a b"), node_of(aten.t.default, t(6, 6))),
    "minor before major": ("aten.view", by(_swapped), node_of(aten.view.default, t(4, 6), [24])),
    "expert axis confused": (
        "aten.bmm",
        texts("0|1", "b m k, b k n -> b n m"),
        node_of(aten.bmm.default, t(2, 6, 4), t(2, 4, 6)),
    ),
    "constant along what varies": ("aten.cumsum", texts("", "a b -> a c"), node_of(aten.cumsum.default, t(4, 6), 1)),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_rule(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, entry, node = WRONG[kind]
    assert not counterexamples(node), "the rule of the table is right"
    monkeypatch.setitem(_ROWS, name, entry)
    found = counterexamples(node)
    assert found
    assert name in str(found[0]) and "x=" in found[0].choice


LOCALISED = {
    "bias added by each rank": ("autopar.linear", node_of(own.linear.default, t(4, 6), t(3, 6), t(3))),
    "mean of shards not scaled": ("aten.mean", node_of(aten.mean.dim, t(4, 6), [1])),
    "index neither offset nor masked": ("aten.embedding", node_of(aten.embedding.default, t(12, 4), index(2, 6))),
    "gathered index not masked": ("aten.gather", node_of(aten.gather.default, t(4, 12), 1, index(4, 6))),
    "range without offset": ("aten.arange", node_of(aten.arange.default, 12)),
    "size not made local": ("aten.expand", node_of(aten.expand.default, t(4, 1), [4, 6])),
    "slice bounds not scaled": ("aten.slice", node_of(aten.slice.Tensor, t(12, 4), 0, 6, 12)),
    "groups not divided": (
        "aten.convolution",
        node_of(aten.convolution.default, t(2, 8, 5), t(24, 2, 3), None, [1], [1], [1], False, [0], 4),
    ),
    "mean of a loss of shards not scaled": ("aten.mse_loss", node_of(aten.mse_loss.default, t(4, 6), t(4, 6))),
    "addend added by each rank": ("aten.addmm", node_of(aten.addmm.default, t(12), t(6, 4), t(4, 12))),
    "accumulated into by each rank": (
        "aten.index_put",
        node_of(aten.index_put.default, t(8, 12), [index(6)], t(6, 12), True),
    ),
    "copies not divided": ("aten.repeat", node_of(aten.repeat.default, t(6), [4, 2])),
    "one of a shard squeezed away": ("aten.squeeze", node_of(aten.squeeze.default, t(2, 1, 6))),
}


@pytest.mark.parametrize("kind", LOCALISED)
def test_wrong_localisation(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, node = LOCALISED[kind]
    assert not counterexamples(node)
    monkeypatch.delitem(local_indices.HANDLERS, name)
    assert counterexamples(node)


def test_masking_by_multiplication_leaks_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary padded with -inf: rows outside a rank's range must not turn 0 * inf into NaN."""

    def multiplied(localiser: Any, node: Node, value: Node, inside: Node) -> Node:
        return localiser.call(value, aten.mul.Tensor, value, inside)

    def infinite(operand: Node, generator: torch.Generator) -> torch.Tensor:
        value = torch.rand(tuple(operand.meta["val"].shape), generator=generator, dtype=torch.float64)
        return value.masked_fill(torch.arange(value.shape[1]) == 6, -torch.inf)

    node = node_of(aten.gather.default, t(4, 12), 1, index(4, 6))
    assert not prove(node, Mesh.parse("x=2"), sample=infinite)[1]
    monkeypatch.setattr(local_indices, "_masked", multiplied)
    assert prove(node, Mesh.parse("x=2"), sample=infinite)[1]


def test_not_a_number_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_ROWS, "aten.div", texts("0|1", "a b, a b -> a b"))
    node = node_of(aten.div.Tensor, t(4, 6), t(4, 6))
    assert any(c.difference == float("inf") or c.difference != c.difference for c in counterexamples(node, "x=3"))


def test_a_shard_that_the_op_refuses_is_a_counterexample(monkeypatch: pytest.MonkeyPatch) -> None:
    name, entry, node = WRONG["missing partial"]
    monkeypatch.setitem(_ROWS, name, entry)
    assert any(c.error for c in counterexamples(node))


def test_one_value_in_two_layouts_is_left_out() -> None:
    """`x @ x` split by rows needs x split and whole: a graph reshards one of them, the op alone can't."""
    square = t(6, 6)
    executed, wrong = prove(node_of(aten.mm.default, square, square), Mesh.parse("x=2"))
    assert not wrong
    assert executed == 1  # nothing split; of the others none has x in one layout
