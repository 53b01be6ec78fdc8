"""The text of a small step before and after each pass, under a plan written down here (dp=2, tp=2: Megatron's split).

AUTOPAR_GOLDEN=write pytest tests/golden      # writes the files anew; then read the diff
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

import passes
from autopar.capture.step import TrainStep
from autopar.compiling import annotated
from autopar.layers import Cut, units_of
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.reshard import Resharder
from autopar.rules.choices import Choice, choice_text, enumerate_choices, operand_layouts, result_layouts
from autopar.rules.nodes import tensor_operands
from passes.context import Context
from passes.split_stages import split_stages
from tests.golden.graph_text import graph_text
from tests.virtual.random_plans import resharder_of

FOLDER = Path(__file__).parent
MESH = Mesh.parse("dp=2 tp=2")
PINNED = {
    "batch:x": "dp=d0",
    "param:up.weight": "tp=d0",
    "param:up.bias": "tp=d0",
    "param:down.weight": "tp=d1",
    "up/autopar.linear/forward#0": "dp=d0 tp=o",
    "down/autopar.linear/forward#0": "dp=d0 tp=i",
    "/aten.pow/forward#0": "dp=d0",
}


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def _choice(node: Node, resharder: Resharder, layouts: dict[Node, Layout]) -> Choice:
    """The pinned choice; else the one whose operands are cheapest to have, the most split first."""
    if node.op == "placeholder" and node.meta["role"].kind == "scalar":
        return ()
    options = enumerate_choices(node.meta["rule"], MESH, allow_partial=node.op == "call_function")

    def cost(choice: Choice) -> tuple[bool, float, int, str]:
        text = choice_text(node.meta["rule"], choice)
        needed = operand_layouts(node.meta["rule"], choice)
        pairs = zip(tensor_operands(node), needed, strict=True)
        moving = sum(resharder.cost_s(layouts[operand], layout, 4) for operand, layout in pairs)
        is_state = node.op == "placeholder" and node.meta["role"].kind != "batch"
        shares = sum(split.factor >= 0 and not is_state for split in choice)
        return text != PINNED.get(node.meta["key"], text), moving, -shares, text

    return min(options, key=cost)


@functools.cache
def texts() -> dict[str, str]:
    """File name → text, in the order of the passes."""
    torch.manual_seed(0)
    step = TrainStep(Perceptron(), {"x": torch.randn(4, 4)}, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    units, _ = units_of(step.capture().gradient.graph)
    joined = annotated(step.capture(), 1, Cut.single(units))
    graph, resharder = joined.graph, resharder_of(MESH)
    layouts: dict[Node, Layout] = {}
    choices: dict[str, Choice] = {}
    for node in graph.nodes:
        if node.op != "output":
            choices[node.meta["key"]] = choice = _choice(node, resharder, layouts)
            layouts[node] = result_layouts(node.meta["rule"], choice)[0]
    context = Context(MESH, 1, choices, joined.state_pairs, resharder)
    found = {"0_joined": graph_text(graph)}
    for number, step_pass in enumerate(passes.STEP_PASSES, 1):
        graph = step_pass(graph, context)
        found[f"{number}_{step_pass.__name__}"] = graph_text(graph)
    (stage,) = split_stages(graph, context).stages
    number = len(found)
    for name, part in stage.parts.items():
        found[f"{number}_split_stages_{name}"] = graph_text(part.graph.graph)
    for offset, part_pass in enumerate(passes.PART_PASSES, 1):
        for name in stage.parts:
            stage.parts[name] = part_pass(stage.parts[name], context)
            found[f"{number + offset}_{part_pass.__name__}_{name}"] = graph_text(stage.parts[name].graph.graph)
    return found


def changed() -> dict[str, str]:
    """Without the texts that a pass left as they were: a file for each would say nothing."""
    found: dict[str, str] = {}
    latest: dict[str, str] = {}
    for name, text in texts().items():
        what = (
            name.rpartition("_")[2] if name.rpartition("_")[2] in ("prologue", "forward", "backward", "update") else ""
        )
        if latest.get(what) != text:
            found[name] = latest[what] = text
    return found


def test_there_is_a_file_for_each_pass_that_changes_something() -> None:
    if os.environ.get("AUTOPAR_GOLDEN") == "write":
        for file in FOLDER.glob("*.txt"):
            file.unlink()
        for name, text in changed().items():
            (FOLDER / f"{name}.txt").write_text(text)
    assert {file.stem for file in FOLDER.glob("*.txt")} == set(changed())


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.txt")))
def test_text(name: str) -> None:
    assert changed().get(name) == (FOLDER / f"{name}.txt").read_text()
