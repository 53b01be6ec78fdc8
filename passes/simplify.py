"""Drop what changes nothing: copies, views to the shape a value has, chains of views, multiplication by one.

    y = x.clone(); z = y.pow(1.0); v = z.view(4, 8).view(8, 4)     ->     v = x.view(8, 4)

Before: a functional graph (no in-place ops), so that a copy and what it copies can't be told apart. After: none of the
patterns of `RULES` is left. Numbers stay bit-equal, and so do strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.program.storages import local_value
from passes.editing import edit, is_mutating

aten = torch.ops.aten


def simplify(part: Any, context: Any = None) -> Any:
    """`part` (a `Part` or `GraphModule`) without ops that change nothing."""
    return edit(part, _simplify)


def _simplify(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        assert not is_mutating(node), f"simplify needs a functional graph, got {node.format_node()}"
        rule = RULES.get(node.target)
        replacement = rule(node) if rule else None
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.target in RULES:
            graph.erase_node(node)


def _operand(node: fx.Node) -> fx.Node | None:
    return node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None


def _same(node: fx.Node) -> fx.Node | None:
    """The operand, if it agrees with the result in shape, dtype, device and strides."""
    operand = _operand(node)
    if operand is None:
        return None
    old, new = local_value(operand), local_value(node)
    if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
        return None
    same = old.shape == new.shape and old.dtype == new.dtype and old.device == new.device
    return operand if same and old.stride() == new.stride() else None


def _by_one(node: fx.Node) -> fx.Node | None:
    """`x * 1`, `x / 1`, `x ** 1`: exact, NaN and signed zeros included."""
    factor = node.args[1] if len(node.args) == 2 and not node.kwargs else None
    return _same(node) if isinstance(factor, (int, float)) and factor == 1 else None


def _view(node: fx.Node) -> fx.Node | None:
    """A view to the same shape is dropped; a view of a view is a view of its operand."""
    same = _same(node)
    source = _operand(node)
    if same is not None or source is None or source.target not in VIEWS:
        return same
    base = _operand(source)
    if base is not None and local_value(base).is_contiguous():
        node.args = (base, *node.args[1:])
        return _same(node)
    return None


def _transposed_twice(node: fx.Node) -> fx.Node | None:
    """`x.t().t()` and `x.transpose(a, b).transpose(a, b)`."""
    source = _operand(node)
    if source is None or source.target is not node.target:
        return None
    dim = local_value(node).dim()
    mine, theirs = ({d % dim for d in n.args[1:] if isinstance(d, int)} for n in (node, source))
    return _operand(source) if mine == theirs else None


VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)

RULES: dict[Any, Callable[[fx.Node], fx.Node | None]] = {
    aten.clone.default: _same,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.expand.default: _same,
    aten._to_copy.default: _same,
    aten.mul.Tensor: _by_one,
    aten.mul.Scalar: _by_one,
    aten.div.Tensor: _by_one,
    aten.div.Scalar: _by_one,
    aten.pow.Tensor_Scalar: _by_one,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.t.default: _transposed_twice,
    aten.transpose.int: _transposed_twice,
}
"""Op → what may stand in the node's place, or None."""
