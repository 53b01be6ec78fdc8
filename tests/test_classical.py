"""Each classical strategy is a point in the space of layouts: pinned, its classical collectives come out, no others.

Volumes are bytes that one rank sends (rings). Ψ is the bytes of all parameters. The cluster has no latency and no
launch time, so that volume decides; where the text of a strategy says "only", scalars are exempt.

| strategy | a step of M microbatches sends, times (N-1)/N                                                     |
|----------|---------------------------------------------------------------------------------------------------|
| DDP      | all-reduce 2Ψ: gradients are summed locally and reduced once                                      |
| ZeRO-1   | reduce-scatter Ψ + all-gather Ψ: as DDP, but each rank updates its share                          |
| ZeRO-2   | reduce-scatter MΨ + all-gather Ψ: the accumulators are split, so each microbatch reduces           |
| ZeRO-3   | all-gather 2MΨ + reduce-scatter MΨ: parameters are gathered anew by each forward and each backward |

Sources: Rajbhandari et al. 2020 (ZeRO), section 7; Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti et al.
2022 (sequence parallelism), section 4.2.2.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

import pytest

import passes
from autopar.cluster.cluster import Cluster, Device, Level
from autopar.compiling import annotated, compile, keys_again, parsed_choices, prices
from autopar.layers import Cut, units_of
from autopar.layout import Layout
from autopar.planning import plan
from autopar.plans import Plan
from autopar.program.parts import Pipeline
from autopar.program.program import Program
from autopar.program.traffic import _KINDS, _whole_bytes, traffic
from autopar.reshard import Resharder
from passes.context import Context
from tests.virtual.random_plans import wrong
from tests.virtual.step_models import BATCH, LENGTH, VOCAB, step_of

WIDE = 16
ACTIVATION = BATCH * LENGTH * WIDE * 4
"""Bytes of one [b s h]."""
SCALAR = 8


def ideal(num_devices: int) -> Cluster:
    """Memory without end, ops without launch time, next to no latency: volume decides, of equal volumes fewer calls."""
    device = Device("ideal", 10**12, {"float32": 1e12}, 1e13, 0.0)
    return Cluster(f"{num_devices}xideal", device, (Level("link", num_devices, 1e9, 1e-12),))


@functools.cache
def plan_of(model: str, microbatches: int, num_devices: int, pins: str) -> Plan:
    return plan(step_of(model, microbatches), ideal(num_devices), pin=pins)


@functools.cache
def program_of(model: str, microbatches: int, num_devices: int, pins: str) -> Program:
    return compile(step_of(model, microbatches), plan_of(model, microbatches, num_devices, pins))


@functools.cache
def bare_pipeline(model: str, microbatches: int, num_devices: int, pins: str) -> Pipeline:
    """The plan's collectives where the layouts put them, before passes move and bundle them."""
    step = step_of(model, microbatches)
    made = plan_of(model, microbatches, num_devices, pins)
    units, _ = units_of(step.capture().gradient.graph)
    cut = Cut(units, tuple(made.node_stage[unit] for unit in units))
    joined = annotated(step.capture(), microbatches, cut, made.rules)
    choices, resharder = parsed_choices(joined, made.choices), Resharder(made.mesh, prices(made.cluster, made.mesh))
    again = keys_again(joined, made.recomputed)
    context = Context(made.mesh, microbatches, choices, joined.state_pairs, resharder, again)
    graph = joined.graph
    for step_pass in (passes.lay_out, passes.insert_moves, passes.localise_shapes, passes.recompute):
        graph = step_pass(graph, context)
    pipeline = passes.split_stages(graph, context)
    for stage in pipeline.stages:
        for name in stage.parts:
            for part_pass in (passes.simplify, passes.share_equal_nodes, passes.eliminate_dead_code):
                stage.parts[name] = part_pass(stage.parts[name], context)
    return pipeline


@dataclass(frozen=True, order=True)
class Call:
    part: str
    axis: str
    kind: str
    bytes: int


def calls(model: str, microbatches: int, num_devices: int, pins: str) -> Counter[Call]:
    """The collectives of a step's parts, each counted once a part, by the bytes of the whole tensor; no scalars."""
    found: Counter[Call] = Counter()
    pipeline = bare_pipeline(model, microbatches, num_devices, pins)
    for stage in pipeline.stages:
        for part in stage.parts.values():
            for node in part.graph.graph.nodes:
                kind = _KINDS.get(getattr(node.target, "__name__", "")) if node.op == "call_function" else None
                if kind is not None:
                    axis = str(node.args[1])
                    whole = _whole_bytes(node, kind, pipeline.mesh.size(axis))
                    if whole > SCALAR:
                        found[Call(part.name, axis, kind, whole)] += 1
    return found


def sent(pipeline: Pipeline, axis: str) -> dict[str, int]:
    """Bytes sent per step by kind, scalars left out."""
    rows = [row for row in traffic(pipeline, min_bytes=SCALAR + 1) if row.axis == axis]
    return {row.kind: row.bytes_sent for row in rows}


def parameter_bytes(model: str) -> int:
    return sum(p.numel() * p.element_size() for p in step_of(model).model.parameters() if p.requires_grad)


# -- data parallelism ----------------------------------------------------------------------------------------------
MODELS = ["perceptrons, 8 rows", "gpt, 8 rows"]


@pytest.mark.parametrize(("model", "microbatches"), [(MODELS[0], 1), (MODELS[0], 4), (MODELS[1], 4)])
def test_ddp_reduces_each_gradient_once_a_step_and_nothing_else(model: str, microbatches: int) -> None:
    program = program_of(model, microbatches, 2, "dp=2, zero=0")
    psi = parameter_bytes(model)
    assert sent(program.pipeline, "dp") == {"all_reduce": 2 * psi // 2}
    assert {call.part for call in calls(model, microbatches, 2, "dp=2, zero=0")} <= {"update", "backward"}


def test_ddp_on_four_ranks() -> None:
    program = program_of("perceptrons, 8 rows", 1, 4, "dp=4, zero=0")
    assert sent(program.pipeline, "dp") == {"all_reduce": 2 * parameter_bytes("perceptrons, 8 rows") * 3 // 4}


def test_ddp_has_one_all_reduce_for_each_parameter() -> None:
    sizes = Counter(p.numel() * 4 for p in step_of("perceptrons, 8 rows").model.parameters())
    assert calls("perceptrons, 8 rows", 4, 2, "dp=2, zero=0") == {
        Call("update", "dp", "all_reduce", size): n for size, n in sizes.items()
    }


@pytest.mark.parametrize(
    ("model", "zero", "microbatches", "reduced"),
    [
        (MODELS[0], 1, 1, 1),
        (MODELS[0], 1, 4, 1),
        (MODELS[0], 2, 1, 1),
        (MODELS[0], 2, 4, 4),
        (MODELS[1], 1, 1, 1),
        (MODELS[1], 2, 4, 4),
    ],
)
def test_zero_1_and_2(model: str, zero: int, microbatches: int, reduced: int) -> None:
    program = program_of(model, microbatches, 2, f"dp=2, zero={zero}")
    psi = parameter_bytes(model)
    assert sent(program.pipeline, "dp") == {"reduce_scatter": reduced * psi // 2, "all_gather": psi // 2}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_zero_3_gathers_in_forward_and_backward(microbatches: int) -> None:
    program = program_of("perceptrons, 8 rows", microbatches, 2, "dp=2, zero=3")
    psi = parameter_bytes("perceptrons, 8 rows")
    expected = {"all_gather": 2 * microbatches * psi // 2, "reduce_scatter": microbatches * psi // 2}
    assert sent(program.pipeline, "dp") == expected
    found = calls("perceptrons, 8 rows", microbatches, 2, "dp=2, zero=3")
    assert {call.part for call in found if call.kind == "all_gather"} == {"forward", "backward"}


def test_zero_3_spares_the_backward_gather_of_what_the_backward_does_not_read() -> None:
    """Biases of linear layers and the position table: 3Ψ less one Ψ of these."""
    microbatches = 4
    program = program_of("gpt, 8 rows", microbatches, 2, "dp=2, zero=3")
    psi = parameter_bytes("gpt, 8 rows")
    named = dict(step_of("gpt, 8 rows").model.named_parameters())
    linear_biases = ("qkv.bias", "out.bias", "up.bias", "down.bias")
    unread = sum(p.numel() * 4 for name, p in named.items() if name.endswith((*linear_biases, "positions.weight")))
    expected = {"all_gather": microbatches * (2 * psi - unread) // 2, "reduce_scatter": microbatches * psi // 2}
    assert sent(program.pipeline, "dp") == expected


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_zero_splits(zero: int) -> None:
    values = program_of("perceptrons, 8 rows", 4, 2, f"dp=2, zero={zero}").pipeline.stages[0].values
    split = {kind: {v.layout.position("dp") is not None for s, v in values.items() if s.kind == kind and v.layout.dims}
             for kind in ("state", "accumulator", "param")}  # fmt: skip
    assert split == {"state": {zero >= 1}, "accumulator": {zero >= 2}, "param": {zero >= 3}}
    partial = {v.layout.partial_op("dp") for s, v in values.items() if s.kind == "accumulator"}
    assert partial == ({"sum"} if zero < 2 else {None})


# -- tensor parallelism --------------------------------------------------------------------------------------------
SEQUENCE = "tp=2, blocks.*.norm*: tp=seq, norm: tp=seq"


def per_layer(num_devices: int, pins: str, microbatches: int = 1) -> Counter[Call]:
    """What a third layer adds to the collectives of two (of which one may have another plan that costs the same)."""
    two, three = (calls(f"gpt, {n} wide layers", microbatches, num_devices, pins) for n in (2, 3))
    assert not two - three, "a layer more takes a collective away"
    return three - two


def test_megatron_all_reduces_twice_forward_and_twice_backward_per_layer() -> None:
    assert per_layer(2, "tp=2") == {
        Call("forward", "tp", "all_reduce", ACTIVATION): 2,
        Call("backward", "tp", "all_reduce", ACTIVATION): 2,
    }


def test_megatron_splits_the_first_linear_out_and_the_second_in_without_being_told() -> None:
    choices = plan_of("gpt, 2 wide layers", 1, 2, "tp=2").choices
    for layer in range(2):
        for name, letter in {"qkv": "o", "out": "i", "up": "o", "down": "i"}.items():
            assert choices[f"blocks.{layer}.{name}/autopar.linear/forward#0"].startswith(f"tp={letter}")
        assert choices[f"blocks.{layer}/autopar.attention/forward#0"] == "tp=k"


def test_megatron_with_its_split_written_out_is_the_same() -> None:
    pins = "tp=2, *.qkv: tp=out, *.out: tp=in, *.up: tp=out, *.down: tp=in"
    written, found = (calls("gpt, 1 wide layers", 1, 2, given) for given in (pins, "tp=2"))
    large = [Counter({call: n for call, n in each.items() if call.bytes >= ACTIVATION}) for each in (written, found)]
    assert large[0] == large[1]


def test_a_split_vocabulary_never_gathers_its_logits() -> None:
    found = calls("gpt, 2 wide layers", 1, 2, "tp=2")
    tokens = BATCH * LENGTH * 4
    assert VOCAB * tokens not in {call.bytes for call in found}
    assert found[Call("forward", "tp", "all_reduce", tokens)] == 1  # the greatest logit of each token


def test_sequence_parallelism_turns_each_all_reduce_into_a_pair() -> None:
    """The same volume: what the forward gathers for a layer's first linears, the backward reads, too."""
    found = per_layer(2, SEQUENCE)
    assert {call: n for call, n in found.items() if call.part != "update"} == {
        Call(part, "tp", kind, ACTIVATION): 2
        for part in ("forward", "backward")
        for kind in ("all_gather", "reduce_scatter")
    }
    # gradients of what acts on split positions: two norms' scales and shifts
    assert {call: n for call, n in found.items() if call.part == "update"} == {
        Call("update", "tp", "all_reduce", WIDE * 4): 4
    }


def test_what_is_kept_split_is_gathered_anew() -> None:
    """As Megatron does (their section 4.2.2), which saves memory: each rank keeps a share of the norms' results."""
    pins = f"{SEQUENCE}, recompute=*norm*"
    added = per_layer(2, pins) - per_layer(2, SEQUENCE)
    assert {call: n for call, n in added.items() if call.part == "backward"} == {
        Call("backward", "tp", "all_gather", ACTIVATION): 2
    }
    assert kept_shares(SEQUENCE) == {False, True}
    assert kept_shares(pins) == {True}


def kept_shares(pins: str) -> set[bool]:
    """Whether tp splits the activations that a block keeps."""
    values = bare_pipeline("gpt, 1 wide layers", 1, 2, pins).stages[0].values
    of_shape = [v.layout for slot, v in values.items() if slot.kind == "saved" and _is_activation(v.layout)]
    return {layout.position("tp") is not None for layout in of_shape}


def _is_activation(layout: Layout) -> bool:
    return layout.global_shape == (BATCH, LENGTH, WIDE)


def test_data_and_tensor_parallelism_compose() -> None:
    """Left free, the update of what tp doesn't split is shared over tp: no more bytes, less work. Pinned, it isn't."""
    whole_modules = ("positions", "*norm*", "*.out.bias", "*.down.bias")
    found = per_layer(4, ", ".join(["dp=2, tp=2, zero=0", *(f"{glob}: tp=none" for glob in whole_modules)]))
    assert {call: n for call, n in found.items() if call.axis == "tp"} == {
        Call("forward", "tp", "all_reduce", ACTIVATION // 2): 2,
        Call("backward", "tp", "all_reduce", ACTIVATION // 2): 2,
    }
    layer = dict(step_of("gpt, 1 wide layers").model.named_modules())["blocks.0"]
    whole = {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "out.bias", "down.bias"}
    shares = Counter(p.numel() * 4 // (1 if name in whole else 2) for name, p in layer.named_parameters())
    assert {call.bytes: n for call, n in found.items() if call.axis == "dp"} == shares
    assert {(call.part, call.kind) for call in found if call.axis == "dp"} == {("update", "all_reduce")}


# -- pipeline parallelism ------------------------------------------------------------------------------------------
def test_a_pipeline_sends_each_microbatch_once_each_way() -> None:
    microbatches = 2
    program = program_of("gpt, 2 wide layers", microbatches, 2, "pp=2")
    rows = [(row.stage, row.axis, row.kind, row.count, row.bytes_sent) for row in traffic(program.pipeline)]
    assert rows == [(stage, "pp", "p2p", microbatches, ACTIVATION) for stage in (0, 1)]


# -- all of these are right ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model", "microbatches", "num_devices", "pins"),
    [
        ("perceptrons, 8 rows", 4, 2, "dp=2, zero=3"),
        ("gpt, 1 wide layers", 1, 2, SEQUENCE),
        ("gpt, 2 wide layers", 2, 2, "pp=2"),
    ],
)
def test_numbers(model: str, microbatches: int, num_devices: int, pins: str) -> None:
    assert wrong(step_of(model, microbatches), program_of(model, microbatches, num_devices, pins).pipeline) == []
