"""Bugs seeded into the passes are caught by the comparison on the virtual mesh: what it would miss, it can't prove."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from autopar import collectives, joint
from autopar.errors import VerificationError
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.program.parts import Part
from passes.editing import edit
from tests.virtual.random_plans import random_pipeline, wrong
from tests.virtual.step_models import step_of

aten = torch.ops.aten
localise_shapes: Any = importlib.import_module("passes.localise_shapes")
local_indices: Any = importlib.import_module("passes.local_indices")
Change = Callable[[Graph], int]


def is_caught(model: str, microbatches: int, mesh: str, seed: int, part_passes: tuple[Any, ...] = ()) -> bool:
    step = step_of(model, microbatches)
    pipeline = random_pipeline(step, Mesh.parse(mesh), seed, part_passes)
    try:
        return bool(wrong(step, pipeline))
    except VerificationError:
        return True  # replicas that differ


class Seeded:
    """A pass on parts with a bug: `change` returns how often it struck."""

    def __init__(self, change: Change, part: str | None = None) -> None:
        self.change, self.part, self.struck = change, part, 0
        self.__name__ = "seeded"

    def __call__(self, part: Part, context: object) -> Part:
        if self.part not in (None, part.name):
            return part
        return edit(part, self._strike)

    def _strike(self, graph: Graph) -> None:
        self.struck += self.change(graph)


def _nodes(graph: Graph, target: object) -> list[Node]:
    return [node for node in graph.nodes if node.target is target]


def drop_sum(graph: Graph) -> int:
    """The first all-reduce of a sum is left out (a maximum may be: a softmax is the same under any shift)."""
    for node in _nodes(graph, collectives.all_reduce):
        if node.args[2] == "sum":
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            return 1
    return 0


def scale(target: object, factor: float) -> Change:
    """The first call's result is multiplied."""

    def change(graph: Graph) -> int:
        return sum(_followed(graph, node, aten.mul.Scalar, factor) for node in _nodes(graph, target)[:1])

    return change


def _followed(graph: Graph, node: Node, target: Any, *arguments: Any) -> int:
    """Whoever read `node` reads `target(node, …)`."""
    users = list(node.users)
    with graph.inserting_after(node):
        wrong_value = graph.call_function(target, (node, *arguments))
    wrong_value.meta = dict(node.meta)
    for user in users:
        user.replace_input_with(node, wrong_value)
    return 1


def rotate_shards(graph: Graph) -> int:
    """The first gather has its shards in a wrong order."""
    for node in _nodes(graph, collectives.all_gather)[:1]:
        dim = node.args[2]
        return _followed(graph, node, aten.roll.default, [node.meta["local_val"].shape[dim] // 2], [dim])
    return 0


def accumulations(change: Callable[[Node], None]) -> Change:
    """On the first sum over microbatches: an add of an accumulator."""

    def strike(graph: Graph) -> int:
        for node in _nodes(graph, aten.add.Tensor):
            total = node.args[0]
            if isinstance(total, Node) and total.op == "placeholder" and total.meta["slot"].kind == "accumulator":
                change(node)
                return 1
        return 0

    return strike


def doubled(node: Node) -> None:
    node.kwargs = {"alpha": 2}


def alone(node: Node) -> None:
    node.args, node.kwargs = (node.args[1], node.args[1]), {"alpha": 0}


def largest_instead_of_sum(graph: Graph) -> int:
    for node in _nodes(graph, collectives.all_reduce):
        if node.args[2] == "sum":
            node.args = (*node.args[:2], "max")
            return 1
    return 0


BUGS: dict[str, tuple[Change, str]] = {
    "an all-reduce of a gradient dropped": (drop_sum, "update"),
    "an all-reduce of the forward dropped": (drop_sum, "forward"),
    "an all-reduce of the backward dropped": (drop_sum, "backward"),
    "a gradient reduced twice": (scale(collectives.all_reduce, 2.0), "update"),
    "a gradient accumulated twice": (accumulations(doubled), "backward"),
    "only the last microbatch counts": (accumulations(alone), "backward"),
    "shards gathered in a wrong order": (rotate_shards, "forward"),
    "the largest instead of the sum": (largest_instead_of_sum, "forward"),
    "a millionth too much": (scale(collectives.reduce_scatter, 1 + 1e-6), "forward"),
}


def test_without_a_bug_nothing_differs() -> None:
    assert not is_caught("gpt", 2, "dp=2", 0)


@pytest.mark.parametrize("bug", BUGS)
def test_bug_in_a_pass(bug: str) -> None:
    change, part = BUGS[bug]
    for seed in range(8):  # of random plans, the first that has what the bug spoils
        seeded = Seeded(change, part)
        caught = is_caught("gpt", 2, "dp=2", seed, (seeded,))
        if seeded.struck:
            break
    assert seeded.struck, "the bug found nothing to strike"
    assert caught


# -- in the passes on the step ---------------------------------------------------------------------------------
def test_axes_of_a_factor_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """`4096@tp.dp` offset as if dp were major."""
    right = localise_shapes.Localiser.first
    struck = []

    def reversed_axes(self: Any, node: Node, size: int, axes: tuple[str, ...], inner: int = 1) -> Any:
        struck.append(len(axes))
        return right(self, node, size, axes[::-1], inner)

    monkeypatch.setattr(localise_shapes.Localiser, "first", reversed_axes)
    seed = next(s for s in range(20) if _has_two_axes_offset(s, struck))
    assert is_caught("gpt", 1, "dp=2 tp=2", seed)


def _has_two_axes_offset(seed: int, struck: list[int]) -> bool:
    struck.clear()
    random_pipeline(step_of("gpt", 1), Mesh.parse("dp=2 tp=2"), seed, ())
    return max(struck, default=0) > 1


@pytest.mark.parametrize("handler", ["autopar.linear", "aten.embedding_dense_backward", "aten.gather"])
def test_localisation_left_out(handler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(local_indices.HANDLERS, handler)
    try:
        assert any(is_caught("gpt", 1, "dp=2", seed) for seed in range(3))
    except (IndexError, RuntimeError, AssertionError) as error:  # an index outside of its shard
        assert str(error)


def test_one_stage_of_a_tied_gradient_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    right = joint._Joiner._summands
    struck = []

    def first_only(self: Any, node: Node) -> list[Node]:
        found = right(self, node)
        struck.append(len(found))
        return found[:1]

    assert not is_caught("gpt", 1, "pp=2", 0)
    monkeypatch.setattr(joint._Joiner, "_summands", first_only)
    assert is_caught("gpt", 1, "pp=2", 0)
    assert max(struck) == 2


def test_a_layout_that_is_not_that_of_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value said to be partial is not reduced: a rule that forgets a partial sum."""
    right = Layout.add_partial
    monkeypatch.setattr(
        Layout, "add_partial", lambda self, axis, op="sum": self if op == "sum" else right(self, axis, op)
    )
    try:
        assert any(is_caught("gpt", 1, "dp=2", seed) for seed in range(2))
    except AssertionError as error:
        assert str(error)
