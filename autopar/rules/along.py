"""Rules of ops that work along some dims: those are whole, all others free.

sort(x, dim=1):  a [b] c -> a [b] c, a [b] c
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from autopar.rules.entries import Rows, by
from autopar.rules.letters import from_letters, letters, letters_along, named_dims
from autopar.rules.nodes import argument, shapes_of
from autopar.rules.notation import BoundRule, Dims, Linear, Shape


def along(index: int, name: str, default: object, linear: Linear = ()) -> Callable[[Node], BoundRule]:
    """An op whose operands and results have the same dims, but for the sizes of those that it works along."""

    def rule(node: Node) -> BoundRule:
        operands, results = shapes_of(node)
        dims = named_dims(argument(node, index, name, default), len(operands[0]))
        sizes, kept = dict[str, int](), set[str]()
        values = [letters_along(shape, dims, i, sizes, kept) for i, shape in enumerate((*operands, *results))]
        return from_letters(values[: len(operands)], values[len(operands) :], sizes, kept, linear)

    return rule


def all_but(index: int, name: str) -> Callable[[Node], BoundRule]:
    """Pointwise along one dim, which is free; all others are whole."""

    def rule(node: Node) -> BoundRule:
        operands, results = shapes_of(node)
        dims, sizes = letters(operands[0], "d")
        free = argument(node, index, name) % len(dims)
        kept = {f"d{d}" for d in range(len(dims)) if d != free}
        return from_letters([dims] * len(operands), [dims] * len(results), sizes, kept)

    return rule


def _halves(shape: Shape, dim: int) -> tuple[Dims, Dims, dict[str, int]]:
    """Letters of a value whose `dim` is two halves, and of one half."""
    half, sizes = letters(shape, "d")
    d = dim % len(shape)
    sizes |= {"halves": 2, f"d{d}": shape[d] // 2}
    return (*half[:d], ("halves", f"d{d}"), *half[d + 1 :]), half, sizes


def glu(node: Node) -> BoundRule:
    """`([2] d) -> d`: each half may be split, as both are alike."""
    both, half, sizes = _halves(shapes_of(node)[0][0], argument(node, 1, "dim", -1))
    return from_letters([both], [half], sizes, {"halves"})


def glu_backward(node: Node) -> BoundRule:
    """`d, ([2] d) -> ([2] d)`"""
    both, half, sizes = _halves(shapes_of(node)[0][1], argument(node, 2, "dim"))
    return from_letters([half, both], [both], sizes, {"halves"}, ((0,),))


def whole_last(count: int) -> Callable[[Node], BoundRule]:
    """Pointwise but for the last `count` dims."""

    def rule(node: Node) -> BoundRule:
        operands, (result,) = shapes_of(node)
        dims, sizes = letters(result, "d")
        kept = {f"d{i}" for i in range(len(result) - count, len(result))}
        return from_letters([dims] * len(operands), [dims], sizes, kept, linear=((0,),))

    return rule


ROWS: Rows = {
    "aten._softmax": by(along(1, "dim", 0)),
    "aten._log_softmax": by(along(1, "dim", 0)),
    "aten._safe_softmax": by(along(1, "dim", 0)),
    "aten._softmax_backward_data": by(along(2, "dim", 0, ((0,),))),
    "aten._log_softmax_backward_data": by(along(2, "dim", 0, ((0,),))),
    "aten.cumsum": by(along(1, "dim", 0, ((0,),))),
    "aten.sort": by(along(1, "dim", -1)),
    "aten.topk": by(along(2, "dim", -1)),
    "aten.flip": by(along(1, "dims", None, ((0,),))),
    "aten.roll": by(along(2, "dims", None, ((0,),))),
    "aten.tril": by(whole_last(2)),
    "aten.triu": by(whole_last(2)),
    "aten.cumprod": by(along(1, "dim", 0)),
    "aten.cummax": by(along(1, "dim", 0)),
    "aten.cummin": by(along(1, "dim", 0)),
    "aten.logcumsumexp": by(along(1, "dim", 0)),
    "aten._logcumsumexp": by(along(1, "dim", 0)),
    "aten.rot90": by(along(2, "dims", [0, 1], ((0,),))),
    "aten._masked_softmax": by(along(2, "dim", -1)),
    "aten._masked_softmax_backward": by(along(3, "dim", -1, ((0,),))),
    "aten.renorm": by(all_but(2, "dim")),
    "aten.glu": by(glu),
    "aten.glu_backward": by(glu_backward),
}
