"""Rules of matrix products: `m k, k n -> m n`; what is summed over vanishes and leaves a partial sum."""

from __future__ import annotations

from torch.fx import Node

from autopar.rules.along import along
from autopar.rules.entries import Rows, by, texts
from autopar.rules.letters import aligned, from_letters
from autopar.rules.nodes import shapes_of
from autopar.rules.notation import BoundRule


def added_product(node: Node) -> BoundRule:
    """`m n, m k, k n -> m n`, batched or not, the addend broadcast: partial with a factor, or added once."""
    (addend, left, right), (result,) = shapes_of(node)
    dims = (("b",), ("m",), ("n",))[-len(result) :]
    batch = dims[:-2]
    sizes = {"b": result[0], "m": left[-2], "k": left[-1], "n": right[-1]}
    operands = [aligned(addend, dims), (*batch, ("m",), ("k",)), (*batch, ("k",), ("n",))]
    return from_letters(operands, [dims], sizes, linear=((0, 1), (0, 2), (1,), (2,)))


ROWS: Rows = {
    "aten.mm": texts("0|1", "m k, k n -> m n"),
    "aten.bmm": texts("0|1", "b m k, b k n -> b m n"),
    "aten.dot": texts("0|1", "k, k -> "),
    "aten.mv": texts("0|1", "m k, k -> m"),
    "autopar.linear": texts("0|1", "... i, o i -> ... o", "... i, o i, o -> ... o"),
    "autopar.linear_dx": texts("0|1", "... o, o i -> ... i"),
    "autopar.linear_dw": texts("0|1", "... i, ... o -> o i"),
    "autopar.expert_mm": texts("0|1", "s i, e i o, {e}s -> s o"),
    "autopar.expert_mm_dx": texts("0|1", "s o, e i o, {e}s -> s i"),
    "autopar.expert_mm_dw": texts("0|1", "s i, s o, {e}s -> e i o"),
    "autopar.grouped_mm": texts("0|1", "[s] i, [e] i o, [e] -> [s] o"),
    "autopar.grouped_mm_dx": texts("0|1", "[s] o, [e] i o, [e] -> [s] i"),
    "autopar.grouped_mm_dw": texts("0|1", "[s] i, [s] o, [e] -> [e] i o"),
    # a bias is added once: by the rank at 0 on the axes that split what vanishes
    "aten.addmm": by(added_product),
    "aten._addmm_activation": texts("", "n, m [k], [k] n -> m n"),
    "aten.addmv": texts("1|2", "m, m k, k -> m", ", m k, k -> m"),
    "aten.addr": texts("1|2", "m n, m, n -> m n", "n, m, n -> m n"),
    "aten.addbmm": texts("1|2", "m n, b m k, b k n -> m n", "n, b m k, b k n -> m n"),
    "aten.baddbmm": by(added_product),
    "aten.vdot": texts("0|1", "k, k -> "),
    "aten._int_mm": texts("0|1", "m k, k n -> m n"),
    "aten.linalg_cross": by(along(2, "dim", -1, ((0,), (1,)))),
    "aten.trace": texts("0", "[m] [n] -> "),
}
