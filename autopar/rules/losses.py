"""Rules of losses: summed over what they are taken of, or a mean of it, or left as they are (the op's `reduction`).

mse_loss(x, y, reduction="sum"):  a b, a b -> (a number)

A shard's mean is of fewer elements, and so is the gradient of a mean: both are divided by the number of shards.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.rules.entries import Rows, by
from autopar.rules.letters import aligned, from_letters, letters
from autopar.rules.nodes import argument, shapes_of
from autopar.rules.notation import BoundRule, Dims

NONE, MEAN, SUM = 0, 1, 2
"""ATen's values of `reduction`."""


def reduction_of(node: Node) -> int:
    """The op's `reduction`, wherever its schema has it."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    index = next(i for i, a in enumerate(target._schema.arguments) if a.name == "reduction")
    return int(argument(node, index, "reduction", MEAN))


def elementwise_loss(node: Node) -> BoundRule:
    """`mse_loss(x, y)`: a loss of each element, or the sum or mean of these."""
    operands, (result,) = shapes_of(node)
    dims, sizes = letters(operands[0], "d")
    return from_letters([aligned(shape, dims) for shape in operands], [dims if result else ()], sizes)


def elementwise_backward(node: Node) -> BoundRule:
    """Linear in the loss's gradient, which is a number where the loss is one."""
    operands, (result,) = shapes_of(node)
    dims, sizes = letters(result, "d")
    return from_letters([aligned(shape, dims) for shape in operands], [dims], sizes, linear=((0,),))


def _samples(x: tuple[int, ...]) -> tuple[Dims, Dims, dict[str, int]]:
    """Letters of scores `n c …` (or `c`) and of targets `n …`."""
    dims, sizes = letters(x, "d")
    return dims, (dims[0], *dims[2:]) if len(x) > 1 else (), sizes


def nll_loss(node: Node) -> BoundRule:
    """`n [c], n, [c] -> n, ` or a sum, and the sum of weights (0 where nothing is reduced); a mean needs both whole."""
    (x, _, *weights), (loss, _) = shapes_of(node)
    dims, targets, sizes = _samples(x)
    classes = dims[min(1, len(x) - 1)]
    kept = set(sizes) if reduction_of(node) == MEAN else {*classes}
    weight = [(classes,)] * len(weights)
    return from_letters([dims, targets, *weight], [targets if loss else (), ()], sizes, kept, indexes={1: classes[0]})


def nll_loss_backward(node: Node) -> BoundRule:
    """`n, n [c], n, [c], -> n [c]`: the total weight is an operand, so that samples are free in a mean, too."""
    (gradient, x, _, *weights, _), _ = shapes_of(node)
    dims, targets, sizes = _samples(x)
    classes = dims[min(1, len(x) - 1)]
    weight = [(classes,)] * len(weights)
    operands = [targets if gradient else (), dims, targets, *weight, ()]
    return from_letters(operands, [dims], sizes, {*classes}, ((0,),), indexes={2: classes[0]})


_NAMES = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")
_FORWARD = (*_NAMES, "binary_cross_entropy_with_logits")
_BACKWARD = tuple(f"{name}_backward" for name in _NAMES)

ELEMENTWISE = (*_FORWARD, *_BACKWARD)
"""Losses of each element, and their backward."""

ROWS: Rows = {
    **{f"aten.{name}": by(elementwise_loss) for name in _FORWARD},
    **{f"aten.{name}": by(elementwise_backward) for name in _BACKWARD},
    "aten.nll_loss_forward": by(nll_loss),
    "aten.nll_loss_backward": by(nll_loss_backward),
    "aten.nll_loss2d_forward": by(nll_loss),
    "aten.nll_loss2d_backward": by(nll_loss_backward),
}
