"""The table of sharding rules: one line per op.

A row is the op's name (with its overload where that matters: `aten.max.other`), its rules in the notation (the one
whose operands fit the node is taken), and the operands in which the op is linear: `"0|1"` is linear in each alone,
`"01"` in both jointly. Rules that depend on an op's attributes are functions from the node to a `BoundRule`; pointwise
ops have one rule from their tag.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.errors import CaptureError, RuleError
from autopar.rules import convolution, dims, shapes
from autopar.rules.nodes import is_pointwise, is_random, op_name, shapes_of
from autopar.rules.notation import BoundRule, Linear, bind, parse_rule


@dataclass(frozen=True, slots=True)
class Entry:
    """How an op's rule is found: texts in the notation, or a function of the node."""

    texts: tuple[str, ...] = ()
    linear: Linear = ()
    function: Callable[[Node], BoundRule] | None = None


def _linear(text: str) -> Linear:
    return tuple(tuple(map(int, part)) for part in text.split("|")) if text else ()


def _texts(linear: str, *texts: str) -> Entry:
    return Entry(texts, _linear(linear))


def _by(function: Callable[[Node], BoundRule]) -> Entry:
    return Entry(function=function)


_ROWS: dict[str, Entry] = {
    # matmul family
    "aten.mm": _texts("0|1", "m k, k n -> m n"),
    "aten.bmm": _texts("0|1", "b m k, b k n -> b m n"),
    "aten.dot": _texts("0|1", "k, k -> "),
    "aten.mv": _texts("0|1", "m k, k -> m"),
    "autopar.linear": _texts("0|1", "... i, o i -> ... o", "... i, o i, o -> ... o"),
    "autopar.linear_dx": _texts("0|1", "... o, o i -> ... i"),
    "autopar.linear_dw": _texts("0|1", "... i, ... o -> o i"),
    "autopar.grouped_mm": _texts("0|1", "[s] i, [e] i o, [e] -> [s] o"),
    "autopar.grouped_mm_dx": _texts("0|1", "[s] o, [e] i o, [e] -> [s] i"),
    "autopar.grouped_mm_dw": _texts("0|1", "[s] i, [s] o, [e] -> [e] i o"),
    # attention: grouped heads are the minor factor of the query's heads
    "autopar.attention": _by(shapes.attention),
    "autopar.attention_backward": _by(shapes.attention_backward),
    # views
    "aten.t": _by(shapes.transposed),
    "aten.transpose": _by(shapes.transposed),
    "aten.permute": _by(shapes.permuted),
    "aten.view": _by(shapes.viewed),
    "aten.view.dtype": _by(shapes.whole),
    "aten._unsafe_view": _by(shapes.viewed),
    "aten.reshape": _by(shapes.viewed),
    "aten.unsqueeze": _by(shapes.viewed),
    "aten.squeeze": _by(shapes.viewed),
    "aten.expand": _by(shapes.expanded),
    "aten.slice": _by(shapes.sliced),
    "aten.slice_backward": _by(shapes.slice_backward),
    "aten.select": _by(shapes.selected),
    "aten.select_backward": _by(shapes.select_backward),
    "aten.split": _by(shapes.split),
    "aten.split_with_sizes": _by(shapes.split),
    "aten.cat": _by(shapes.concatenated),
    "aten.constant_pad_nd": _by(shapes.padded),
    # reductions
    "aten.sum": _by(shapes.reduction("sum", "0")),
    "aten.mean": _by(shapes.reduction("sum", "0")),
    "aten.amax": _by(shapes.reduction("max")),
    "aten.amin": _by(shapes.reduction("min")),
    "aten.max": _by(shapes.reduction("max")),
    "aten.max.other": _by(shapes.pointwise),
    "aten.min": _by(shapes.reduction("min")),
    "aten.min.other": _by(shapes.pointwise),
    # normalisation and softmax
    "aten.native_layer_norm": _by(shapes.layer_norm),
    "aten.native_layer_norm_backward": _by(shapes.layer_norm_backward),
    "aten._softmax": _by(shapes.whole_dim(1)),
    "aten._log_softmax": _by(shapes.whole_dim(1)),
    "aten._softmax_backward_data": _by(shapes.whole_dim(2)),
    "aten._log_softmax_backward_data": _by(shapes.whole_dim(2)),
    "aten.cumsum": _by(shapes.whole_dim(1)),
    # convolution and pooling
    "aten.convolution": _by(convolution.convolution),
    "aten.convolution_backward": _by(convolution.convolution_backward),
    "aten.max_pool2d_with_indices": _by(convolution.pooling_2d),
    "aten.max_pool2d_with_indices_backward": _by(convolution.pooling_2d),
    "aten.avg_pool2d": _by(convolution.pooling_2d),
    "aten.avg_pool2d_backward": _by(convolution.pooling_2d),
    "aten._adaptive_avg_pool2d": _by(convolution.pooling_2d),
    "aten._adaptive_avg_pool2d_backward": _by(convolution.pooling_2d),
    # along whole dims
    "aten._safe_softmax": _by(shapes.whole_dim(1)),
    "aten.any": _by(shapes.reduction(None)),
    "aten.all": _by(shapes.reduction(None)),
    "aten.prod": _by(shapes.reduction(None)),
    "aten.argmax": _by(shapes.reduction(None)),
    "aten.argmin": _by(shapes.reduction(None)),
    "aten.logsumexp": _by(shapes.reduction(None)),
    "aten.var": _by(shapes.reduction(None)),
    "aten.var_mean": _by(shapes.reduction(None)),
    "aten.sort": _by(dims.along(1, "dim", -1)),
    "aten.topk": _by(dims.along(2, "dim", -1)),
    "aten.flip": _by(dims.along(1, "dims", None, ((0,),))),
    "aten.roll": _by(dims.along(2, "dims", None, ((0,),))),
    "aten.slice_scatter": _by(dims.along(2, "dim", 0, ((0, 1),))),
    "aten.stack": _by(dims.stacked),
    "aten.unbind": _by(dims.unbound),
    "aten.select_scatter": _by(dims.select_scatter),
    "aten.copy": _by(shapes.pointwise),
    # index family
    "aten.index": _by(dims.indexed),
    "aten.index_select": _by(dims.index_select),
    "aten.embedding": _texts("0", "v d, {v}... -> ... d"),
    "aten.embedding_dense_backward": _by(shapes.embedding_backward),
    "aten.gather": _by(shapes.gather),
    "aten.scatter_add": _by(shapes.scatter_add),
    "aten.tril": _by(shapes.whole_last(2)),
    "aten.triu": _by(shapes.whole_last(2)),
    # factories: constant, or knowing their offset
    "aten.arange": _texts("", "-> a"),
    "aten.full": _texts("", "-> ..."),
    "aten.zeros": _texts("", "-> ..."),
    "aten.ones": _texts("", "-> ..."),
    "aten.empty": _texts("", "-> ..."),
    "aten.scalar_tensor": _texts("", "-> "),
    "aten.full_like": _by(shapes.pointwise),
    "aten.zeros_like": _by(shapes.pointwise),
    "aten.ones_like": _by(shapes.pointwise),
    "aten.empty_like": _by(shapes.pointwise),
    "aten.new_zeros": _by(shapes.factory_like),
    "aten.new_full": _by(shapes.factory_like),
    "aten.new_ones": _by(shapes.factory_like),
    # copies
    "aten._to_copy": _by(shapes.copied),
    "aten.clone": _texts("0", "... -> ..."),
    "aten.contiguous": _texts("0", "... -> ..."),
    "aten.alias": _texts("0", "... -> ..."),
    "aten.detach": _texts("0", "... -> ..."),
    "aten.lift_fresh_copy": _texts("0", "... -> ..."),
    # our own markers
    "relay": _texts("0", "... -> ..."),
    "accumulate": _texts("0", "... -> ..."),
}


def has_rule(node: Node) -> bool:
    """Whether the table, or the pointwise tag, says how the op may be split."""
    return _entry(node) is not None


def check_rules(graph: Graph) -> None:
    """Warns of each op without a rule, and refuses random ones: every rank would draw numbers of its own.

    Raises `CaptureError` naming the user's line.
    """
    told: set[str] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        name, where = op_name(node), node.meta.get("source") or node.meta.get("path") or "the model"
        if is_random(node):
            raise CaptureError(
                f"{name} ({where}): random ops can't be split over ranks yet; set dropout to 0 or call model.eval()"
            )
        if not has_rule(node) and name not in told:
            told.add(name)
            warnings.warn(
                f"{name} ({where}) has no sharding rule: it runs whole on every rank; add one with autopar.rule",
                RuntimeWarning,
                stacklevel=3,
            )


def rule_of(node: Node) -> BoundRule:
    """The rule of a call node at its real shapes; ops without one are whole on every device."""
    entry = _entry(node)
    if entry is None:
        return shapes.whole(node)
    if entry.function is not None:
        return entry.function(node)
    operands, results = shapes_of(node)
    for text in entry.texts:
        rule = parse_rule(text, entry.linear)
        if len(rule.operands) == len(operands):
            return bind(rule, operands, results)
    raise RuleError(f"{op_name(node)}: no rule for {len(operands)} tensor operands")


def _entry(node: Node) -> Entry | None:
    if node.target is operator.getitem:
        return None
    target: Any = node.target
    entry = _ROWS.get(f"{op_name(node)}.{getattr(target, '_overloadname', '')}") or _ROWS.get(op_name(node))
    if entry is not None or not isinstance(target, torch._ops.OpOverload):
        return entry
    draws = is_random(node)  # a shard would draw other numbers than the whole
    return Entry(function=shapes.pointwise) if is_pointwise(target) and not draws else None


def register_rule(name: str, text: str, linear: str = "") -> None:
    """Adds a row for a user's own op."""
    _ROWS[name.replace("::", ".")] = _texts(linear, text)
