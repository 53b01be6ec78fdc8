"""Makes an op's arguments local where they speak of global sizes: shapes, counts of channels, groups, strides.

    expand(x, [4, 6])  with dim 1 split two ways  ->  expand(x, [4, 3])

Each handler rewrites one node in place before it runs. What needs more than sizes, and operands that count once, is in
`local_indices`: means, and indices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from autopar import collectives
from autopar.layout import chunk_size
from autopar.rules.choices import axes_of
from autopar.rules.factors import LeafRule
from autopar.rules.losses import ELEMENTWISE, MEAN, reduction_of
from autopar.rules.nodes import argument, node_argument, tensor_operands
from autopar.rules.resampling import UPSAMPLING
from autopar.rules.views import dense_order

if TYPE_CHECKING:
    from passes.localise_shapes import Localiser

aten = torch.ops.aten
Handler = Callable[["Localiser", Node], None]


def set_argument(node: Node, index: int, name: str, value: Any) -> None:
    """Puts `value` where the argument stands: by position, or by name."""
    if name in node.kwargs or len(node.args) <= index:
        node.kwargs = {**node.kwargs, name: value}
    else:
        node.args = (*node.args[:index], value, *node.args[index + 1 :])


def local_result(localiser: Localiser, node: Node) -> list[int]:
    """The local shape of the node's one result."""
    return list(node.meta["layout"].local_shape(localiser.mesh))


def local_operand(localiser: Localiser, node: Node, index: int) -> list[int]:
    """The local shape of tensor operand `index`."""
    return list(tensor_operands(node)[index].meta["layout"].local_shape(localiser.mesh))


def local_size(localiser: Localiser, node: Node, letter: str) -> int:
    """The size of a rank's chunk of a letter of the node's rule."""
    rule: LeafRule = node.meta["rule"]
    return math.prod(_chunk(localiser, node, f) for f, factor in enumerate(rule.factors) if factor.letter == letter)


def _chunk(localiser: Localiser, node: Node, factor: int) -> int:
    axes = axes_of(node.meta["choice"], factor)
    return chunk_size(node.meta["rule"].factors[factor].size, map(localiser.mesh.size, axes))


# -- shapes ------------------------------------------------------------------------------------------------------
def shape_argument(index: int, name: str) -> Handler:
    """The argument is the result's shape."""

    def handle(localiser: Localiser, node: Node) -> None:
        set_argument(node, index, name, local_result(localiser, node))

    return handle


def _view(localiser: Localiser, node: Node) -> None:
    """A view as another dtype has no shape to make local."""
    if not isinstance(argument(node, 1, "size"), torch.dtype):
        set_argument(node, 1, "size", local_result(localiser, node))


def _strided(size: int, stride: int) -> Handler:
    """Arguments for the result's shape and strides: dense ones, in the order of the given."""

    def handle(localiser: Localiser, node: Node) -> None:
        shape = local_result(localiser, node)
        set_argument(node, size, "size", shape)
        set_argument(node, stride, "stride", _dense_strides(shape, argument(node, stride, "stride")))

    return handle


def _dense_strides(shape: Sequence[int], like: Sequence[int]) -> list[int]:
    strides, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        strides[d] = step
        step *= max(shape[d], 1)
    return strides


def _repeat(localiser: Localiser, node: Node) -> None:
    """A split dim of copies is copied less often."""
    shape, result = local_operand(localiser, node, 0), local_result(localiser, node)
    padded = [1] * (len(result) - len(shape)) + shape
    set_argument(node, 1, "repeats", [whole // part for whole, part in zip(result, padded, strict=True)])


def _as_strided(localiser: Localiser, node: Node) -> None:
    """A view of the dims from the greatest stride to the least, then their permutation."""
    order = dense_order(node)
    assert order is not None, node.format_node()
    shape = local_result(localiser, node)
    dense = localiser.call(node, aten.reshape.default, node_argument(node, 0), [shape[d] for d in order])
    places = {d: place for place, d in enumerate(order)}
    node.target, node.args, node.kwargs = aten.permute.default, (dense, [places[d] for d in range(len(shape))]), {}


def given_strides(localiser: Localiser, node: Node) -> None:
    """Gives whole operands the strides that they had when the op, which speaks of storage, was captured."""
    for operand in dict.fromkeys(tensor_operands(node)):
        if operand.meta["local_val"].stride() != operand.meta["val"].stride():
            _restride(localiser, node, operand)


def _restride(localiser: Localiser, node: Node, operand: Node) -> None:
    strides, rank = operand.meta["val"].stride(), operand.meta["val"].dim()
    order = sorted(range(rank), key=lambda d: (-strides[d], d))
    dense = localiser.call(node, aten.permute.default, operand, order)
    dense = localiser.call(node, aten.clone.default, dense)
    dense.kwargs = {"memory_format": torch.contiguous_format}
    localiser.run(dense)
    back = localiser.call(node, aten.permute.default, dense, [order.index(d) for d in range(rank)])
    node.replace_input_with(operand, back)


def _reshape_alias(localiser: Localiser, node: Node) -> None:
    node.target, node.args, node.kwargs = aten.reshape.default, (node.args[0], local_result(localiser, node)), {}


def _narrow(localiser: Localiser, node: Node) -> None:
    """A chunk's start shrinks with its dim."""
    layout = tensor_operands(node)[0].meta["layout"]
    dim = argument(node, 1, "dim") % len(layout.dims)
    start, whole, local = argument(node, 2, "start"), layout.global_shape[dim], layout.local_shape(localiser.mesh)[dim]
    set_argument(node, 2, "start", (start + whole if start < 0 else start) * local // whole)
    set_argument(node, 3, "length", local_result(localiser, node)[dim])


def _affine_grid(localiser: Localiser, node: Node) -> None:
    samples = local_result(localiser, node)[0]
    set_argument(node, 1, "size", [samples, *argument(node, 1, "size")[1:]])


# -- channels ----------------------------------------------------------------------------------------------------
def _groups(index: int, name: str) -> Handler:
    """The argument is the size of letter `g`."""

    def handle(localiser: Localiser, node: Node) -> None:
        set_argument(node, index, name, local_size(localiser, node, "g"))

    return handle


def _group_norm(x: int, first: int, names: tuple[str, str], groups: int) -> Handler:
    """Arguments for samples and channels, from `first` on, and for groups."""

    def handle(localiser: Localiser, node: Node) -> None:
        _groups(groups, "group")(localiser, node)
        for i, (name, size) in enumerate(zip(names, local_operand(localiser, node, x), strict=False)):
            set_argument(node, first + i, name, size)

    return handle


def _convolution(localiser: Localiser, node: Node) -> None:
    _groups(8, "groups")(localiser, node)
    once(2)(localiser, node)


def _convolution_backward(localiser: Localiser, node: Node) -> None:
    """The bias has as many elements as the local gradient has channels."""
    _groups(9, "groups")(localiser, node)
    if node.args[3] is not None:
        set_argument(node, 3, "bias_sizes", local_operand(localiser, node, 0)[1:2])


# -- operands that count once ------------------------------------------------------------------------------------
def once(index: int) -> Handler:
    """What is added to a partial result is added by one rank: the one at 0 on each axis that the sum runs over.

    Chosen, not multiplied: the operand may hold infinities. One that is partial itself is added by all.
    """

    def handle(localiser: Localiser, node: Node) -> None:
        operand = node.args[index] if len(node.args) > index else None
        if not isinstance(operand, Node):
            return
        layout = operand.meta["layout"]
        for axis, _ in node.meta["layout"].partial:
            if layout.partial_op(axis) is not None:
                continue
            value = node.args[index]
            position = localiser.call(node, collectives.coordinate, axis)
            others = localiser.call(node, aten.scalar_tensor.default, position)
            first = localiser.call(node, aten.eq.Scalar, others, 0)
            value = localiser.call(node, aten.where.ScalarOther, first, value, 0, layout=layout)
            node.args = (*node.args[:index], value, *node.args[index + 1 :])

    return handle


def plus(localiser: Localiser, node: Node) -> None:
    """A sum; what is whole on an axis over which the other summand is partial counts once."""
    for index in range(2):
        once(index)(localiser, node)
    node.target = aten.add.Tensor


# -- losses ------------------------------------------------------------------------------------------------------
def _mean_of_loss(localiser: Localiser, node: Node) -> None:
    """A shard's mean is of fewer elements, and so is the gradient of a mean."""
    rule: LeafRule = node.meta["rule"]
    own = math.prod(_chunk(localiser, node, factor) for factor in range(len(rule.factors)))
    if reduction_of(node) == MEAN:
        localiser.scale_result(node, own, math.prod(factor.size for factor in rule.factors))


_STRIDED_FACTORIES: dict[str, Handler] = {
    "aten.empty_strided": _strided(0, 1),
    "aten.new_empty_strided": _strided(1, 2),
    "aten.empty_permuted": shape_argument(0, "size"),
    "aten.new_empty": shape_argument(1, "size"),
}

OF_STORAGE = frozenset(
    {
        *("aten.as_strided", "aten.as_strided_scatter"),
        *("aten._weight_norm_interface", "aten._weight_norm_interface_backward"),
    }
)
"""Ops whose arguments, or kernels (wrong numbers from strided operands in torch 2.13), speak of operands' storage."""

HANDLERS: dict[str, Handler] = {
    "aten.view": _view,
    "aten._unsafe_view": shape_argument(1, "size"),
    "aten.reshape": shape_argument(1, "shape"),
    "aten._reshape_alias": _reshape_alias,
    "aten.as_strided": _as_strided,
    "aten.expand": shape_argument(1, "size"),
    "aten.repeat": _repeat,
    "aten.narrow_copy": _narrow,
    "aten.full": shape_argument(0, "size"),
    "aten.zeros": shape_argument(0, "size"),
    "aten.ones": shape_argument(0, "size"),
    "aten.empty": shape_argument(0, "size"),
    "aten.new_zeros": shape_argument(1, "size"),
    "aten.new_full": shape_argument(1, "size"),
    "aten.new_ones": shape_argument(1, "size"),
    **_STRIDED_FACTORIES,
    "aten.select_backward": shape_argument(1, "input_sizes"),
    "aten.diagonal_backward": shape_argument(1, "input_sizes"),
    "aten.unfold_backward": shape_argument(1, "input_sizes"),
    **{f"aten.{name}_backward": shape_argument(2, "input_size") for name in UPSAMPLING},
    "aten.affine_grid_generator": _affine_grid,
    "aten.channel_shuffle": _groups(1, "groups"),
    "aten.native_group_norm": _group_norm(0, 3, ("N", "C"), 6),
    "aten.native_group_norm_backward": _group_norm(1, 5, ("N", "C"), 8),
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    **dict.fromkeys(("aten.addmm", "aten.addmv", "aten.addr", "aten.addbmm", "aten.baddbmm"), once(0)),
    **dict.fromkeys(("aten.index_add", "aten.index_put", "aten._unsafe_index_put"), once(0)),
    **dict.fromkeys(("aten.conv_tbc", "autopar.linear"), once(2)),
    "plus": plus,
    **{f"aten.{name}": _mean_of_loss for name in ELEMENTWISE},
}
