"""A row of the table of rules: an op's rule in the notation, or a function from the node to its rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Node

from autopar.rules.notation import BoundRule, Linear, parse_linear


@dataclass(frozen=True, slots=True)
class Entry:
    """How an op's rule is found: texts in the notation (the first that fits the node), or a function of the node."""

    texts: tuple[str, ...] = ()
    linear: Linear = ()
    function: Callable[[Node], BoundRule] | None = None


Rows = dict[str, Entry]
"""Entries by the op's name, with its overload where that matters: `aten.mm`, `aten.max.other`."""


def texts(linear: str, *rules: str) -> Entry:
    """A row in the notation; `"0|1"` is linear in each operand alone, `"01"` in both jointly."""
    return Entry(rules, parse_linear(linear))


def by(function: Callable[[Node], BoundRule]) -> Entry:
    """A row that depends on the op's attributes."""
    return Entry(function=function)
