"""The memory model beside measured allocations."""

import sys
from pathlib import Path

import pytest
import torch
from torch import fx

from autopar import collectives
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.program.allocations import buffer_bytes, local_bytes
from autopar.program.memory import part_peak, stage_peak
from autopar.program.parts import Pipeline, Slot, StageProgram
from autopar.program.saved import stage_codes
from autopar.program.steps import plan_steps, without_zeros
from passes.eliminate_dead_code import eliminate_dead_code
from passes.reinplace import reinplace

sys.path.insert(0, str(Path(__file__).parent))
from tracing import ALONE, code_of, part_of, traced_part, values_of
from tracking import Tracker

aten = torch.ops.aten
F32 = 4


def measured(part, *arguments, kept=()):
    """The peak while the generated function runs; the caller keeps the arguments numbered in `kept`."""
    function = code_of(part).bind(None, torch.device("cpu"))[part.name]
    inputs = [a if a is None else a.clone() for a in arguments]
    held = [inputs[i] for i in kept]
    tracker = Tracker()
    tracker.watch(*(a for a in inputs if a is not None))
    with torch.inference_mode(), tracker:
        function(inputs)
    del held
    return tracker.peak


def chain(x, w):
    for _ in range(4):
        x = (x @ w).relu()
    return (x.t().sum(0).expand(3, 8) * 2,)


def test_a_part_agrees_with_what_is_measured():
    arguments = torch.randn(8, 16), torch.randn(16, 16)
    part = traced_part(chain, "batch:x param:w", "saved:y", *arguments)
    for variant in (part, reinplace(part)):
        profile = part_peak(variant, ALONE)
        assert profile.peak == measured(variant, *arguments, kept=(1,))
        assert profile.parameters == 16 * 16 * F32
    assert part_peak(reinplace(part), ALONE).peak <= part_peak(part, ALONE).peak


def test_an_input_is_freed_after_its_last_reader():
    part = traced_part(lambda x, y: (x.exp().sum() + y.sum(),), "saved:x saved:y", "saved:z", *torch.randn(2, 100))
    assert part_peak(part, ALONE).peak == 300 * F32 == measured(part, *torch.randn(2, 100))


def test_items_of_a_tuple_live_apart():
    """The indices of the maximum are read later than its values, which are freed by then."""

    def function(x):
        values, indices = x.max(1)
        small = values.sum()
        return (x.t() @ x).sum() + small, indices.t()

    part = traced_part(function, "saved:x", "saved:y saved:i", torch.randn(64, 2))
    assert part_peak(part, ALONE).peak == measured(part, torch.randn(64, 2))


def test_several_outputs_and_views_count_once():
    def function(x):
        a, b = x.max(0)
        first, second = (x * 2).split(4)
        return first + second, a, b.t()

    part = traced_part(function, "saved:x", "saved:y saved:a saved:b", torch.randn(8, 8))
    assert part_peak(part, ALONE).peak == measured(part, torch.randn(8, 8))


@pytest.mark.parametrize("first", [True, False])
def test_the_first_gradient_takes_the_accumulators_place(first):
    part = reinplace(
        traced_part(
            lambda x, dy, a: (a + dy.t() @ x,),
            "saved:x saved:dy accumulator:w",
            "accumulator:w",
            *(torch.randn(64, 8), torch.randn(64, 8), torch.randn(8, 8)),
            name="backward",
        )
    )
    profile = part_peak(part, ALONE, first=first)
    arguments = torch.randn(64, 8), torch.randn(64, 8), None if first else torch.randn(8, 8)
    assert profile.peak == measured(part, *arguments)
    assert profile.gradients == 64 * F32 * (1 if first else 2)
    assert profile.where.startswith("backward: mm")


# -- collectives ------------------------------------------------------------------------------------------------
def gathering(start):
    """A started all-gather of a parameter, 4 → 8 rows, and something to do meanwhile."""
    graph = fx.Graph()
    weight, x = graph.placeholder("w"), graph.placeholder("x")
    pending = graph.call_function(collectives.all_gather_start, (weight, "dp", 0 if start else 1))
    other = graph.call_function(aten.exp.default, (x,))
    whole = graph.call_function(collectives.wait, (pending,))
    y = graph.call_function(aten.mul.Tensor, (whole, other))
    graph.output((y,))
    shapes = {weight: (4, 8), x: (8, 8), pending: (8, 8), other: (8, 8), whole: (8, 8), y: (8, 8)}
    for node, shape in shapes.items():
        node.meta["local_val"] = node.meta["val"] = torch.zeros(shape)
    return part_of(fx.GraphModule(torch.nn.Module(), graph), "param:w batch:x", "saved:y")


def test_buffers_in_flight():
    mesh = Mesh.parse("dp=2")
    profile = part_peak(gathering(start=True), mesh)
    assert profile.parameters == (32 + 64) * F32  # the shard at rest and the gathered weight, in its buffer
    assert (profile.buffers, profile.activations) == (0, 128 * F32)
    apart = part_peak(gathering(start=False), mesh)  # along dim 1: what arrives is put together at the wait
    assert apart.peak == profile.peak


@pytest.mark.parametrize(
    ("target", "args", "expected"),
    [
        (collectives.all_gather, ("dp", 0), 0),
        (collectives.all_gather, ("dp", 1), 3 * 64),
        (collectives.reduce_scatter, ("dp", 0), 48),
        (collectives.all_reduce, ("tp",), 64),
        (collectives.all_to_all, ("tp", 0, 1), 32),
        (collectives.shard, ("tp", 0), 0),
    ],
)
def test_buffers_of_collectives(target, args, expected):
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["local_val"] = torch.zeros(4, 4)
    assert buffer_bytes(graph.call_function(target, (x, *args)), Mesh.parse("dp=4 tp=2")) == expected


def test_local_bytes_without_local_values():
    node = fx.Graph().placeholder("x")
    node.meta.update(val=torch.zeros(8, 4), layout=Layout.parse("[8@dp 4]"))
    assert local_bytes(node, Mesh.parse("dp=4")) == 8 * F32


# -- whole steps -------------------------------------------------------------------------------------------------
def training(microbatches, schedule):
    """Two layers, their backward, and SGD with momentum."""

    def forward(x, w1, w2):
        h = (x @ w1).relu()
        return (h @ w2).square().mean(), h, h @ w2

    def backward(x, w2, h, y, a1, a2):
        dy = y * (2.0 / y.numel())
        dh = dy @ w2.t() * (h > 0)
        return a1 + x.t() @ dh, a2 + h.t() @ dy

    def update(w1, m1, a1, w2, m2, a2):
        m1, m2 = m1 * 0.9 + a1, m2 * 0.9 + a2
        return w1 - m1 * 0.1, m1, w2 - m2 * 0.1, m2

    x, w1, w2 = torch.randn(32, 8), torch.randn(8, 16), torch.randn(16, 4)
    h, y = torch.randn(32, 16), torch.randn(32, 4)
    parts = [
        traced_part(forward, "batch:x param:w1 param:w2", "output:loss saved:h saved:y", x, w1, w2),
        traced_part(
            backward,
            "batch:x param:w2 saved:h saved:y accumulator:w1 accumulator:w2",
            "accumulator:w1 accumulator:w2",
            *(x, w2, h, y, w1, w2),
            name="backward",
        ),
        traced_part(
            update,
            "param:w1 state:w1.m accumulator:w1 param:w2 state:w2.m accumulator:w2",
            "param:w1 state:w1.m param:w2 state:w2.m",
            *(w1, w1, w1, w2, w2, w2),
            name="update",
        ),
    ]
    parts = [reinplace(eliminate_dead_code(part)) for part in parts]
    values = {slot: value for part in parts for slot, value in values_of(part).items()}
    stage = StageProgram(0, {part.name: part for part in parts}, values)
    return Pipeline(ALONE, microbatches, (stage,), (), (tuple(schedule.split()),))


def run_step(pipeline, tracker):
    """One step as the executor runs it, in a few lines."""
    (code,) = stage_codes(pipeline)
    functions = code.bind(None, torch.device("cpu"))
    plan = without_zeros(plan_steps(pipeline)[0], {name: s.optional for name, s in code.functions.items()})
    store = {}
    for (slot, _), cell in plan.cells.items():
        if slot.kind in ("batch", "param", "state"):
            store[cell] = torch.randn(code.values[slot].layout.global_shape)
            tracker.watch(store[cell])
    with torch.inference_mode(), tracker:
        for call in plan.calls:
            if call.part not in functions:
                continue
            arguments = [store.get(cell) for cell in call.inputs]
            for cell in call.frees:
                store.pop(cell, None)
            results = functions[call.part](arguments)
            store.update({cell: value for cell, value in zip(call.outputs, results, strict=True) if cell >= 0})
            del results


@pytest.mark.parametrize("schedule", ["0F0 0B0", "0F0 0F1 0F2 0B0 0B1 0B2", "0F0 0F1 0B0 0F2 0B1 0B2"])
def test_a_whole_step_agrees_with_what_is_measured(schedule):
    pipeline = training(schedule.count("F"), schedule)
    tracker = Tracker()
    run_step(pipeline, tracker)
    profile = stage_peak(pipeline, 0)
    assert profile.peak == tracker.peak, (profile, tracker.at)
    assert profile.optimizer == profile.parameters == (8 * 16 + 16 * 4) * F32


def test_more_in_flight_needs_more():
    peaks = [
        stage_peak(training(3, schedule), 0).activations
        for schedule in ("0F0 0B0 0F1 0B1 0F2 0B2", "0F0 0F1 0B0 0F2 0B1 0B2", "0F0 0F1 0F2 0B0 0B1 0B2")
    ]
    assert peaks[0] < peaks[1] < peaks[2]


def test_what_no_part_touches_counts():
    pipeline = training(1, "0F0 0B0")
    (stage,) = pipeline.stages
    table = next(iter(stage.values.values()))
    more = StageProgram(0, stage.parts, {**stage.values, Slot("buffer", "unused"): table})
    extra = stage_peak(Pipeline(ALONE, 1, (more,), (), pipeline.schedule), 0).peak - stage_peak(pipeline, 0).peak
    assert extra == torch.Size(table.layout.global_shape).numel() * F32
