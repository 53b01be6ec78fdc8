"""Gives every node of a step graph its leaf rule and every value its factors.

Metadata written: `rule` (`LeafRule`; inputs get one whose factors are their own) and `factor_sizes` (per dim of the
value; a tuple of those for a node with several results, None where a result is absent).
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.rules.choices import input_rule
from autopar.rules.factors import FactorInference, LeafRule
from autopar.rules.nodes import result_values, tensor_operands
from autopar.rules.notation import BoundRule
from autopar.rules.table import rule_of

_ValueDims = list[list[int]]


def annotate_factors(graph: Graph, equal: list[tuple[Node, Node]] | None = None) -> None:
    """Writes `rule` and `factor_sizes` on the nodes; `equal` pairs values to be divided alike (state in and out)."""
    inference = FactorInference()
    dims: dict[Node, Any] = {}
    handles: dict[Node, int] = {}
    bound: dict[Any, BoundRule] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            dims[node] = inference.value(tuple(map(int, node.meta["val"].shape)))
        elif node.op == "call_function" and node.target is operator.getitem:
            dims[node] = dims[node.args[0]][node.args[1]]
        elif node.op == "call_function":
            operands = [dims[operand] for operand in tensor_operands(node)]
            handles[node], results = inference.add(_rule(node, bound), operands)
            dims[node] = _spread(node, results)
    for a, b in equal or []:
        for left, right in zip(dims[a], dims[b], strict=True):
            assert inference.atoms.unify(left, right), (a, b)
    _write(graph, inference, dims, handles)


def _rule(node: Node, known: dict[Any, BoundRule]) -> BoundRule:
    """The node's rule; those that are called alike, in equal layers, say, have one."""
    numbers: dict[Node, int] = {}
    call = (node.target, node.meta.get("found_rule"), _type(node.meta["val"]))
    given = (call, _given(node.args, numbers), _given(node.kwargs, numbers))
    if given not in known:
        known[given] = rule_of(node)
    return known[given]


def _given(argument: Any, numbers: dict[Node, int]) -> Any:
    """Equal for arguments by which a rule can't tell calls apart: nodes by their types and by which are the same."""
    if isinstance(argument, Node):
        return numbers.setdefault(argument, len(numbers)), _type(argument.meta["val"])
    if isinstance(argument, (tuple, list)):
        return tuple(_given(item, numbers) for item in argument)
    if isinstance(argument, dict):
        return tuple((key, _given(item, numbers)) for key, item in argument.items())
    return type(argument), argument


def _type(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    return tuple(map(_type, value)) if isinstance(value, (tuple, list)) else type(value)


def _spread(node: Node, results: list[_ValueDims]) -> Any:
    """Aligns the results with the node's value: alone, or per tuple item with None for the absent."""
    if not isinstance(node.meta["val"], (tuple, list)):
        return results[0]
    remaining = iter(results)
    return [None if value is None else next(remaining) for value in result_values(node)]


def _write(graph: Graph, inference: FactorInference, dims: dict[Node, Any], handles: dict[Node, int]) -> None:
    def sizes(value: _ValueDims | None) -> tuple[tuple[int, ...], ...] | None:
        return None if value is None else tuple(inference.atoms.sizes(dim) for dim in value)

    memos: dict[LeafRule, dict[Any, Any]] = {}
    for node in graph.nodes:
        if node not in dims:
            continue
        several = isinstance(node.meta["val"], (tuple, list))
        node.meta["factor_sizes"] = tuple(sizes(v) for v in dims[node]) if several else sizes(dims[node])
        if node in handles:
            node.meta["rule"] = _sharing_memo(inference.leaf_rule(handles[node]), memos)
        elif node.op != "call_function":
            atoms = tuple(tuple(inference.atoms.leaves(dim)) for dim in dims[node])
            node.meta["rule"] = _sharing_memo(input_rule(node.meta["factor_sizes"], atoms), memos)


def _sharing_memo(rule: LeafRule, memos: dict[LeafRule, dict[Any, Any]]) -> LeafRule:
    """Equal rules (of equal layers, say) share what is derived from them."""
    return replace(rule, memo=memos.setdefault(rule, rule.memo))
