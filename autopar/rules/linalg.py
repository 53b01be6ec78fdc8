"""Rules of linear algebra on batches of matrices: batch dims are free, the matrices whole.

Right-hand sides are free in their columns. A factorisation that comes with a solution doesn't depend on these.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from autopar.rules.entries import Rows, by, texts
from autopar.rules.letters import from_letters, letters, whole, whole_letters
from autopar.rules.nodes import shapes_of
from autopar.rules.notation import BoundRule, Dims, Linear, Shape, bind, parse_rule


def _on_either_side(left: str, right: str, linear: Linear = ()) -> Callable[[Node], BoundRule]:
    """The rule of a solve by where the unknown stands: `A X = B`, or `X A = B` (the op's argument `left` is False)."""

    def rule(node: Node) -> BoundRule:
        operands, results = shapes_of(node)
        return bind(parse_rule(left if node.kwargs.get("left", True) else right, linear), operands, results)

    return rule


def solved(node: Node) -> BoundRule:
    """`A X = B`; a `B` of vectors (of the rank of A less one) has no columns to split."""
    (matrix, right), results = shapes_of(node)
    factors = "... [n] [m] =k, ... [p] =k, ... =k"
    if len(right) == 1 or right == matrix[:-1]:
        text = "... [n] [m], ... [a] -> ... [a], ... [n] [m], ... [p], ..."
    elif node.kwargs.get("left", True):
        text = f"... [n] [m], ... [a] k -> ... [a] k, {factors}"
    else:
        text = f"... [n] [m], ... k [a] -> ... k [a], {factors}"
    return bind(parse_rule(text), (matrix, right), results)


def unpacked(node: Node) -> BoundRule:
    """Batch dims are free; of what isn't asked for there is an empty result."""
    (matrix, pivots), results = shapes_of(node)
    rank = len(matrix) - 2
    batch, sizes = letters(matrix[:rank], "d")
    kept = set[str]()

    def dims(shape: Shape, value: int) -> Dims:
        if shape[:rank] != matrix[:rank]:
            return whole_letters(shape, f"e{value}_", sizes, kept)
        return (*batch, *whole_letters(shape[rank:], f"x{value}_", sizes, kept))

    operands, outs = [dims(matrix, 0), dims(pivots, 1)], [dims(shape, 2 + i) for i, shape in enumerate(results)]
    lacking = [{name for (name,) in batch} - {name for (name,) in out} for out in outs]
    return from_letters(operands, outs, sizes, kept, same=lacking)


_ONE = texts("", "... [n] [m] -> ... [n] [m]")
_SQUARE_AND_INFO = texts("", "... [n] [m] -> ... [n] [m], ...")
_FACTORS_2 = texts("", "... [n] [m] -> ... [a] [b], ... [c] [d]")

ROWS: Rows = {
    "aten.cholesky": _ONE,
    "aten.cholesky_inverse": _ONE,
    "aten.cholesky_solve": texts("0", "... [n] k, ... [m] [l] -> ... [n] k"),
    "aten._cholesky_solve_helper": texts("0", "... [n] k, ... [m] [l] -> ... [n] k"),
    "aten.linalg_cholesky_ex": _SQUARE_AND_INFO,
    "aten.linalg_inv_ex": _SQUARE_AND_INFO,
    "aten.linalg_matrix_exp": _ONE,
    "aten.linalg_householder_product": texts("", "... [n] [m], ... [k] -> ... [n] [m]"),
    "aten.linalg_qr": _FACTORS_2,
    "aten.geqrf": texts("", "... [n] [m] -> ... [n] [m], ... [k]"),
    "aten.ormqr": texts("2", "... [n] [m], ... [k], ... [a] [b] -> ... [a] [b]"),
    "aten._linalg_svd": texts("", "... [n] [m] -> ... [a] [b], ... [k], ... [c] [d]"),
    "aten._linalg_eigh": texts("", "... [n] [m] -> ... [k], ... [a] [b]"),
    "aten.linalg_eig": texts("", "... [n] [m] -> ... [k], ... [a] [b]"),
    "aten._linalg_eigvals": texts("", "... [n] [m] -> ... [k]"),
    "aten._linalg_det": texts("", "... [n] [m] -> ..., ... [a] [b], ... [k]"),
    "aten._linalg_slogdet": texts("", "... [n] [m] -> ..., ..., ... [a] [b], ... [k]"),
    "aten.linalg_lu": texts("", "... [n] [m] -> ... [a] [b], ... [c] [d], ... [e] [f]"),
    "aten.linalg_lu_factor_ex": texts("", "... [n] [m] -> ... [n] [m], ... [k], ..."),
    "aten.linalg_lu_solve": by(
        _on_either_side(
            "... [n] [m], ... [p], ... [a] k -> ... [a] k", "... [n] [m], ... [p], ... k [a] -> ... k [a]", ((2,),)
        )
    ),
    "aten.lu_unpack": by(unpacked),
    "aten.linalg_ldl_factor_ex": texts("", "... [n] [m] -> ... [n] [m], ... [k], ..."),
    "aten._linalg_solve_ex": by(solved),
    "aten.linalg_solve_triangular": by(
        _on_either_side("... [n] [m], ... [a] k -> ... [a] k", "... [n] [m], ... k [a] -> ... k [a]", ((1,),))
    ),
    "aten.triangular_solve": texts("", "... [a] k, ... [n] [m] -> ... [a] k, ... [n] [m] =k"),
    "aten._cdist_forward": texts("", "... p [m], ... r [m] -> ... p r"),
    "aten._cdist_backward": texts("0", "... p r, ... p [m], ... r [m], ... p r -> ... p [m]"),
    "aten._euclidean_dist": texts("", "... p [m], ... r [m] -> ... p r"),
    "aten._pdist_forward": texts("", "[n] [m] -> [k]"),
    "aten._pdist_backward": texts("0", "[k], [n] [m], [k] -> [n] [m]"),
    "aten.dist": by(whole),
}
