"""Writes of a traced graph: what a model writes part by part into a fresh tensor, as the parts put together.

    copy(x, y)                                                          → y, in the dtype of x
    slice_scatter(slice_scatter(new_empty, a, 3, 0, 2), b, 3, 2, 6)     → cat([a, b], 3)
    slice(slice_scatter(x, a, 3, 0, 2), 3, 2, 6)                        → slice(x, 3, 2, 6)
    slice(slice_scatter(x, a, 3, 0, 2), 3, 0, 2)                        → a

A write reads all of what it writes into, and so do its backward's: each would be a pass over memory, and a tensor that
nothing has filled yet would ask for a layout of its own.

Invariants:
- outputs are bit-equal;
- a value whose memory lies in another order takes a write's place only where no view of it asks for that order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.private import size_expression

aten = torch.ops.aten

Insert = Callable[..., fx.Node]
"""`clean.insert`: a node in front of another, computed on fakes."""

FACTORIES = {
    *(aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default),
    *(aten.empty_strided.default, aten.new_empty_strided.default),
}
"""What they give is written before it is read."""


def simplify_writes(graph: fx.Graph, mode: Any, insert: Insert) -> None:
    """Rewrites in place; what is no longer used stays."""
    for node in graph.nodes:
        found = _REWRITES[node.target](node, mode, insert) if node.target in _REWRITES else None
        if found is not None and _can_stand_for(found, node):
            node.replace_all_uses_with(found)


@dataclass(frozen=True, slots=True)
class _Part:
    """The elements `start` to `end` along `dim` of a tensor; `value`: what is written there."""

    dim: int
    start: int
    end: int
    value: fx.Node | None = None

    @classmethod
    def of(cls, node: fx.Node) -> _Part | None:
        """What a `slice_scatter` writes, or a `slice` reads; None where that isn't in one piece, or of unknown size."""
        args: Any = node.args
        writes = node.target == aten.slice_scatter.default
        rest = args[2:] if writes else args[1:]
        where: tuple[Any, ...] = (*rest, *(0, None, None, 1)[len(rest) :])
        dim, start, end, step = where
        shape = args[0].meta["val"].shape
        size = shape[dim]
        start, end = 0 if start is None else start, size if end is None else end
        if step != 1 or not all(isinstance(n, int) for n in (size, start, end)) or min(start, end) < 0:
            return None
        return cls(dim % len(shape), min(start, size), min(end, size), args[1] if writes else None)


def _written(node: fx.Node, mode: Any, insert: Insert) -> fx.Node | None:
    """What was written over all of a tensor."""
    target: Any = node.args[0]
    source: Any = node.args[1]
    if not isinstance(source, fx.Node) or not _same_sizes(source, target):
        return None
    if source.meta["val"].dtype == target.meta["val"].dtype:
        return source
    return insert(node, mode, aten._to_copy.default, source, dtype=target.meta["val"].dtype)


def _joined(node: fx.Node, mode: Any, insert: Insert) -> fx.Node | None:
    """The parts that were written one by one and make up the whole tensor."""
    parts: list[_Part] = []
    base: Any = node
    while isinstance(base, fx.Node) and base.target == aten.slice_scatter.default:
        part = _Part.of(base)
        if part is None:
            return None
        parts.append(part)
        base = base.args[0]
    parts.sort(key=lambda part: part.start)
    dim, size = parts[0].dim, node.meta["val"].shape[parts[0].dim]
    ends = [0, *(part.end for part in parts)]
    is_whole = [part.start for part in parts] == ends[:-1] and ends[-1] == size
    if base.target not in FACTORIES or not is_whole or any(part.dim != dim for part in parts):
        return None
    return insert(node, mode, aten.cat.default, [part.value for part in parts], dim)


def _read_past_writes(node: fx.Node, mode: Any, insert: Insert) -> fx.Node | None:
    """What a slice reads of what was written, or of what was there before, where it reads either alone."""
    wanted = _Part.of(node)
    base: Any = node.args[0]
    while wanted is not None and base.target == aten.slice_scatter.default:
        part = _Part.of(base)
        if part is None or part.dim != wanted.dim:
            break
        if (part.start, part.end) == (wanted.start, wanted.end):
            return part.value
        if part.start < wanted.end and wanted.start < part.end:
            break
        base = base.args[0]
    if wanted is None or base is node.args[0]:
        return None
    return insert(node, mode, aten.slice.Tensor, base, wanted.dim, wanted.start, wanted.end)


_REWRITES: dict[Any, Callable[[fx.Node, Any, Insert], fx.Node | None]] = {
    aten.copy.default: _written,
    aten.slice_scatter.default: _joined,
    aten.slice.Tensor: _read_past_writes,
}


# -- memory ----------------------------------------------------------------------------------------------------------
_ASKING = {aten.view.default, aten._unsafe_view.default, aten.as_strided.default}
_FOLLOWING = {
    *(operator.getitem, aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default),
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim),
    *(aten.expand.default, aten.detach.default, aten.alias.default),
}
"""Views of any tensor, whatever the order of its memory."""


def _can_stand_for(found: fx.Node, node: fx.Node) -> bool:
    a, b = found.meta["val"], node.meta["val"]
    same = a.dtype == b.dtype and _same_sizes(found, node)
    return same and (_sizes(a.stride()) == _sizes(b.stride()) or not any(_askers(node)))


def _askers(node: fx.Node) -> Iterator[fx.Node]:
    """The views of a value that depend on the order of its memory."""
    for user in node.users:
        if user.target in _ASKING:
            yield user
        elif user.target in _FOLLOWING:
            yield from _askers(user)


def _same_sizes(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta["val"], other.meta["val"]
    return isinstance(a, Tensor) and isinstance(b, Tensor) and _sizes(a.shape) == _sizes(b.shape)


def _sizes(sizes: Any) -> list[Any]:
    return [size_expression(size) for size in sizes]
