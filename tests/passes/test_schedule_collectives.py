"""Where starts and waits go, and that nothing else changes."""

import itertools
import random
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

from autopar import collectives
from autopar.mesh import Mesh
from autopar.program.storages import is_collective, is_start, is_wait, target_name
from passes.kinds import block_of
from passes.reinplace import reinplace
from passes.schedule_collectives import Overlap, check_order, schedule_collectives

sys.path.insert(0, str(Path(__file__).parents[1] / "program"))
from tracing import Identity, part_of, run_part

aten = torch.ops.aten
MESH = Mesh.parse("dp=2")


class Builder:
    """A graph with real values as `val`, so that every node has a shape."""

    def __init__(self):
        self.graph, self.comm, self.path, self.inputs = fx.Graph(), Identity(), "", []

    def input(self, slot, *shape):
        node = self.graph.placeholder(slot.replace(":", "_").replace(".", "_"))
        node.meta["val"] = torch.rand(shape)
        self.inputs.append(slot)
        return node

    def call(self, target, *args):
        node = self.graph.call_function(target, args)
        values = fx.node.map_arg(args, lambda n: n.meta["val"])
        run = getattr(self.comm, target.__name__) if is_collective(node) else target
        node.meta.update(val=run(*values), path=self.path)
        return node

    def part(self, name, **outputs):
        self.graph.output(tuple(outputs.values()))
        slots = " ".join(key.replace("__", ":", 1) for key in outputs)
        return part_of(fx.GraphModule(torch.nn.Module(), self.graph), " ".join(self.inputs), slots, name)


def arguments(part):
    return [node.meta["val"].clone() for node in part.graph.graph.nodes if node.op == "placeholder"]


def same_numbers(before, after):
    """Generated, with in-place ops and all, beside the blocking order."""
    expected = run_part(before, *arguments(before), comm=Identity(), mesh=MESH)
    got = run_part(reinplace(after), *arguments(before), comm=Identity(), mesh=MESH)
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def layered_forward(layers=4):
    """y = relu(x W_i) with each W_i gathered where it is used."""
    b = Builder()
    weights = [b.input(f"param:layers.{i}.w", 2, 4) for i in range(layers)]
    x = b.input("batch:x", 3, 4)
    for i, weight in enumerate(weights):
        b.path = f"layers.{i}"
        x = b.call(aten.relu.default, b.call(aten.mm.default, x, b.call(collectives.all_gather, weight, "dp", 0)))
    return b.part("forward", saved__y=x)


def order(part):
    """The calls in order: `all_gather_start 1` is the second one, `mm 0` the first."""
    counts, numbers, words = {}, {}, []
    for node in part.graph.graph.nodes:
        if node.op != "call_function":
            continue
        name = target_name(node)
        if is_wait(node):
            number = numbers[node.args[0]]
        else:
            number = numbers[node] = counts.setdefault(name, 0)
            counts[name] += 1
        words.append(f"{name.removesuffix('_start')}{'?' if is_start(node) else ''} {number}")
    return words


def test_parameter_gathers_start_one_block_ahead():
    part = layered_forward()
    after = schedule_collectives(part)
    assert order(after) == [
        *("all_gather? 0", "all_gather? 1", "wait 0", "mm 0", "relu 0"),
        *("all_gather? 2", "wait 1", "mm 1", "relu 1"),
        *("all_gather? 3", "wait 2", "mm 2", "relu 2"),
        *("wait 3", "mm 3", "relu 3"),
    ]
    assert same_numbers(part, after)


def test_gathers_stay_within_the_budget():
    whole = 4 * 4 * 4  # bytes of one gathered weight
    one = schedule_collectives(layered_forward(), Overlap(gathered_bytes=whole))
    assert order(one)[:6] == ["all_gather? 0", "wait 0", "mm 0", "all_gather? 1", "relu 0", "wait 1"]
    two = schedule_collectives(layered_forward(), Overlap(gathered_bytes=2 * whole, blocks_ahead=3))
    flying = most = 0
    for word in order(two):
        flying += word.startswith("all_gather?") - word.startswith("mm")
        most = max(most, flying)
    assert most == 2
    assert same_numbers(layered_forward(), two)


def test_reductions_in_flight_have_a_budget():
    """Those of an update would all start at once, each with its operand and result in memory."""
    b = Builder()
    grads = [b.input(f"accumulator:{i}", 4, 4) for i in range(6)]
    part = b.part(
        "update", **{f"param__{i}": b.call(collectives.reduce_scatter, g, "dp", 0) for i, g in enumerate(grads)}
    )
    size = grads[0].meta["val"].nbytes
    for budget, most in ((1 << 30, 6), (3 * size, 2), (1, 1)):
        words = [word.split()[0] for word in order(schedule_collectives(part, Overlap(gathered_bytes=budget)))]
        flying = list(itertools.accumulate({"reduce_scatter?": 1, "wait": -1}.get(word, 0) for word in words))
        assert max(flying) == most, (budget, words)


def test_few_are_outstanding():
    part = schedule_collectives(layered_forward(6), Overlap(outstanding=2, blocks_ahead=9))
    flying = most = 0
    for word in order(part):
        flying += word.startswith("all_gather?") - word.startswith("wait")
        most = max(most, flying)
    assert most == 2


def layered_backward(layers=4, axis_of_activation=None):
    """dx = dy W_iᵀ (reduced over an axis, if given), acc_i + reduce_scatter(xᵀ dy)."""
    b = Builder()
    weights = [b.input(f"param:layers.{i}.w", 4, 4) for i in range(layers)]
    saved = [b.input(f"saved:x{i}", 3, 4) for i in range(layers)]
    totals = [b.input(f"accumulator:layers.{i}.w", 2, 4) for i in range(layers)]
    dy, outputs = b.input("received:dy", 3, 4), {}
    for i in reversed(range(layers)):
        b.path = f"layers.{i}"
        dw = b.call(aten.mm.default, b.call(aten.t.default, saved[i]), dy)
        part = b.call(collectives.reduce_scatter, dw, "dp", 0)
        outputs[f"accumulator__layers.{i}.w"] = b.call(aten.add.Tensor, totals[i], part)
        dy = b.call(aten.mm.default, dy, b.call(aten.t.default, weights[i]))
        if axis_of_activation:
            dy = b.call(collectives.all_reduce, dy, axis_of_activation)
        dy = b.call(aten.relu.default, dy)
    return b.part("backward", saved__dx=dy, **outputs)


def backward_with_sums_at_the_end(layers=4):
    """As captured with several microbatches: a gradient's sum, and the view that its reduction needs, come last."""
    b = Builder()
    weights = [b.input(f"param:layers.{i}.w", 4, 4) for i in range(layers)]
    saved = [b.input(f"saved:x{i}", 3, 4) for i in range(layers)]
    totals = [b.input(f"accumulator:layers.{i}.w", 2, 4) for i in range(layers)]
    dy, gradients, outputs = b.input("received:dy", 3, 4), {}, {}
    for i in reversed(range(layers)):
        b.path = f"layers.{i}"
        gradients[i] = b.call(aten.mm.default, b.call(aten.t.default, saved[i]), dy)
        dy = b.call(aten.relu.default, b.call(aten.mm.default, dy, b.call(aten.t.default, weights[i])))
    for i in range(layers):
        b.path = f"layers.{i}.w"
        part = b.call(collectives.reduce_scatter, b.call(aten.view.default, gradients[i], [4, 4]), "dp", 0)
        outputs[f"accumulator__layers.{i}.w"] = b.call(aten.add.Tensor, totals[i], part)
    return b.part("backward", saved__dx=dy, **outputs)


def test_reductions_start_as_soon_as_their_gradient_is_there():
    """They are awaited a block later, wherever the sum stood."""
    part = backward_with_sums_at_the_end()
    after = schedule_collectives(part)
    words = [word for word in order(after) if word.split()[0] in ("mm", "reduce_scatter?", "wait")]
    assert words == [
        *("mm 0", "reduce_scatter? 0", "mm 1"),
        *("mm 2", "reduce_scatter? 1", "mm 3", "wait 0"),
        *("mm 4", "reduce_scatter? 2", "mm 5", "wait 1"),
        *("mm 6", "reduce_scatter? 3", "mm 7", "wait 2", "wait 3"),
    ]
    assert same_numbers(part, after)


def test_gradient_reductions_are_awaited_one_block_later():
    part = layered_backward()
    after = schedule_collectives(part)
    words = [word for word in order(after) if not word.startswith("t ")]
    for i in range(2):  # of block i: started in it, awaited at the end of the next one
        start, done = words.index(f"reduce_scatter? {i}"), words.index(f"wait {i}")
        assert words.index(f"mm {2 * i}") < start < words.index(f"mm {2 * i + 1}")
        assert words.index(f"relu {i + 1}") < done < words.index(f"mm {2 * i + 4}")
    assert words[-1] == "add 3"
    assert same_numbers(part, after)


def test_weight_gradients_hide_activation_collectives():
    part = layered_backward(axis_of_activation="tp")
    after = schedule_collectives(part)
    words = [word for word in order(after) if not word.startswith("t ")]
    start = words.index("all_reduce? 0")
    assert words[start - 1] == "mm 0"  # dx comes first, what follows the start is dw and its reduction
    assert words[start + 1 : start + 4] == ["mm 1", "reduce_scatter? 0", "wait 0"]
    assert same_numbers(part, after)


def test_gradients_are_added_at_once():
    b = Builder()
    totals, x = [b.input(f"accumulator:{i}", 4, 4) for i in range(3)], b.input("saved:x", 4, 4)
    gradients = [x]
    for _ in totals:
        gradients.append(b.call(aten.mm.default, gradients[-1], x))
    sums = {
        f"accumulator__{i}": b.call(aten.add.Tensor, t, g)
        for i, (t, g) in enumerate(zip(totals, gradients[1:], strict=True))
    }
    part = b.part("backward", **sums)
    after = schedule_collectives(part)
    assert order(after) == ["mm 0", "add 0", "mm 1", "add 1", "mm 2", "add 2"]
    assert same_numbers(part, after)


def test_casts_of_gradients_go_with_their_sums():
    """Under mixed precision they stand at the end of the backward: each layer's gradient would be kept until then."""
    b = Builder()
    totals, x = [b.input(f"accumulator:{i}", 4, 4) for i in range(2)], b.input("saved:x", 4, 4)
    first = b.call(aten.mm.default, x, x)
    gradients = [first, b.call(aten.mm.default, first, x)]
    casts = [b.call(aten.clone.default, b.call(aten.t.default, g)) for g in gradients]
    sums = [b.call(aten.add.Tensor, total, cast) for total, cast in zip(totals, casts, strict=True)]
    part = b.part("backward", **{f"accumulator__{i}": each for i, each in enumerate(sums)})
    after = schedule_collectives(part)
    assert order(after) == ["mm 0", "t 0", "clone 0", "add 0", "mm 1", "t 1", "clone 1", "add 1"]
    assert same_numbers(part, after)


def test_update_starts_early_and_ends_late():
    """ZeRO-1: each parameter's reduce-scatter, update, all-gather; none waits where it needn't."""
    b = Builder()
    names = [f"layers.{i}.w" for i in range(3)]
    weights = [b.input(f"param:{name}", 2, 4) for name in names]
    grads = [b.input(f"accumulator:{name}", 4, 4) for name in names]
    outputs = {}
    for name, weight, grad in zip(names, weights, grads, strict=True):
        b.path = name.removesuffix(".w")
        own = b.call(collectives.reduce_scatter, grad, "dp", 0)
        new = b.call(aten.sub.Tensor, weight, own)
        outputs[f"param__{name}"] = new
        outputs[f"saved__{name}"] = b.call(collectives.all_gather, new, "dp", 0)
    part = b.part("update", **outputs)
    after = schedule_collectives(part)
    words = order(after)
    assert words.index("reduce_scatter? 1") < words.index("sub 0")
    gathered = len(words) - 1 - words[::-1].index("wait 0")
    assert words.index("sub 1") < gathered < words.index("sub 2") and words[-2:] == ["wait 1", "wait 2"]
    assert same_numbers(part, after)


def test_a_part_without_collectives_is_left_alone():
    b = Builder()
    part = b.part("forward", saved__y=b.call(aten.relu.default, b.input("batch:x", 2)))
    assert schedule_collectives(part) is part


def test_two_steps_of_one_gather():
    """A weight split by two axes: the second gather starts when the first is there."""
    b = Builder()
    weight, x = b.input("param:w", 1, 4), b.input("batch:x", 3, 4)
    whole = b.call(collectives.all_gather, b.call(collectives.all_gather, weight, "tp", 0), "dp", 0)
    part = b.part("forward", saved__y=b.call(aten.mm.default, x, whole))
    after = schedule_collectives(part)
    assert order(after) == ["all_gather? 0", "wait 0", "all_gather? 1", "wait 1", "mm 0"]
    assert same_numbers(part, after)


def test_checker_names_the_fault():
    part = layered_forward(2)
    nodes = list(part.graph.graph.nodes)
    check_order(part.graph.graph, nodes)
    nodes[4], nodes[5] = nodes[5], nodes[4]
    with pytest.raises(AssertionError, match=r"schedule_collectives: .* precedes"):
        check_order(part.graph.graph, nodes)
    with pytest.raises(AssertionError, match="lost or doubled"):
        check_order(part.graph.graph, nodes[:-2])


def test_block_of():
    assert block_of("model.layers.3.mlp.up_proj") == "model.layers.3"
    assert block_of("h.3") == "h.3"
    assert block_of("lm_head") == "lm_head"
    assert block_of("") == ""


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_keep_their_numbers(seed):
    picks = random.Random(seed)
    b = Builder()
    values = [b.input(f"param:{i}", 4, 4) for i in range(3)] + [b.input("batch:x", 4, 4)]
    total = b.input("accumulator:w", 4, 4)
    for step in range(20):
        b.path = f"layers.{step // 4}"
        kind = picks.randrange(5)
        x = picks.choice(values[-6:])
        if kind == 0:
            y = b.call(aten.narrow.default, b.call(collectives.all_gather, x, "dp", 0), 0, 0, 4)
        elif kind == 1:
            y = b.call(collectives.all_reduce, b.call(aten.mul.Tensor, x, 0.25), "tp")
        elif kind == 2:
            y = b.call(aten.t.default, x)
        else:
            y = b.call(picks.choice([aten.mm.default, aten.add.Tensor, aten.mul.Tensor]), x, picks.choice(values))
        values.append(y)
    reduced = b.call(aten.add.Tensor, total, b.call(collectives.all_reduce, picks.choice(values), "dp"))
    part = b.part("backward", saved__y=values[-1], saved__z=picks.choice(values), accumulator__w=reduced)
    limits = Overlap(picks.choice([64, 1 << 20]), picks.choice([1, 3, 16]), picks.choice([0, 1, 3]))
    assert same_numbers(part, schedule_collectives(part, limits))
