"""The table of sharding rules: one line per op, a file per family.

A row is the op's name (with its overload where that matters: `aten.max.other`), its rules in the notation (the one
whose operands fit the node is taken), and the operands in which the op is linear: `"0|1"` is linear in each alone,
`"01"` in both jointly. Rules that depend on an op's attributes are functions from the node to a `BoundRule`; pointwise
ops have one rule from their tag.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.errors import CaptureError
from autopar.rules import (
    along,
    attention,
    convolution,
    copies,
    factories,
    fft,
    indexing,
    linalg,
    losses,
    matmul,
    normalisation,
    pieces,
    pointwise,
    pooling,
    rearrangements,
    reductions,
    resampling,
    scattering,
    views,
)
from autopar.rules.entries import Entry, Rows
from autopar.rules.letters import whole
from autopar.rules.nodes import is_pointwise, is_random, op_name, shapes_of
from autopar.rules.notation import BoundRule, Rule, bind, fits, parse_rule, read_rule

_ROWS: Rows = {
    **matmul.ROWS,
    **attention.ROWS,
    **views.ROWS,
    **rearrangements.ROWS,
    **pieces.ROWS,
    **reductions.ROWS,
    **normalisation.ROWS,
    **along.ROWS,
    **convolution.ROWS,
    **pooling.ROWS,
    **resampling.ROWS,
    **fft.ROWS,
    **linalg.ROWS,
    **losses.ROWS,
    **indexing.ROWS,
    **scattering.ROWS,
    **factories.ROWS,
    **copies.ROWS,
    **pointwise.ROWS,
}


_DIVIDED = frozenset(
    {
        *linalg.ROWS,
        *(f"aten.{name}" for name in ("aminmax", "_aminmax", "histc", "bucketize", "searchsorted")),
        *(f"aten.{name}" for name in ("linalg_vector_norm", "norm", "index_put", "_unsafe_index_put")),
        *(f"aten.{name}" for name in ("soft_margin_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")),
        *(f"aten.{name}" for name in ("nll_loss_forward", "nll_loss2d_forward")),
    }
)
"""Ops that no axis splits into chunks with padding: what neutral values add isn't nothing, or the kernel refuses it."""

_TRUSTED_TAGS = ("aten", "prims", "autopar")
"""Namespaces whose ops are what their tags say; others are tried."""


def has_rule(node: Node) -> bool:
    """Whether the table, or the pointwise tag, says how the op may be split."""
    entry = _entry(node)
    return entry is not None and (entry.function is not None or _fitting(entry, node) is not None)


def check_rules(graph: Graph) -> None:
    """Refuses random ops: every rank would draw numbers of its own. Raises `CaptureError` naming the user's line."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        name, where = op_name(node), node.meta.get("source") or node.meta.get("path") or "the model"
        if is_random(node):
            raise CaptureError(
                f"{name} ({where}) draws numbers of its own on every rank; draw with torch's random functions in the "
                "model, or pass the numbers in with the batch"
            )


def rule_of(node: Node) -> BoundRule:
    """The rule of a call node at its real shapes: `meta["found_rule"]`, or the table's; others are whole everywhere."""
    if "found_rule" in node.meta:
        bound = bind(read_rule(node.meta["found_rule"]), *shapes_of(node))
        return replace(bound, divided=_vanishing(bound))
    bound = _bound(node)
    return replace(bound, divided=frozenset(bound.sizes)) if op_name(node) in _DIVIDED else bound


def _bound(node: Node) -> BoundRule:
    entry = _entry(node)
    if entry is not None and entry.function is not None:
        return entry.function(node)
    rule = _fitting(entry, node) if entry is not None else None
    return whole(node) if rule is None else bind(rule, *shapes_of(node))


def _vanishing(rule: BoundRule) -> frozenset[str]:
    """The letters that some result lacks."""
    each = [{letter for dim in dims for letter in dim} for dims in rule.results]
    return frozenset(letter for letter in rule.sizes if any(letter not in letters for letters in each))


def _fitting(entry: Entry, node: Node) -> Rule | None:
    """The first of the op's rules that fits the node's operands and results."""
    rules = (parse_rule(text, entry.linear) for text in entry.texts)
    return next((rule for rule in rules if fits(rule, *shapes_of(node))), None)


def _entry(node: Node) -> Entry | None:
    if node.target is operator.getitem:
        return None
    target: Any = node.target
    entry = _ROWS.get(f"{op_name(node)}.{getattr(target, '_overloadname', '')}") or _ROWS.get(op_name(node))
    if entry is not None or not isinstance(target, torch._ops.OpOverload):
        return entry
    draws = is_random(node)  # a shard would draw other numbers than the whole
    is_trusted = target.namespace in _TRUSTED_TAGS and is_pointwise(target) and not draws
    return Entry(function=pointwise.pointwise) if is_trusted else None
