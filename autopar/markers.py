"""Functions that stand in step graphs for what isn't an ATen op: identities that carry a choice, and reshard moves.

`relay` and `accumulate` are identities on the global value. A relay is the one place where the consumers of a value in
one phase share a layout, so that a gather is paid once. `accumulate` adds a microbatch's value to the step's sum.

Moves (`gather`, …) change one axis of a layout and leave the global value as it is; the localise pass lowers them to
the collectives of `autopar.collectives`. Positions are (dim, factor index) in the layout that has or gets the split.
"""

from __future__ import annotations

from torch import Tensor


def relay(x: Tensor) -> Tensor:
    """The same value for all its consumers of one phase, in the layout that they share."""
    return x


def accumulate(x: Tensor) -> Tensor:
    """The sum over microbatches of `x`."""
    return x


def plus(total: Tensor, x: Tensor) -> Tensor:
    """The sum of two scalars. Where one is partial and the other whole, the whole one counts on one rank alone: so a
    chain of sums needs no reduction before its end."""
    return total + x


def gather(x: Tensor, axis: str, dim: int, factor: int) -> Tensor:
    """split → replicated: all-gather; `axis` is the minor-most of its factor."""
    return x


def narrow(x: Tensor, axis: str, dim: int, factor: int) -> Tensor:
    """replicated → split: each rank keeps its part; no communication."""
    return x


def reduce(x: Tensor, axis: str, op: str) -> Tensor:
    """partial → replicated: all-reduce."""
    return x


def reduce_scatter(x: Tensor, axis: str, op: str, dim: int, factor: int) -> Tensor:
    """partial → split."""
    return x


def exchange(x: Tensor, axis: str, dim: int, factor: int, to_dim: int, to_factor: int) -> Tensor:
    """split here → split there: all-to-all."""
    return x


IDENTITIES = frozenset({relay, accumulate})
MOVES = frozenset({gather, narrow, reduce, reduce_scatter, exchange})
