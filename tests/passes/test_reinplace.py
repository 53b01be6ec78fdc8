"""In-place ops: bit-equal to the functional graph, and never on what somebody still reads."""

import random
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

from autopar import collectives
from autopar.program.parts import Slot
from passes.editing import is_mutating
from passes.reinplace import donated_slots, inplace_overload, out_overload, reinplace

sys.path.insert(0, str(Path(__file__).parents[1] / "program"))
from tracing import interpret, part_of, run_part, slots, traced_part

aten = torch.ops.aten


def mutating(part):
    return [node for node in part.graph.graph.nodes if is_mutating(node)]


def adamw(p, g, m, v, step, lr):
    step = step + 1
    p = p * (1 - lr * 0.01)
    m = torch.lerp(m, g, 0.1)
    v = torch.addcmul(v * 0.999, g, g, value=0.001)
    denominator = v.sqrt() / (1 - 0.999**step).sqrt() + 1e-8
    return torch.addcdiv(p, m, denominator, value=-1.0) * 1.0, m, v, step


ADAMW_SLOTS = (
    "param:w accumulator:w state:w.m state:w.v state:w.step scalar:lr",
    "param:w state:w.m state:w.v state:w.step",
)


def adamw_part():
    w, lr = torch.rand(5, 4), torch.tensor(0.1, dtype=torch.float64)
    arguments = w, torch.rand(5, 4), torch.rand(5, 4), torch.rand(5, 4), torch.tensor(3.0), lr
    return traced_part(adamw, *ADAMW_SLOTS, *arguments, name="update"), arguments


def test_an_update_writes_into_its_slots():
    part, arguments = adamw_part()
    changed = reinplace(part)
    assert donated_slots(part) == slots("param:w state:w.m state:w.v state:w.step")
    expected = interpret(part, *(a.clone() for a in arguments))
    given = [a.clone() for a in arguments]
    got = run_part(changed, *given)
    for slot, new, old, wanted in zip(part.outputs, got, (given[0], *given[2:5]), expected, strict=True):
        assert torch.equal(new, wanted), slot
        assert new is old, slot
    functional = [n for n in changed.graph.graph.nodes if n.op == "call_function" and not is_mutating(n)]
    assert len(functional) <= 5, functional  # the temporaries' first values: sqrt of v, and four of the scalars


def test_the_pass_leaves_its_input_alone():
    part, _ = adamw_part()
    before = str(part.graph.graph)
    reinplace(part)
    assert str(part.graph.graph) == before


def test_temporaries_are_overwritten_and_read_values_are_not():
    def function(x):
        a = x + 1
        b = a * 2  # a is read later
        c = b.exp()  # b is dead: in place
        return a + c, x.relu()  # c is dead and a is too: in place; x is the caller's

    part = reinplace(traced_part(function, "saved:x", "saved:y saved:z", torch.randn(4)))
    assert [node.target for node in mutating(part)] == [aten.exp_.default, aten.add_.Tensor]
    x = torch.randn(4)
    kept = x.clone()
    got = run_part(part, x)
    assert torch.equal(x, kept) and torch.equal(got[0], (x + 1) + ((x + 1) * 2).exp())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ((a := x + 1).t() * 2, a.sum()),  # a view whose base is read later
        lambda x: (a := x + 1, a * 2),  # returned
        lambda x: ((a := x + 1) + a.t(),),  # another view of the same storage
        lambda x: (x.t() * 2,),  # the caller's
        lambda x: ((x[:1] + 1).expand(4, 4) * 2,),  # several elements in one place
        lambda x: ((x + 1).float() > 0,),  # another dtype
        lambda x: ((x + 1).sum(0) * 2 + x,),  # another shape
    ],
    ids=range(7),
)
def test_what_may_not_be_overwritten(function):
    x = torch.randn(4, 4)
    part = traced_part(function, "saved:x", " ".join(f"saved:{i}" for i in range(len(function(x)))), x)
    kept = x.clone()
    changed = reinplace(part)
    for got, expected in zip(run_part(changed, x), interpret(part, kept), strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(x, kept)


def test_the_second_operand_serves_where_the_first_may_not():
    part = reinplace(traced_part(lambda x: (x + x.exp(),), "saved:x", "saved:y", torch.randn(3)))
    (node,) = mutating(part)
    assert node.target is aten.add_.Tensor and node.args[0].target is aten.exp.default


def test_out_forms_serve_where_there_is_no_in_place_form():
    part = reinplace(
        traced_part(lambda g, x: (aten.silu_backward(g * 2, x),), "saved:g saved:x", "saved:y", *torch.randn(2, 3))
    )
    (node,) = mutating(part)
    assert node.target is aten.silu_backward.grad_input
    g, x = torch.randn(2, 3)
    assert torch.equal(run_part(part, g, x)[0], aten.silu_backward(g * 2, x))


def test_overloads():
    assert inplace_overload(aten.mul.Tensor) is aten.mul_.Tensor
    assert inplace_overload(aten.mm.default) is None
    assert out_overload(aten.mm.default) is None
    assert out_overload(aten.where.self) == (aten.where.self_out, "out")
    assert out_overload(aten.mul.Scalar) is None  # its out form computes elsewhere and copies


def test_accumulators_are_added_to_in_place():
    part = traced_part(
        lambda x, a: (a + x * 2,), "saved:x accumulator:w", "accumulator:w", *torch.randn(2, 3), name="backward"
    )
    total = torch.ones(3)
    (got,) = run_part(reinplace(part), torch.ones(3), total)
    assert got is total and torch.equal(total, torch.full((3,), 3.0))


def test_an_output_that_cannot_be_computed_in_place_is_copied_into_its_slot():
    part = traced_part(
        lambda w, g: (g.cumsum(0) + w.flip(0), w),
        "param:w accumulator:w",
        "param:w saved:old",
        *torch.rand(2, 3),
        name="update",
    )
    w, g = torch.rand(2, 3)
    old, gradient = w.clone(), g.clone()
    new, before = run_part(reinplace(part), w, g)
    assert new is w and torch.equal(w, gradient.cumsum(0) + old.flip(0)) and torch.equal(before, old)


def test_a_transposed_chain_does_not_corrupt_a_square_parameter():
    part = traced_part(lambda w: ((w.t() * 2),), "param:w", "param:w", torch.rand(3, 3), name="update")
    w = torch.rand(3, 3)
    old = w.clone()
    (new,) = run_part(reinplace(part), w)
    assert new is w and torch.equal(w, old.t() * 2)


def test_a_collective_in_flight_holds_its_input():
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(aten.add.Tensor, (x, 1))
    pending = graph.call_function(collectives.all_reduce_start, (made, "dp"))
    other = graph.call_function(aten.mul.Tensor, (made, 2))  # would overwrite what is being sent
    total = graph.call_function(collectives.wait, (pending,))
    last = graph.call_function(aten.add.Tensor, (total, other))
    graph.output((last,))
    for node in (x, made, pending, other, total, last):
        node.meta["val"] = torch.zeros(4)
    changed = reinplace(part_of(fx.GraphModule(torch.nn.Module(), graph), "saved:x", "saved:y"))
    (node,) = mutating(changed)
    assert node.target is aten.add_.Tensor and [operand.name for operand in node.args] == ["wait", "mul_tensor"]


OPS = [
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: a - b,
    lambda a, b: a.sigmoid(),
    lambda a, b: torch.where(a > 0, a, b),
    lambda a, b: a.t(),
    lambda a, b: a.t().clone(),
    lambda a, b: a.reshape(2, 8).view(4, 4),
    lambda a, b: a.mm(b),
    lambda a, b: a.masked_fill(b > 0, 0.5),
    lambda a, b: a.scatter(0, (b > 0).long(), b),
    lambda a, b: torch.cat([a[:2], b[2:]]),
    lambda a, b: a[:1].expand(4, 4),
    lambda a, b: a.clamp(-1, 1),
    lambda a, b: a.cumsum(0),
    lambda a, b: torch.lerp(a, b, 0.3),
]


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_stay_bit_equal(seed):
    """Programs of random ops on random earlier values, some returned, some slots donated."""
    picks = random.Random(seed)

    def function(*inputs):
        values = list(inputs)
        for _ in range(14):
            window = values[-5:] if picks.random() < 0.7 else values
            values.append(picks.choice(OPS)(picks.choice(window), picks.choice(values)))
        return tuple(picks.choice(values[3:]) * 1.5 if i < 2 else values[-i] for i in range(4))

    inputs = torch.randn(3, 4, 4).unbind()
    part = traced_part(function, "param:w state:m saved:x", "param:w state:m saved:y saved:z", *inputs, name="update")
    changed = reinplace(part)
    arguments = [value.clone() for value in inputs]
    expected = interpret(part, *(value.clone() for value in inputs))
    got = run_part(changed, *arguments)
    for slot, new, wanted in zip(part.outputs, got, expected, strict=True):
        assert torch.equal(new, wanted), slot
    assert got[0] is arguments[0] and got[1] is arguments[1]
    assert torch.equal(arguments[2], inputs[2])
    assert donated_slots(part) == (Slot("param", "w"), Slot("state", "m"))
