"""The one-line notation: what it reads, what it refuses, and how letters get sizes at a node."""

from __future__ import annotations

import pytest

from autopar.errors import RuleError
from autopar.rules.notation import BoundRule, ValueSpec, bind, parse_rule, read_rule, rule_text

Shape = tuple[int, ...]


def bound(text: str, operands: list[Shape], results: list[Shape], **sizes: int) -> BoundRule:
    return bind(parse_rule(text), tuple(operands), tuple(results), sizes or None)


# -- reading -----------------------------------------------------------------------------------------------------
def test_letters() -> None:
    rule = parse_rule("m k, k n -> m n")
    assert [spec.dims for spec in rule.operands] == [(("m",), ("k",)), (("k",), ("n",))]
    assert [spec.dims for spec in rule.results] == [(("m",), ("n",))]
    assert all(spec.reduction == "sum" and not spec.whole for spec in (*rule.operands, *rule.results))


def test_whole_product_one_and_dots() -> None:
    (operand,) = parse_rule("... [d] (a b) 1 -> ... [d]").operands
    assert operand.dims == (("...",), ("d",), ("a", "b"), ())
    assert operand.whole == {"d"}


def test_index_and_reduction() -> None:
    rule = parse_rule("v d, {v}... -> ... d")
    assert [spec.indexes for spec in rule.operands] == [None, "v"]
    assert parse_rule("a b -> a +max").results[0].reduction == "max"


def test_no_operands_and_scalar_result() -> None:
    assert parse_rule("-> a").operands == ()
    assert parse_rule("k, k -> ").results[0].dims == ()


def test_several_results_each_with_its_reduction() -> None:
    rule = parse_rule("a b -> a +max, a b")
    assert [spec.reduction for spec in rule.results] == ["max", "sum"]


def test_long_names_are_one_factor() -> None:
    assert parse_rule("batch seq -> batch seq").operands[0].dims == (("batch",), ("seq",))


MALFORMED = ["m k, k n", "m ? -> m", "m k => m", "m-k -> m", "a [b c] -> a", "(a b -> a", "a) -> a", "a a -> a"]


@pytest.mark.parametrize("text", [*MALFORMED, "a b -> a +most"])
def test_malformed_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(RuleError) as error:
        parse_rule(text)
    assert text in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "a b, b -> a",
        "a (b [4]) -> a",
        "a b -> a +max, b",
        "() -> (); linear 0",
        "a, a -> a; linear 0|1",
        "a, 1 -> a; linear 01",
    ],
)
def test_text_of_a_rule_is_read_back(text: str) -> None:
    rule = read_rule(text)
    words = [[_word(dim, spec) for dim in spec.dims] for spec in (*rule.operands, *rule.results)]
    count, reductions = len(rule.operands), [spec.reduction for spec in rule.results]
    assert rule_text(words[:count], words[count:], reductions, rule.linear) == text


def _word(dim: tuple[str, ...], spec: ValueSpec) -> str:
    words = [f"[{name}]" if name in spec.whole else name for name in dim]
    return "1" if not words else words[0] if len(words) == 1 else f"({' '.join(words)})"


def test_linear_operands_beyond_nine_are_apart_by_commas() -> None:
    linear = ((0, 11), (12,), (3,))
    text = rule_text([["a"]] * 13, [["a"]], [""], linear)
    assert text.endswith("; linear 0,11,|12,|3")
    assert read_rule(text).linear == linear


@pytest.mark.parametrize("text", ["a -> a; linear x", "a -> a; linear 1", "a -> a; linear |"])
def test_malformed_linear_operands_are_refused(text: str) -> None:
    with pytest.raises(RuleError, match="linear"):
        read_rule(text)


def test_a_number_is_a_whole_part_of_that_size() -> None:
    rule = bound("a ([2] b) -> a b", [(6, 24)], [(6, 12)])
    assert rule.sizes == {"a": 6, "b": 12, "2": 2}
    assert rule.whole == {"2"}
    with pytest.raises(RuleError, match="size 9"):
        bound("a ([2] b) -> a b", [(6, 9)], [(6, 4)])


# -- binding -----------------------------------------------------------------------------------------------------
def test_sizes() -> None:
    rule = bound("m k, k n -> m n", [(6, 4), (4, 12)], [(6, 12)])
    assert rule.sizes == {"m": 6, "k": 4, "n": 12}


def test_dots_align_from_the_right_and_may_be_empty() -> None:
    rule = bound("... i, o i -> ... o", [(2, 6, 4), (3, 4)], [(2, 6, 3)])
    assert rule.operands == ((("d0",), ("d1",), ("i",)), (("o",), ("i",)))
    assert bound("... i, o i -> ... o", [(4,), (3, 4)], [(3,)]).results == ((("o",),),)


def test_product_with_one_open_factor() -> None:
    rule = bound("(a b) -> a b", [(12,)], [(3, 4)])
    assert rule.operands == ((("a", "b"),),)
    assert bound("(a b) c -> a", [(12, 5)], [(3,)]).sizes["b"] == 4


def test_size_one_has_no_letters() -> None:
    rule = bound("m k, k n -> m n", [(6, 1), (1, 12)], [(6, 12)])
    assert rule.operands == ((("m",), ()), ((), ("n",)))


def test_broadcast_dim_of_size_one() -> None:
    rule = bound("... , ... -> ...", [(4, 1), (4, 6)], [(4, 6)])
    assert rule.operands == ((("d0",), ()), (("d0",), ("d1",)))
    assert rule.sizes["d1"] == 6


def test_given_sizes_open_a_product() -> None:
    assert bound("(a b c) -> (a b c)", [(24,)], [(24,)], a=2, b=3).sizes["c"] == 4


@pytest.mark.parametrize(
    ("text", "operands", "results"),
    [
        ("m k, k n -> m n", [(6, 4), (5, 12)], [(6, 12)]),
        ("m k -> m", [(6, 4)], [(5,)]),
        ("(a b) -> a b", [(12,)], [(3, 5)]),
        ("(a b) -> a", [(12,)], [(5,)]),
        ("(a b c) -> a", [(12,)], [(3,)]),
        ("m k -> m", [(6, 4, 2)], [(6,)]),
        ("m k -> m", [(6, 4), (6, 4)], [(6,)]),
        ("m k -> m, k", [(6, 4)], [(6,)]),
    ],
)
def test_shapes_that_contradict_the_rule(text: str, operands: list[Shape], results: list[Shape]) -> None:
    with pytest.raises(RuleError):
        bound(text, operands, results)
