"""What a step costs as formulas in the microbatch `b` and the sequence `s`: to be shown, and swept.

    step.formulas()["matmul_flops"]                        # 256*b*s*(7*s + 2496)
    step.formulas()["matmul_flops"].subs({BATCH: 8, SEQUENCE: 4096})     # symbols of `autopar.capture.symbolic`

All are of one microbatch on one device. `saved_bytes` are the forward values that the backward reads, each storage
once, parameters and inputs aside (Korthikanti et al. 2022, section 4, counts the same).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
from torch.fx import Node

from autopar.capture.graphs import Captured, op_name
from autopar.rules.nodes import node_argument

Shape = tuple[Any, ...]
Shapes = Mapping[str, Shape]

_VIEWS = {"view", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "slice", "select", "split", "alias"}


def formulas(captured: Captured, shapes: Shapes) -> dict[str, sympy.Expr]:
    """`matmul_flops`, `saved_bytes` and `parameter_bytes`, expanded; `shapes` as of `symbolic_shapes`."""
    nodes = list(captured.gradient.graph.nodes)
    parameters = sum(
        n.meta["val"].numel() * n.meta["val"].element_size()
        for n in nodes
        if n.op == "placeholder" and n.meta["role"].kind == "param"
    )
    work = sum((_flops(node, shapes) for node in nodes), sympy.Integer(0))
    saved = [math.prod(shapes[n.name]) * n.meta["val"].element_size() for n in _saved(nodes, shapes)]
    found = {
        "matmul_flops": work,
        "saved_bytes": sum(saved, sympy.Integer(0)),
        "parameter_bytes": sympy.Integer(parameters),
    }
    return {name: sympy.factor_terms(sympy.expand(value)) for name, value in found.items()}


def _flops(node: Node, shapes: Shapes) -> Any:
    count = _MATMULS.get(op_name(node)) if node.op == "call_function" else None
    if count is None:
        return 0
    return 2 * count([shapes[n.name] for n in node.args if isinstance(n, Node) and n.name in shapes])


def _attention(matmuls: int) -> Callable[[list[Shape]], Any]:
    def count(operands: list[Shape]) -> Any:
        start = matmuls // 3  # the backward has the output's gradient first
        q, k = operands[-2:] if matmuls == 2 and len(operands) == 2 else operands[start : start + 2]
        v = operands[start + 2] if len(operands) > start + 2 else k
        return matmuls * math.prod(q[:3]) * max(q[3], v[3]) * k[2]

    return count


_MATMULS: dict[str, Callable[[list[Shape]], Any]] = {
    "linear": lambda o: math.prod(o[0]) * o[1][0],
    "linear_dx": lambda o: math.prod(o[0]) * o[1][1],
    "linear_dw": lambda o: math.prod(o[0]) * o[1][-1],
    "mm": lambda o: math.prod(o[0]) * o[1][1],
    "bmm": lambda o: math.prod(o[0]) * o[1][2],
    "attention": _attention(2),
    "attention_backward": _attention(5),
}
"""Multiply-adds of an op from its tensor operands' shapes; attention is counted whole, as if it weren't causal."""


def _saved(nodes: list[Node], shapes: Shapes) -> list[Node]:
    """The forward values whose storages the backward reads."""
    bases: dict[Node, None] = {}
    for node in nodes:
        if node.op == "call_function" and node.meta["phase"] == "backward":
            for source in node.all_input_nodes:
                if source.op == "call_function" and source.meta["phase"] == "forward":
                    base = _base(source)
                    if base.op == "call_function" and base.name in shapes:
                        bases[base] = None
    return list(bases)


def _base(value: Node) -> Node:
    while value.op == "call_function" and value.target is not operator.getitem and op_name(value) in _VIEWS:
        value = node_argument(value, 0)
    return value
