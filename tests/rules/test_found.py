"""Rules for what the table lacks: registered and proven, found by experiment, or refused with the reason."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.fx import Graph, Node

import autopar
from autopar.errors import CaptureError, PlanError, RuleError
from autopar.rules import registered
from autopar.rules.examples import node_of, t
from autopar.rules.found import find_rules, require_proven, write_rules
from autopar.rules.nodes import call_text
from autopar.rules.table import has_rule, rule_of
from tests.rules.custom_ops import ops

aten = torch.ops.aten

AFFINE = "trial::affine(f32[4 8], f32[8], f32[8])"


@pytest.fixture(autouse=True)
def _no_rules_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registered, "_REGISTERED", {})
    yield


def affine() -> Node:
    node = node_of(ops.affine.default, t(4, 8), t(8), t(8))
    node.meta["source"] = "model.py:41"
    return node


def graph_of(node: Node) -> list[Graph]:
    return [node.graph]


# -- found by experiment -------------------------------------------------------------------------------------------
def test_a_call_is_told_by_op_attributes_and_types() -> None:
    assert call_text(affine()) == AFFINE
    assert call_text(node_of(ops.bump_.default, t(4), 1.5)) == "trial::bump_(f32[4], 1.5)"


def test_found_rules_are_told_and_written_on_nodes() -> None:
    told: list[str] = []
    node = affine()
    found = find_rules(graph_of(node), told.append)
    assert found.by_experiment == {AFFINE: "a b, b, b -> a b; linear 02|12"}
    assert not found.registered
    assert len(told) == 1 and AFFINE in told[0]
    assert rule_of(node).whole
    write_rules(node.graph, found.all)
    assert not rule_of(node).whole
    assert rule_of(node).linear == ((0, 2), (1, 2))


def test_a_pointwise_tag_is_believed_of_torchs_ops_alone() -> None:
    assert has_rule(node_of(aten.add.Tensor, t(4), t(4)))
    assert not has_rule(node_of(ops.tagged_wrongly.default, t(4, 8)))
    found = find_rules(graph_of(node_of(ops.tagged_wrongly.default, t(4, 8))))
    assert list(found.by_experiment.values()) == ["a [b] -> a [b]; linear 0"]


def test_what_runs_whole_is_told_once_with_op_line_and_reason() -> None:
    node = node_of(ops.positive.default, t(8))
    node.meta["source"] = "model.py:12"
    twice = node.graph.node_copy(node, dict(zip(node.all_input_nodes, node.all_input_nodes, strict=True)).__getitem__)
    twice.meta = dict(node.meta)
    with pytest.warns(RuntimeWarning) as caught:
        assert not find_rules(graph_of(node)).all
    (message,) = (str(w.message) for w in caught)
    assert message.startswith("trial::positive (model.py:12) has no sharding rule: it runs whole on every rank")


@pytest.mark.parametrize("name", ["noisy", "counting", "writes_unsaid"])
def test_an_op_that_is_not_what_it_says_is_refused(name: str) -> None:
    node = node_of(getattr(ops, name).default, t(4, 8))
    node.meta["source"] = "model.py:7"
    with pytest.raises(CaptureError, match=rf"trial::{name} \(model.py:7\).*without saying so"):
        find_rules(graph_of(node))


def test_an_op_that_rounds_is_told_why_it_splits_less() -> None:
    node = node_of(ops.rounds.default, t(32, 64), t(48, 64))
    with pytest.warns(RuntimeWarning, match=r"trial::rounds .*computes in float32 whatever it is given"):
        (rule,) = find_rules(graph_of(node)).all.values()
    assert "[b]" in rule


def test_undefined_values_are_no_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.rules.found.has_rule", lambda node: False)
    node = node_of(aten.new_empty_strided.default, t(4, 8), [4, 8], [8, 1])
    with pytest.warns(RuntimeWarning, match="runs whole on every rank"):
        assert not find_rules(graph_of(node)).all


# -- registered ----------------------------------------------------------------------------------------------------
def test_a_registered_rule_is_proven_and_used() -> None:
    autopar.rule("trial::affine", "b d, d, d -> b d", linear="02")
    found = find_rules(graph_of(affine()))
    assert found.registered == {AFFINE: "b d, d, d -> b d; linear 02"}
    assert not found.by_experiment


def test_the_last_rule_of_a_name_counts_and_an_overload_before_its_op() -> None:
    autopar.rule("trial::affine", "[b] d, d, d -> [b] d")
    autopar.rule("trial::affine", "b [d], [d], [d] -> b [d]")
    assert find_rules(graph_of(affine())).registered == {AFFINE: "b [d], [d], [d] -> b [d]"}
    autopar.rule("trial::affine.default", "[b] d, d, d -> [b] d")
    assert find_rules(graph_of(affine())).registered == {AFFINE: "[b] d, d, d -> [b] d"}


def test_a_registered_rule_goes_before_the_table() -> None:
    autopar.rule("aten::mm", "m [k], [k] n -> m n")
    node = node_of(aten.mm.default, t(4, 6), t(6, 8))
    found = find_rules(graph_of(node))
    write_rules(node.graph, found.all)
    assert rule_of(node).whole == {"k"}


def test_a_registered_rule_does_not_hide_what_an_op_is() -> None:
    autopar.rule("trial::noisy", "a b -> a b")
    with pytest.raises(CaptureError, match="draws random numbers without saying so"):
        find_rules(graph_of(node_of(ops.noisy.default, t(4, 8))))


def test_a_registered_rule_that_cannot_be_tried_is_not_used() -> None:
    autopar.rule("trial::on_gpus_alone", "a b -> a b")
    node = node_of(ops.on_gpus_alone.default, t(4, 8))
    with pytest.warns(RuntimeWarning, match=r"trial::on_gpus_alone .*can't be proven, since .*it isn't used"):
        assert not find_rules(graph_of(node)).all
    with pytest.raises(PlanError, match="can't be proven"):
        require_proven(graph_of(node), {call_text(node): "a b -> a b"})


WRONG = {
    "a mean is no sum": ("average", "a b -> a", (t(4, 8),)),
    "a stencil needs its neighbours": ("smooth", "a b -> a b", (t(4, 8),)),
    "a maximum": ("peak", "a b -> a", (t(4, 8),)),
    "beyond a size that it knows": ("only_first_hundred", "a b -> a b", (t(6, 256),)),
    "too few operands": ("affine", "a b, b -> a b", (t(4, 8), t(8), t(8))),
    "sizes that don't fit": ("project", "a b, b c -> a c", (t(4, 8), t(6, 8))),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_rule_is_refused_with_the_counterexample(kind: str) -> None:
    name, text, operands = WRONG[kind]
    autopar.rule(f"trial::{name}", text)
    node = node_of(getattr(ops, name).default, *operands)
    node.meta["source"] = "model.py:41"
    with pytest.raises(RuleError, match=rf"trial::{name} \(model.py:41\): the rule '{text}' is wrong") as error:
        find_rules(graph_of(node))
    assert "x=" in str(error.value) or "operands" in str(error.value) or "size" in str(error.value)


def test_a_rule_that_is_linear_in_too_much_is_refused() -> None:
    autopar.rule("trial::affine", "b d, d, d -> b d", linear="0")
    with pytest.raises(RuleError, match=r"x=\+0.*differs by"):
        find_rules(graph_of(affine()))


@pytest.mark.parametrize(
    ("name", "text", "linear", "message"),
    [
        ("trial::nothing", "a -> a", "", "no op 'trial::nothing'"),
        ("nowhere::affine", "a -> a", "", "no op 'nowhere::affine'"),
        ("affine", "a -> a", "", "no op 'affine'"),
        ("trial::affine.out", "a -> a", "", "no overload 'out'"),
        ("trial::affine", "a => a", "", "a => a"),
        ("trial::affine", "a -> a", "1", "linear in operand 1"),
        ("trial::affine", "a -> a", "x", "linear operands 'x'"),
    ],
)
def test_what_means_nothing_is_refused_at_once(name: str, text: str, linear: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        autopar.rule(name, text, linear)


# -- of a plan -----------------------------------------------------------------------------------------------------
def test_rules_of_a_plan_are_proven_anew() -> None:
    require_proven(graph_of(affine()), {AFFINE: "a b, b, b -> a b; linear 02|12"})
    with pytest.raises(PlanError, match=r"of trial::affine.*is wrong"):
        require_proven(graph_of(affine()), {AFFINE: "a b, b, b -> a b; linear 0"})


def test_no_warnings_where_all_is_found() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_rules(graph_of(affine()))
