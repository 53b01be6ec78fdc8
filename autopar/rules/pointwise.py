"""Rules of pointwise ops: dims align from the right."""

from __future__ import annotations

from torch.fx import Node

from autopar.rules.entries import Rows, by
from autopar.rules.letters import aligned, from_letters, letters
from autopar.rules.nodes import pointwise_linear, shapes_of
from autopar.rules.notation import BoundRule


def pointwise(node: Node) -> BoundRule:
    """Dims align from the right; those of size 1 are broadcast."""
    operand_shapes, (result, *others) = shapes_of(node)
    dims, sizes = letters(result, "d")

    results = [dims] + [aligned(shape, dims) for shape in others]
    operands = [aligned(shape, dims) for shape in operand_shapes]
    return from_letters(operands, results, sizes, linear=pointwise_linear(node))


UNTAGGED = (
    *("_add_relu", "_prelu_kernel", "_prelu_kernel_backward", "complex", "elu_backward", "fill", "floor_divide"),
    *("hardshrink_backward", "hardsigmoid_backward", "hardswish", "hardswish_backward", "hardtanh_backward"),
    *("leaky_relu_backward", "log_sigmoid_backward", "log_sigmoid_forward", "masked_fill.Tensor", "mish_backward"),
    *("polar", "rrelu_with_noise_backward", "rsub.Tensor", "softplus_backward", "softshrink_backward", "zero"),
    *("copy", "max.other", "min.other", "_standard_gamma_grad"),
)
"""Ops that are pointwise, though ATen doesn't tag them."""

ROWS: Rows = {f"aten.{name}": by(pointwise) for name in UNTAGGED}
