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
    fft,
    indexing,
    linalg,
    losses,
    matmul,
    normalisation,
    pieces,
    pointwise,
    pooling,
    rearrangements,
    reductions,
    resampling,
    scattering,
    views,
)
from autopar.rules.examples.example import Example, Examples, index, mask, node_of, t

EXAMPLES: Examples = {
    **matmul.EXAMPLES,
    **attention.EXAMPLES,
    **views.EXAMPLES,
    **rearrangements.EXAMPLES,
    **pieces.EXAMPLES,
    **reductions.EXAMPLES,
    **normalisation.EXAMPLES,
    **along.EXAMPLES,
    **convolution.EXAMPLES,
    **pooling.EXAMPLES,
    **resampling.EXAMPLES,
    **fft.EXAMPLES,
    **linalg.EXAMPLES,
    **losses.EXAMPLES,
    **indexing.EXAMPLES,
    **scattering.EXAMPLES,
    **factories.EXAMPLES,
    **copies.EXAMPLES,
    **pointwise.EXAMPLES,
}
"""All of them, in the order of the table."""

__all__ = ["EXAMPLES", "Example", "Examples", "index", "mask", "node_of", "t"]
