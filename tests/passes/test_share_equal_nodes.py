"""Equal nodes, dead nodes, and nodes that change nothing."""

import sys
from pathlib import Path

import pytest
import torch
from torch import fx

from autopar import collectives
from passes.eliminate_dead_code import eliminate_dead_code
from passes.share_equal_nodes import share_equal_nodes
from passes.simplify import simplify

sys.path.insert(0, str(Path(__file__).parents[1] / "program"))
from tracing import interpret, part_of, traced_part

aten = torch.ops.aten


def targets(part):
    return [node.target for node in part.graph.graph.nodes if node.op == "call_function"]


def same(before, after, *arguments):
    return all(
        torch.equal(a, b) for a, b in zip(interpret(before, *arguments), interpret(after, *arguments), strict=True)
    )


def test_equal_nodes_are_computed_once():
    part = traced_part(
        lambda x: (x.t() @ x.t() + x.exp() * x.exp(), torch.zeros(2) + torch.zeros(2)),
        "saved:x",
        "saved:y saved:z",
        torch.randn(3, 3),
    )
    after = share_equal_nodes(part)
    kinds = targets(after)
    assert kinds.count(aten.t.default) == kinds.count(aten.exp.default) == kinds.count(aten.zeros.default) == 1
    assert same(part, after, torch.randn(3, 3))


def test_what_differs_stays():
    """Types of scalars, phases, and random values."""
    part = traced_part(
        lambda x: (x.pow(2) + x.pow(2.0), torch.bernoulli(x) + torch.bernoulli(x)),
        "saved:x",
        "saved:y saved:z",
        torch.rand(3),
    )
    assert len(targets(share_equal_nodes(part))) == len(targets(part))


def gathers(*phases):
    graph = fx.Graph()
    weight = graph.placeholder("w")
    weight.meta["val"] = torch.zeros(2)
    results = []
    for phase in phases:
        node = graph.call_function(collectives.all_gather, (weight, "dp", 0))
        node.meta.update(val=torch.zeros(4), phase=phase)
        results.append(node)
    graph.output(tuple(results))
    return part_of(
        fx.GraphModule(torch.nn.Module(), graph), "param:w", " ".join(f"saved:{i}" for i in range(len(phases)))
    )


def test_collectives_are_shared_within_a_phase_only():
    assert len(targets(share_equal_nodes(gathers("forward", "forward")))) == 1
    assert len(targets(share_equal_nodes(gathers("forward", "backward")))) == 2  # gathered anew to save memory


def test_mutating_graphs_are_refused():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(2)
    y = graph.call_function(aten.add_.Tensor, (x, 1))
    y.meta["val"] = torch.zeros(2)
    graph.output((y,))
    part = part_of(fx.GraphModule(torch.nn.Module(), graph), "saved:x", "saved:y")
    for fold in (share_equal_nodes, simplify):
        with pytest.raises(AssertionError, match="needs a functional graph, got"):
            fold(part)


def test_dead_code_goes_and_slots_stay():
    part = traced_part(
        lambda x, y: (x.exp().sum() * 0 + 1, x * 2)[1:], "saved:x saved:y", "saved:z", *torch.randn(2, 3)
    )
    after = eliminate_dead_code(part)
    assert targets(after) == [aten.mul.Tensor]
    assert [node.op for node in after.graph.graph.nodes].count("placeholder") == 2
    assert len(targets(part)) > 1  # the pass works on a copy


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: x.clone() + 1, [aten.add.Tensor]),
        (lambda x: x.t().contiguous() + 1, [aten.t.default, aten.clone.default, aten.add.Tensor]),
        (lambda x: x.pow(1.0).mul(1.0).div(1) + 1, [aten.add.Tensor]),
        (lambda x: x.mul(2.0) + 1, [aten.mul.Tensor, aten.add.Tensor]),
        (lambda x: x.view(2, 8).view(16).view(4, 4) + 1, [aten.add.Tensor]),
        (lambda x: x.view(2, 8).view(16) + 1, [aten.view.default, aten.add.Tensor]),
        (lambda x: x.t().t() + 1, [aten.add.Tensor]),
        (lambda x: x.transpose(0, 1).transpose(-1, -2) + 1, [aten.add.Tensor]),
        (lambda x: x.expand(4, 4) + 1, [aten.add.Tensor]),
        (lambda x: (x > 0).mul(1) + 1, [aten.gt.Scalar, aten.mul.Tensor, aten.add.Tensor]),  # bool to int
    ],
    ids=range(10),
)
def test_what_changes_nothing_goes(function, left):
    part = traced_part(lambda x: (function(x),), "saved:x", "saved:y", torch.randn(4, 4))
    after = simplify(part)
    assert targets(after) == left
    x = torch.randn(4, 4)
    x[0, 0] = -0.0
    assert same(part, after, x)


def test_nothing_is_rounded_away():
    part = traced_part(lambda x: (x.pow(1.0) * 1.0,), "saved:x", "saved:y", torch.randn(4))
    special = torch.tensor([-0.0, torch.inf, -torch.inf, 1e-45])
    (got,), (expected,) = interpret(simplify(part), special), interpret(part, special)
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
