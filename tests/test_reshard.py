"""Reshards: any layout to any other by priced moves, executed on the virtual mesh."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from autopar import markers
from autopar.layout import Layout, is_worth_splitting
from autopar.mesh import Mesh
from autopar.program.virtual import Lockstep
from autopar.reshard import Move, Price, Resharder, moved_bytes, moves_from
from passes.check_layouts import check_layouts
from passes.localise_shapes import localise_graph
from tests.random_layouts import SHAPES, random_layout

BASE, ALPHA, BETA = 1e-6, 1e-5, 1e-9


def ring(mesh: Mesh, alpha: float = ALPHA, slow: dict[str, float] | None = None) -> Price:
    """Alpha-beta prices of ring collectives with a fixed time for each call; `slow` multiplies an axis's price."""

    def price(kind: str, axis: str, num_bytes: float) -> float:
        n = mesh.size(axis)
        hops = 2 * (n - 1) if kind == "all_reduce" else n - 1
        share = {"all_reduce": 2 * (n - 1) / n, "all_to_all": (n - 1) / n / n}.get(kind, (n - 1) / n)
        return (BASE + hops * alpha + share * num_bytes * BETA) * (slow or {}).get(axis, 1.0)

    return price


def kinds(source: str, target: str, mesh_text: str, item_bytes: int = 4, **options: object) -> list[str]:
    mesh = Mesh.parse(mesh_text)
    resharder = Resharder(mesh, ring(mesh, **options))  # type: ignore[arg-type]
    path = resharder.path(Layout.parse(source), Layout.parse(target), item_bytes)
    return [f"{move.kind} {move.axis}" for move, _ in path]


# -- what is cheapest ----------------------------------------------------------------------------------------------
BIG = "(8 4096)"


@pytest.mark.parametrize(
    ("source", "target", "mesh", "expected"),
    [
        ("[8192@tp 64]", "[8192@tp 64]", "tp=2", []),
        ("[8192@tp 64]", "[8192 64]", "tp=2", ["gather tp"]),
        ("[8192 64]", "[8192 64@tp]", "tp=2", ["narrow tp"]),
        ("[8192@tp 64]", "[8192 64@tp]", "tp=4", ["exchange tp"]),
        ("[8192 64] +tp", "[8192 64]", "tp=4", ["reduce tp"]),
        ("[8192 64] +tp", "[8192@tp 64]", "tp=4", ["reduce_scatter tp"]),
        ("[8192 64] +dp +tp", "[8192@tp 64@dp]", "dp=2 tp=2", ["reduce_scatter tp", "reduce_scatter dp"]),
        ("[8192@tp.dp 64]", "[8192@tp 64]", "dp=2 tp=2", ["gather dp"]),
        ("[(8@dp 4096@tp) 64]", "[(8@dp 4096) 64]", "dp=2 tp=2", ["gather tp"]),
        ("[(8@dp 4096) 64] +tp", "[(8@dp 4096@tp) 64]", "dp=2 tp=2", ["reduce_scatter tp"]),
    ],
)
def test_one_collective_where_one_does(source: str, target: str, mesh: str, expected: list[str]) -> None:
    found = kinds(source, target, mesh)
    assert sorted(found) == sorted(expected)


def test_reduce_scatter_and_gather_over_a_fast_axis_spare_the_slow_one() -> None:
    """A hierarchical all-reduce: the slow axis moves only a share."""
    found = kinds("[4096 4096] +dp +tp", "[4096 4096]", "dp=2 tp=8", alpha=0.0, slow={"dp": 20.0})
    assert found == ["reduce_scatter tp", "reduce dp", "gather tp"]


def test_latency_decides_for_small_values() -> None:
    assert sorted(kinds("[8] +dp +tp", "[8]", "dp=2 tp=8", slow={"dp": 2.0})) == ["reduce dp", "reduce tp"]


def test_the_order_of_axes_on_a_factor_is_mended() -> None:
    found = kinds("[4096@tp.dp 64]", "[4096@dp.tp 64]", "dp=2 tp=2")
    assert found and all(step.split()[0] in ("gather", "exchange", "narrow") for step in found)


def test_a_partial_value_is_never_made() -> None:
    mesh = Mesh.parse("tp=2")
    assert Resharder(mesh, ring(mesh)).cost_s(Layout.parse("[8]"), Layout.parse("[8] +tp"), 4) == math.inf


def test_other_reductions_keep_theirs() -> None:
    mesh = Mesh.parse("tp=2")
    path = Resharder(mesh, ring(mesh)).path(Layout.parse("[8] +max:tp"), Layout.parse("[8]"), 4)
    assert [(move.kind, move.op) for move, _ in path] == [("reduce", "max")]


def test_there_is_no_room_where_half_would_be_padding() -> None:
    mesh = Mesh.parse("a=2 b=2")
    targets = [str(after) for _, after in moves_from(Layout.parse("[2@a 3]"), mesh)]
    assert targets == ["[2 3]", "[2 3@a]", "[2@a 3@b]"]


# -- properties ----------------------------------------------------------------------------------------------------
MESHES = ["dp=2 tp=3", "a=2 b=2 c=3"]


def reshardable(rng: random.Random, mesh: Mesh) -> tuple[Layout, Layout]:
    """A random source (partials included) and a target without partials that the source doesn't have."""
    sizes = rng.choice(SHAPES)
    source, target = random_layout(sizes, mesh, rng), random_layout(sizes, mesh, rng)
    for axis, op in target.partial:
        if source.partial_op(axis) != op:
            target = target.drop(axis)
    return source, target


def executed(
    path: list[tuple[Move, Layout]], source: Layout, target: Layout, mesh: Mesh, whole: torch.Tensor
) -> torch.Tensor:
    """The value in `source`, moved along `path` by the localised collectives on all ranks, put together again."""
    graph, mode = Graph(), FakeTensorMode()
    node = graph.placeholder("x")
    with mode:
        value = torch.empty(whole.shape, dtype=whole.dtype)
    common = {"val": value, "path": "", "phase": "forward", "level": "step", "stage": 0, "source": ""}
    node.meta.update(common, layout=source, key="x")
    for move, after in path:
        node = graph.call_function(getattr(markers, move.kind), (node, *move.arguments))
        node.meta.update(common, layout=after, key=move.kind)
    graph.output((node,))
    check_layouts(graph, mesh, "the test")
    localise_graph(graph, mesh)
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    shards = [source.shard(whole, mesh, mesh.coordinates(rank)) for rank in range(mesh.num_ranks)]
    noise = torch.randint(-9, 9, shards[0].shape).double()
    for axis, _ in source.partial:
        for group in mesh.groups(axis):
            shards[group[0]] = shards[group[0]] + noise
            shards[group[-1]] = shards[group[-1]] - noise
    (got,) = Lockstep(mesh).run(module, [shards], lambda _node, _wide: None)
    for rank in range(mesh.num_ranks):
        assert tuple(got[rank].shape) == target.local_shape(mesh)
        at = {axis: 0 if not _matters(axis, target) else c for axis, c in mesh.coordinates(rank).items()}
        mine, theirs = (target.content(got[r], mesh, mesh.coordinates(r)) for r in (rank, mesh.rank(at)))
        assert torch.equal(mine, theirs), "replicas differ"
    return target.unshard(lambda at: got[mesh.rank(at)], mesh)


def _matters(axis: str, layout: Layout) -> bool:
    return layout.position(axis) is not None or layout.partial_op(axis) is not None


@pytest.mark.parametrize("mesh_text", MESHES)
def test_paths_executed_equal_the_direct_relayout(mesh_text: str) -> None:
    rng, mesh = random.Random(3), Mesh.parse(mesh_text)
    torch.manual_seed(0)
    resharder = Resharder(mesh, ring(mesh))
    lengths = []
    for _ in range(60):
        source, target = reshardable(rng, mesh)
        whole = torch.randint(-50, 50, source.global_shape).double()  # sums in any order are exact
        path = resharder.path(source, target, 8)
        assert torch.equal(executed(path, source, target, mesh, whole), whole), f"{source} -> {target}"
        lengths.append(len(path))
    assert max(lengths) >= 3


@pytest.mark.parametrize("mesh_text", MESHES)
def test_a_path_costs_the_sum_of_its_moves_and_no_more_than_gathering_everything(mesh_text: str) -> None:
    rng, mesh = random.Random(4), Mesh.parse(mesh_text)
    price = ring(mesh)
    resharder = Resharder(mesh, price)

    def total(moves: list[tuple[Move, Layout]], source: Layout) -> float:
        befores = [source, *(after for _, after in moves)]
        return sum(
            price(move.collective, move.axis, moved_bytes(move, before, mesh, 4)) if move.collective else 0.0
            for (move, _), before in zip(moves, befores, strict=False)
        )

    for _ in range(60):
        source, target = reshardable(rng, mesh)
        cost, path = resharder.cost_s(source, target, 4), resharder.path(source, target, 4)
        assert cost == pytest.approx(total(path, source), abs=1e-7)
        assert cost <= total(gather_everything(source, target, mesh), source) + 1e-7


def gather_everything(source: Layout, target: Layout, mesh: Mesh) -> list[tuple[Move, Layout]]:
    """Reduce what is partial (and must not stay), gather every split, then keep the part that the target wants."""
    moves: list[tuple[Move, Layout]] = []
    layout = source
    for axis, op in source.partial:
        if target.partial_op(axis) is None:
            layout = layout.drop(axis)
            moves.append((Move("reduce", axis, op), layout))
    while layout.split_axes:
        where, factor = next((w, f) for w, f in layout.positions() if f.axes)
        layout = layout.drop(factor.axes[-1])
        moves.append((Move("gather", factor.axes[-1], source=where), layout))
    for where, factor in target.positions():
        for axis in factor.axes:
            layout = layout.split(axis, where)
            moves.append((Move("narrow", axis, target=where), layout))
    assert layout == target
    return moves


def test_moves_change_one_axis_and_are_all_different() -> None:
    rng, mesh = random.Random(5), Mesh.parse("a=2 b=2 c=3")
    for sizes, _ in itertools.product(SHAPES, range(10)):
        layout = random_layout(sizes, mesh, rng)
        moves = list(moves_from(layout, mesh))
        assert len({(move.kind, move.arguments) for move, _ in moves}) == len(moves)
        for move, after in moves:
            assert after.drop(move.axis) == layout.drop(move.axis)
            assert all(not f.axes or is_worth_splitting(f.size, map(mesh.size, f.axes)) for _, f in after.positions())


def test_bytes_are_those_of_the_tensor_that_the_axis_does_not_split() -> None:
    mesh = Mesh.parse("dp=2 tp=4")
    layout = Layout.parse("[8@dp 16@tp]")
    moved = {move.kind + move.axis: moved_bytes(move, layout, mesh, 4) for move, _ in moves_from(layout, mesh)}
    assert moved["gatherdp"] == 8 * 4 * 4  # dp's own whole: 8 rows, tp still splits the columns
    assert moved["gathertp"] == 4 * 16 * 4
    partial = Layout.parse("[8@dp 16] +tp")
    moved = {move.kind: moved_bytes(move, partial, mesh, 4) for move, _ in moves_from(partial, mesh)}
    assert moved["reduce"] == moved["reduce_scatter"] == 4 * 16 * 4
