"""Cleaning of a traced graph: fewer nodes, the same numbers.

    detach(x), alias(x), view(x, x.shape), t(t(x))   → x
    x * 1, x / 1, x ** 1                             → x
    addmm(b, x, w)                                   → add(mm(x, w), b)
    x[a:9223372036854775807]                         → x[a:size]
    _unsafe_view, reshape, sizes of -1               → view with all sizes
    x.new_full(size, value), new_zeros, new_ones     → full, zeros, ones
    device=, pin_memory=                             → gone: the graph is device-neutral
    equal views, casts and cheap factories           → the first of them
    writes into a tensor, part by part               → the parts put together (`writes`)
    what nothing uses                                → gone

Invariants:
- the graph is functional before and after; outputs are bit-equal, `addmm` excepted (its sum rounds once more in low
  precision);
- a node that replaces another carries its label.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.writes import simplify_writes
from autopar.layers import block_of
from autopar.private import OpOverload, schema_of, size_expression

aten = torch.ops.aten


def clean(graph: fx.GraphModule, mode: Any, *, kept: Collection[Any] = ()) -> fx.GraphModule:
    """Applies all rewrites in place; `mode` is the fake mode of the graph's values, `kept` ops stay whole."""
    for node in graph.graph.nodes:
        _drop_device(node)
        rewrite = DECOMPOSITIONS.get(node.target) if node.target not in kept else None
        if rewrite is not None:
            rewrite(node, mode)
    _erase_profiling(graph.graph)
    simplify_writes(graph.graph, mode, insert)
    for node in graph.graph.nodes:
        source = _same_value(node)
        if source is not None:
            node.replace_all_uses_with(source)
    _merge_equal(graph.graph)
    graph.graph.eliminate_dead_code()
    return graph


def insert(before: fx.Node, mode: Any, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node in front of `before`, with its label and a value computed on fakes."""
    node = before.graph.create_node("call_function", target, args, kwargs)
    before.prepend(node)
    node.meta = {**before.meta, "val": _fake_value(node, mode)}
    return node


def _fake_value(node: fx.Node, mode: Any) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda other: other.meta["val"])
    target: Any = node.target
    with mode, torch.no_grad():
        return target(*args, **kwargs)


# -- decompositions --------------------------------------------------------------------------------------------------


def _split_addmm(product: Any) -> Callable[[fx.Node, Any], None]:
    def rewrite(node: fx.Node, mode: Any) -> None:
        bias, left, right = node.args
        scales = [node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)]
        terms = [insert(node, mode, product, left, right), bias]
        for i, scale in enumerate(scales):
            if scale != 1:
                terms[i] = insert(node, mode, aten.mul.Tensor, terms[i], scale)
        node.replace_all_uses_with(insert(node, mode, aten.add.Tensor, *terms))

    return rewrite


def _as_view(node: fx.Node, mode: Any) -> None:
    """One spelling of every view: the op `view`, no size left as -1."""
    node.target = aten.view.default
    shape = list(node.meta["val"].shape)
    if all(isinstance(size, int) for size in shape):
        node.args = (node.args[0], shape)


def _drop_device(node: fx.Node) -> None:
    """The graph is device-neutral: its factories make tensors on the default device."""
    defaults = {"device": torch.device("cpu"), "pin_memory": False, "layout": torch.strided}
    node.kwargs = {k: v for k, v in node.kwargs.items() if k not in defaults or v not in (defaults[k], None)}


def _clamp_end(node: fx.Node, mode: Any) -> None:
    """`x[a:]` has 2**63 - 1 as its end: the size says it better."""
    args: Any = node.args
    is_backward = node.target == aten.slice_backward.default
    sizes, at = (args[1], 2) if is_backward else (args[0].meta["val"].shape, 1)
    if len(args) <= at + 2:
        return
    size, end = sizes[args[at]], args[at + 2]
    if isinstance(size, int) and isinstance(end, int) and end > size:
        node.update_arg(at + 2, size)


def _plain_factory(target: Any, num_values: int = 0) -> Callable[[fx.Node, Any], None]:
    """`x.new_full(size, value)` → `full(size, value)`: a factory that depends on no value."""

    def rewrite(node: fx.Node, mode: Any) -> None:
        kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}
        node.replace_all_uses_with(insert(node, mode, target, *node.args[1 : 2 + num_values], **kwargs))

    return rewrite


ADDED_PRODUCTS = (aten.addmm.default, aten.baddbmm.default)
"""Whole in update graphs: Muon iterates in bf16, where a sum that is rounded once more is another step."""

DECOMPOSITIONS: dict[Any, Callable[[fx.Node, Any], None]] = {
    aten.new_full.default: _plain_factory(aten.full.default, 1),
    aten.new_zeros.default: _plain_factory(aten.zeros.default),
    aten.new_ones.default: _plain_factory(aten.ones.default),
    aten.addmm.default: _split_addmm(aten.mm.default),
    aten.baddbmm.default: _split_addmm(aten.bmm.default),
    aten.view.default: _as_view,
    aten._unsafe_view.default: _as_view,
    aten.reshape.default: _as_view,
    aten.slice.Tensor: _clamp_end,
    aten.slice_backward.default: _clamp_end,
}

# -- identities ------------------------------------------------------------------------------------------------------

_ALWAYS = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}
_WHEN_ALIKE = {
    aten.clone.default,
    aten._to_copy.default,
    aten.view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.permute.default,
    aten.contiguous.default,
}
_NEUTRAL: dict[Any, float] = {
    aten.mul.Tensor: 1,
    aten.mul.Scalar: 1,
    aten.div.Tensor: 1,
    aten.div.Scalar: 1,
    aten.pow.Tensor_Scalar: 1,
}
_VIEWS_BACK = {aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default}


def _same_value(node: fx.Node) -> fx.Node | None:
    """The node whose value `node` repeats, or None."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    if node.target in _ALWAYS:
        return source
    if node.target in _WHEN_ALIKE and _alike(node, source) and not _permutes(node):
        return source
    if node.target in _NEUTRAL and node.args[1] == _NEUTRAL[node.target]:
        return source if _alike(node, source) else None
    if node.target == aten.add.Tensor and node.args[1] == 0 and not source.meta["val"].is_floating_point():
        return source if _alike(node, source) else None
    if node.target in _VIEWS_BACK and source.target == node.target and isinstance(source.args[0], fx.Node):
        return source.args[0] if _undoes(node, source) else None
    return None


def _permutes(node: fx.Node) -> bool:
    """A permutation of equal sizes looks alike (strides differ, but for sizes of 1)."""
    args: Any = node.args
    return node.target == aten.permute.default and list(args[1]) != sorted(args[1])


def _undoes(node: fx.Node, source: fx.Node) -> bool:
    """Whether `node`, a view of the view `source`, gives back what `source` was made from."""
    outer: Any = node.args
    inner: Any = source.args
    if node.target == aten.t.default:
        return True
    if node.target == aten.transpose.int:
        rank = node.meta["val"].dim()
        return {d % rank for d in outer[1:]} == {d % rank for d in inner[1:]}
    if node.target == aten.permute.default:
        return [inner[1][d] for d in outer[1]] == list(range(len(outer[1])))
    return _alike(node, inner[0])


def _alike(node: fx.Node, other: fx.Node) -> bool:
    a, b = node.meta.get("val"), other.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dtype != b.dtype:
        return False
    return _sizes(a.shape) == _sizes(b.shape) and _sizes(a.stride()) == _sizes(b.stride())


def _sizes(sizes: Any) -> list[Any]:
    return [size_expression(size) for size in sizes]


# -- equal nodes -----------------------------------------------------------------------------------------------------

_MERGED_IN_PHASE = {"full", "scalar_tensor", "arange", "zeros", "ones", "_to_copy", "expand", "eq", "bitwise_not"}
"""Cheap to make again: merged only within a phase, so that nothing is kept from forward to backward for their sake; in
the backward only within a layer, so that nothing passes from stage to stage. (In the forward what depends on no
parameter is made by each stage that needs it.)"""


def _merge_equal(graph: fx.Graph) -> None:
    first: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        name = node.target.overloadpacket.__name__
        if name in _MERGED_IN_PHASE:
            scope = _scope(node)
        elif is_view(node):
            scope = ""
        else:
            continue
        key = (node.target, scope, str(node.args), str(sorted(node.kwargs.items())))
        earlier = first.setdefault(key, node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)


def _scope(node: fx.Node) -> str:
    label = node.meta.get("custom", {})
    phase = label.get("phase", "")
    return f"{phase} of {block_of(label['path'])}" if phase == "backward" else phase


def is_view(node: fx.Node) -> bool:
    """Whether the op's output shares its input's memory."""
    target: Any = node.target
    schema = schema_of(target)
    return any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)


def _erase_profiling(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if "profiler._record_function" in str(node.target):
            node.replace_all_uses_with(None)
            graph.erase_node(node)
