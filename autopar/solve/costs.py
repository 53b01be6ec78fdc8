"""What a node of a step graph costs on one rank under a choice: arithmetic and memory traffic by its rule.

Arithmetic of the matmul family is two operations per element of the product of all its factors, so any split divides
it; padding counts as content, and so does filling it. Attention has its own count. Every op reads its operands and
writes its results once. Views cost nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from autopar import markers
from autopar.layout import Layout, chunk_size
from autopar.mesh import Mesh
from autopar.rules.choices import Choice, enumerate_choices, filled, operand_layouts, result_layouts, ways_of
from autopar.rules.factors import LeafRule
from autopar.rules.nodes import index_operands, is_view, op_name, result_values, tensor_operands

Compute = Callable[[float, float, str], float]
"""(operations, bytes, dtype name) → seconds on one device."""

MATMULS = frozenset(
    {
        *("aten.mm", "aten.bmm", "aten.dot", "aten.mv", "aten.addmm", "aten.baddbmm"),
        *("autopar.linear", "autopar.linear_dx", "autopar.linear_dw"),
    }
)
_GROUPED_MATMULS = frozenset(
    f"autopar.{name}{part}" for name in ("expert_mm", "grouped_mm") for part in ("", "_dx", "_dw")
)
CONVOLUTIONS = {"aten.convolution": 1, "aten.convolution_backward": 2}
"""How many convolutions an op does: the backward one each for the gradients of input and weight."""
_ATTENTION_MATMULS = {"autopar.attention": 2, "autopar.attention_backward": 5}
"""Matmuls of size [s, d] x [d, t] per head: QKᵀ and PV; backward recomputes QKᵀ and adds four (Dao 2022, B.4)."""
_DRAWN_BYTES = {f"autopar.random_{kind}": 24 * 8 for kind in ("mask", "uniform", "normal", "integers")}
"""Bytes that a random op moves per element beside its result: a dozen passes over words of 8 bytes, in and out."""
HEAVY = MATMULS | _GROUPED_MATMULS | CONVOLUTIONS.keys() | _ATTENTION_MATMULS.keys()
"""The ops that take the time, by name: what has operations to count."""


def flops(node: Node) -> float:
    """Floating-point operations of the whole op; 0 for what only moves data."""
    name = op_name(node)
    rule: LeafRule = node.meta["rule"]
    if name in MATMULS:
        return 2.0 * math.prod(factor.size for factor in rule.factors)
    if name in _GROUPED_MATMULS:  # each row meets the weight of one expert
        return 2.0 * math.prod(factor.size for factor in rule.factors if factor.letter != "e")
    if name in CONVOLUTIONS:  # per output: its positions, not the input's, and with groups one group's channels
        once = [factor.size for factor in rule.factors if factor.letter[0] not in "xi" and factor.letter != "w0"]
        return 2.0 * CONVOLUTIONS[name] * math.prod(once)
    if name in _ATTENTION_MATMULS:
        sizes: dict[str, int] = {}
        for factor in rule.factors:
            sizes[factor.letter] = sizes.get(factor.letter, 1) * factor.size
        sizes["d"] = max(sizes.get("d", 1), sizes.pop("e", 1))  # fused kernels take keys and values of one width
        causal = 0.5 if any(f.letter == "s" and f.is_whole for f in rule.factors) else 1.0
        return 2.0 * causal * _ATTENTION_MATMULS[name] * math.prod(sizes.values())
    return 0.0


def share(rule: LeafRule, choice: Choice, mesh: Mesh) -> float:
    """The part of the op's work that a choice leaves to a rank, padding included."""
    part = 1.0
    for factor, ways in ways_of(choice, mesh).items():
        size = rule.factors[factor].size
        part *= chunk_size(size, ways) / size
    return part


def local_bytes(layout: Layout, element_bytes: int, mesh: Mesh) -> float:
    """Bytes of a value on one rank."""
    return float(_local_elements(layout, mesh) * element_bytes)


@functools.lru_cache(maxsize=1 << 15)
def _local_elements(layout: Layout, mesh: Mesh) -> int:
    return math.prod(layout.local_shape(mesh))


def _filled_bytes(
    rule: LeafRule, choice: Choice, operand_bytes: Sequence[float], mesh: Mesh, indices: tuple[int, ...]
) -> float:
    """What filling padding moves: an operand is read and written once for each factor of it that is filled."""
    found = filled(rule, choice, mesh, indices)
    times = (sum(map(len, fills.values())) for fills in found)
    return sum(2 * count * size for count, size in zip(times, operand_bytes, strict=True))


@dataclass(frozen=True, slots=True)
class Work:
    """What an op does, however it is laid out: operations, bytes of its operands and results, their dtype's name."""

    flops: float
    moved_bytes: float
    dtype: str
    rule: LeafRule | None
    """None for what takes no time."""

    def least_seconds(self, mesh: Mesh, compute: Compute) -> float:
        """On a rank of a stage at least: no choice leaves it less than an equal part of the bytes, or than
        `least_share` of the operations (an axis longer than each factor of an attention splits none of it)."""
        if self.rule is None:
            return 0.0
        part = least_share(self.rule, mesh) if self.flops else 1.0
        return compute(self.flops * part, self.moved_bytes / mesh.num_ranks, self.dtype)


def work_of(node: Node) -> Work:
    """What an op of a step graph does."""
    if not takes_time(node):
        return Work(0.0, 0.0, "", None)
    values = (*(operand.meta["val"] for operand in tensor_operands(node)), *_results(node))
    moved = sum(value.numel() * value.element_size() for value in values)
    return Work(flops(node), moved, str(_results(node)[0].dtype).removeprefix("torch."), node.meta["rule"])


def least_share(rule: LeafRule, mesh: Mesh) -> float:
    """The least part of an op's work that a choice leaves to a rank of a mesh with axes of these sizes."""
    key = ("share", *sorted(size for _, size in mesh.axes))
    if key not in rule.memo:
        rule.memo[key] = min(share(rule, choice, mesh) for choice in enumerate_choices(rule, mesh))
    part: float = rule.memo[key]
    return part


def takes_time(node: Node) -> bool:
    """Whether a node does work: views, relays and inputs don't."""
    return node.op == "call_function" and not is_view(node) and node.target not in markers.IDENTITIES


def compute_costs(node: Node, choices: Sequence[Choice], mesh: Mesh, compute: Compute) -> list[float]:
    """Seconds of the op on one rank, for each choice."""
    if not takes_time(node):
        return [0.0] * len(choices)
    values = (*(operand.meta["val"] for operand in tensor_operands(node)), *_results(node))
    drawn = _DRAWN_BYTES.get(op_name(node), 0)
    widths = tuple(value.element_size() + drawn for value in values)
    key = ("costs", op_name(node), widths, _results(node)[0].dtype, index_operands(node), tuple(choices), mesh, compute)
    rule: LeafRule = node.meta["rule"]
    if key not in rule.memo:
        rule.memo[key] = _compute_costs(node, widths, choices, mesh, compute)
    return list(rule.memo[key])


def _compute_costs(
    node: Node, widths: tuple[int, ...], choices: Sequence[Choice], mesh: Mesh, compute: Compute
) -> list[float]:
    rule: LeafRule = node.meta["rule"]
    dtype = str(_results(node)[0].dtype).removeprefix("torch.")
    total, indices = flops(node), index_operands(node)
    costs = []
    for choice in choices:
        layouts = (*operand_layouts(rule, choice), *result_layouts(rule, choice))
        held = [local_bytes(layout, width, mesh) for layout, width in zip(layouts, widths, strict=True)]
        moved = sum(held) + _filled_bytes(rule, choice, held[: len(rule.operands)], mesh, indices)
        costs.append(compute(total * share(rule, choice, mesh), moved, dtype))
    return costs


def _results(node: Node) -> list[Tensor]:
    return [value for value in result_values(node) if value is not None]
