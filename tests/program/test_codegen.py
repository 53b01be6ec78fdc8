"""Generated source: what it computes, how it reads, what it frees."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

from autopar import collectives
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.program.codegen import generate_source
from autopar.program.parts import Slot, StageProgram
from autopar.program.spelling import Speller

sys.path.insert(0, str(Path(__file__).parent))
from tracing import Identity, code_of, interpret, part_of, run_part, traced_part

aten = torch.ops.aten


def attention_block(x, w, b):
    q, k, v = (x @ w.t()).view(2, 8, 3, 4, 4).unbind(2)
    scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).softmax(-1)
    y = (scores @ v.transpose(1, 2)).transpose(1, 2).reshape(2, 8, 16)
    return torch.nn.functional.layer_norm(y * 2.0 + b, (16,)), scores.max(-1)[1]


def block_part():
    arguments = torch.randn(2, 8, 16), torch.randn(48, 16), torch.randn(16)
    return traced_part(attention_block, "batch:x param:w param:b", "saved:y saved:i", *arguments), arguments


def test_equals_the_graph():
    part, arguments = block_part()
    for got, expected in zip(run_part(part, *arguments), interpret(part, *arguments), strict=True):
        assert torch.equal(got, expected)


def test_is_deterministic_and_plain():
    part, _ = block_part()
    again, _ = block_part()
    assert code_of(part).source == code_of(again).source
    source = code_of(part).source
    assert "torch.ops.aten" not in source  # every op here has a public spelling
    compile(source, "stage_0.py", "exec")


def test_reads_like_the_model():
    part, _ = block_part()
    nodes = [node for node in part.graph.graph.nodes if node.op == "call_function"]
    for node in nodes:
        node.meta.update(path="layers.0.attn" if node in nodes[:5] else "layers.0.norm", source="model.py:7")
    source = code_of(part).source
    assert source.count("# layers.0.attn\n") == 1 and source.count("# layers.0.norm\n") == 1
    assert "# model.py:7" in source
    assert "w,  # param:w f32[48 16]" in source
    assert "batch_x.view(16, 16).mm(w.t())" in source.replace("reshape", "view")


def test_empties_its_inputs_and_drops_what_is_dead():
    part, arguments = block_part()
    inputs = list(arguments)
    function = code_of(part).bind(None, torch.device("cpu"))["forward"]
    function(inputs)
    assert inputs == []
    assert "del batch_x" in code_of(part).source and "del w" not in code_of(part).source


SPELLED = [
    (aten.mm.default, (torch.randn(3, 3), torch.randn(3, 3)), {}, "a.mm(b)"),
    (aten.add.Tensor, (torch.randn(3), torch.randn(3)), {}, "(a + b)"),
    (aten.add.Tensor, (torch.randn(3), torch.randn(3)), {"alpha": 2}, "a.add(b, alpha=2)"),
    (aten.mul.Scalar, (torch.randn(3), -0.5), {}, "(a * -0.5)"),
    (aten.mul_.Scalar, (torch.randn(3), 3), {}, "a.mul_(3)"),
    (aten.div.Tensor, (torch.randn(3), torch.randn(3)), {}, "(a / b)"),
    (
        aten.div.Tensor_mode,
        (torch.randn(3), torch.randn(3)),
        {"rounding_mode": "floor"},
        'a.div(b, rounding_mode="floor")',
    ),
    (aten.rsub.Scalar, (torch.randn(3), 1), {}, "_rsub(a, 1)"),
    (aten.pow.Tensor_Scalar, (torch.rand(3), 2), {}, "a.pow(2)"),
    (aten.sum.dim_IntList, (torch.randn(3, 4), [0], True), {}, "a.sum((0,), True)"),
    (aten.sum.default, (torch.randn(3, 4),), {}, "a.sum()"),
    (aten.view.default, (torch.randn(4, 2), [8]), {}, "a.view(8)"),
    (aten._unsafe_view.default, (torch.randn(4, 2), [2, 4]), {}, "a.view(2, 4)"),
    (aten.slice.Tensor, (torch.randn(4, 6), 1, 2, 9223372036854775807), {}, "a.narrow(1, 2, 4)"),
    (aten.slice.Tensor, (torch.randn(6), 0, -3, -1), {}, "a.narrow(0, 3, 2)"),
    (aten.slice.Tensor, (torch.randn(6), 0, 0, 6, 2), {}, None),
    (aten._to_copy.default, (torch.randn(3),), {"dtype": torch.bfloat16}, "a.to(torch.bfloat16)"),
    (aten._to_copy.default, (torch.randn(3),), {"dtype": torch.float32}, "a.clone()"),
    (aten.clone.default, (torch.randn(3, 2).t(),), {"memory_format": torch.contiguous_format}, None),
    (aten.masked_fill.Scalar, (torch.randn(3), torch.tensor([True, False, True]), -math.inf), {}, None),
    (aten.where.self, (torch.tensor([True, False]), torch.randn(2), torch.randn(2)), {}, None),
    (aten.cat.default, ([torch.randn(2), torch.randn(3)], 0), {}, None),
    (aten.index.Tensor, (torch.randn(4, 3), [None, torch.tensor([0, 2])]), {}, None),
    (aten.native_layer_norm.default, (torch.randn(2, 4), [4], None, None, 1e-5), {}, None),
    (aten.split.Tensor, (torch.randn(6), 2), {}, None),
    (aten.silu.default, (torch.randn(3),), {}, "_silu(a)"),
    (aten.silu_backward.grad_input, (torch.randn(3), torch.randn(3)), {"grad_input": torch.empty(3)}, None),
    (aten.embedding_dense_backward.default, (torch.randn(2, 4), torch.tensor([1, 0]), 3, -1, False), {}, None),
    (aten.lerp_.Scalar, (torch.randn(3), torch.randn(3), 0.25), {}, "a.lerp_(b, 0.25)"),
    (
        aten.addcmul_.default,
        (torch.randn(3), torch.randn(3), torch.randn(3)),
        {"value": 0.5},
        "a.addcmul_(b, c, value=0.5)",
    ),
    (aten.gelu.default, (torch.randn(3),), {"approximate": "tanh"}, None),
    (aten.full.default, ([2], 1.5), {"dtype": torch.float32, "layout": torch.strided, "pin_memory": False}, None),
    (aten.arange.start_step, (0, 8, 2), {"device": torch.device("cpu")}, None),
    (aten.new_zeros.default, (torch.randn(2), [3]), {"pin_memory": False}, "a.new_zeros((3,))"),
]


@pytest.mark.parametrize(("target", "args", "kwargs", "text"), SPELLED, ids=[str(case[0]) for case in SPELLED])
def test_spelling_calls_the_same_kernel(target, args, kwargs, text):
    """By text where it matters, and by value and strides always."""
    graph, operands, env = fx.Graph(), [], {}

    def lift(value):
        if isinstance(value, torch.Tensor):
            node = graph.placeholder("abc"[len(operands)])
            node.meta["val"] = value
            operands.append(value)
            return node
        return [lift(item) for item in value] if isinstance(value, list) else value

    node = graph.call_function(target, tuple(lift(a) for a in args), {k: lift(v) for k, v in kwargs.items()})
    expected = target(*args, **kwargs) if not target._schema.is_mutable else None
    node.meta["val"] = expected if expected is not None else args[0]
    speller = Speller()
    spelled = speller.call(node, lambda n: n.name)
    assert text is None or spelled == text
    env.update({name: eval(code, {"torch": torch}) for name, code in speller.bindings.items()})
    env.update(zip("abc", [operand.clone() for operand in operands], strict=False), torch=torch, device="cpu")
    got = eval(spelled, env)
    if expected is None:
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        expected = target(*copies, **{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()})
    both = zip(got, expected, strict=True) if isinstance(got, (tuple, list)) else [(got, expected)]
    for a, b in both:
        assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()


def test_factories_are_made_on_the_ranks_device():
    part = traced_part(lambda x: x + torch.arange(4), "batch:x", "saved:y", torch.zeros(4))
    assert "device=device" in code_of(part).source
    assert "cpu" not in code_of(part).source


# -- accumulators ----------------------------------------------------------------------------------------------
def accumulate(*pairs):
    return tuple(total + gradient for total, gradient in pairs)


def test_a_missing_accumulator_is_zero_and_keeps_the_gradient():
    part = traced_part(
        lambda x, dy, acc: (acc + dy.t() @ x,),
        "saved:x saved:dy accumulator:w",
        "accumulator:w",
        *(torch.randn(4, 3), torch.randn(4, 2), torch.randn(2, 3)),
        name="backward",
    )
    code = code_of(part)
    assert code.functions["backward"].optional == (Slot("accumulator", "w"),)
    x, dy = torch.randn(4, 3), torch.randn(4, 2)
    (first,) = run_part(part, x, dy, None)
    assert torch.equal(first, dy.t() @ x)
    (second,) = run_part(part, x, dy, first)
    assert torch.equal(second, first + dy.t() @ x)


def test_kept_gradients_never_share_memory():
    """Tied gradients, gradients that are also saved, and inputs are copied."""
    shapes = torch.randn(3), torch.randn(3), torch.randn(3), torch.randn(3)
    part = traced_part(
        lambda x, a, b, c: (a + x * 2, b + x * 2, c + x),
        "saved:x accumulator:a accumulator:b accumulator:c",
        "accumulator:a accumulator:b accumulator:c",
        *shapes,
        name="backward",
    )
    for node in part.graph.graph.nodes:  # tie: b gets the gradient of a
        if node.target is aten.add.Tensor and node.args[0].name == "b_1":
            node.args = (node.args[0], next(n for n in part.graph.graph.nodes if n.target is aten.mul.Tensor))
    part.graph.recompile()
    x = torch.randn(3)
    totals = run_part(part, x, None, None, None)
    assert len({t.data_ptr() for t in (*totals, x)}) == 4
    assert all(torch.equal(t, e) for t, e in zip(totals, (x * 2, x * 2, x), strict=True))


def test_an_accumulator_with_other_readers_is_required():
    part = traced_part(
        lambda x, a: (a + x, a * 2),
        "saved:x accumulator:a",
        "accumulator:a saved:b",
        *(torch.randn(3), torch.randn(3)),
        name="backward",
    )
    assert code_of(part).functions["backward"].optional == ()


# -- constants and collectives -----------------------------------------------------------------------------------
def test_constants_are_passed_in():
    table = torch.randn(5)
    graph = fx.Graph()
    x = graph.placeholder("x")
    constant = graph.get_attr("table")
    total = graph.call_function(aten.add.Tensor, (x, constant))
    graph.output((total,))
    for node in (x, constant, total):
        node.meta["val"] = torch.zeros(5)
    root = torch.nn.Module()
    root.register_buffer("table", table)
    part = part_of(fx.GraphModule(root, graph), "batch:x", "saved:y")
    code = code_of(part)
    assert torch.equal(code.constants["forward.table"], table)
    assert 'constants["forward.table"]' in code.source
    assert torch.equal(run_part(part, torch.ones(5))[0], table + 1)


def test_collectives_are_calls_of_the_communicator():
    graph = fx.Graph()
    x = graph.placeholder("x")
    index = graph.call_function(collectives.coordinate, ("tp",))
    pending = graph.call_function(collectives.all_gather_start, (x, "tp", 0))
    whole = graph.call_function(collectives.wait, (pending,))
    total = graph.call_function(collectives.all_reduce, (whole, "tp"), {"op": "sum"})
    scaled = graph.call_function(aten.add.Tensor, (total, index))
    graph.output((scaled,))
    for node, size in ((x, 4), (pending, 8), (whole, 8), (total, 8), (scaled, 8)):
        node.meta["val"] = torch.zeros(size)
    index.meta["val"] = 0
    whole.meta["layout"] = Layout.parse("[8]")
    part = part_of(fx.GraphModule(torch.nn.Module(), graph), "batch:x", "saved:y")
    source = code_of(part, mesh=Mesh.parse("tp=2")).source
    for text in (
        'coordinate = comm.coordinate("tp")',
        'batch_x_gathering = comm.all_gather_start(batch_x, "tp", 0); del batch_x',
        "batch_x_gathered = comm.wait(batch_x_gathering); del batch_x_gathering  # f32[8]",
        'batch_x_reduced = comm.all_reduce(batch_x_gathered, "tp", op="sum"); del batch_x_gathered',
    ):
        assert text in source.replace("'", '"'), source
    comm = Identity()
    assert torch.equal(run_part(part, torch.ones(4), comm=comm)[0], torch.full((8,), 2.0))
    assert comm.calls == ["all_gather_start", "wait", "all_reduce"]


def test_a_name_never_hides_another():
    """Slots and nodes with the names of Python's and of the module's own things."""
    part = traced_part(
        lambda a, b, c: (a.mm(b) + c, torch.nn.functional.silu(c)),
        "param:torch param:comm batch:class",
        "saved:lambda saved:inputs",
        *(torch.randn(2, 2), torch.randn(2, 2), torch.randn(2, 2)),
    )
    arguments = [torch.randn(2, 2) for _ in range(3)]
    for got, expected in zip(run_part(part, *arguments), interpret(part, *arguments), strict=True):
        assert torch.equal(got, expected)


def test_generate_source_is_the_modules_text():
    part, _ = block_part()
    stage = StageProgram(0, {"forward": part}, {})
    text = generate_source(stage, Mesh.parse("dp=2"))
    assert text.startswith('"""Stage 0 of 1 on mesh dp=2: forward.')
    assert text.rstrip().endswith('return {"forward": forward}')
