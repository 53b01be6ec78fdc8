"""Rules of copies: every dim is free, and partial sums pass."""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.rules.entries import Rows, by, texts
from autopar.rules.letters import from_letters, letters
from autopar.rules.nodes import result_values, tensor_operands
from autopar.rules.notation import BoundRule


def copied(node: Node) -> BoundRule:
    """`... -> ...`; partial sums pass but through a cast that rounds to whole numbers, or to bool."""
    (operand,), (result,) = tensor_operands(node), result_values(node)
    assert result is not None
    source = operand.meta["val"].dtype
    rounds = result.dtype == torch.bool or (source.is_floating_point and not result.dtype.is_floating_point)
    dims, sizes = letters(tuple(map(int, result.shape)), "d")
    return from_letters([dims], [dims], sizes, linear=() if rounds else ((0,),))


ROWS: Rows = {
    "aten._to_copy": by(copied),
    "aten.clone": texts("0", "... -> ..."),
    "aten.contiguous": texts("0", "... -> ..."),
    "aten.alias": texts("0", "... -> ..."),
    "aten.detach": texts("0", "... -> ..."),
    "aten.lift_fresh_copy": texts("0", "... -> ..."),
    "relay": texts("0", "... -> ..."),
    "accumulate": texts("0", "... -> ..."),
    "plus": texts("01|0|1", ", -> "),
}
