"""Rules of reductions: what vanishes leaves a value partial under the op, or is whole where shards do not combine."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from autopar.rules.entries import Rows, by
from autopar.rules.letters import from_letters, letters, named_dims
from autopar.rules.nodes import argument, shapes_of
from autopar.rules.notation import BoundRule, Linear


def reduction(op: str | None, linear: str = "") -> Callable[[Node], BoundRule]:
    """Reduced dims vanish: split, they leave a value partial under `op`; with no op (`argmax`) they are whole."""

    def rule(node: Node) -> BoundRule:
        (operand,), results = shapes_of(node)
        dims, sizes = letters(operand, "d")
        which = named_dims(argument(node, 1, "dim"), len(operand))
        keepdim = len(results[0]) == len(operand)
        result = tuple(() if d in which else dims[d] for d in range(len(operand)) if keepdim or d not in which)
        kept = {f"d{d}" for d in which} if op is None or len(results) > 1 else set()
        sets: Linear = ((0,),) if linear else ()
        return from_letters([dims], [result] * len(results), sizes, kept, linear=sets, reduction=op or "sum")

    return rule


ROWS: Rows = {
    "aten.sum": by(reduction("sum", "0")),
    "aten.mean": by(reduction("sum", "0")),
    "aten.amax": by(reduction("max")),
    "aten.amin": by(reduction("min")),
    "aten.max": by(reduction("max")),
    "aten.min": by(reduction("min")),
    "aten.any": by(reduction(None)),
    "aten.all": by(reduction(None)),
    "aten.prod": by(reduction(None)),
    "aten.argmax": by(reduction(None)),
    "aten.argmin": by(reduction(None)),
    "aten.logsumexp": by(reduction(None)),
    "aten.var": by(reduction(None)),
    "aten.var_mean": by(reduction(None)),
}
