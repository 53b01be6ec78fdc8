"""`lay_out`: the rules at the chosen splits give every value its layout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from passes.lay_out import lay_out, needed_layouts

sys.path.insert(0, str(Path(__file__).parent))
from small_graphs import context_of, named, step_graph


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.mm(x, up)).mm(down)


INPUTS = {"x": torch.randn(6, 4), "up": torch.randn(4, 8), "down": torch.randn(8, 4)}


def test_every_node_has_its_choice_and_layout() -> None:
    graph = step_graph(mlp, INPUTS)
    context = context_of(
        graph, "tp=2", {"batch:up": "tp=d1", "aten.mm#0": "tp=n", "aten.relu#0": "tp=d1", "aten.mm#1": "tp=k"}
    )
    lay_out(graph, context)
    layouts = {node.meta["key"]: str(node.meta["layout"]) for node in graph.nodes if node.op != "output"}
    assert layouts == {
        "batch:x": "[6 4]",
        "batch:up": "[4 8@tp]",
        "batch:down": "[8 4]",
        "aten.mm#0": "[6 8@tp]",
        "aten.relu#0": "[6 8@tp]",
        "aten.mm#1": "[6 4] +tp",
    }
    assert named(graph, "aten.mm#1").meta["choice"] == context.choices["aten.mm#1"]
    assert [str(layout) for layout in needed_layouts(named(graph, "aten.mm#1"))] == ["[6 8@tp]", "[8@tp 4]"]


def test_several_results_and_the_items_of_them() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        values, _ = torch.max(x, 1)
        return values

    graph = step_graph(function, {"x": torch.randn(6, 4)})
    lay_out(graph, context_of(graph, "tp=2", {"aten.max#0": "tp=d0"}))
    assert [str(layout) for layout in named(graph, "aten.max#0").meta["layout"]] == ["[6@tp]", "[6@tp]"]
    items = [node for node in graph.nodes if node.meta.get("key", "").startswith("getitem")]
    assert items and {str(item.meta["layout"]) for item in items} == {"[6@tp]"}


def test_absent_results_have_no_layout() -> None:
    def function(g: torch.Tensor, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        found = torch.ops.aten.native_layer_norm_backward(g, x, [4], m, m, None, None, [True, False, False])
        return found[0]

    graph = step_graph(function, {"g": torch.randn(6, 4), "x": torch.randn(6, 4), "m": torch.randn(6, 1)})
    lay_out(graph, context_of(graph, "tp=2", {"aten.native_layer_norm_backward#0": "tp=d0"}))
    layouts = named(graph, "aten.native_layer_norm_backward#0").meta["layout"]
    assert [str(layout) for layout in layouts] == ["[6@tp 4]", "None", "None"]


def test_a_node_without_a_choice_is_an_error() -> None:
    graph = step_graph(mlp, INPUTS)
    context = context_of(graph, "tp=2", {})
    del context.choices["aten.relu#0"]  # type: ignore[attr-defined]
    with pytest.raises(KeyError, match=r"aten\.relu#0"):
        lay_out(graph, context)
