"""`bucket_collectives` on sums that lead to one another: found by random plans, where a reduced sum is cut, summed and
reduced a second time over the same axis."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from autopar import collectives
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.program.parts import Part, Slot
from autopar.program.virtual import Lockstep
from passes.bucket_collectives import bucket_collectives

aten = torch.ops.aten


def chained() -> Part:
    """Two sums, one of them reduced twice: a' = sum(a), a'' = sum(a' / 2), b' = sum(b)."""
    graph, mode = Graph(), FakeTensorMode()
    with mode:
        local = torch.empty(4)
    place = {"phase": "update", "level": "step", "stage": 0, "path": "up", "local_val": local, "val": local}
    a, b = graph.placeholder("a"), graph.placeholder("b")
    once = graph.call_function(collectives.all_reduce, (a, "dp", "sum"))
    half = graph.call_function(aten.div.Scalar, (once, 2))
    twice = graph.call_function(collectives.all_reduce, (half, "dp", "sum"))
    other = graph.call_function(collectives.all_reduce, (b, "dp", "sum"))
    graph.output((twice, other))
    for node in graph.nodes:
        node.meta.update(place)
    slots = tuple(Slot("accumulator", name) for name in ("a", "b"))
    return Part(
        "update", slots, tuple(Slot("param", name) for name in ("a", "b")), GraphModule(torch.nn.Module(), graph)
    )


def run(part: Part) -> list[torch.Tensor]:
    mesh, partial = Mesh.parse("dp=2"), Layout.parse("[4] +dp")
    wide = [[torch.arange(4.0) + i + rank for rank in range(2)] for i in range(2)]
    results = Lockstep(mesh).run(part.graph, wide, lambda _node, _values: None)
    assert partial.local_shape(mesh) == (4,)
    return [result[0] for result in results]


def test_a_sum_does_not_travel_with_one_that_it_leads_to() -> None:
    part = chained()
    bucketed = bucket_collectives(part)
    bucketed.graph.graph.lint()
    reduced = [n for n in bucketed.graph.graph.nodes if n.target is collectives.all_reduce]
    assert len(reduced) == 2  # a and b together, then a again
    assert all(torch.equal(got, expected) for got, expected in zip(run(bucketed), run(part), strict=True))
