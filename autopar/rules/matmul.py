"""Rules of matrix products: `m k, k n -> m n`; what is summed over vanishes and leaves a partial sum."""

from __future__ import annotations

from autopar.rules.entries import Rows, texts

ROWS: Rows = {
    "aten.mm": texts("0|1", "m k, k n -> m n"),
    "aten.bmm": texts("0|1", "b m k, b k n -> b m n"),
    "aten.dot": texts("0|1", "k, k -> "),
    "aten.mv": texts("0|1", "m k, k -> m"),
    "autopar.linear": texts("0|1", "... i, o i -> ... o", "... i, o i, o -> ... o"),
    "autopar.linear_dx": texts("0|1", "... o, o i -> ... i"),
    "autopar.linear_dw": texts("0|1", "... i, ... o -> o i"),
    "autopar.grouped_mm": texts("0|1", "[s] i, [e] i o, [e] -> [s] o"),
    "autopar.grouped_mm_dx": texts("0|1", "[s] o, [e] i o, [e] -> [s] i"),
    "autopar.grouped_mm_dw": texts("0|1", "[s] i, [s] o, [e] -> [e] i o"),
}
