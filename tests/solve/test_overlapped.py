"""What hides behind computation: where the windows are, how much fits, and what the lowered program does meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch.fx import Node

from autopar.capture.step import TrainStep
from autopar.compiling import annotated, lower
from autopar.layers import Cut, units_of
from autopar.mesh import Mesh
from autopar.pins import parse_pins
from autopar.planning import plan
from autopar.plans import Plan
from autopar.program.parts import Part, Pipeline
from autopar.program.storages import is_start, is_wait
from autopar.program.traffic import collective_of
from autopar.repriced import reprice
from autopar.reshard import Resharder
from autopar.solve import spent
from autopar.solve.allowed import bind_pins
from autopar.solve.beside import beside, step_s
from autopar.solve.build import BuiltProblem, build_problem
from autopar.solve.modes import Mode
from autopar.solve.overlapped import Overlapped, Ways, overlapped
from autopar.solve.problem import evaluate
from autopar.solve.search import solve
from autopar.solve.windows import Window, Windows, windows_of
from passes.kinds import started_by
from tests.solve.test_recompute import setting_of
from tests.virtual.step_models import GPT, momentum, token_batch

LAYERS, WIDTH = 3, 192
"""Wide enough that the weights are gathered block by block."""
Price = Callable[[str, str, float], float]


@dataclass(frozen=True)
class Case:
    """A plan of the small GPT in which all parameters are split, and the program made of it."""

    built: BuiltProblem
    choice: tuple[int, ...]
    pipeline: Pipeline
    price: Price

    @property
    def overlapped(self) -> Overlapped:
        return overlapped(self.built, self.choice)

    def at(self, contention: float = 0.0, capacity: float = 1e15) -> Case:
        """The same choice on other devices."""
        setting = replace(self.built.setting, contention=contention, capacity=capacity)
        return replace(self, built=build_problem(self.built.step, setting))

    def ways(self, stage: int = 0) -> Ways:
        return self.overlapped.axes[stage]["dp"]


@functools.cache
def step_of(microbatches: int) -> TrainStep:
    torch.manual_seed(0)
    model = GPT(width=WIDTH, heads=2, layers=LAYERS, tied=False)
    return TrainStep(model, token_batch(16), optimizer=momentum, microbatches=microbatches)


@functools.cache
def case(
    microbatches: int = 2,
    mesh: str = "dp=2",
    byte_s: float = 1e-7,
    recompute: str = "none",
    contention: float = 0.0,
) -> Case:
    """`byte_s`: what the links take for a byte; computation takes 1e-8 seconds for each byte that it moves."""
    step, laid_out = step_of(microbatches), Mesh.parse(mesh)
    units = units_of(step.capture().gradient.graph)[0]
    stages = laid_out.num_stages
    cut = Cut.from_boundaries(units, [round(i * len(units) / stages) for i in range(stages)])
    graph = annotated(step.capture(), microbatches, cut)

    def price(kind: str, axis: str, num_bytes: float) -> float:
        return 1e-7 + num_bytes * byte_s

    allowed = bind_pins(parse_pins("zero=3"), graph.graph, laid_out)
    resharder = Resharder(laid_out, price)
    setting = replace(
        setting_of(step, laid_out, recompute),
        allowed=allowed,
        resharder=resharder,
        contention=contention,
        is_pipelined=stages > 1,
    )
    built = build_problem(graph, setting)
    choice = solve(built.problem, gap=1e-2).choice
    again = tuple(node.meta["key"] for node in built.recomputed(choice))
    pipeline = lower(graph.copied(), built.choices(choice), laid_out, microbatches, price, "1f1b", again)
    return Case(built, choice, pipeline, price)


# -- what the program does -----------------------------------------------------------------------------------------
def part_s(part: Part, made: Case, seconds: Callable[[Node], float]) -> float:
    """A part on one rank: collectives of an axis run one after another beside everything else, waits wait for them."""
    now, free, ends = 0.0, dict[str, float](), dict[Node, float]()
    for node in part.graph.graph.nodes:
        found = collective_of(node, made.pipeline.mesh)
        if found is not None:
            begin = max(now, free.get(found.axis, 0.0))
            free[found.axis] = ends[node] = begin + made.price(found.kind, found.axis, found.whole_bytes)
            now = now if is_start(node) else ends[node]
        elif is_wait(node):
            now = max(now, ends[started_by(node)])
        elif node.op == "call_function":
            now += seconds(node)
    return now


def program_s(made: Case) -> float:
    """A step of a program of one stage."""
    picked = made.built.picked(made.choice)
    rows = zip(made.built.nodes, made.built.plain, made.choice, picked, strict=True)
    once = {node.meta["key"]: float(p.cost[i]) / (1 + (s.mode is Mode.AGAIN)) for node, p, i, s in rows}
    (stage,) = made.pipeline.stages
    total = 0.0
    for part in stage.parts.values():
        times = 1 if part.name in ("prologue", "update") else made.pipeline.microbatches
        total += times * part_s(part, made, lambda node: once.get(node.meta.get("key", ""), 0.0))
    return total


@pytest.mark.parametrize(
    ("microbatches", "byte_s", "recompute"),
    [(1, 1e-8, "none"), (1, 1e-7, "none"), (2, 1e-9, "none"), (2, 3e-8, "none"), (2, 1e-7, "none"), (2, 3e-8, "full")],
)
def test_what_is_said_to_hide_does_in_the_program(microbatches: int, byte_s: float, recompute: str) -> None:
    """The lowered program, run on paper, takes no longer than is said, and not much less."""
    made = case(microbatches, byte_s=byte_s, recompute=recompute)
    runs, found = program_s(made), made.overlapped
    assert runs <= found.step_s < found.serial_s
    assert found.step_s <= 1.07 * runs


# -- how much fits -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("byte_s", [1e-9, 3e-8, 1e-7])
def test_no_more_hides_than_computation_is_beside_it(byte_s: float) -> None:
    made = case(byte_s=byte_s)
    ways, problem = made.ways(), made.at(1.0).built.problem
    computing = sum(float(n.cost[i]) for n, i in zip(problem.nodes, made.choice, strict=True) if n.row == 0)
    assert 0 < ways.hidden_s <= made.built.setting.microbatches * computing
    assert made.overlapped.step_s == pytest.approx(made.overlapped.serial_s - ways.hidden_s)
    moved = sum(float(edge.cost[made.choice[edge.source], made.choice[edge.target]]) for edge in problem.edges)
    assert ways.hidden_s + ways.exposed_s == pytest.approx(2 * moved, rel=1e-3)


def test_what_fits_hides_but_for_the_ends_of_the_parts() -> None:
    """The gathers of the first window, and the reductions of the last, are waited for."""
    ways = case(byte_s=1e-9).ways()
    assert 0.6 < ways.hidden_s / (ways.hidden_s + ways.exposed_s) < 0.9


def test_contention_costs_both_sides() -> None:
    made = case(byte_s=3e-8)
    hidden = {k: made.at(k).ways().hidden_s for k in (0.0, 0.5, 1.0)}
    assert hidden[0.5] == pytest.approx(hidden[0.0] / 2)
    assert hidden[1.0] == 0
    assert made.at(1.0).overlapped.step_s == pytest.approx(made.overlapped.serial_s)


def test_what_is_too_large_or_too_small_to_start_ahead_is_waited_for() -> None:
    made = case(byte_s=1e-9)
    tight = made.at(capacity=10 * 4 * WIDTH * WIDTH).ways().hidden_s  # of matrices, the smallest
    assert 0 < tight < 0.8 * made.ways().hidden_s
    assert 0 < made.at(capacity=1.0).ways().hidden_s < tight  # reductions


def test_each_stage_of_a_pipeline_has_its_own() -> None:
    found = case(mesh="pp=2 dp=2", byte_s=1e-8).overlapped
    assert found.step_s < found.serial_s
    assert [sorted(axes) for axes in found.axes] == [["dp", "pp"], ["dp", "pp"]]  # who receives waits
    assert all(axes["dp"].hidden_s > 0 and axes["pp"].hidden_s == 0 for axes in found.axes)


# -- what it costs -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mesh", ["dp=2", "pp=2 dp=2"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("byte_s", [1e-9, 3e-8, 1e-6])
def test_the_prices_are_what_the_windows_say(mesh: str, recompute: str, microbatches: int, byte_s: float) -> None:
    """A choice costs its problem's objective and what is late: as if waited for, less what hides of it."""
    made = case(microbatches, mesh, byte_s, recompute, contention=0.6)
    found, serial = made.overlapped, evaluate(made.at(1.0).built.problem, made.choice)
    assert found.serial_s == pytest.approx(serial.objective, rel=1e-9)
    assert found.step_s == pytest.approx(step_s(made.built, made.choice), rel=1e-9)
    assert sum(part.seconds for part in spent.seconds(made.built, made.choice)) == pytest.approx(found.step_s)
    runs = beside(made.built, made.choice)
    of_windows = [max(c + 0.6 * h, h + 0.6 * c) for c, h in zip(runs.computing, runs.hiding, strict=True)]
    stages = made.built.setting.mesh.num_stages
    for stage in range(stages):
        own = [number for number, window in enumerate(made.built.windows.windows) if window.stage == stage]
        apart = serial.rows[stage] - sum(runs.computing[number] for number in own)
        apart += serial.rows[stages + stage] - sum(runs.hiding[number] for number in own)
        told = found.rows[stage] + found.rows[stages + stage]
        assert told == pytest.approx(apart + sum(of_windows[number] for number in own), rel=1e-9)
    priced = evaluate(made.built.problem, made.choice).objective
    is_late = any(hiding > computing for computing, hiding in zip(runs.computing, runs.hiding, strict=True))
    assert (priced < found.step_s * (1 - 1e-9)) == is_late
    assert is_late or byte_s < 1e-6


def test_a_plan_tells_what_hides() -> None:
    made = plan(step_of(2), "2xh100", pin="dp=2, zero=3")
    (row,) = made.estimate.overlap
    assert (row.stage, row.axis) == (0, "dp") and row.hidden_s > 0 and row.exposed_s > 0
    assert made.estimate.objective_s == pytest.approx(made.estimate.serial_s - row.hidden_s)
    told = [(what, seconds) for each in made.estimate.modules for what, seconds in each.seconds.items()]
    assert sum(seconds for _, seconds in told) == pytest.approx(made.estimate.objective_s)
    assert sum(seconds for what, seconds in told if what.startswith("dp ")) == pytest.approx(row.exposed_s, rel=1e-3)
    priced = reprice(step_of(2), made)
    assert step_s(priced.built, priced.choice) == pytest.approx(made.estimate.objective_s, rel=1e-9)
    assert "communication beside computation" in str(made)
    assert Plan.from_json(made.to_json()) == made


# -- windows -------------------------------------------------------------------------------------------------------
def graph_of(microbatches: int) -> tuple[Windows, dict[str, Node]]:
    step = step_of(microbatches)
    graph = annotated(step.capture(), microbatches, Cut.single(units_of(step.capture().gradient.graph)[0]))
    nodes = {node.meta["key"]: node for node in graph.graph.nodes if "key" in node.meta}
    return windows_of(graph, advances=microbatches == 1), nodes


def test_windows_are_runs_through_blocks() -> None:
    windows, nodes = graph_of(2)
    seen = [(window.phase, window.blocks[-1]) for window in windows.windows]
    blocks = [f"blocks.{i}" for i in range(LAYERS)]
    assert seen[: LAYERS + 1] == [("forward", block) for block in (*blocks, "head")]
    assert seen[LAYERS + 1 :] == [("backward", block) for block in ("head", *reversed(blocks), "tokens")]
    assert windows.windows[0].blocks[0] == "tokens"  # no matmul of its own: it goes with the first block
    assert windows.windows[windows.of[nodes["blocks.1.up/autopar.linear/forward#0"]]].blocks == ("blocks.1",)


def test_gathers_hide_behind_the_window_before_and_reductions_behind_the_next() -> None:
    windows, nodes = graph_of(2)

    def beside(value: str, reader: str) -> list[tuple[str, str]]:
        ways = (windows.gathered, windows.reduced)
        found = [share for way in ways for share in way(nodes[value], nodes[reader])]
        assert all(part == 1 for _, part in found)
        return [(windows.windows[window].phase, windows.windows[window].blocks[-1]) for window, _ in found]

    weight = "blocks.1.up.weight"
    assert beside(f"{weight}/relay/prologue#0", f"{weight}/relay/forward#0") == [("forward", "blocks.0")]
    assert beside(f"{weight}/relay/prologue#0", f"{weight}/relay/backward#0") == [("backward", "blocks.2")]
    first = "blocks.0.up.weight"
    assert beside(f"{first}/relay/prologue#0", f"{first}/relay/forward#0") == []
    assert beside(f"param:{weight}", f"{weight}/relay/prologue#0") == []
    gradient = "blocks.1.up/autopar.linear_dw/backward#0"
    assert beside(gradient, f"{weight}/accumulate/backward#0") == [("backward", "blocks.0")]
    assert beside("tokens/aten.embedding_dense_backward/backward#0", "tokens.weight/accumulate/backward#0") == []
    assert beside("blocks.1.up/autopar.linear/forward#0", "blocks.1/relay/forward#0") == []


def test_with_one_microbatch_the_backward_reduces_what_goes_to_the_update() -> None:
    windows, nodes = graph_of(1)
    gradient, relay = nodes["blocks.1.up/autopar.linear_dw/backward#0"], nodes["blocks.1.up.weight/relay/update#0"]
    ((window, part),) = windows.reduced(gradient, relay)
    assert (windows.windows[window].blocks[-1], part) == ("blocks.0", 1.0)
    assert windows.is_advanced(gradient, relay)
    assert replace(windows, advances=False).reduced(gradient, relay) == ()


@pytest.mark.parametrize("step", [-1, 1])
def test_layers_that_stand_for_several_come_after_one_another(step: int) -> None:
    """a b (c d) x 5 e: c follows d four times of five, and b once; e follows d once."""
    turn = ("layers", 1)
    rows = [("a", 1, None), ("b", 1, None), ("c", 5, turn), ("d", 5, turn), ("e", 1, None)]
    made = tuple(Window(0, "forward", (name,), times, period) for name, times, period in rows[::-step])
    windows = Windows(made, {}, {}, {}, False)
    names = [window.blocks[0] for window in made]

    def near(name: str) -> dict[str, float]:
        return {names[window]: part for window, part in windows.beside(names.index(name), step)}

    assert near("b") == {"a": 1.0}
    assert near("a") == {}
    assert near("c") == {"d": 0.8, "b": 0.2}
    assert near("d") == {"c": 1.0}
    assert near("e") == {"d": 1.0}
