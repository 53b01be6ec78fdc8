"""Layers that stand for several: the problem of a folded step is that of the whole one, to the last edge."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autopar.bounds import PHASES
from autopar.capture.folding import Folded
from autopar.capture.graphs import graph_hash, op_name
from autopar.capture.runs import Repeats, equal_runs
from autopar.capture.step import TrainStep
from autopar.cluster import parse_cluster
from autopar.compiling import annotated, compile
from autopar.errors import LayersDifferError
from autopar.joint import StepGraph
from autopar.layers import Cut, homes_of, units_of
from autopar.mesh import Mesh
from autopar.pins import parse_pins
from autopar.planning import plan
from autopar.skeletons import Skeletons
from autopar.solve.beside import beside
from autopar.solve.build import BuiltProblem, build_problem
from autopar.solve.costs import least_share
from autopar.solve.problem import evaluate
from autopar.trials import Trials
from tests.solve.test_recompute import setting_of
from tests.virtual.step_models import GPT, token_batch


class Loop(nn.Module):
    """Residual sums outside of the blocks, blocks of two kinds in turn, and a value that all of them read."""

    def __init__(self, width: int = 8, layers: int = 13) -> None:
        super().__init__()
        kinds = (lambda: nn.Sequential(nn.Linear(width, width), nn.GELU()), lambda: nn.Linear(width, width))
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(kinds[i % 2]() for i in range(layers))
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        shift = x = self.first(x)
        for block in self.blocks:
            x = x + block(x) * shift
        return self.last(x).square().mean()


class Dropping(nn.Module):
    """Draws in the blocks, between them, by a module that all of them share, and before and after them."""

    def __init__(self, width: int = 8, layers: int = 7) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3), nn.GELU()) for _ in range(layers)
        )
        self.shared = nn.Dropout(0.2)
        self.run: Callable[..., Tensor] = lambda function, x: function(x)

    def between(self, x: Tensor) -> Tensor:
        return self.shared(F.dropout(self.shared(x), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.first(x))
        for block in self.blocks:
            x = x + self.run(self.between, block(x))
        return self.last(F.dropout(self.shared(x), 0.1)).square().mean()


class Gathering(nn.Module):
    """The backward of each block makes the same zeros."""

    def __init__(self, width: int = 8, layers: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Gathered(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Gathered(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        return scores.gather(1, scores.topk(2).indices).sum(1, keepdim=True)


def gpt_step(microbatches: int = 2, **options) -> TrainStep:
    torch.manual_seed(0)
    return TrainStep(GPT(width=8, layers=6, **options), token_batch(8), microbatches=microbatches)


def loop_step(microbatches: int = 2) -> TrainStep:
    return TrainStep(Loop(), torch.randn(8, 8), microbatches=microbatches)


def dropping_step(microbatches: int = 2) -> TrainStep:
    torch.manual_seed(0)
    return TrainStep(Dropping(), torch.randn(8, 8), microbatches=microbatches)


def gathering_step(microbatches: int = 2) -> TrainStep:
    return TrainStep(Gathering(), torch.randn(8, 8), microbatches=microbatches)


STEPS = {"gpt": gpt_step, "loop": loop_step, "dropping": dropping_step, "gathering": gathering_step}


@functools.cache
def folded_step(name: str) -> TrainStep:
    step = STEPS[name]()
    assert step.fold().runs
    return step


@functools.cache
def whole_step(name: str) -> TrainStep:
    step = STEPS[name]()
    step.capture()
    assert not step.fold().runs
    return step


@pytest.mark.parametrize("name", STEPS)
def test_a_folded_step_unfolds_to_what_is_traced_whole(name: str) -> None:
    folded = folded_step(name).fold()
    assert graph_hash(folded.whole) == graph_hash(whole_step(name).capture())
    assert len(folded.captured.gradient.graph.nodes) < len(folded.whole.gradient.graph.nodes)


def test_runs_may_have_a_period_and_a_rest() -> None:
    (run,) = folded_step("loop").fold().runs
    assert (run.path, run.first, run.period, run.count) == ("blocks", 0, 2, 6)  # and a thirteenth block


def joined(folded: Folded, numbers: tuple[int, ...], microbatches: int, stages: int) -> StepGraph:
    """The step graph of some periods, cut where the whole one is cut evenly."""
    captured, repeats = folded.at([numbers]), Repeats.of(folded.runs, (numbers,))
    units = units_of(captured.gradient.graph)[0]
    whole = units_of(folded.whole.gradient.graph)[0]
    stage_of = {unit: i * stages // len(whole) for i, unit in enumerate(whole)}
    cut = Cut(units, tuple(stage_of[unit] for unit in units))
    return annotated(captured, microbatches, cut, repeats=repeats)


def expanded(small: BuiltProblem, large: BuiltProblem, step: StepGraph, choice: list[int]) -> list[int]:
    """The choice of the whole problem in which every layer does what stands for it does."""
    homes = homes_of(step.graph)
    picked = {}
    for node, pick in zip(small.nodes, choice, strict=True):
        home, key = homes[node], node.meta["key"]
        for block in step.repeats.blocks(home) if home else ("",):
            picked[key.replace(home, block, 1) if home else key] = pick
    return [picked[node.meta["key"]] for node in large.nodes]


@pytest.mark.parametrize(
    ("name", "numbers", "mesh", "recompute"),
    [
        ("gpt", (0, 1, 3, 4, 5), "dp=2", "auto"),
        ("loop", (0, 1, 4, 5), "dp=2 tp=2", "none"),
        ("loop", (0, 1, 3, 5), "dp=2", "auto"),
        ("dropping", (0, 1, 3, 4, 5, 6), "pp=2 dp=2", "auto"),
        ("gathering", (0, 1, 3, 4, 5, 6, 7), "pp=2 dp=2", "none"),
    ],
)
def test_the_folded_problem_is_the_whole_one(name: str, numbers: tuple[int, ...], mesh: str, recompute: str) -> None:
    """Whatever is chosen: objective, rows and memory of the whole problem, built without folding, are the same."""
    step, parsed = folded_step(name), Mesh.parse(mesh)
    folded = step.fold()
    small_step = joined(folded, numbers, step.microbatches, parsed.num_stages)
    all_numbers = tuple(range(folded.runs[0].count))
    large_step = joined(folded, all_numbers, step.microbatches, parsed.num_stages)
    setting = replace(setting_of(step, parsed, recompute), contention=0.4, is_pipelined=parsed.num_stages > 1)
    small, large = (build_problem(s, setting) for s in (small_step, large_step))
    assert any(moved.hideable is not None and moved.hideable.any() for moved in small.moves)
    priced = [  # what is forbidden costs infinitely much on both sides, which would say nothing
        replace(p, edges=tuple(replace(e, cost=np.where(np.isinf(e.cost), 0.0, e.cost)) for e in p.edges))
        for p in (small.problem, large.problem)
    ]
    for seed in range(5):
        draw = random.Random(seed)
        choice = [draw.randrange(len(options)) for options in small.strategies]
        there = expanded(small, large, small_step, choice)
        found, expected = (evaluate(p, c) for p, c in zip(priced, (choice, there), strict=True))
        assert found.rows == pytest.approx(expected.rows, rel=1e-9)
        assert found.usage == pytest.approx(expected.usage, rel=1e-9)
        assert found.objective == pytest.approx(expected.objective, rel=1e-9)
        runs, of_all = (beside(b, c) for b, c in zip((small, large), (choice, there), strict=True))
        assert sum(runs.computing) == pytest.approx(sum(of_all.computing), rel=1e-9)
        assert sum(runs.hiding) == pytest.approx(sum(of_all.hiding), rel=1e-9)
        late, of_each = (sum(each.late_s(setting.contention)) for each in (runs, of_all))
        assert 0.8 * of_each <= late * (1 + 1e-9) and late <= of_each * (1 + 1e-9)  # of alike windows it is their sum's


def test_layers_that_differ_are_traced_whole() -> None:
    class Uneven(Loop):
        def forward(self, x: Tensor) -> Tensor:
            for i, block in enumerate(self.blocks):
                x = x + block(x) * (i + 1)
            return x.square().mean()

    folded = TrainStep(Uneven(), torch.randn(8, 8)).fold()
    assert not folded.runs


def test_blocks_are_compared_by_what_they_are() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(14))
    assert [(r.first, r.count) for r in equal_runs(model, {})] == [(0, 14)]
    model.blocks[7] = nn.Linear(4, 4, bias=False)
    assert [(r.first, r.count) for r in equal_runs(model, {})] == [(0, 7), (8, 6)]
    assert not equal_runs(model, {f"blocks.{i}.weight": i for i in range(14)})  # groups of the optimizer
    model.blocks[3].register_forward_hook(lambda *args: None)
    assert [(r.first, r.count) for r in equal_runs(model, {})] == [(8, 6)]
    model.blocks[10].weight = model.blocks[9].weight
    assert not equal_runs(model, {})


@pytest.mark.parametrize(
    ("name", "cluster", "pins"),
    [
        ("gpt", "2xcpu", "pp=2"),
        ("loop", "4xcpu", "pp=2, tp=2"),
    ],
)
def test_a_plan_of_a_folded_step_is_that_of_the_whole(name: str, cluster: str, pins: str) -> None:
    """Choices, seconds, bytes by class and collectives are those of a plan made with all layers; and it compiles."""
    step, whole = folded_step(name), whole_step(name)
    small, large = (plan(s, cluster, pin=pins) for s in (step, whole))
    assert small.estimate.objective_s == pytest.approx(large.estimate.objective_s, rel=1e-6)
    assert small.estimate.memory == large.estimate.memory
    assert [replace(row, step_s=0) for row in small.estimate.collectives] == [
        replace(row, step_s=0) for row in large.estimate.collectives
    ]
    assert small.valid_for == large.valid_for
    assert small.choices == large.choices and small.recomputed == large.recomputed
    assert small.node_stage == large.node_stage
    assert compile(whole, small).verify(num_steps=1).ok


def test_the_layer_after_those_that_the_update_reduces_stands_for_itself() -> None:
    """With one microbatch; bytes by class at the peak are those of all layers (they were extrapolated from a layer
    between two that are reduced late and the last ones, some of them to less than nothing)."""
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(8))
    model.forward = lambda x: functools.reduce(lambda y, block: y + block(y), model.blocks, x).square().mean()
    steps = [TrainStep(model, {"x": torch.randn(8, 16)}) for _ in range(2)]
    steps[1].capture()
    assert steps[0].fold().runs and not steps[1].fold().runs
    small, large = (plan(step, "2xcpu", pin="dp=2, zero=3").estimate.memory for step in steps)
    assert [replace(row, where="") for row in small] == [replace(row, where="") for row in large]


def test_layers_that_draw_run_as_the_reference_does() -> None:
    """Planned folded, compiled whole: eager draws the captured step's numbers, and so do both devices."""
    step = folded_step("dropping")
    program = compile(step, plan(step, "2xcpu", pin="tp=2"))
    report = program.verify(num_steps=1)
    assert report.ok, str(report)
    draws = [node for node in step.capture().gradient.graph.nodes if op_name(node) == "random_mask"]
    names = {node.args[1] for node in draws}
    assert names >= {"blocks.6.1#0", "#0", "#7", "shared#0", "shared#15"}
    assert len(names) == 7 + 8 + 16


def test_draws_in_an_order_of_their_own_leave_the_step_whole() -> None:
    """Run again without the numbers of the forward, the last layer draws first."""
    model = Dropping()
    model.run = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    step = TrainStep(model, torch.randn(8, 8), microbatches=1)
    assert not step.fold().runs


def test_a_pin_on_one_layer_unfolds_the_step() -> None:
    made = plan(folded_step("loop"), "2xcpu", pin="tp=2, blocks.3: tp=none")
    assert "blocks.3/autopar.linear/forward#0" not in made.choices
    assert "blocks.5/autopar.linear/forward#0" in made.choices


class Secret(Loop):
    """Treats one layer unlike the others, though its module is like theirs."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) * (2 if getattr(block, "doubles", lambda: False)() else 1)
        return x.square().mean()


class Quiet(nn.Linear):
    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, width)
        self.number = number

    def doubles(self) -> bool:
        return self.number == 4


def test_layers_that_only_seem_equal_are_found_out_when_compiled() -> None:
    model = Secret()
    model.blocks = nn.ModuleList(Quiet(8, number) for number in range(9))
    step = TrainStep(model, torch.randn(8, 8))
    made = plan(step, "2xcpu", pin="dp=2")
    with pytest.raises(LayersDifferError, match="plan this step again"):
        compile(step, made)
    again = plan(step, "2xcpu", pin="dp=2")
    assert compile(step, again).verify(num_steps=1).ok


# -- stages that stand for several -----------------------------------------------------------------------------------
class Chain(nn.Module):
    def __init__(self, width: int = 8, layers: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def chain_step(model: nn.Module, is_folded: bool, width: int = 8) -> TrainStep:
    step = TrainStep(model, torch.randn(16, width), microbatches=8, clip_norm=1.0)
    if not is_folded:
        step.capture()
    assert bool(step.fold().runs) == is_folded
    return step


def test_few_stages_stand_for_many() -> None:
    """Cut, choices, bytes by class and seconds are those of a plan that looked at every stage; and it compiles."""
    torch.manual_seed(0)
    model = Chain()
    whole = chain_step(model, is_folded=False)
    small, large = (plan(s, "10xcpu", pin="pp=5, tp=2") for s in (chain_step(model, is_folded=True), whole))
    assert small.node_stage == large.node_stage
    assert small.choices == large.choices and small.recomputed == large.recomputed
    rows, expected = ([replace(row, where="") for row in p.estimate.memory] for p in (small, large))
    assert rows == expected
    assert small.estimate.bubble_fraction == pytest.approx(large.estimate.bubble_fraction)
    # but for the scalars of the gradient norm, which every stage sends to every other
    assert small.estimate.step_s["microbatches"] == pytest.approx(large.estimate.step_s["microbatches"])
    assert small.estimate.objective_s == pytest.approx(large.estimate.objective_s, rel=0.1)
    assert compile(whole, small).verify(num_steps=1).ok


def skeletons_of(step: TrainStep) -> Skeletons:
    return Skeletons(step.fold(), step.microbatches, {})


def test_stages_are_alike_by_their_layers_and_where_values_pass_from_neighbour_to_neighbour() -> None:
    skeletons = skeletons_of(chain_step(Chain(layers=16), is_folded=True))
    cut = Cut.from_boundaries(skeletons.units, [0, 2, 5, 8, 10, 13])
    found = skeletons.likeness(cut)
    assert found.kept == (0, 1, 3, 5)  # the first, three layers, two layers, the last
    assert found.like == (0, 1, 1, 2, 1, 3)
    assert found.times == (1, 3, 1, 1)
    kinds = skeletons.likeness(Cut.from_boundaries(skeletons.units, [0, 2, 5, 8, 10, 13], (0, 1, 0, 0, 0, 0)))
    assert kinds.kept == (0, 1, 2, 3, 5) and kinds.like == (0, 1, 2, 3, 2, 4)  # the second chooses otherwise
    skipping = skeletons_of(folded_step("loop"))  # all of its blocks read what the first layer gives
    assert skipping.likeness(Cut.from_boundaries(skipping.units, [0, 3, 5, 7, 9])).kept == (0, 1, 2, 3, 4)


class Turning(Chain):
    """What the blocks multiply with is the same for all: computed in the first, and anew on each stage."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            turned = super().forward(x) * torch.arange(8, dtype=torch.float32).cos()
            return turned.tanh()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(8, 8) for _ in range(10))


def test_keys_of_what_stages_compute_anew_are_those_of_all_stages() -> None:
    step = chain_step(Turning(), is_folded=True)
    skeletons = skeletons_of(step)
    cut = Cut.from_boundaries(skeletons.units, [0, 2, 4, 6, 8])
    few = skeletons.graph(cut)
    assert len(skeletons.likeness(cut).kept) == 3
    told = skeletons.everywhere(few, {n.meta["key"]: _what(n) for n in few.graph.nodes if "key" in n.meta})
    every = annotated(chain_step(Turning(), is_folded=False).capture(), step.microbatches, cut)
    expected = {n.meta["key"]: _what(n) for n in every.graph.nodes if "key" in n.meta}
    assert sum("cos" in key for key in expected) >= 5
    sums = {key for key in expected if key.split("/")[0] == ""}  # of the norm: every stage has those of all others
    assert {key: what for key, what in told.items() if key not in sums} == {
        key: what for key, what in expected.items() if key not in sums
    }


def _what(node: Node) -> tuple[str, tuple[int, ...]]:
    value = node.meta["val"]
    return str(node.target) if node.op == "call_function" else node.op, tuple(getattr(value, "shape", ()))


@pytest.mark.parametrize(
    ("pins", "contention"),
    [("tp=4", 1.0), ("pp=2, dp=2", 1.0), ("pp=4", 1.0), ("dp=2, tp=2, zero=3", 0.5), ("pp=2, dp=2, zero=2", 0.5)],
)
def test_no_plan_beats_the_bounds_of_its_layers(pins: str, contention: float) -> None:
    step = chain_step(Chain(width=64), is_folded=True, width=64)
    cluster = parse_cluster("4xcpu")
    cluster = replace(cluster, device=replace(cluster.device, contention=contention))
    trials = Trials(step, skeletons_of(step), cluster, parse_pins(pins), 1e9)
    made = plan(step, cluster, pin=pins)
    assert any(row.hidden_s for row in made.estimate.overlap) == (contention < 1)
    looks = [trials.bounds.layer_s(made.mesh, PHASES[:count]) for count in range(len(PHASES) + 1)]
    rising = [trials.bounds.least_s(made.mesh), *looks, made.estimate.objective_s]
    assert all(lower <= higher * (1 + 1e-9) for lower, higher in itertools.pairwise(rising)), rising
    assert looks[-1] >= 0.3 * made.estimate.objective_s  # it says something
    assert 0.05 * made.estimate.objective_s <= trials.units_s(made.mesh) <= made.estimate.objective_s * (1 + 1e-9)


def test_an_axis_longer_than_every_factor_shares_no_work() -> None:
    step = chain_step(Chain(), is_folded=True)
    bounds = Trials(step, skeletons_of(step), parse_cluster("64xcpu"), parse_pins(None), 1e9).bounds
    even, long = (Mesh.parse(text) for text in ("pp=1 dp=8 tp=8", "pp=1 dp=1 tp=64"))
    linears = [node for node in bounds.whole.graph.nodes if op_name(node) == "linear"]
    assert {least_share(node.meta["rule"], even) for node in linears} == {1 / 64}
    assert {least_share(node.meta["rule"], long) for node in linears} == {1.0}
    assert bounds.least_s(long) > bounds.least_s(even)
    assert bounds.least_s(even) == bounds.least_s(Mesh.parse("pp=1 tp=8 dp=8"))


class Straight(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_of_stages_of_one_layer_each_as_many_are_there_as_layers_are_wanted() -> None:
    skeletons = skeletons_of(chain_step(Straight(layers=8), is_folded=True))
    count = len(skeletons.units)
    found = skeletons.likeness(Cut.from_boundaries(skeletons.units, list(range(count))))
    (run,) = skeletons.folded.runs
    layers = [stage for stage in found.kept if skeletons.units[stage].startswith("blocks")]
    assert len(layers) == len(run.kept) < 8 and found.kept[0] == 0 and found.kept[-1] == count - 1
    assert max(found.times) == count - len(found.kept) + 1  # one stands for all others


class Headed(nn.Module):
    """Most of the work follows the last block, outside of any module that has a stage of its own by its name."""

    def __init__(self, width: int = 16, words: int = 512) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def test_what_follows_the_blocks_is_bound_to_the_last_unit() -> None:
    step = TrainStep(Headed(), torch.randn(64, 16), microbatches=8)
    trials = Trials(step, skeletons_of(step), parse_cluster("2xcpu"), parse_pins("pp=2"), 1e9)
    made = [plan(step, "2xcpu", pin=pins) for pins in ("pp=2", "pp=2, blocks.3: stage=0")]
    assert trials.skeletons.units[-1] not in ("blocks.3", "head")
    for each in made:
        assert trials.bounds.least_s(each.mesh) <= each.estimate.objective_s * (1 + 1e-9)
    assert made[0].estimate.objective_s <= made[1].estimate.objective_s * 1.02  # the cut sees where the work is
