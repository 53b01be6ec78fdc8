"""How ops that count or index are made local: bounds of slices, shares of means, offsets and masks of indices.

    embedding(table, index)     -> where(inside, embedding(table, (index - first) * inside), 0)

A handler rewrites its node in place; what it adds comes right before it, or (a scaled or masked result) right after.
`HANDLERS` is the whole table, that of `local_arguments` included.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from autopar.layout import Layout, chunk_size
from autopar.random_ops import shard_arguments
from autopar.rules.choices import axes_of
from autopar.rules.factors import LeafRule
from autopar.rules.nodes import argument, node_argument, tensor_operands
from passes import local_arguments
from passes.local_arguments import Handler, local_result, once, set_argument

if TYPE_CHECKING:
    from passes.localise_shapes import Localiser

aten = torch.ops.aten


def _scaled(localiser: Localiser, layout: Layout, dim: int, index: int) -> int:
    """A bound along `dim` in local terms: chunks shrink with the dim; the far end (2**63 - 1) stays."""
    whole, local = layout.global_shape[dim], layout.local_shape(localiser.mesh)[dim]
    if index >= whole:
        return local
    if index < 0:
        index += whole
    return index * local // whole


def _slice(localiser: Localiser, node: Node) -> None:
    layout = tensor_operands(node)[0].meta["layout"]
    dim = argument(node, 1, "dim", 0) % len(layout.dims)
    for index, name in ((2, "start"), (3, "end")):
        bound = argument(node, index, name)
        if bound is not None:
            set_argument(node, index, name, _scaled(localiser, layout, dim, bound))


def _slice_backward(localiser: Localiser, node: Node) -> None:
    layout = node.meta["layout"]
    dim = argument(node, 2, "dim") % len(layout.dims)
    bounds = (argument(node, 3, "start"), argument(node, 4, "end"))
    start, end = (_scaled(localiser, layout, dim, bound) for bound in bounds)
    node.args = (node.args[0], local_result(localiser, node), dim, start, end, node.args[5])


def _split(localiser: Localiser, node: Node) -> None:
    dim = argument(node, 2, "dim", 0)
    sizes = [layout.local_shape(localiser.mesh)[dim] for layout in node.meta["layout"]]
    has_sizes = isinstance(node.args[1], (list, tuple))
    node.args = (node.args[0], sizes if has_sizes else sizes[0], *node.args[2:])


def _mean(localiser: Localiser, node: Node) -> None:
    """A shard's mean, times its share of the elements that the whole is the mean of (padding counts in both)."""
    operand, result = tensor_operands(node)[0].meta["layout"], node.meta["layout"]
    reduced = [factor for _, factor in operand.positions() if any(result.partial_op(axis) for axis in factor.axes)]
    own = math.prod(factor.local_size(localiser.mesh) for factor in reduced)
    localiser.scale_result(node, own, math.prod(factor.size for factor in reduced))


def replace_node(node: Node, result: Node, users: list[Node]) -> None:
    """`result` stands for the step graph's node from now on: it has its key and its readers."""
    if "key" in node.meta:
        result.meta["key"] = node.meta.pop("key")
    for user in users:
        user.replace_input_with(node, result)


@dataclass(frozen=True, slots=True)
class _Range:
    """This rank's part of what a letter of a rule counts: its first index, how many it has, and the chunk's size."""

    first: Node | int
    count: Node | int
    size: int

    @property
    def is_whole(self) -> bool:
        return self.first == 0


def _indexed(localiser: Localiser, node: Node) -> _Range:
    """The rank's range of what the node's indices count."""
    rule: LeafRule = node.meta["rule"]
    letters = [letter for _, letter in rule.indexes[:1]]
    leaves = [f for f, factor in enumerate(rule.factors) if factor.letter in letters]
    if not leaves:
        return _Range(0, 1, 1)
    major, inner = rule.factors[leaves[0]], math.prod(rule.factors[f].size for f in leaves[1:])
    axes = axes_of(node.meta["choice"], leaves[0])
    size = chunk_size(major.size, map(localiser.mesh.size, axes)) * inner
    first, count = localiser.first(node, major.size, axes, inner), localiser.count(node, major.size, axes, inner)
    return _Range(first, count, size)


def _localised_index(localiser: Localiser, node: Node, index: Node, own: _Range) -> tuple[Node, Node]:
    """Indices into this rank's range (0 where outside), and where they are inside."""
    shifted = localiser.call(node, aten.sub.Tensor, index, own.first)
    above = localiser.call(node, aten.ge.Scalar, shifted, 0)
    below = localiser.call(node, aten.lt.Scalar, shifted, own.count)
    inside = localiser.call(node, aten.bitwise_and.Tensor, above, below)
    clamped = localiser.call(node, aten.mul.Tensor, shifted, inside)
    return clamped, inside


def _masked(localiser: Localiser, node: Node, value: Node, inside: Node) -> Node:
    """`value` where `inside`, else 0: chosen, not multiplied, since what is masked out may be infinite."""
    missing = value.meta["local_val"].dim() - inside.meta["local_val"].dim()
    for _ in range(missing):
        inside = localiser.call(node, aten.unsqueeze.default, inside, -1)
    nothing = False if value.meta["local_val"].dtype == torch.bool else 0
    return localiser.call(node, aten.where.ScalarOther, inside, value, nothing)


def contiguous_operands(localiser: Localiser, node: Node) -> None:
    """For kernels that read operands as if they were contiguous: wrong numbers from a strided shard.

    Torch 2.13's reads statistics so; what a user's kernel does isn't known.
    """
    for operand in tensor_operands(node):
        if not operand.meta["local_val"].is_contiguous():
            dense = localiser.call(node, aten.clone.default, operand)
            dense.kwargs = {"memory_format": torch.contiguous_format}
            localiser.run(dense)
            dense.meta["layout"] = operand.meta["layout"]
            node.replace_input_with(operand, dense)


def _embedding(localiser: Localiser, node: Node) -> None:
    own = _indexed(localiser, node)
    if not own.is_whole:
        index, inside = _localised_index(localiser, node, node_argument(node, 1), own)
        node.args = (node.args[0], index)
        _mask_result(localiser, node, inside)


def _mask_result(localiser: Localiser, node: Node, inside: Node) -> None:
    users = list(node.users)
    with localiser.graph.inserting_before(node.next):
        localiser.run(node)
        result = _masked(localiser, node, node, inside)
    result.meta["layout"] = node.meta["layout"]
    replace_node(node, result, users)


def _embedding_backward(localiser: Localiser, node: Node) -> None:
    own = _indexed(localiser, node)
    if own.is_whole:
        return
    gradient, index, padding = node_argument(node, 0), node_argument(node, 1), node.args[3]
    if isinstance(padding, int) and padding >= 0:
        kept = localiser.call(node, aten.ne.Scalar, index, padding)
        gradient = _masked(localiser, node, gradient, kept)
    index, inside = _localised_index(localiser, node, index, own)
    gradient = _masked(localiser, node, gradient, inside)
    node.args = (gradient, index, own.size, -1, *node.args[4:])


def _gather(localiser: Localiser, node: Node) -> None:
    own = _indexed(localiser, node)
    if not own.is_whole:
        index, inside = _localised_index(localiser, node, node_argument(node, 2), own)
        node.args = (node.args[0], node.args[1], index, *node.args[3:])
        _mask_result(localiser, node, inside)


def _scatter_add(localiser: Localiser, node: Node) -> None:
    own = _indexed(localiser, node)
    if not own.is_whole:
        index, inside = _localised_index(localiser, node, node_argument(node, 2), own)
        node.args = (*node.args[:2], index, _masked(localiser, node, node_argument(node, 3), inside))
    once(0)(localiser, node)


def _expert_mm(localiser: Localiser, node: Node) -> None:
    """Experts are counted from this rank's first; rows of others are zero by the op itself."""
    own, operands = _indexed(localiser, node), tensor_operands(node)
    if own.is_whole:
        return
    index = localiser.call(node, aten.sub.Tensor, operands[2], own.first)
    node.args = (*node.args[:2], index, *([own.size] if len(node.args) > 3 else []))


def _squeeze(localiser: Localiser, node: Node) -> None:
    """A view: a dim that only a shard has of size 1 must stay."""
    node.target, node.args, node.kwargs = aten.view.default, (node.args[0], local_result(localiser, node)), {}


def _arange(localiser: Localiser, node: Node) -> None:
    """`start + step * (offset + i)`, counted as torch does: in whole numbers or in float64, then cast.

    Counting in the result's own dtype would round twice.
    """
    (whole,), (local,) = node.meta["layout"].global_shape, node.meta["layout"].local_shape(localiser.mesh)
    if whole == local:
        return
    numbers = [a for a in node.args if isinstance(a, (int, float))]
    start, step = (numbers[0] if len(numbers) > 1 else 0), (numbers[2] if len(numbers) > 2 else 1)
    major, *minor = node.meta["layout"].dims[0]
    first = localiser.first(node, major.size, major.axes, math.prod(factor.size for factor in minor))
    dtype = node.meta["val"].dtype
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    node.target, node.args, node.kwargs = aten.arange.default, (local,), {**node.kwargs, "dtype": wide}
    users, layout = list(node.users), node.meta["layout"]
    with localiser.graph.inserting_before(node.next):
        localiser.run(node)
        value = localiser.call(node, aten.add.Tensor, node, first, layout=layout)
        if step != 1:
            value = localiser.call(node, aten.mul.Tensor, value, step, layout=layout)
        if start != 0:
            value = localiser.call(node, aten.add.Tensor, value, start, layout=layout)
        if wide != dtype:
            value = localiser.cast(value, dtype)
    replace_node(node, value, users)


def _drawn(localiser: Localiser, node: Node) -> None:
    """A random op draws by the global index: its shard's factors, their steps in the whole, and where it begins."""
    layout = node.meta["layout"]
    sizes, strides, own = shard_arguments(
        [f.size for _, f in layout.positions()], layout.local_factor_shape(localiser.mesh)
    )
    begin: Node | int = 0
    for (_, factor), stride in zip(layout.positions(), own, strict=True):
        first = localiser.first(node, factor.size, factor.axes, stride)
        begin = first if begin == 0 else begin if first == 0 else localiser.call(node, operator.add, begin, first)
    set_argument(node, 2, "shape", local_result(localiser, node))
    node.kwargs = {**node.kwargs, "sizes": sizes, "strides": strides, "offset": begin}


HANDLERS: dict[str, Handler] = {
    **local_arguments.HANDLERS,
    "aten.slice": _slice,
    "aten.slice_backward": _slice_backward,
    **dict.fromkeys(("aten.split", "aten.split_with_sizes"), _split),
    **dict.fromkeys(("aten.unsafe_split", "aten.unsafe_split_with_sizes"), _split),
    "aten.mean": _mean,
    "aten.native_layer_norm_backward": contiguous_operands,
    **dict.fromkeys(("aten._weight_norm_interface", "aten._weight_norm_interface_backward"), contiguous_operands),
    "aten.squeeze": _squeeze,
    "aten.embedding": _embedding,
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.gather": _gather,
    "aten.scatter_add": _scatter_add,
    **dict.fromkeys(("autopar.expert_mm", "autopar.expert_mm_dx", "autopar.expert_mm_dw"), _expert_mm),
    "aten.arange": _arange,
    **dict.fromkeys(("autopar.random_mask", "autopar.random_uniform"), _drawn),
    **dict.fromkeys(("autopar.random_normal", "autopar.random_integers"), _drawn),
}
"""Ops whose arguments speak of global sizes or indices, with the rewrite that makes them local."""
