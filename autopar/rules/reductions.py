"""Rules of reductions: what vanishes leaves a value partial under the op, or is whole where shards do not combine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeGuard

from torch.fx import Node

from autopar.rules.entries import Rows, by
from autopar.rules.letters import from_letters, letters, named_dims, whole
from autopar.rules.nodes import argument, shapes_of
from autopar.rules.notation import BoundRule, Linear


def reduction(
    op: str | None, linear: str = "", index: int | None = 1, default: object = None
) -> Callable[[Node], BoundRule]:
    """Reduced dims vanish: split, they leave a value partial under `op`; with no op (`argmax`) they are whole.

    The op's argument `dim` stands at `index`, None where it is a keyword alone.
    """

    def rule(node: Node) -> BoundRule:
        return _reduced(node, op, linear, 99 if index is None else index, default)

    return rule


def _reduced(node: Node, op: str | None, linear: str, index: int, default: object = None) -> BoundRule:
    (operand,), results = shapes_of(node)
    dims, sizes = letters(operand, "d")
    which = named_dims(argument(node, index, "dim", default), len(operand))
    keepdim = len(results[0]) == len(operand)
    result = tuple(() if d in which else dims[d] for d in range(len(operand)) if keepdim or d not in which)
    kept = {f"d{d}" for d in which} if op is None else set()
    sets: Linear = ((0,),) if linear else ()
    return from_letters([dims], [result] * len(results), sizes, kept, linear=sets, reduction=op or "sum")


def extremum(op: str) -> Callable[[Node], BoundRule]:
    """`max(x)` is partial where split; `max(x, dim)` says where the greatest stands, too: that dim is whole."""

    def rule(node: Node) -> BoundRule:
        return _reduced(node, op if len(shapes_of(node)[1]) == 1 else None, "", 1)

    return rule


def aminmax(node: Node) -> BoundRule:
    """The least and the greatest."""
    found = _reduced(node, "min", "", 99 if "dim" in node.kwargs else 1)
    return replace(found, reductions=("min", "max"))


def histogram(node: Node) -> BoundRule:
    """Counts add up where the range is given; else it follows from all values."""
    (operand,), (result,) = shapes_of(node)
    if argument(node, 2, "min", 0) >= argument(node, 3, "max", 0):
        return whole(node)
    dims, sizes = letters(operand, "d")
    return from_letters([dims], [(("b",),)], {**sizes, "b": result[0]}, {"b"})


def _norm_reduction(order: object) -> str | None:
    """How norms of shards combine without further work; a root of a sum of powers doesn't."""
    return (
        {float("inf"): "max", float("-inf"): "min", 0.0: "sum", 1.0: "sum"}.get(float(order))
        if _is_number(order)
        else None
    )


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float))


def vector_norm(node: Node) -> BoundRule:
    """`max` for the infinity norm, `min` for its negative, sums for orders 0 and 1; other orders are whole."""
    return _reduced(node, _norm_reduction(argument(node, 1, "ord", 2)), "", 2)


def norm(node: Node) -> BoundRule:
    """`vector_norm` by its older name."""
    return _reduced(node, _norm_reduction(argument(node, 1, "p", 2)), "", 2)


ROWS: Rows = {
    "aten.sum": by(reduction("sum", "0")),
    "aten.mean": by(reduction("sum", "0")),
    "aten.amax": by(reduction("max")),
    "aten.amin": by(reduction("min")),
    "aten.max": by(extremum("max")),
    "aten.min": by(extremum("min")),
    "aten.any": by(reduction(None)),
    "aten.all": by(reduction(None)),
    "aten.prod": by(reduction(None)),
    "aten.argmax": by(reduction(None)),
    "aten.argmin": by(reduction(None)),
    "aten.logsumexp": by(reduction(None)),
    "aten.var": by(reduction(None)),
    "aten.var_mean": by(reduction(None)),
    "aten.std": by(reduction(None)),
    "aten.std_mean": by(reduction(None)),
    "aten.nansum": by(reduction("sum")),
    "aten.count_nonzero": by(reduction("sum")),
    "aten.aminmax": by(aminmax),
    "aten._aminmax": by(aminmax),
    "aten.median": by(reduction(None)),
    "aten.nanmedian": by(reduction(None)),
    "aten.mode": by(reduction(None, default=-1)),
    "aten.kthvalue": by(reduction(None, index=2, default=-1)),
    "aten.linalg_vector_norm": by(vector_norm),
    "aten.linalg__powsum": by(reduction("sum", index=2)),
    "aten.norm": by(norm),
    "aten._is_all_true": by(reduction(None)),
    "aten._is_any_true": by(reduction(None)),
    "aten.histc": by(histogram),
}
