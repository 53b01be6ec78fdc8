"""What the solver chooses from at a node, and the layouts that follow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx import Node

from autopar import composites
from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.rules.choices import (
    Split,
    choice_text,
    enumerate_choices,
    input_rule,
    operand_layouts,
    parse_choice,
    result_layouts,
    splittable,
)
from autopar.rules.examples import index, node_of, t
from autopar.rules.factors import LeafRule
from autopar.rules.prove import single_op

aten, own = torch.ops.aten, torch.ops.autopar
assert composites.LOWERED


def rule(node: Node) -> LeafRule:
    found: LeafRule = single_op(node)[1].meta["rule"]
    return found


def texts(node: Node, mesh: str, **options: bool) -> list[str]:
    found = rule(node)
    return [choice_text(found, choice) for choice in enumerate_choices(found, Mesh.parse(mesh), **options)]


MM = node_of(aten.mm.default, t(6, 4), t(4, 10))


def test_one_axis_splits_a_factor_passes_partial_sums_or_neither() -> None:
    assert texts(MM, "tp=2") == ["", "tp=m", "tp=k", "tp=n", "tp=+0", "tp=+1"]


def test_a_factor_need_not_divide_but_no_rank_may_get_half_padding() -> None:
    assert texts(MM, "tp=3") == ["", "tp=m", "tp=k", "tp=n", "tp=+0", "tp=+1"]
    assert texts(MM, "tp=7", allow_partial=False) == ["", "tp=m", "tp=k", "tp=n"]
    assert texts(MM, "tp=8", allow_partial=False) == ["", "tp=m", "tp=n"]
    assert texts(MM, "tp=20", allow_partial=False) == [""]


def test_an_axis_of_one_rank_and_the_pipeline_choose_nothing() -> None:
    assert texts(MM, "pp=4 dp=1 tp=2") == texts(MM, "tp=2")
    assert texts(MM, "tp=1") == [""]


def test_axes_that_share_a_factor_have_an_order_others_have_none() -> None:
    found = texts(node_of(aten.mm.default, t(8, 4), t(4, 6)), "dp=2 tp=2", allow_partial=False)
    assert {"dp=m tp=m", "tp=m dp=m"} <= set(found)
    assert "dp=m tp=n" in found and "tp=n dp=m" not in found
    assert len(found) == len(set(found)) == 4 * 4 + 3  # m, n and k in either order
    assert len(texts(node_of(aten.mm.default, t(8, 1), t(1, 1)), "a=2 b=2 c=2", allow_partial=False)) == 1 + 3 + 6 + 6


def test_axes_that_share_a_factor_must_be_worth_it_together() -> None:
    assert "dp=m tp=m" in texts(MM, "dp=2 tp=2")
    assert "dp=m tp=m" not in texts(MM, "dp=3 tp=4")


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2 tp=2"])
def test_text_parses_back(mesh: str) -> None:
    for node in (
        MM,
        node_of(own.linear.default, t(2, 6, 4), t(4, 4), t(4)),
        node_of(aten.embedding.default, t(8, 4), index(6)),
    ):
        found = rule(node)
        for choice in enumerate_choices(found, Mesh.parse(mesh)):
            assert parse_choice(found, choice_text(found, choice)) == choice


@pytest.mark.parametrize("text", ["tp=q", "tp=+7", "tp", "tp="])
def test_a_choice_that_names_no_factor(text: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_choice(rule(MM), text, "up/mm#0")
    assert "up/mm#0" in str(error.value) and "m, k, n" in str(error.value)


def layouts(node: Node, text: str) -> tuple[list[str], list[str]]:
    found = rule(node)
    choice = parse_choice(found, text)
    return [str(x) for x in operand_layouts(found, choice)], [str(x) for x in result_layouts(found, choice)]


@pytest.mark.parametrize(
    ("text", "operands", "results"),
    [
        ("", ["[6 4]", "[4 10]"], ["[6 10]"]),
        ("tp=m", ["[6@tp 4]", "[4 10]"], ["[6@tp 10]"]),
        ("tp=k", ["[6 4@tp]", "[4@tp 10]"], ["[6 10] +tp"]),
        ("tp=+1", ["[6 4]", "[4 10] +tp"], ["[6 10] +tp"]),
        ("dp=m tp=k", ["[6@dp 4@tp]", "[4@tp 10]"], ["[6@dp 10] +tp"]),
        ("dp=+0 tp=n", ["[6 4] +dp", "[4 10@tp]"], ["[6 10@tp] +dp"]),
    ],
)
def test_layouts_follow_from_the_rule(text: str, operands: list[str], results: list[str]) -> None:
    assert layouts(MM, text) == (operands, results)


def test_the_order_of_axes_is_that_of_the_choice() -> None:
    node = node_of(aten.mm.default, t(8, 4), t(4, 6))
    assert layouts(node, "tp=m dp=m")[1] == ["[8@tp.dp 6]"]
    assert layouts(node, "dp=m tp=m")[1] == ["[8@dp.tp 6]"]


def test_a_reduction_leaves_its_own_partial() -> None:
    assert layouts(node_of(aten.amax.default, t(4, 6), [1]), "tp=d1") == (["[4 6@tp]"], ["[4] +max:tp"])


def test_several_results_each_have_a_layout() -> None:
    node = node_of(aten.native_layer_norm.default, t(4, 6), [6], t(6), t(6), 1e-5)
    assert layouts(node, "dp=d0") == (["[4@dp 6]", "[6]", "[6]"], ["[4@dp 6]", "[4@dp 1]", "[4@dp 1]"])


def test_what_values_index_is_split_in_whole_ranges_only() -> None:
    """A vocabulary that a view divides may be split by its major factor: a rank's rows must be one range."""
    table = input_rule(((3, 4), (6,)), ((0, 1), (2,)))
    assert [splittable(table, f) for f in range(3)] == [True, True, True]
    embedding = rule(node_of(aten.embedding.default, t(12, 4), index(6)))
    (vocabulary, *others) = embedding.factors
    parts = (replace(vocabulary, size=3), replace(vocabulary, size=4, is_major=False))
    divided = replace(embedding, factors=(*parts, *others))
    assert splittable(divided, 0) and not splittable(divided, 1)


def test_inputs_name_their_dims() -> None:
    found = input_rule(((3, 4), (), (6,)), ((0, 1), (), (2,)))
    assert [choice_text(found, (Split("tp", factor=f),)) for f in range(3)] == ["tp=d0.0", "tp=d0.1", "tp=d2"]
    assert str(result_layouts(found, parse_choice(found, "tp=d0.1"))[0]) == "[(3 4@tp) 1 6]"
