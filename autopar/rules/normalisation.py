"""Rules of normalisation: what statistics are taken over is whole, all else free."""

from __future__ import annotations

from torch.fx import Node

from autopar.rules.entries import Rows, by
from autopar.rules.letters import from_letters, letters
from autopar.rules.nodes import argument, shapes_of
from autopar.rules.notation import BoundRule


def _first_normalised(node: Node, shape_argument: int, rank: int) -> int:
    return rank - len(argument(node, shape_argument, "normalized_shape"))


def layer_norm(node: Node) -> BoundRule:
    """`... [d], d, d -> ... [d], ... 1, ... 1`"""
    operands, (result, statistic, _) = shapes_of(node)
    dims, sizes = letters(result, "d")
    first = _first_normalised(node, 1, len(result))
    weights = [dims[first:]] * (len(operands) - 1)
    statistics = tuple(dims[i] if i < first else () for i in range(len(statistic)))
    kept = {f"d{i}" for i in range(first, len(result))}
    return from_letters([dims, *weights], [dims, statistics, statistics], sizes, kept)


def layer_norm_backward(node: Node) -> BoundRule:
    """`... [d], ... [d], ... 1, ... 1, d, d -> ... [d], d, d`: the weights' gradients are partial over split rows."""
    operands, results = shapes_of(node)
    dims, sizes = letters(operands[0], "d")
    first = _first_normalised(node, 2, len(dims))
    statistics = tuple(dims[i] if i < first else () for i in range(len(operands[2])))
    weights = [dims[first:]] * (len(operands) - 4)
    outputs = [dims if len(shape) == len(dims) and i == 0 else dims[first:] for i, shape in enumerate(results)]
    kept = {f"d{i}" for i in range(first, len(dims))}
    return from_letters([dims, dims, statistics, statistics, *weights], outputs, sizes, kept)


ROWS: Rows = {
    "aten.native_layer_norm": by(layer_norm),
    "aten.native_layer_norm_backward": by(layer_norm_backward),
}
