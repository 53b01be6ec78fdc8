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


ROWS: Rows = {
    "aten.max.other": by(pointwise),
    "aten.min.other": by(pointwise),
}
