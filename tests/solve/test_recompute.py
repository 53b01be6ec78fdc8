"""Recompute chosen with the layouts: what is kept, computed again or dropped, and plans under tight memory."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from autopar.capture.step import TrainStep
from autopar.compiling import annotated, compile, lower
from autopar.errors import InfeasibleError, PlanError
from autopar.fitting import GAP
from autopar.key_globs import forward_globs
from autopar.layers import Cut, units_of
from autopar.mesh import Mesh
from autopar.planning import plan
from autopar.plans import Plan
from autopar.program.storages import lifetimes, local_value, nbytes, output_values
from autopar.reshard import Resharder
from autopar.rules.nodes import is_view
from autopar.solve.build import BuiltProblem, Setting, build_problem
from autopar.solve.layers_apart import restricted, solve_modes
from autopar.solve.modes import Mode, is_forward, modes_of, producer
from autopar.solve.problem import Edge, Problem, brute_force, evaluate
from autopar.solve.ranks import ranks_of
from autopar.solve.search import solve
from tests.virtual.random_plans import wrong
from tests.virtual.step_models import GPT, momentum, step_of, token_batch

CLUSTER, PINS = "2xcpu", "dp=2, zero=1"


class Wide(nn.Module):
    """Two residual blocks whose inner values are most of what is kept."""

    def __init__(self, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@functools.cache
def gpt_step(microbatches: int = 2) -> TrainStep:
    """Activations are a good part of the memory, states are split whatever the limit."""
    torch.manual_seed(0)
    model = GPT(width=16, heads=2, layers=2, tied=False)
    return TrainStep(model, token_batch(32), optimizer=momentum, microbatches=microbatches)


@functools.cache
def planned(pins: str = PINS, memory: float | None = None) -> Plan:
    return plan(gpt_step(), CLUSTER, pin=pins, memory=memory)


def peak(found: Plan) -> int:
    return max(row.peak for row in found.estimate.memory)


def budget(share: float) -> float:
    """Memory between what keeping everything takes (0) and computing all again (1)."""
    loose, full = planned(), planned(f"{PINS}, recompute=full")
    return peak(loose) + (peak(full) - peak(loose)) * share


def setting_of(step: TrainStep, mesh: Mesh, recompute: str = "auto") -> Setting:
    return Setting(
        mesh=mesh,
        microbatches=step.microbatches,
        ranks=ranks_of(mesh, step.microbatches, range(mesh.num_stages)),
        capacity=1e15,
        compute=lambda flops, num_bytes, dtype: flops * 1e-9 + num_bytes * 1e-8,
        resharder=Resharder(mesh, price),
        transfer=lambda num_bytes: num_bytes * 1e-9,
        allowed=lambda node, rule, choice: True,
        recompute=recompute,
    )


def price(kind: str, axis: str, num_bytes: float) -> float:
    return 1e-5 + num_bytes * 1e-9


def built_for(step: TrainStep, mesh: Mesh, recompute: str = "auto") -> tuple[Cut, BuiltProblem]:
    units = units_of(step.capture().gradient.graph)[0]
    cut = Cut.from_boundaries(units, [round(i * len(units) / mesh.num_stages) for i in range(mesh.num_stages)])
    graph = annotated(step.capture(), step.microbatches, cut)
    return cut, build_problem(graph, setting_of(step, mesh, recompute))


def mode_by_node(built: BuiltProblem, choice: tuple[int, ...]) -> dict[Node, Mode | None]:
    picks = zip(built.nodes, built.strategies, choice, strict=True)
    return {node: options[pick].mode for node, options, pick in picks}


# -- modes -------------------------------------------------------------------------------------------------------
def modes_by_key(wanted=None) -> dict[str, str]:
    step = gpt_step()
    cut = Cut.single(units_of(step.capture().gradient.graph)[0])
    found = modes_of(annotated(step.capture(), step.microbatches, cut).graph, wanted)
    return {node.meta["key"]: "/".join(mode.value for mode in modes) for node, modes in found.of.items()}


def test_modes_follow_who_reads_a_value() -> None:
    modes = modes_by_key()
    block = "blocks.0"
    assert modes[f"{block}/aten.gelu/forward#0"] == "kept/again/dropped"  # the backward reads it, or what was moved
    assert modes[f"{block}.up/autopar.linear/forward#0"] == "kept/again"
    assert modes[f"{block}.out/autopar.linear/forward#0"] == "again/dropped"  # only for the sum that it goes into
    assert modes[f"{block}.down/autopar.linear/forward#0"] == "dropped"  # leads only out of the block
    assert modes[f"{block}/aten.add/forward#1"] == "kept/dropped"  # the next block needs it
    assert modes[f"{block}/aten.view/forward#0"] == "again/dropped"  # a view on the way
    assert modes[f"{block}.up.weight/relay/forward#0"] == "again/dropped"
    assert modes["/aten.div/forward#0"] == "dropped"  # the loss


def test_a_pin_fixes_what_is_computed_again() -> None:
    modes = modes_by_key(lambda node: node.meta["path"] == "blocks.1.up")
    assert modes["blocks.1.up/autopar.linear/forward#0"] == "again"
    assert modes["blocks.1/aten.gelu/forward#0"] == "kept/dropped"
    assert modes["blocks.0.up/autopar.linear/forward#0"] == "kept"


@pytest.mark.parametrize("mesh", ["dp=2", "pp=2 dp=2"])
def test_what_is_computed_again_has_its_operands(mesh: str) -> None:
    _, built = built_for(gpt_step(), Mesh.parse(mesh))
    for seed in range(3):
        modes = mode_by_node(built, random_solution(built, seed))
        for node, mode in modes.items():
            for value in node.all_input_nodes if mode is Mode.AGAIN else ():
                source, _ = producer(value)
                is_here = is_forward(source) and source.meta["stage"] == node.meta["stage"]
                assert not is_here or modes[source] in (Mode.KEPT, Mode.AGAIN), (node, source)


def random_solution(built: BuiltProblem, seed: int) -> tuple[int, ...]:
    """A valid choice that random prices of the strategies make the best."""
    rng = np.random.default_rng(seed)
    nodes = tuple(replace(n, cost=n.cost + rng.random(len(n.cost)), memory={}) for n in built.problem.nodes)
    return solve(replace(built.problem, nodes=nodes, limits=()), gap=0.05).choice


@pytest.mark.parametrize("seed", range(2))
def test_limits_count_what_the_program_saves(seed: int) -> None:
    """On one rank: the forward's saved storages are the values that the solution keeps, to the byte."""
    step, mesh = step_of("llama, 2 layers"), Mesh.parse("dp=1")
    cut, built = built_for(step, mesh)
    choice = random_solution(built, seed)
    again = frozenset(node.meta["key"] for node in built.recomputed(choice))
    pipeline = lower(annotated(step.capture(), 1, cut), built.choices(choice), mesh, 1, price, "1f1b", tuple(again))
    stage = pipeline.stages[0]
    saved = {slot for slot in stage.parts["backward"].inputs if slot.kind == "saved"}
    graph = stage.parts["forward"].graph.graph
    alive = lifetimes(graph)
    results = zip(stage.parts["forward"].outputs, output_values(graph), strict=True)
    origins = {origin for slot, value in results if slot in saved for origin in alive.of(value)}
    program_bytes = sum(item_bytes(node, item) for node, item in origins if node.op != "placeholder")
    modes = mode_by_node(built, choice)
    kept = [(node, item) for node, item in needed_results(built, modes) if modes[node] is Mode.KEPT]
    counted = {storage_of(node, item): item_bytes(node, item) for node, item in kept}
    assert program_bytes == sum(counted.values())


def needed_results(built: BuiltProblem, modes: dict[Node, Mode | None]) -> set[tuple[Node, int]]:
    """What the backward reads, and what is computed again for it (random prices may keep more than that)."""
    needed: set[tuple[Node, int]] = set()
    for node in reversed(built.nodes[0].graph.nodes):
        is_backward = node.op == "call_function" and node.meta["phase"] == "backward"
        is_again = modes.get(node) is Mode.AGAIN and any(n is node for n, _ in needed)
        if is_backward or is_again:
            needed |= {producer(value) for value in node.all_input_nodes if is_forward(producer(value)[0])}
    return needed


def storage_of(node: Node, item: int) -> tuple[Node, int]:
    """Random prices may keep a value and a view of it: that is one storage."""
    while is_view(node):
        node, item = producer(node.args[0])
    return node, item


def item_bytes(node: Node, item: int) -> int:
    value = local_value(node)
    return nbytes(value[item] if isinstance(value, (tuple, list)) else value)


# -- solving -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("microbatches", [1, 2])
def test_modes_are_the_best_of_all(microbatches: int) -> None:
    """With the layouts fixed: every choice of modes is tried, at limits from all kept to what fits only just."""
    torch.manual_seed(0)
    step = TrainStep(Wide(), {"x": torch.randn(64, 8)}, optimizer=momentum, microbatches=microbatches)
    _, built = built_for(step, Mesh.parse("dp=2"))
    free = solve(replace(built.problem, nodes=tuple(replace(n, memory={}) for n in built.problem.nodes), limits=()))
    picked = zip(built.strategies, free.choice, strict=True)
    same = [
        np.array([i for i, option in enumerate(options) if replace(option, mode=options[pick].mode) == options[pick]])
        for options, pick in picked
    ]
    most = max(evaluate(built.problem, free.choice).usage)
    objectives = []
    for share in (1.2, 1.0, 0.9, 0.8, 0.7, 0.5):
        limits = tuple(replace(limit, capacity=share * most) for limit in built.problem.limits)
        problem = replace(built.problem, limits=limits)
        best = brute_force(folded(restricted(problem, same)))
        found = solve_modes(built, problem, free)
        assert found.objective == pytest.approx(best.objective, rel=2e-4)
        objectives.append(best.objective)
    assert objectives == sorted(objectives) and objectives[0] < max(o for o in objectives if math.isfinite(o))


def folded(problem: Problem) -> Problem:
    """Without the nodes that have one strategy only: what they and their edges cost is added to the others."""
    free = [i for i, node in enumerate(problem.nodes) if node.num_strategies > 1]
    at = {index: position for position, index in enumerate(free)}
    weight = [sum(term.weight for term in problem.objective if row in term.rows) for row in range(problem.num_rows)]
    cost = {i: problem.nodes[i].cost * weight[problem.nodes[i].row] for i in free}
    constant = sum(float(n.cost[0]) * weight[n.row] for n in problem.nodes if n.num_strategies == 1)
    edges = []
    for edge in problem.edges:
        priced, ends = edge.cost * weight[edge.row], [i for i in (edge.source, edge.target) if i in at]
        if len(ends) == 2:
            edges.append(Edge(at[edge.source], at[edge.target], priced))
        elif ends:
            cost[ends[0]] = cost[ends[0]] + priced.reshape(-1)
        else:
            constant += priced.item()
    used = [sum(n.memory[k].item() for n in problem.nodes if n.num_strategies == 1 and k in n.memory) for k in range(9)]
    limits = tuple(replace(limit, constant=limit.constant + used[k]) for k, limit in enumerate(problem.limits))
    nodes = [replace(problem.nodes[i], cost=cost[i] + constant * (i == free[0]), row=0) for i in free]
    return Problem(tuple(nodes), tuple(edges), limits)


def test_recompute_is_no_worse_than_without() -> None:
    """The problem with modes has the one without in it, at the same usage or less."""
    step, mesh = gpt_step(), Mesh.parse("dp=2")
    _, plain = built_for(step, mesh, "kept")
    _, built = built_for(step, mesh)
    free = solve(replace(plain.problem, nodes=tuple(replace(n, memory={}) for n in plain.problem.nodes), limits=()))
    usage = max(evaluate(plain.problem, free.choice).usage)
    for share in (0.8,):
        limit = {"capacity": share * usage}
        tight = [
            solve(replace(b.problem, limits=tuple(replace(one, **limit) for one in b.problem.limits)), gap=1e-4)
            for b in (plain, built)
        ]
        assert tight[1].objective <= tight[0].objective * (1 + 2e-4)


# -- plans -------------------------------------------------------------------------------------------------------
def test_memory_between_two_needs_is_met_by_recompute() -> None:
    loose, full = planned(), planned(f"{PINS}, recompute=full")
    assert loose.recomputed == () and peak(full) < peak(loose)
    found = planned(memory=budget(0.5))
    assert found.recomputed
    assert peak(found) <= budget(0.5)
    assert loose.estimate.objective_s < found.estimate.objective_s <= full.estimate.objective_s * (1 + GAP)
    assert "again in the backward" in next(c for c in found.candidates if c.status == "chosen").reason
    program = compile(gpt_step(), found)
    assert wrong(gpt_step(), program.pipeline) == []
    assert any("recomputed" in n.meta for n in program.pipeline.stages[0].parts["backward"].graph.graph.nodes)


def test_full_takes_less_memory_than_none_and_is_equal() -> None:
    none, full = planned(f"{PINS}, recompute=none"), planned(f"{PINS}, recompute=full")
    assert none.recomputed == ()
    assert peak(full) < peak(none)
    assert none.estimate.objective_s < full.estimate.objective_s
    for found in (none, full):
        assert wrong(gpt_step(), compile(gpt_step(), found).pipeline) == []


def test_full_keeps_less_on_every_stage_of_a_pipeline() -> None:
    step = step_of("gpt, 8 rows", 4)
    plans = [plan(step, CLUSTER, pin=f"pp=2, recompute={what}") for what in ("none", "full")]
    kept = [[row.activations for row in p.estimate.memory] for p in plans]
    assert kept[1][0] < kept[0][0]
    assert wrong(step, compile(step, plans[1]).pipeline) == []


def test_a_tighter_limit_never_gives_a_faster_plan() -> None:
    times = [planned(memory=budget(share)).estimate.objective_s for share in (0.0, 0.5, 0.8)]
    assert times[0] == pytest.approx(planned().estimate.objective_s)
    assert all(later >= earlier * (1 - GAP) for earlier, later in itertools.pairwise(times))


def test_a_glob_names_the_modules() -> None:
    found = planned(f"{PINS}, recompute=blocks.1.up")
    assert found.recomputed == ("blocks.1.up/*/forward#*",)
    keys = set(filter(re.compile(glob_text(found)).match, all_keys()))
    assert {key.partition("/")[0] for key in keys if "linear" in key} == {"blocks.1.up"}


def all_keys() -> list[str]:
    step = gpt_step()
    cut = Cut.single(units_of(step.capture().gradient.graph)[0])
    return [n.meta["key"] for n in annotated(step.capture(), 2, cut).graph.nodes if "key" in n.meta]


def glob_text(found: Plan) -> str:
    return "|".join(fnmatch.translate(glob) for glob in found.recomputed)


@pytest.mark.parametrize("glob", ["blocks.7", "mlp.*"])
def test_a_glob_that_matches_nothing_is_refused(glob: str) -> None:
    with pytest.raises(PlanError, match=f"recompute={re.escape(glob)}.*matches no module"):
        planned(f"{PINS}, recompute={glob}")


def test_full_needs_blocks() -> None:
    with pytest.raises(PlanError, match="has no blocks"):
        plan(step_of("convnet"), CLUSTER, pin="dp=2, recompute=full")


def test_what_is_said_to_fit_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.certificate.TIME_S", 0.0)  # of the relaxations, only the budget is asked for
    with pytest.raises(InfeasibleError, match=r"^no plan fits .* needs [\d.]+ \w+\n") as caught:
        planned(memory=1000.0)
    wanted = re.search(r"--memory (\S+): fits", str(caught.value))
    assert wanted is not None
    assert peak(plan(gpt_step(), CLUSTER, pin=PINS, memory=wanted[1])) > 1000


# -- globs -------------------------------------------------------------------------------------------------------
def test_globs_name_whole_modules_and_keep_out_the_rest() -> None:
    again = [f"h.{i}.{name}/linear/forward#0" for i in range(12) for name in ("qkv", "mlp.up")]
    again += [f"h.{i}/gelu/forward#0" for i in range(12)]
    kept = [f"h.{i}/add/forward#1" for i in range(12)]
    assert forward_globs(again, kept) == ("h.*.*/forward#*", "h.*/gelu/forward#*")
    assert forward_globs(again[:2], kept + again[2:]) == ("h.0.*/forward#*",)


@pytest.mark.parametrize("seed", range(3))
def test_globs_match_exactly_on_random_sets(seed: int) -> None:
    rng = random.Random(seed)
    keys = [f"h.{i}.{m}/{op}/forward#{k}" for i in range(3) for m in ("a", "a.b", "c") for op in "xy" for k in range(2)]
    wanted = {key for key in keys if rng.random() < 0.6}
    out = {key for key in keys if key not in wanted and rng.random() < 0.7}
    globs = forward_globs(sorted(wanted), out)
    matched = {key for key in keys if any(fnmatch.fnmatchcase(key, glob) for glob in globs)}
    assert wanted <= matched and not matched & out


def test_views_are_not_listed_where_keeping_them_is_free() -> None:
    _, built = built_for(step_of("llama, 2 layers"), Mesh.parse("dp=1"))
    free = solve(replace(built.problem, limits=(), nodes=tuple(replace(n, memory={}) for n in built.problem.nodes)))
    listed = [node for node in built.recomputed(free.choice) if not is_view(node)]
    assert listed == []  # computing again takes time
