"""`insert_moves`: the cheapest moves on every edge whose ends disagree, each once in a phase."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph

from autopar.layout import Layout
from autopar.mesh import Mesh
from passes.check_layouts import check_layouts
from passes.context import Context
from passes.insert_moves import insert_moves
from passes.lay_out import lay_out
from passes.localise_shapes import localise_graph

sys.path.insert(0, str(Path(__file__).parent))
from small_graphs import context_of, executed, kinds, named, step_graph

MOVES = {"gather", "narrow", "reduce", "reduce_scatter", "exchange"}


def moved(function: Any, inputs: dict[str, torch.Tensor], mesh: str, choices: dict[str, str]) -> tuple[Graph, Context]:
    graph = step_graph(function, inputs)
    context = context_of(graph, mesh, choices)
    insert_moves(lay_out(graph, context), context)
    check_layouts(graph, context.mesh, "insert_moves")
    graph.lint()
    return graph, context


def run(graph: Graph, mesh: str, inputs: dict[str, torch.Tensor], outputs: int = 1) -> list[torch.Tensor]:
    """Outputs are replicated."""
    values = next(n for n in graph.nodes if n.op == "output").args[0]
    layouts = [Layout.whole(value.meta["layout"].factor_sizes) for value in values]
    parsed = Mesh.parse(mesh)
    localise_graph(graph, parsed)
    return executed(graph, parsed, inputs, layouts[:outputs])


def moves(graph: Graph) -> list[str]:
    return [kind for kind in kinds(graph) if kind in MOVES]


X, W = torch.randint(-5, 5, (6, 4)).float(), torch.randint(-5, 5, (4, 8)).float()


def test_nothing_where_nothing_disagrees() -> None:
    graph, _ = moved(lambda x: torch.relu(x), {"x": X}, "tp=2", {})
    assert moves(graph) == []


def test_an_edge_and_the_output() -> None:
    choices = {"batch:x": "tp=d0", "aten.mm#0": "tp=k"}
    graph, _ = moved(lambda x, w: torch.mm(x, w), {"x": X, "w": W}, "tp=2", choices)
    assert moves(graph) == ["exchange", "narrow", "reduce"]
    assert torch.equal(run(graph, "tp=2", {"x": X, "w": W})[0], X @ W)


def test_equal_moves_of_one_value_are_shared() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, 1) + torch.log_softmax(x, 1)

    graph, _ = moved(function, {"x": X}, "tp=2", {"batch:x": "tp=d1"})
    assert moves(graph) == ["gather"]


def test_paths_share_their_first_moves() -> None:
    """dp and tp both gathered for one consumer, dp alone for the other."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x, 0) + torch.relu(x)

    choices = {"batch:x": "tp=d0 dp=d0", "aten.relu#0": "tp=d0"}
    graph, _ = moved(function, {"x": torch.randn(8, 3)}, "dp=2 tp=2", choices)
    assert moves(graph).count("gather") == 3  # of x over dp, then over tp; of relu(x) over tp


def test_equal_moves_in_other_phases_are_their_own() -> None:
    graph = step_graph(lambda x: torch.softmax(x, 1) + torch.log_softmax(x, 1), {"x": X})
    named(graph, "aten._log_softmax#0").meta["phase"] = "backward"
    context = context_of(graph, "tp=2", {"batch:x": "tp=d1"})
    insert_moves(lay_out(graph, context), context)
    gathers = [node for node in graph.nodes if getattr(node.target, "__name__", "") == "gather"]
    assert [node.meta["phase"] for node in gathers] == ["forward", "backward"]


def test_one_value_in_two_places_has_a_layout_in_each() -> None:
    """`x @ x` split by rows: x split as the first operand and whole as the second (both were resharded at once)."""
    square = torch.randint(-5, 5, (6, 6)).float()
    for choice in ("tp=m", "tp=n", "tp=k", "tp=+0", "tp=+1"):
        choices = {"batch:x": "tp=d0", "aten.mm#0": choice}
        if "+" in choice:
            choices |= {"aten.sum#0": "tp=d0", "aten.expand#0": "tp=+0"}
        graph, _ = moved(_square_of_sum if "+" in choice else _square, {"x": square}, "tp=2", choices)
        (got,) = run(graph, "tp=2", {"x": square})
        expected = square @ square
        if "+" in choice:
            expected = _square_of_sum(square)
        assert torch.equal(got, expected), choice


def _square(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, x)


def _square_of_sum(x: torch.Tensor) -> torch.Tensor:
    y = x.sum(0, keepdim=True).expand(6, 6)
    return torch.mm(y, y)


def test_state_comes_back_in_its_own_layout() -> None:
    graph = step_graph(lambda w, g: w - g, {"w": X, "g": X.clone()})
    weight = named(graph, "batch:w")
    result = named(graph, "aten.sub#0")
    context = context_of(graph, "dp=2", {"batch:w": "dp=d0"})
    context = Context(context.mesh, 1, context.choices, ((weight, result),), context.resharder)
    insert_moves(lay_out(graph, context), context)
    assert moves(graph) == ["gather", "narrow"]
    (value,) = next(n for n in graph.nodes if n.op == "output").args[0]
    assert str(value.meta["layout"]) == "[6@dp 4]" and value.meta["phase"] == "update"


def test_moves_run_where_their_consumer_does() -> None:
    graph, _ = moved(lambda x: torch.softmax(x, 1), {"x": X}, "tp=2", {"batch:x": "tp=d1"})
    (gather,) = [node for node in graph.nodes if getattr(node.target, "__name__", "") == "gather"]
    assert {key: gather.meta[key] for key in ("phase", "level", "stage")} == {
        "phase": "forward",
        "level": "step",
        "stage": 0,
    }


def test_operands_inside_a_list() -> None:
    choices = {"batch:x": "tp=d0", "aten.cat#0": "tp=d1"}
    graph, _ = moved(lambda x: torch.cat([x, x, x]), {"x": X}, "tp=2", choices)
    assert moves(graph) == ["exchange", "gather"]
    assert torch.equal(run(graph, "tp=2", {"x": X})[0], torch.cat([X, X, X]))
