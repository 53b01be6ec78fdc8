"""The pin language: what it reads, and what it refuses with a message that helps."""

import pytest

from autopar.errors import PlanError
from autopar.pins import ModulePin, Pins, matches_module, parse_pins


def test_one_string_and_a_list_say_the_same():
    expected = Pins(
        axes={"pp": 2, "tp": 4},
        zero=3,
        microbatches=8,
        recompute="layers.*",
        modules=(ModulePin("layers.*.mlp", "tp", "out"), ModulePin("head", "tp", "vocab")),
    )
    one = "pp=2 tp=4, zero=3,microbatches=8 recompute=layers.* layers.*.mlp: tp=out, head:tp=vocab"
    several = [
        "pp=2",
        "tp=4",
        "zero=3",
        "microbatches=8",
        "recompute=layers.*",
        "layers.*.mlp: tp=out",
        "head: tp=vocab",
    ]
    assert parse_pins(one) == parse_pins(several) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tp=2",
        "zero=0, recompute=none",
        "dp=2, microbatches=4, a.*: dp=batch, a.*: tp=in",
        "a.*: tp=in, a.*: stage=0, b: stage=12",
    ],
)
def test_text_parses_back(text):
    assert str(parse_pins(text)) == text
    assert parse_pins(str(parse_pins(text))) == parse_pins(text)


def test_nothing_pinned():
    assert parse_pins(None) == parse_pins([]) == Pins()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "expected AXIS=N"),
        ("tp=", "whole number"),
        ("tp=x", "whole number"),
        ("tp=0", "at least 1"),
        ("tp=-2", "whole number"),
        ("=2", "expected AXIS=N"),
        ("zero=4", "from 0 to 3"),
        ("microbatches=none", "whole number"),
        ("recompute=", "none, full or a glob"),
        ("tp=out", "Write 'GLOB: tp=out'"),
        ("layers.*: tp=sideways", "expected one of in, out"),
        ("layers.*:", "expected AXIS=N"),
        (": tp=out", "pin ':'"),
        ("tp=2 tp=4", "contradicts an earlier pin, which says 2"),
        ("zero=1, zero=2", "contradicts"),
        ("a: tp=in, a: tp=out", "contradicts"),
        ("a: stage=0, a: stage=1", "contradicts an earlier pin, which says 0"),
        ("a: stage=first", "whole number of at least 0"),
        ("stage=1", "Write 'GLOB: stage=1'"),
    ],
)
def test_malformed_pins_are_named(text, message):
    with pytest.raises(PlanError, match="pin ") as caught:
        parse_pins(text)
    assert message in str(caught.value)


def test_the_same_pin_twice_is_no_contradiction():
    assert parse_pins("tp=2 tp=2, a: tp=in, a: tp=in") == parse_pins("tp=2, a: tp=in")


def test_globs_match_modules_and_what_is_in_them():
    assert matches_module("layers.*", "layers.3.mlp.up_proj")
    assert matches_module("layers.*.mlp", "layers.3.mlp.up_proj")
    assert not matches_module("layers.*.mlp", "layers.3.attention")
    assert not matches_module("head", "header")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("xp=2", "no such mesh axis; the axes of this search are pp, dp, tp"),
        ("layers.*: ep=in", "no such mesh axis"),
        ("layer.*.mlp: tp=out", "matches no module of the model; modules near it: layers.0.mlp"),
        ("recompute=blocks.*", "matches no module"),
        ("blocks.*: stage=1", "matches no module"),
    ],
)
def test_pins_that_match_nothing(text, message):
    with pytest.raises(PlanError) as caught:
        parse_pins(text).check(("pp", "dp", "tp"), ("layers.0", "layers.0.mlp", "head"))
    assert message in str(caught.value)


def test_pins_that_match():
    parse_pins("tp=2, recompute=layers.*, head: tp=vocab").check(("pp", "dp", "tp"), ("layers.0", "head"))
