"""Prices for flows too large for a linear solver: sequential tree-reweighted messages, and subgradient steps.

    for prices, choice in ascend(flow, rounds, upper):      # each round's prices prove a bound (`flow.price`)
        ...

For fixed prices of limits and peaks, one sweep over the nodes, forward and back, moves cost along links so that the
bound rises (TRW-S: Kolmogorov, "Convergent tree-reweighted message passing", 2006, section 4); the way back also reads
off a choice. Between sweeps, the price of a limit rises while the choice breaks it and falls while there is room, and
the weight of a peak moves to its greatest row (Polyak steps). No result is taken on trust: bounds come from
`flow.price`, objectives from `evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from autopar.solve.flow import Block, Flow, Priced, Prices, price, row_weights
from autopar.solve.model import Index
from autopar.solve.problem import Array

SWEEPS = 3
FIRST_PRICE = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class _End:
    """One end of a link as a node sees it: the other node, and how its strategies fall into classes."""

    other: int
    members: Index
    order: Index
    starts: Index
    here: slice
    there: slice
    matrix: int
    is_source: bool

    def least(self, values: Array) -> Array:
        """The least of `values` per class."""
        return np.minimum.reduceat(values[self.order], self.starts)


def ascend(flow: Flow, rounds: int, offer: Callable[[Mapping[int, int]], float]) -> Priced:
    """The best prices of `rounds` rounds; each round's choice goes to `offer`, which says what the best so far costs."""
    prices = _no_prices(flow)
    best, steepness = price(flow, prices), 1.0
    for _ in range(rounds):
        coupling, choice = _sweep(flow, prices)
        upper = offer(choice)
        found = price(flow, replace(prices, coupling=coupling))
        steepness = 1.0 if found.bound > best.bound else max(0.05, 0.9 * steepness)
        best = found if found.bound > best.bound else best
        if not flow.memory and not flow.model.peaks and found.bound - best.bound < 1e-7 * abs(best.bound):
            continue
        prices = _step(flow, found, choice, upper, steepness)
    return best
