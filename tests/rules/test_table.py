"""Every row of the table of rules, proven by execution: each choice on two-way, three-way and two-axis meshes."""

from __future__ import annotations

import functools

import pytest

from autopar.rules import proofs
from autopar.rules.examples import EXAMPLES
from autopar.rules.table import _ROWS

PLACED = ("eye", "tril_indices", "triu_indices", "linspace", "logspace", "range", "fft_fftfreq", "fft_rfftfreq")
WINDOWS = ("bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window")
UNSPLIT = frozenset(
    f"aten.{name}"
    for name in (
        *("scalar_tensor",),  # no dims
        *(
            "put",
            "as_strided_scatter",
            "masked_scatter",
            "masked_scatter_backward",
            "_pdist_forward",
            "dist",
        ),  # need all elements
        *("_is_all_true", "_is_any_true"),  # no collective of bools
        *(*PLACED, *WINDOWS),  # elements depend on where they stand
    )
)
"""Rows that say that nothing can be split."""


@functools.cache
def proof(name: str) -> proofs.Proof:
    return proofs.proof_of(proofs.table_row(name))


@pytest.mark.parametrize("name", EXAMPLES)
def test_row(name: str) -> None:
    found = proof(name)
    assert not found.counterexamples, "\n".join(found.counterexamples)
    assert found.executed > 0
    assert (found.divided > 0) == (name not in UNSPLIT)


def test_no_row_is_left_unproven() -> None:
    assert set(EXAMPLES) == set(_ROWS)


def test_how_much_is_proven() -> None:
    """The executions are counted by `autopar rules --prove`."""
    assert len(EXAMPLES) - len(UNSPLIT) >= 310
    assert sum(map(len, EXAMPLES.values())) >= 500
