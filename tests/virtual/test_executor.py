"""Hand-built pipelines on the virtual mesh, beside plain autograd."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from autopar import collectives
from autopar.errors import PlanError, VerificationError
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.program.executor import StageExecutor, join_outputs, split_microbatches
from autopar.program.parts import Slot
from autopar.program.state import is_plain, placements, plain_layout
from autopar.program.steps import plan_steps, without_zeros
from autopar.program.virtual import Lockstep, VirtualMesh

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))
import hand_built as hb


def loaded(pipeline, names, weights, observe=None) -> VirtualMesh:
    virtual = VirtualMesh(pipeline, observe)
    for name, weight in zip(names, weights, strict=True):
        virtual.load({Slot("param", name): weight, Slot("state", f"{name}.m"): torch.zeros_like(weight)})
    return virtual


@pytest.mark.parametrize("case", ["two_stages", "gpipe", "zero3"])
def test_virtual_mesh_equals_autograd(case):
    pipeline = {"two_stages": hb.two_stages, "gpipe": lambda: hb.two_stages(()), "zero3": hb.zero3}[case]()
    names, shapes = (["w"], [(12, 6)]) if case == "zero3" else (["w1", "w2"], [(8, 6), (12, 8)])
    weights = hb.weights(*shapes)
    virtual, reference = loaded(pipeline, names, weights), hb.Reference(weights)
    for step, lr in enumerate((0.1, 0.1, 0.05)):
        x, y = hb.batch(step)
        outputs = virtual.step({"x": x, "y": y}, {"group0.lr": lr})
        assert outputs["loss"].item() == pytest.approx(reference.step(x, y, lr), rel=1e-6)
        for name, weight, momentum in zip(names, reference.weights, reference.momenta, strict=True):
            torch.testing.assert_close(virtual.gather(Slot("param", name)), weight)
            torch.testing.assert_close(virtual.gather(Slot("state", f"{name}.m")), momentum)
        if "out" in outputs:
            torch.testing.assert_close(outputs["out"], reference.outputs)


def test_plan_frees_sends_and_settles():
    plan = plan_steps(hb.two_stages())[0]
    names = {cell: f"{slot}@{m}" for (slot, m), cell in plan.cells.items()}
    text = [f"{call} frees {' '.join(sorted(names[c] for c in call.frees))}" for call in plan.calls]
    assert text[1] == "forward 0 frees saved:a@0"
    assert text[3] == "backward 0 frees batch:x@0 received:da@0 saved:h@0"
    settled = [(str(call), [m.microbatch for m in call.settled]) for call in plan.calls if call.settled]
    assert settled == [(f"backward {m}", [m]) for m in range(4)]
    assert [names[c] for c in plan.zeroed] == ["accumulator:w1@None"]
    lean = without_zeros(plan, {"backward": [Slot("accumulator", "w1")]})
    assert (lean.zeroed, lean.absent) == ((), plan.zeroed)
    assert lean.absent[0] in lean.calls[-1].frees


def test_deadlock_names_who_waits_for_what():
    rows = (
        ("0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"),
        ("1F0", "1F1", "1F2", "1B0", "1F3", "1B1", "1B2", "1B3"),
    )
    with pytest.raises(PlanError, match=r"stage 0 at backward 0 waits for saved:da of microbatch 0 from stage 1"):
        VirtualMesh(hb.two_stages(rows))


def test_unknown_action_is_refused():
    with pytest.raises(PlanError, match="0W0: stage 0 has only the parts forward, backward, update"):
        plan_steps(hb.two_stages((("0F0", "0W0"), ("1F0",))))


def test_replicas_that_differ_are_named():
    virtual = loaded(hb.two_stages(), ["w1", "w2"], hb.weights((8, 6), (12, 8)))
    x, y = hb.batch(0)
    virtual.step({"x": x, "y": y}, {"group0.lr": 0.1})
    pipeline = virtual.pipeline
    whole = dataclasses.replace(pipeline.stages[0].values[Slot("param", "w1")], layout=Layout.parse("[4 6]"))
    pipeline.stages[0].values[Slot("param", "w1")] = whole
    with pytest.raises(VerificationError, match="param:w1: ranks 0 and 1 along axis 'tp'"):
        virtual.gather(Slot("param", "w1"))


def test_observer_sees_every_value_of_every_rank():
    seen = []
    virtual = loaded(
        hb.zero3(), ["w"], hb.weights((12, 6)), lambda *where: seen.append((*where[:3], where[3].name, len(where[4])))
    )
    x, y = hb.batch(0)
    virtual.step({"x": x, "y": y}, {"group0.lr": 0.1})
    assert (0, "prologue", None, "all_gather", 2) in seen
    assert (0, "backward", 3, "reduce_scatter_start", 2) in seen


def test_a_forgotten_wait_shows():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    started = graph.call_function(collectives.all_reduce_start, (x, "tp"))
    graph.output((graph.call_function(torch.add, (started, 1)),))
    with pytest.raises(TypeError):
        module = torch.fx.GraphModule(torch.nn.Module(), graph)
        Lockstep(Mesh.parse("tp=2")).run(module, [[torch.ones(1)] * 2], lambda node, wide: None)


def test_batches_and_outputs():
    value = torch.arange(8).view(4, 2)
    assert [piece.tolist() for piece in split_microbatches(value, (2, 2), 2, "x")] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
    ]
    with pytest.raises(PlanError, match=r"batch 'x': got shape \(4, 2\), expected \(6, 2\)"):
        split_microbatches(value, (3, 2), 2, "x")
    assert join_outputs([torch.tensor(1.0), torch.tensor(2.0)]).item() == 3.0
    assert join_outputs([value, value]).shape == (8, 2)


@pytest.mark.parametrize(
    ("text", "plain", "whole"),
    [
        ("[(8@dp 4) 6@tp]", True, "[32@dp 6@tp]"),
        ("[(2@dp 4@tp)]", True, "[8@dp.tp]"),
        ("[(8@dp 4@tp)]", False, "[32@dp.tp]"),
        ("[(3 8@tp)]", False, "[24@tp]"),
        ("[8@tp.dp]", False, "[8@dp.tp]"),
        ("[]", True, "[]"),
    ],
)
def test_plain_layouts(text, plain, whole):
    mesh, layout = Mesh.parse("dp=2 tp=2"), Layout.parse(text)
    assert is_plain(layout, mesh) is plain
    assert str(plain_layout(layout, mesh)) == whole
    assert len(placements(plain_layout(layout, mesh), mesh)) == 2


class Alone:
    """The communicator of a single rank."""

    stage, device, coordinates = 0, torch.device("cpu"), {"dp": 0}


@pytest.mark.parametrize("optional", [{}, {"backward": [Slot("accumulator", "w")]}])
def test_executor_frees_zeroes_and_adopts(optional):
    """Functions that take a list and empty it, add in place, and may keep the first gradient for an absent sum."""
    seen = []

    def forward(inputs):
        x, y, weight = inputs
        inputs.clear()
        error = x @ weight.T - y
        return (error.square().mean() / hb.MICROBATCHES, error)

    def backward(inputs):
        x, error, total = inputs
        inputs.clear()
        seen.append(None if total is None else total.clone())
        gradient = error.T @ x * (2 / error.numel() / hb.MICROBATCHES)
        return (gradient if total is None else total.add_(gradient),)

    def update(inputs):
        weight, gradient, momentum, lr = inputs
        inputs.clear()
        momentum = momentum.mul_(0.9).add_(gradient)
        return (weight.sub_(momentum * lr), momentum)

    def prologue(inputs):
        return (inputs.pop(),)

    pipeline = dataclasses.replace(hb.zero3(), mesh=Mesh.parse("dp=1"))
    functions = {"prologue": prologue, "forward": forward, "backward": backward, "update": update}
    executor = StageExecutor(pipeline, Alone(), functions, optional)
    (weight,) = hb.weights((12, 6))
    executor.set(Slot("param", "w"), weight.clone())
    executor.set(Slot("state", "w.m"), torch.zeros_like(weight))
    reference = hb.Reference([weight])
    for step in range(2):
        x, y = hb.batch(step)
        pieces = {"x": list(x.chunk(hb.MICROBATCHES)), "y": list(y.chunk(hb.MICROBATCHES))}
        loss = executor.step(pieces, {"group0.lr": torch.tensor(0.1)})["loss"]
        assert loss.item() == pytest.approx(reference.step(x, y, 0.1), rel=1e-6)
        torch.testing.assert_close(executor.get(Slot("param", "w")), reference.weights[0])
        first = seen[step * hb.MICROBATCHES]
        assert (first is None) if optional else torch.equal(first, torch.zeros(12, 6))
    alive = {str(slot) for (slot, _), cell in executor.plan.cells.items() if executor._store[cell] is not None}
    assert alive == {"param:w", "state:w.m", *([] if optional else ["accumulator:w"])}
