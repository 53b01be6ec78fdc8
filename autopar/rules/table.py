"""The table of sharding rules: one line per op, a file per family.

A row is the op's name (with its overload where that matters: `aten.max.other`), its rules in the notation (the one
whose operands fit the node is taken), and the operands in which the op is linear: `"0|1"` is linear in each alone,
`"01"` in both jointly. Rules that depend on an op's attributes are functions from the node to a `BoundRule`; pointwise
ops have one rule from their tag.
"""

from __future__ import annotations

import operator
import warnings
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.errors import CaptureError, RuleError
from autopar.rules import (
    along,
    attention,
    convolution,
    copies,
    factories,
    indexing,
    matmul,
    normalisation,
    pieces,
    pointwise,
    pooling,
    reductions,
    views,
)
from autopar.rules.entries import Entry, Rows, texts
from autopar.rules.letters import whole
from autopar.rules.nodes import is_pointwise, is_random, op_name, shapes_of
from autopar.rules.notation import BoundRule, bind, fits, parse_rule

_ROWS: Rows = {
    **matmul.ROWS,
    **attention.ROWS,
    **views.ROWS,
    **pieces.ROWS,
    **reductions.ROWS,
    **normalisation.ROWS,
    **along.ROWS,
    **convolution.ROWS,
    **pooling.ROWS,
    **indexing.ROWS,
    **factories.ROWS,
    **copies.ROWS,
    **pointwise.ROWS,
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
                f"{name} ({where}) draws numbers of its own on every rank; draw with torch's random functions in the "
                "model, or pass the numbers in with the batch"
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
        return whole(node)
    if entry.function is not None:
        return entry.function(node)
    operands, results = shapes_of(node)
    for text in entry.texts:
        rule = parse_rule(text, entry.linear)
        if fits(rule, operands, results):
            return bind(rule, operands, results)
    found = ", ".join(str(list(shape)) for shape in operands)
    raise RuleError(f"{op_name(node)}: no rule for operands {found}; its rules are {' | '.join(entry.texts)}")


def _entry(node: Node) -> Entry | None:
    if node.target is operator.getitem:
        return None
    target: Any = node.target
    entry = _ROWS.get(f"{op_name(node)}.{getattr(target, '_overloadname', '')}") or _ROWS.get(op_name(node))
    if entry is not None or not isinstance(target, torch._ops.OpOverload):
        return entry
    draws = is_random(node)  # a shard would draw other numbers than the whole
    return Entry(function=pointwise.pointwise) if is_pointwise(target) and not draws else None


def register_rule(name: str, text: str, linear: str = "") -> None:
    """Adds a row for a user's own op."""
    _ROWS[name.replace("::", ".")] = texts(linear, text)
