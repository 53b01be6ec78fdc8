"""Mistakes seeded into whole passes: each strikes, and is caught by the comparison on the virtual mesh.

Those of `test_mutations` spoil one node; here a pass forgets a rule that it must keep, wherever it applies.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from autopar import collectives
from autopar.errors import VerificationError
from autopar.joint import forward_twin
from autopar.mesh import Mesh
from autopar.program.parts import Part, Pipeline
from passes.editing import edit
from tests.virtual.random_plans import random_pipeline, wrong
from tests.virtual.step_models import step_of

aten = torch.ops.aten
SEEDS = range(6)
Strike = Callable[[], int]
"""How often a mistake struck so far."""


def module(name: str) -> Any:
    return importlib.import_module(f"passes.{name}")


def is_caught(strikes: Strike, mesh: str, model: str = "gpt", microbatches: int = 2, change: Any = None) -> bool:
    """Whether of some random plans the first that the mistake strikes differs; an op that can't run counts, too."""
    step = step_of(model, microbatches)
    for seed in SEEDS:
        before = strikes()
        try:
            pipeline = random_pipeline(step, Mesh.parse(mesh), seed)
            pipeline = change(pipeline) if change is not None else pipeline
            if strikes() > before and wrong(step, pipeline):
                return True
        except (AssertionError, RuntimeError, IndexError, VerificationError) as error:
            if strikes() > before:
                return bool(str(error))
            raise
    assert strikes(), "the mistake found nothing to strike"
    return False


# -- in the parts that the passes leave ---------------------------------------------------------------------------
def parts_changed(change: Callable[[Graph], int], struck: list[int]) -> Callable[[Pipeline], Pipeline]:
    def changed(part: Part) -> Part:
        return edit(part, lambda graph: struck.append(1) if change(graph) else None)

    def run(pipeline: Pipeline) -> Pipeline:
        stages = [replace(s, parts={name: changed(part) for name, part in s.parts.items()}) for s in pipeline.stages]
        return replace(pipeline, stages=tuple(stages))

    return run


def rolled(target: Any, dim_of: Callable[[Node], int]) -> Callable[[Graph], int]:
    """The operand of the first call is rolled by a shard: each rank gets its neighbour's."""

    def change(graph: Graph) -> int:
        for node in graph.nodes:
            if node.target is not target:
                continue
            dim, operand = dim_of(node), node.args[0]
            with graph.inserting_before(node):
                wrong_order = graph.call_function(aten.roll.default, (operand, [node_size(operand, dim) // 2], [dim]))
            wrong_order.meta = dict(operand.meta)
            node.replace_input_with(operand, wrong_order)
            return 1
        return 0

    return change


def node_size(node: Node, dim: int) -> int:
    return int(node.meta["local_val"].shape[dim])


def swapped_states(graph: Graph) -> int:
    """The update takes the second moment for the first."""
    states = [n for n in graph.nodes if n.op == "placeholder" and n.meta["slot"].kind == "state"]
    by_name = {n.meta["slot"].name: n for n in states}
    first = next((n for name, n in by_name.items() if name.endswith("exp_avg")), None)
    second = by_name.get(first.meta["slot"].name + "_sq") if first is not None else None
    if first is None or second is None:
        return 0
    users = list(first.users)
    first.replace_all_uses_with(second, lambda user: user.op != "output")
    return len(users)


def one_gradient_dropped(graph: Graph) -> int:
    """The backward adds nothing to one accumulator."""
    for node in graph.nodes:
        accumulates = node.target in (aten.add.Tensor, aten.add_.Tensor)
        if accumulates and node.args[0].op == "placeholder" and node.args[0].meta["slot"].kind == "accumulator":
            node.kwargs = {"alpha": 0}
            return 1
    return 0


def halves_swapped(graph: Graph) -> int:
    for node in graph.nodes:
        if node.target is collectives.wait and node.args[0].target is collectives.all_gather_start:
            dim, users = node.args[0].args[2], list(node.users)
            with graph.inserting_after(node):
                swapped = graph.call_function(aten.roll.default, (node, [node_size(node, dim) // 2], [dim]))
            swapped.meta = dict(node.meta)
            for user in users:
                user.replace_input_with(node, swapped)
            return 1
    return 0


GRAPH_MISTAKES: dict[str, tuple[Callable[[Graph], int], str]] = {
    "a reduce-scatter that keeps the neighbour's share": (
        rolled(collectives.reduce_scatter_start, lambda node: node.args[2]),
        "dp=2",
    ),
    "a slice that is the neighbour's": (rolled(collectives.shard, lambda node: node.args[2]), "dp=2"),
    "an all-to-all that sends to the wrong rank": (
        rolled(collectives.all_to_all_start, lambda node: node.args[2]),
        "dp=2",
    ),
    "shards gathered in the wrong order": (halves_swapped, "dp=2"),
    "the second moment taken for the first": (swapped_states, "dp=2"),
    "a gradient that is never added": (one_gradient_dropped, "dp=2"),
}


@pytest.mark.parametrize("mistake", GRAPH_MISTAKES)
def test_a_mistake_in_a_part(mistake: str) -> None:
    change, mesh = GRAPH_MISTAKES[mistake]
    struck: list[int] = []
    assert is_caught(lambda: len(struck), mesh, "perceptrons, 8 rows", change=parts_changed(change, struck))


# -- rules that a pass forgets ------------------------------------------------------------------------------------
HANDLERS = ["aten.embedding", "aten.scatter_add", "aten.mean", "aten.slice", "aten.slice_backward", "aten.arange"]


@pytest.mark.parametrize("name", HANDLERS)
def test_an_op_that_is_not_localised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Global indices or counts on a shard: an index without its offset, a mask that isn't sliced, a mean's count."""
    handlers, struck = module("local_indices").HANDLERS, []
    monkeypatch.setitem(handlers, name, lambda *_: struck.append(name))
    model = {"aten.mean": "squares", "aten.slice": "llama", "aten.slice_backward": "llama"}.get(name, "gpt")
    assert is_caught(lambda: len(struck), "dp=2", model, microbatches=1)


def test_a_mask_that_is_never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a split table that other ranks hold count as well."""
    localise, struck = module("localise_shapes"), []
    right = localise.Localiser.call

    def call(self: Any, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        if target is aten.bitwise_and.Tensor:
            struck.append(1)
            return right(self, like, aten.bitwise_or.Tensor, *args, **kwargs)
        return right(self, like, target, *args, **kwargs)

    monkeypatch.setattr(localise.Localiser, "call", call)
    assert is_caught(lambda: len(struck), "dp=2", microbatches=1)


def test_padding_that_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the chunks of a size that doesn't divide counts as content."""
    localise, struck = module("localise_shapes"), []
    monkeypatch.setattr(localise.Localiser, "fill_padding", lambda _self, _node, value, *_: struck.append(1) or value)
    assert is_caught(lambda: len(struck), "tp=4", "gpt, odd sizes", microbatches=1)


def test_equal_nodes_that_differ_in_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    share, struck = module("share_equal_nodes"), []
    right = share._frozen

    def frozen(value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            struck.append(value)
            return "a number"
        return right(value)

    monkeypatch.setattr(share, "_frozen", frozen)
    assert is_caught(lambda: len(struck), "dp=2")


def test_a_value_that_is_overwritten_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a part made dies at once."""
    reinplace, struck = module("reinplace"), []
    right = reinplace._Storage.__post_init__

    def careless(self: Any) -> None:
        right(self)
        struck.append(1)
        self.death = dict.fromkeys(self.death, -1)

    monkeypatch.setattr(reinplace._Storage, "__post_init__", careless)
    assert is_caught(lambda: len(struck), "dp=2")


def test_buckets_unpacked_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, struck = module("bucket_collectives"), []
    right = bucket._reduced

    def shifted(builder: Any, moved: Node, ranks: int, start: int, length: int) -> Node:
        total = node_size(moved, 0)
        struck.append(start)
        return right(builder, moved, ranks, (start + 1) % (total - length + 1), length)

    monkeypatch.setattr(bucket, "_reduced", shifted)
    assert is_caught(lambda: len(struck), "dp=2", "gpt, 8 rows", microbatches=1)


def test_the_backward_reads_what_was_moved_for_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward's relay is taken for the backward's whatever its layout."""
    moves, struck = module("insert_moves"), []

    def reuse(node: Node, context: Any) -> None:
        twin = forward_twin(node)
        if twin is not None and twin.meta["layout"] != node.meta["layout"]:
            struck.append(node.name)
            node.args = (twin,)
            node.meta["layout"] = twin.meta["layout"]

    monkeypatch.setattr(moves, "_reuse", reuse)
    assert is_caught(lambda: len(struck), "dp=2", microbatches=1)


def test_without_a_mistake_nothing_differs() -> None:
    step = step_of("gpt", 2)
    assert not any(wrong(step, random_pipeline(step, Mesh.parse("dp=2"), seed)) for seed in (0, 1))
