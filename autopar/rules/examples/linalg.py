"""Calls that prove the rules of `rules/linalg.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.rules.examples.example import Example, Examples, aten, call, definite, drawn, factored, i32, t
from autopar.rules.prove import Sample, random_value


def _on(sample: Sample, target: Callable[..., Any]) -> Example:
    """An op of one batch of square matrices."""
    return drawn(sample, target, t(6, 4, 4))


EXAMPLES: Examples = {
    "aten.cholesky": [_on(definite, aten.cholesky.default)],
    "aten.cholesky_inverse": [_on(definite, aten.cholesky_inverse.default)],
    "aten.cholesky_solve": [drawn(definite, aten.cholesky_solve.default, t(6, 4, 3), t(6, 4, 4))],
    "aten._cholesky_solve_helper": [
        drawn(definite, aten._cholesky_solve_helper.default, t(6, 4, 3), t(6, 4, 4), False),
    ],
    "aten.linalg_cholesky_ex": [_on(definite, aten.linalg_cholesky_ex.default)],
    "aten.linalg_inv_ex": [_on(definite, aten.linalg_inv_ex.default)],
    "aten.linalg_matrix_exp": [_on(definite, aten.linalg_matrix_exp.default)],
    "aten.linalg_householder_product": [
        drawn(random_value, aten.linalg_householder_product.default, t(6, 5, 4), t(6, 4)),
    ],
    "aten.linalg_qr": [
        drawn(random_value, aten.linalg_qr.default, t(6, 5, 4)),
        drawn(random_value, aten.linalg_qr.default, t(6, 5, 4), "complete"),
    ],
    "aten.geqrf": [drawn(random_value, aten.geqrf.default, t(6, 5, 4))],
    "aten.ormqr": [drawn(random_value, aten.ormqr.default, t(6, 5, 4), t(6, 4), t(6, 5, 3))],
    "aten._linalg_svd": [
        drawn(random_value, aten._linalg_svd.default, t(6, 5, 4)),
        drawn(random_value, aten._linalg_svd.default, t(6, 5, 4), True),
    ],
    "aten._linalg_eigh": [_on(definite, aten._linalg_eigh.default)],
    "aten.linalg_eig": [_on(definite, aten.linalg_eig.default)],
    "aten._linalg_eigvals": [_on(definite, aten._linalg_eigvals.default)],
    "aten._linalg_det": [_on(definite, aten._linalg_det.default)],
    "aten._linalg_slogdet": [_on(definite, aten._linalg_slogdet.default)],
    "aten.linalg_lu": [_on(definite, aten.linalg_lu.default)],
    "aten.linalg_lu_factor_ex": [_on(definite, aten.linalg_lu_factor_ex.default)],
    "aten.linalg_lu_solve": [
        drawn(factored, aten.linalg_lu_solve.default, t(6, 4, 4), t(6, 4, dtype=i32), t(6, 4, 2)),
        drawn(factored, aten.linalg_lu_solve.default, t(6, 4, 4), t(6, 4, dtype=i32), t(6, 2, 4), left=False),
    ],
    "aten.lu_unpack": [
        drawn(factored, aten.lu_unpack.default, t(6, 4, 4), t(6, 4, dtype=i32)),
        drawn(factored, aten.lu_unpack.default, t(6, 4, 4), t(6, 4, dtype=i32), True, False),
    ],
    "aten.linalg_ldl_factor_ex": [_on(definite, aten.linalg_ldl_factor_ex.default)],
    "aten._linalg_solve_ex": [
        drawn(definite, aten._linalg_solve_ex.default, t(6, 4, 4), t(6, 4, 2)),
        drawn(definite, aten._linalg_solve_ex.default, t(6, 4, 4), t(6, 4)),
        drawn(definite, aten._linalg_solve_ex.default, t(4, 4), t(2, 4), left=False),
    ],
    "aten.linalg_solve_triangular": [
        drawn(definite, aten.linalg_solve_triangular.default, t(6, 4, 4), t(6, 4, 2), upper=True),
        drawn(definite, aten.linalg_solve_triangular.default, t(6, 4, 4), t(6, 2, 4), upper=False, left=False),
    ],
    "aten.triangular_solve": [drawn(definite, aten.triangular_solve.default, t(6, 4, 2), t(6, 4, 4))],
    "aten._cdist_forward": [
        call(aten._cdist_forward.default, t(2, 6, 3), t(2, 4, 3), 2.0, None),
        call(aten._cdist_forward.default, t(6, 3), t(4, 3), 1.0, 2),
    ],
    "aten._cdist_backward": [
        call(aten._cdist_backward.default, t(2, 6, 4), t(2, 6, 3), t(2, 4, 3), 2.0, t(2, 6, 4)),
    ],
    "aten._euclidean_dist": [call(aten._euclidean_dist.default, t(2, 6, 3), t(2, 4, 3))],
    "aten._pdist_forward": [call(aten._pdist_forward.default, t(4, 6))],
    "aten._pdist_backward": [call(aten._pdist_backward.default, t(6), t(4, 3), 2.0, t(6))],
    "aten.dist": [call(aten.dist.default, t(4, 6), t(4, 6))],
}
