"""The step graph: what `join` makes of the captured gradient and update graphs."""

from __future__ import annotations

import functools
import operator
from collections import Counter

import pytest
import torch
from torch.fx import Node

from autopar.joint import StepGraph, join
from autopar.markers import accumulate, relay
from tests.virtual.random_plans import even_cut
from tests.virtual.step_models import step_of


@functools.cache
def joined(model: str, microbatches: int = 1, stages: int = 1) -> StepGraph:
    step = step_of(model, microbatches)
    return join(step.capture(), microbatches, even_cut(step, stages))


def calls(step: StepGraph) -> list[Node]:
    return [node for node in step.graph.nodes if node.op == "call_function"]


MODELS = [("gpt", 1, 1), ("gpt", 2, 1), ("gpt, 3 layers", 2, 3), ("convnet", 1, 1), ("gpt, frozen, momentum", 1, 1)]


@pytest.mark.parametrize(("model", "microbatches", "stages"), MODELS)
def test_every_node_says_where_it_runs_under_a_key_of_its_own(model: str, microbatches: int, stages: int) -> None:
    step = joined(model, microbatches, stages)
    step.graph.lint()
    nodes = [node for node in step.graph.nodes if node.op != "output"]
    assert len({node.meta["key"] for node in nodes}) == len(nodes)
    for node in nodes:
        assert node.meta["phase"] in ("prologue", "forward", "backward", "update")
        assert node.meta["level"] == ("microbatch" if _is_of_a_microbatch(node) else "step"), node.meta["key"]
        assert 0 <= node.meta["stage"] < stages


def _is_of_a_microbatch(node: Node) -> bool:
    if node.op == "placeholder":
        return node.meta["role"].kind == "batch"
    return node.meta["phase"] in ("forward", "backward")


@pytest.mark.parametrize(("model", "microbatches", "stages"), MODELS)
def test_data_flows_forward_then_backward_then_update(model: str, microbatches: int, stages: int) -> None:
    order = {"prologue": 0, "forward": 1, "backward": 2, "update": 3}
    for node in calls(joined(model, microbatches, stages)):
        for source in node.all_input_nodes:
            before, after = order[source.meta["phase"]], order[node.meta["phase"]]
            assert before <= after
            stages_of = source.meta["stage"], node.meta["stage"]
            if source.op == "call_function" and before == after == 1:
                assert stages_of[0] <= stages_of[1], "a forward goes up the stages"
            if source.op == "call_function" and before == after == 2:
                assert stages_of[0] >= stages_of[1], "a backward goes down the stages"


def test_outputs_are_loss_buffers_and_new_state() -> None:
    step = joined("convnet")
    output = next(node for node in step.graph.nodes if node.op == "output")
    kinds = Counter(role.kind for role in output.meta["roles"])
    assert kinds["loss"] == 1 and kinds["buffer"] == 3
    trainable = step_of("convnet").trainable_names
    assert kinds["param"] == len(trainable) and kinds["state"] == len(trainable)  # momentum
    assert len(step.state_pairs) == kinds["param"] + kinds["state"]
    for source, value in step.state_pairs:
        assert source.op == "placeholder" and source.meta["val"].shape == value.meta["val"].shape


def test_frozen_parameters_are_read_and_not_written() -> None:
    step = joined("gpt, frozen, momentum")
    written = {source.meta["role"].name for source, _ in step.state_pairs if source.meta["role"].kind == "param"}
    read = {n.meta["role"].name for n in step.graph.nodes if n.op == "placeholder" and n.meta["role"].kind == "param"}
    assert read - written == {"positions.weight", "norm.weight", "blocks.0.up.weight"}


@pytest.mark.parametrize("stages", [1, 3])
def test_a_parameter_reaches_each_phase_of_a_stage_through_one_relay(stages: int) -> None:
    step = joined("gpt, 3 layers", 2, stages)
    for node in step.graph.nodes:
        if node.op != "placeholder" or node.meta["role"].kind != "param":
            continue
        in_step = [user for user in node.users if user.target is relay and user.meta["phase"] == "prologue"]
        assert len({user.meta["stage"] for user in in_step}) == len(in_step)
        for user in in_step:
            phases = Counter((u.meta["phase"], u.meta["stage"]) for u in user.users)
            assert set(phases.values()) == {1} and all(u.target is relay for u in user.users)
        others = [user for user in node.users if user not in in_step]
        assert all(user.meta["phase"] == "update" or user.op == "output" for user in others)


def test_a_value_with_several_consumers_in_a_phase_has_one_relay_for_them() -> None:
    step = joined("gpt")
    for node in calls(step):
        if node.target is relay or not isinstance(node.meta["val"], torch.Tensor) or node.meta["val"].numel() < 2:
            continue
        users = [user for user in node.users if user.op == "call_function"]
        places = Counter((u.meta["phase"], u.meta["level"], u.meta["stage"]) for u in users)
        assert set(places.values()) <= {1}, node.meta["key"]


@pytest.mark.parametrize(("microbatches", "expected"), [(1, 0), (2, 1)])
def test_gradients_are_accumulated_where_there_are_microbatches(microbatches: int, expected: int) -> None:
    step = joined("gpt", microbatches)
    per_parameter = Counter(node.meta["gradient_of"] for node in calls(step) if node.target is accumulate)
    assert per_parameter == Counter({name: expected for name in step_of("gpt").trainable_names if expected})
    named = {node.meta["gradient_of"] for node in calls(step) if "gradient_of" in node.meta}
    assert named == set(step_of("gpt").trainable_names)


def test_a_tied_gradient_is_accumulated_on_each_stage_and_summed_once_a_step() -> None:
    step = joined("gpt, 3 layers", 2, 3)
    parts = [n for n in calls(step) if n.target is accumulate and n.meta["gradient_of"] == "tokens.weight"]
    assert sorted(node.meta["stage"] for node in parts) == [0, 2]
    (total,) = {user for part in parts for user in part.users}
    assert total.target is torch.ops.aten.add.Tensor
    assert (total.meta["phase"], total.meta["level"], total.meta["stage"]) == ("update", "step", 0)


def test_what_depends_on_no_parameter_is_computed_by_each_stage_that_needs_it() -> None:
    """No stage sends masks or positions; only activations and gradients cross, and the tied weight."""
    step = joined("gpt, 3 layers", 1, 3)
    crossing = {
        source.meta["key"]
        for node in calls(step)
        for source in node.all_input_nodes
        if source.meta["stage"] != node.meta["stage"] and source.op == "call_function"
    }
    shapes = {tuple(n.meta["val"].shape) for n in calls(step) if n.meta["key"] in crossing}
    assert shapes <= {(4, 6, 8), (24, 8)}, crossing


def test_each_stage_has_its_own_getitems() -> None:
    for node in calls(joined("gpt, 3 layers", 1, 3)):
        if node.target is operator.getitem:
            assert node.meta["stage"] == node.args[0].meta["stage"]


def test_nothing_dead_is_left() -> None:
    """The sum of a tied gradient over its uses would be sent to another stage by each microbatch for nothing."""
    for node in calls(joined("gpt, 3 layers", 2, 3)):
        assert node.users, node.meta["key"]
