"""`check_layouts` finds whatever a pass left inconsistent, and says where."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.fx import Graph

from autopar import markers
from autopar.layout import Layout
from autopar.mesh import Mesh
from passes.check_layouts import check_layouts
from passes.insert_moves import insert_moves
from passes.lay_out import lay_out

sys.path.insert(0, str(Path(__file__).parent))
from small_graphs import context_of, named, step_graph

MESH = Mesh.parse("dp=2 tp=2")


def graph() -> Graph:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.mm(x, w), 1)

    made = step_graph(function, {"x": torch.randn(4, 8), "w": torch.randn(8, 4)})
    context = context_of(
        made, str(MESH), {"batch:x": "dp=d0", "batch:w": "tp=d1", "aten.mm#0": "dp=m tp=n", "aten._softmax#0": "dp=d0"}
    )
    return insert_moves(lay_out(made, context), context)


def test_a_right_graph_passes() -> None:
    check_layouts(graph(), MESH, "insert_moves")


def fault(broken: Graph) -> str:
    with pytest.raises(AssertionError) as error:
        check_layouts(broken, MESH, "the_pass")
    assert "after the_pass" in str(error.value)
    return str(error.value)


def test_an_operand_in_another_layout() -> None:
    broken = graph()
    named(broken, "batch:x").meta["layout"] = Layout.parse("[4 8@dp]")
    message = fault(broken)
    assert "aten.mm#0" in message and "[4 8@dp]" in message and "[4@dp 8]" in message


def test_a_move_left_out() -> None:
    broken = graph()
    gather = next(node for node in broken.nodes if node.target is markers.gather)
    gather.replace_all_uses_with(gather.args[0])
    broken.erase_node(gather)
    assert "aten._softmax#0" in fault(broken)


def test_a_stated_layout_that_does_not_follow() -> None:
    broken = graph()
    named(broken, "aten._softmax#0").meta["layout"] = Layout.parse("[4 4]")
    assert "derived" in fault(broken)


@pytest.mark.parametrize(
    ("arguments", "layout"), [(("tp", 0, 0), "[4@dp 4]"), (("tp", 1, 0), "[4@dp 4@tp]"), (("dp", 1, 0), "[4 4@tp]")]
)
def test_a_move_that_does_not_lead_there(arguments: tuple[object, ...], layout: str) -> None:
    broken = graph()
    gather = next(node for node in broken.nodes if node.target is markers.gather)
    gather.args = (gather.args[0], *arguments)
    gather.meta["layout"] = Layout.parse(layout)
    assert "gather" in fault(broken)


def test_the_nodes_around_the_fault_are_printed() -> None:
    broken = graph()
    named(broken, "aten.mm#0").meta["layout"] = Layout.parse("[4 4]")
    lines = fault(broken).splitlines()
    assert 4 <= len(lines) <= 6 and sum("#" in line for line in lines[1:]) == len(lines) - 1
