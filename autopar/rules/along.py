"""Rules of ops that work along some dims: those are whole, all others free.

sort(x, dim=1):  a [b] c -> a [b] c, a [b] c
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from autopar.rules.entries import Rows, by
from autopar.rules.letters import from_letters, letters, letters_along, named_dims
from autopar.rules.nodes import argument, shapes_of
from autopar.rules.notation import BoundRule, Linear


def along(index: int, name: str, default: object, linear: Linear = ()) -> Callable[[Node], BoundRule]:
    """An op whose operands and results have the same dims, but for the sizes of those that it works along."""

    def rule(node: Node) -> BoundRule:
        operands, results = shapes_of(node)
        dims = named_dims(argument(node, index, name, default), len(operands[0]))
        sizes, kept = dict[str, int](), set[str]()
        values = [letters_along(shape, dims, i, sizes, kept) for i, shape in enumerate((*operands, *results))]
        return from_letters(values[: len(operands)], values[len(operands) :], sizes, kept, linear)

    return rule


def whole_dim(dim_argument: int) -> Callable[[Node], BoundRule]:
    """Pointwise but for one dim, which every device has whole (softmax, cumsum)."""

    def rule(node: Node) -> BoundRule:
        operands, (result, *_) = shapes_of(node)
        dims, sizes = letters(result, "d")
        dim = argument(node, dim_argument, "dim") % max(len(result), 1)
        return from_letters([dims] * len(operands), [dims], sizes, {f"d{dim}"})

    return rule


def whole_last(count: int) -> Callable[[Node], BoundRule]:
    """Pointwise but for the last `count` dims."""

    def rule(node: Node) -> BoundRule:
        operands, (result,) = shapes_of(node)
        dims, sizes = letters(result, "d")
        kept = {f"d{i}" for i in range(len(result) - count, len(result))}
        return from_letters([dims] * len(operands), [dims], sizes, kept, linear=((0,),))

    return rule


ROWS: Rows = {
    "aten._softmax": by(whole_dim(1)),
    "aten._log_softmax": by(whole_dim(1)),
    "aten._safe_softmax": by(whole_dim(1)),
    "aten._softmax_backward_data": by(whole_dim(2)),
    "aten._log_softmax_backward_data": by(whole_dim(2)),
    "aten.cumsum": by(whole_dim(1)),
    "aten.sort": by(along(1, "dim", -1)),
    "aten.topk": by(along(2, "dim", -1)),
    "aten.flip": by(along(1, "dims", None, ((0,),))),
    "aten.roll": by(along(2, "dims", None, ((0,),))),
    "aten.tril": by(whole_last(2)),
    "aten.triu": by(whole_last(2)),
}
