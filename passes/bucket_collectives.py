"""Small collectives of one kind travel together: one message where there were several.

    a = all_gather(w, "dp", 0)                    flat = cat([w.view(-1), v.view(-1)])
    b = all_gather(v, "dp", 0)              ->    rows = all_gather(flat, "dp", 0).view(2, -1)
                                                  a = rows.narrow(1, 0, 256).clone().view(512); b = …

Before: a functional part of local tensors with blocking collectives. After: the same values; collectives of up to
`Overlap.bucket_bytes` each that may be done at any time are grouped by kind, axis, reduction and dtype:
- gathers made from the part's inputs by views and casts alone: all of the part, at its beginning;
- reductions that lead only to the part's outputs: those of a block, after the last of them.
A message costs as much as copying some 100 kB (on gloo; on NCCL, more), so larger ones are left alone: they go without
a copy. Each element is reduced over the same ranks in the same order, so numbers stay bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from autopar import collectives, layers
from autopar.program.parts import Part
from autopar.program.storages import is_view, local_value, nbytes
from autopar.rules.nodes import node_argument
from passes.context import Overlap
from passes.editing import edit
from passes.kinds import CASTS, block_of, leads_to_outputs

aten = torch.ops.aten
REDUCTIONS = (collectives.reduce_scatter, collectives.all_reduce)
_Key = tuple[Any, ...]


def bucket_collectives(part: Part, context: Any = None) -> Part:
    """`part` with its small early gathers and late reductions grouped; `context` as for `schedule_collectives`."""
    given = getattr(context, "overlap", context)
    limits = given if isinstance(given, Overlap) else Overlap()
    if not any(_may_travel(node, limits.bucket_bytes) for node in part.graph.graph.nodes):
        return part
    return edit(part, lambda graph: _bucket(graph, limits))


def _bucket(graph: fx.Graph, limits: Overlap) -> None:
    early, late = _from_inputs(graph), leads_to_outputs(graph)
    found = [node for node in graph.nodes if _may_travel(node, limits.bucket_bytes)]
    gathers = [node for node in found if node.target is collectives.all_gather and node.args[0] in early]
    for group in _grouped(gathers, lambda node: (_used_in(node, limits.small_bytes),)):
        place = _used_in(group[0], limits.small_bytes)
        _draw_together(graph, group, to_beginning=not place)
        _merge(graph, group, place, _gathered)
    reductions = [node for node in found if node.target is not collectives.all_gather and node in late]
    for candidates in _grouped(reductions, lambda node: (block_of(node.meta.get("path", "")),)):
        group = _independent(graph, candidates)
        if len(group) > 1:
            _gather_behind(graph, group)
            _merge(graph, group, group[0].meta.get("path", ""), _reduced)


def _used_in(gather: fx.Node, small_bytes: int) -> str:
    """The layer for which something is gathered; of what is small, none: it may come at any time."""
    path = gather.meta.get("path", "")
    return "" if _whole_bytes(gather) <= small_bytes else layers.block_of(path) or path


def _whole_bytes(node: fx.Node) -> int:
    """Bytes of what is gathered, or reduced."""
    gathered = node.target is collectives.all_gather
    return nbytes(local_value(node if gathered else node_argument(node, 0)))


def _may_travel(node: fx.Node, limit: int) -> bool:
    """Whether a collective may go into a bucket: not too large, and over whole rows where it cuts or joins."""
    if node.op != "call_function" or node.target not in (collectives.all_gather, *REDUCTIONS):
        return False
    by_rows = bool(node.target is collectives.all_reduce or node.args[2] == 0)
    value = local_value(node_argument(node, 0))
    return by_rows and isinstance(value, Tensor) and value.numel() > 0 and _whole_bytes(node) <= limit


def _grouped(nodes: Iterable[fx.Node], place: Callable[[fx.Node], _Key]) -> list[list[fx.Node]]:
    groups: dict[_Key, list[fx.Node]] = {}
    for node in nodes:
        rest = (*node.args[1:], *sorted(node.kwargs.items()))
        groups.setdefault((node.target, rest, local_value(node).dtype, *place(node)), []).append(node)
    return [group for group in groups.values() if len(group) > 1]


# -- places ------------------------------------------------------------------------------------------------------
def _from_inputs(graph: fx.Graph) -> set[fx.Node]:
    """The part's inputs, and what is made from them by views and casts alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_cheap = is_view(node) or node.target in CASTS
        if node.op == "placeholder" or (is_cheap and all(operand in found for operand in node.all_input_nodes)):
            found.add(node)
    return found


def _draw_together(graph: fx.Graph, group: list[fx.Node], to_beginning: bool) -> None:
    """Moves the operands of `group`, and then `group`, to its first, or to the beginning of the graph."""
    needed: set[fx.Node] = set(group)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    moved = [node for node in graph.nodes if node in needed and node.op != "placeholder"]
    first = next(node for node in graph.nodes if node.op != "placeholder" and (to_beginning or node in needed))
    last = first.prev
    for node in sorted(moved, key=lambda node: node in group):
        last.append(node)
        last = node


def _independent(graph: fx.Graph, candidates: list[fx.Node]) -> list[fx.Node]:
    """Those that no other of them leads to: a sum may be cut, summed again and reduced a second time."""
    hanging: set[fx.Node] = set()
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        if any(operand in hanging for operand in node.all_input_nodes):
            behind.add(node)
        if node in behind or node in candidates:
            hanging.add(node)
    return [node for node in candidates if node not in behind]


def _gather_behind(graph: fx.Graph, group: list[fx.Node]) -> None:
    """Moves `group`, and what hangs on it, behind the last of its operands."""
    hanging: set[fx.Node] = set(group)
    nodes = list(graph.nodes)
    for node in nodes:
        if node.op == "call_function" and any(operand in hanging for operand in node.all_input_nodes):
            hanging.add(node)
    position = {node: index for index, node in enumerate(nodes)}
    last = max((operand for node in group for operand in node.all_input_nodes), key=position.__getitem__)
    moved = [node for node in nodes if node in hanging and (node in group or position[node] < position[last])]
    for node in sorted(moved, key=lambda node: node not in group):
        last.append(node)
        last = node


# -- buckets -----------------------------------------------------------------------------------------------------
def _merge(graph: fx.Graph, group: list[fx.Node], path: str, unpack: Callable[..., fx.Node]) -> None:
    """One collective for those of `group`, which lie side by side."""
    first = group[0]
    ranks = 1 if first.target is collectives.all_reduce else _ranks(first)
    with graph.inserting_before(first):
        builder = _Builder(graph, first, path)
        rows = ranks if first.target is collectives.reduce_scatter else 1
        pieces = [builder.shaped(node.args[0], (rows, -1)) for node in group]
        flat = builder.shaped(builder.call(aten.cat.default, pieces, 1), (-1,))
        moved = builder.collective(first, flat, ranks)
        start = 0
        for node, piece in zip(group, pieces, strict=True):
            length = local_value(piece).shape[1]
            value = builder.shaped(unpack(builder, moved, ranks, start, length), tuple(local_value(node).shape))
            value.meta.update({key: node.meta[key] for key in ("layout", "path", "gradient_of") if key in node.meta})
            node.replace_all_uses_with(value)
            start += length
    for node in group:
        graph.erase_node(node)


def _ranks(node: fx.Node) -> int:
    rows = [int(local_value(value).shape[0]) for value in (node, node_argument(node, 0))]
    return max(rows) // min(rows)


def _gathered(builder: _Builder, moved: fx.Node, ranks: int, start: int, length: int) -> fx.Node:
    return builder.call(aten.narrow.default, builder.shaped(moved, (ranks, -1)), 1, start, length)


def _reduced(builder: _Builder, moved: fx.Node, ranks: int, start: int, length: int) -> fx.Node:
    """In a storage of its own: it may become an accumulator, or be sent."""
    return builder.dense(builder.call(aten.narrow.default, moved, 0, start, length))


class _Builder:
    """Adds nodes with their local values, of the part and phase of `like`."""

    def __init__(self, graph: fx.Graph, like: fx.Node, path: str) -> None:
        self.graph = graph
        self.meta: dict[str, Any] = {key: like.meta[key] for key in ("phase", "level", "stage") if key in like.meta}
        self.meta.update(path=path, source="")

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._node(target, args, kwargs, target(*fx.node.map_arg(args, local_value), **kwargs))

    def dense(self, operand: fx.Node) -> fx.Node:
        return self.call(aten.clone.default, operand, memory_format=torch.contiguous_format)

    def shaped(self, operand: Any, shape: tuple[int, ...]) -> fx.Node:
        """A view, of a copy where there must be one."""
        dense = operand if local_value(operand).is_contiguous() else self.dense(operand)
        return self.call(aten.view.default, dense, list(shape))

    def collective(self, model: fx.Node, flat: fx.Node, ranks: int) -> fx.Node:
        """The collective of `model` on the one-dimensional `flat`."""
        value = local_value(flat)
        sizes: dict[Any, int] = {
            collectives.all_gather: value.numel() * ranks,
            collectives.reduce_scatter: value.numel() // ranks,
        }
        size = sizes.get(model.target, value.numel())
        return self._node(model.target, (flat, *model.args[1:]), dict(model.kwargs), value.new_empty(size))

    def _node(self, target: Any, args: Any, kwargs: dict[str, Any], value: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self.meta, local_val=value)
        return node
