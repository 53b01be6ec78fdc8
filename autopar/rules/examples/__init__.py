"""Calls that prove the rules of the table: for each row its attribute variants, at distinct sizes.

EXAMPLES["aten.mm"][0].node()
"""

from __future__ import annotations

from autopar.rules.examples import (
    along,
    attention,
    convolution,
    copies,
    factories,
    indexing,
    matmul,
    normalisation,
    pieces,
    pointwise,
    pooling,
    reductions,
    views,
)
from autopar.rules.examples.example import Example, Examples, index, mask, node_of, t

EXAMPLES: Examples = {
    **matmul.EXAMPLES,
    **attention.EXAMPLES,
    **views.EXAMPLES,
    **pieces.EXAMPLES,
    **reductions.EXAMPLES,
    **normalisation.EXAMPLES,
    **along.EXAMPLES,
    **convolution.EXAMPLES,
    **pooling.EXAMPLES,
    **indexing.EXAMPLES,
    **factories.EXAMPLES,
    **copies.EXAMPLES,
    **pointwise.EXAMPLES,
}
"""All of them, in the order of the table."""

__all__ = ["EXAMPLES", "Example", "Examples", "index", "mask", "node_of", "t"]
