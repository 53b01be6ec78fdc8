"""What kind of node a node is for the order of a part: what it hangs on, and what hangs on it.

| kind              | made from                                  | leads to                      |
|-------------------|--------------------------------------------|-------------------------------|
| early             | the part's inputs, by moving alone         | anything                      |
| late              | anything, by a collective                  | the part's outputs alone      |
| feeders           | anything, by views, casts and packing      | starts of late nodes alone    |
| fillers           | anything, by no collective                 | gradients and late nodes      |
| small from batch  | the batch and buffers, in small tensors    | anything                      |
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar import layers
from autopar.program.parts import Part
from autopar.program.storages import is_collective, is_start, is_view, is_wait, local_value, nbytes, output_values

aten = torch.ops.aten
CASTS = (aten._to_copy.default, aten.clone.default, operator.getitem)
PACKS = (aten.cat.default,)
SUMS = (aten.add.Tensor,)
SMALL_BYTES = 1 << 16


def block_of(path: str) -> str:
    """`"model.layers.3.mlp"` → `"model.layers.3"`; a path without a number → its first name."""
    return layers.block_of(path) or path.partition(".")[0]


def started_by(wait: fx.Node) -> fx.Node:
    """The start that `wait` awaits."""
    (start,) = wait.all_input_nodes
    return start


def early(graph: fx.Graph) -> set[fx.Node]:
    """What is made from the part's inputs by views, casts, packing and collectives alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_cheap = is_view(node) or node.target in (*CASTS, *PACKS) or is_start(node) or is_wait(node)
        if node.op in ("placeholder", "get_attr") or (is_cheap and all(n in found for n in node.all_input_nodes)):
            found.add(node)
    return {node for node in found if node.op == "call_function"}


def leads_to_outputs(graph: fx.Graph) -> set[fx.Node]:
    """What reaches nothing but the part's outputs, by collectives, sums, views and casts."""
    tail: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_cheap = is_view(node) or node.target in CASTS or node.target in SUMS or is_collective(node)
        if node.op == "call_function" and is_cheap and all(u in tail or u.op == "output" for u in node.users):
            tail.add(node)
    return tail


def late(graph: fx.Graph) -> set[fx.Node]:
    """Collectives, and what follows them, that lead only to the part's outputs by sums, views and casts."""
    tail = leads_to_outputs(graph)
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        if node in tail and (is_start(node) or any(operand in behind for operand in node.all_input_nodes)):
            behind.add(node)
    return behind


def feeders(graph: fx.Graph, ends: set[fx.Node]) -> set[fx.Node]:
    """What leads to starts among `ends` alone, by views, casts and packing."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_cheap = is_view(node) or node.target in (*CASTS, *PACKS)
        leads = bool(node.users) and all(user in found or (user in ends and is_start(user)) for user in node.users)
        if node.op == "call_function" and is_cheap and leads:
            found.add(node)
    return found


def fillers(part: Part, ends: set[fx.Node]) -> set[fx.Node]:
    """What no collective in the middle and no later part waits for: it leads only to gradients or late things."""
    outputs = zip(part.outputs, output_values(part.graph.graph), strict=True)
    sinks = {node for slot, node in outputs if slot.kind == "accumulator" and isinstance(node, fx.Node)} | ends
    found: set[fx.Node] = set()
    for node in reversed(part.graph.graph.nodes):
        is_end = node in sinks and all(u.op == "output" or u in sinks for u in node.users)
        leads = bool(node.users) and all(user in found or user in ends for user in node.users)
        if node.op == "call_function" and not is_start(node) and not is_wait(node) and (is_end or leads):
            found.add(node)
    return found - ends


def is_accumulation(node: fx.Node) -> bool:
    """A sum of a part's input and something that only leads to the output."""
    to_output = all(user.op == "output" for user in node.users)
    return node.target in SUMS and to_output and any(n.op == "placeholder" for n in node.all_input_nodes)


def summed(graph: fx.Graph) -> set[fx.Node]:
    """Accumulations, and what leads to them alone by views and casts."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_cheap = is_view(node) or node.target in CASTS
        leads = is_cheap and bool(node.users) and all(user in found for user in node.users)
        if node.op == "call_function" and (leads or is_accumulation(node)):
            found.add(node)
    return found


def small_from_batch(part: Part) -> set[fx.Node]:
    """What is small and made from the batch and buffers alone: the count of a loss's tokens, for one."""
    found: set[fx.Node] = set()
    slots = iter(part.inputs)
    for node in part.graph.graph.nodes:
        is_input = node.op == "placeholder" and next(slots).kind in ("batch", "random", "buffer")
        is_made = node.op == "call_function" and all(operand in found for operand in node.all_input_nodes)
        if is_input or (is_made and not is_start(node) and nbytes(local_value(node)) <= SMALL_BYTES):
            found.add(node)
    return found
