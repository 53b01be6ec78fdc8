"""Rules found by experiment: as free as can be for ops of a user's own, and none for what has none."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Node

from autopar.mesh import Mesh
from autopar.rules.discover import discover
from autopar.rules.examples import EXAMPLES, index, mask, node_of, t
from autopar.rules.nodes import shapes_of
from autopar.rules.notation import BoundRule, bind, read_rule
from autopar.rules.prove import prove
from autopar.rules.table import rule_of
from tests.rules.custom_ops import ops

aten = torch.ops.aten

FOUND: dict[str, tuple[Node, str]] = {
    "broadcast": (
        node_of(ops.affine.default, t(2, 32, 64), t(64), t(64)),
        "a b c, c, c -> a b c; linear 02|12",
    ),
    "rows": (node_of(ops.rms_norm.default, t(2, 32, 64), t(64), 1e-5), "a b [c], [c] -> a b [c]; linear 1"),
    "matmul": (node_of(ops.project.default, t(2, 32, 64), t(48, 64)), "a b c, d c -> a b d; linear 0|1"),
    "maximum": (node_of(ops.peak.default, t(32, 64)), "a b -> a +max"),
    "mean is no sum of means": (node_of(ops.average.default, t(32, 64)), "a [b] -> a; linear 0"),
    "stencil": (node_of(ops.smooth.default, t(32, 64)), "a [b] -> a [b]; linear 0"),
    "sort": (node_of(ops.ordered.default, t(32, 64)), "a [b] -> a [b], a [b]"),
    "cumulative": (node_of(ops.running.default, t(32, 64)), "a [b] -> a [b]; linear 0"),
    "gather by index": (node_of(ops.pick.default, t(128, 64), index(4, 16)), "[a] b, c d -> c d b; linear 0"),
    "two results": (node_of(ops.sum_and_peak.default, t(32, 64)), "a b -> a, a +max"),
    "linear jointly, not alone": (node_of(ops.blend.default, t(32, 64), t(32, 64)), "a b, a b -> a b; linear 01"),
    "equal sizes, two letters": (node_of(ops.outer.default, t(64), t(64)), "a, b -> a b; linear 0|1"),
    "all sizes equal": (node_of(ops.batched.default, t(4, 4, 4), t(4, 4, 4)), "a b c, a c d -> a b d; linear 0|1"),
    "size one": (node_of(ops.batched.default, t(1, 8, 1), t(1, 1, 6)), "1 a 1, 1 1 b -> 1 a b; linear 0|1"),
    "gate and up in one dim": (node_of(ops.swiglu.default, t(32, 128)), "a ([2] b) -> a b"),
    "pairs": (node_of(ops.rotate_pairs.default, t(4, 32, 64)), "a b (c [2]) -> a b (c [2]); linear 0"),
    "heads of a width": (node_of(ops.norm_heads.default, t(32, 64), 16), "a (b [16]) -> a (b [16])"),
    "a size that it knows": (node_of(ops.only_first_hundred.default, t(32, 256)), "a [b] -> a [b]; linear 0"),
    "no reduction of bools": (node_of(ops.any_negative.default, t(32, 64)), "a [b] -> a"),
    "three large dims": (
        node_of(ops.affine.default, t(8, 4096, 128256), t(128256), t(128256)),
        "a b c, c, c -> a b c; linear 02|12",
    ),
    "one huge dim": (node_of(ops.blend.default, t(10**8), t(10**8)), "a, a -> a; linear 01"),
    "crashes beyond its own rows": (node_of(ops.crashes.default, t(8, 4), 8), "[a] b -> [a] b; linear 0"),
    "silent where heads don't fit": (
        node_of(ops.repeat_heads.default, t(12, 8), t(4, 8)),
        "(a [3]) b, a b -> (a [3]) b; linear 01",
    ),
    "minimum under a mask": (node_of(ops.masked_least.default, t(32, 64), mask(32, 64)), "a b, a b -> a +min"),
}


@pytest.mark.parametrize("kind", FOUND)
def test_found(kind: str) -> None:
    node, expected = FOUND[kind]
    found = discover(node)
    assert found.rule == expected, found.reason


@pytest.mark.parametrize("kind", ["matmul", "gather by index", "gate and up in one dim", "heads of a width"])
def test_found_is_proven_at_the_real_sizes(kind: str) -> None:
    node, expected = FOUND[kind]
    node.meta["found_rule"] = expected
    executed, wrong = prove(node, Mesh.parse("x=2 y=2"))
    assert executed > 4
    assert not wrong


NOT_FOUND: dict[str, tuple[Node, str]] = {
    "writes": (node_of(ops.bump_.default, t(32, 64), 1.0), "writes to its operands"),
    "random, unsaid": (node_of(ops.noisy.default, t(32, 64)), "draws random numbers"),
    "random, said": (node_of(aten.rand_like.default, t(32, 64)), "draws random numbers"),
    "changes from call to call": (node_of(ops.counting.default, t(32, 64)), "two results for equal operands"),
    "writes, unsaid": (node_of(ops.writes_unsaid.default, t(32, 64)), "writes to an operand"),
    "shape depends on values": (node_of(ops.positive.default, t(64)), "can't be run|fake kernel"),
    "always crashes": (node_of(ops.crashes.default, t(8, 4), 7), "crashed"),
    "the same for all operands": (node_of(aten.zeros_like.default, t(8, 4)), "the same whatever"),
    "calls other functions": (
        node_of(torch.ops.higher_order.cond, mask(), torch.sin, torch.cos, (t(4),)),
        "calls other",
    ),
    "no kernel here": (node_of(ops.on_gpus_alone.default, t(8, 4)), "can't be run on trial values"),
    "takes no tensor": (node_of(aten.zeros.default, [4, 6]), "takes no tensor"),
    "undefined": (node_of(aten.new_empty.default, t(4, 6), [4, 6]), "undefined"),
    "a complex result": (node_of(aten.view_as_complex.default, t(4, 6, 2)), "complex"),
    "complex": (node_of(aten.real.default, t(4, 6, dtype=torch.complex64)), "complex"),
}


@pytest.mark.parametrize("kind", NOT_FOUND)
def test_not_found(kind: str) -> None:
    node, reason = NOT_FOUND[kind]
    found = discover(node)
    assert not found.rule
    assert any(word in found.reason for word in reason.split("|")), found.reason


def test_the_random_state_stays() -> None:
    before = torch.get_rng_state()
    discover(NOT_FOUND["random, unsaid"][0])
    assert torch.equal(torch.get_rng_state(), before)


def test_equal_calls_have_equal_rules() -> None:
    node, _ = FOUND["minimum under a mask"]
    torch.manual_seed(1)
    first = discover(node)
    torch.manual_seed(2)
    assert discover(node) == first


# -- the table, found anew -----------------------------------------------------------------------------------------
KNOWN = (
    *("aten.mm", "aten.bmm", "aten.t", "aten.permute", "aten.sum", "aten.amax", "aten._softmax", "aten.cumsum"),
    *("aten.native_layer_norm", "aten.native_layer_norm_backward", "aten.sort", "aten.embedding", "aten.cat"),
    *("aten.gather", "aten.topk", "aten.index_select"),
)


def splits(rule: BoundRule) -> set[tuple[object, ...]]:
    """Each letter that may be split, by where it stands; so rules are compared whatever their letters are called."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for i, dims in enumerate((*rule.operands, *rule.results)):
        for d, dim in enumerate(dims):
            for k, letter in enumerate(dim):
                found.setdefault(letter, []).append((i, d, k))
    return {tuple(places) for letter, places in found.items() if letter not in rule.whole}


@pytest.mark.parametrize("name", KNOWN)
def test_known_ops_are_found_anew(name: str) -> None:
    """Without a look at the table: nothing is freer than the table's rule, and something is found."""
    node = EXAMPLES[name][0].node()
    found, known = discover(node), rule_of(node)
    rule = bind(read_rule(found.rule), *shapes_of(node))
    assert splits(rule) <= splits(known), found.rule
    assert splits(rule)
