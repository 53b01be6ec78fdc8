"""Rules of ops that make values: constant, or knowing their offset."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from autopar.rules.entries import Rows, by, texts
from autopar.rules.letters import from_letters, letters
from autopar.rules.nodes import shapes_of
from autopar.rules.notation import BoundRule
from autopar.rules.pointwise import pointwise


def factory_like(node: Node) -> BoundRule:
    """`new_zeros(x, size)`: the result takes nothing but the dtype from its operand, however that is split."""
    (operand,), (result,) = shapes_of(node)
    operand_dims, sizes = letters(operand, "x")
    dims, result_sizes = letters(result, "d")
    return from_letters([operand_dims], [dims], {**sizes, **result_sizes}, same=[set(sizes)])


def drawn(node: Node) -> BoundRule:
    """`1 -> ...`: a random op knows the global index of each element, wherever its shard lies."""
    rule = factory_like(node)
    return replace(rule, anywhere=frozenset(rule.sizes))


_WHOLE_RANGES = (
    *("linspace", "logspace", "range", "fft_fftfreq", "fft_rfftfreq", "bartlett_window", "blackman_window"),
    *("hamming_window", "hann_window", "kaiser_window"),
)

ROWS: Rows = {
    "aten.arange": texts("", "-> a"),
    "aten.full": texts("", "-> ..."),
    "aten.zeros": texts("", "-> ..."),
    "aten.ones": texts("", "-> ..."),
    "aten.empty": texts("", "-> ..."),
    "aten.scalar_tensor": texts("", "-> "),
    "aten.full_like": by(pointwise),
    "aten.zeros_like": by(pointwise),
    "aten.ones_like": by(pointwise),
    "aten.empty_like": by(pointwise),
    "aten.new_zeros": by(factory_like),
    "aten.new_full": by(factory_like),
    "aten.new_ones": by(factory_like),
    "autopar.random_mask": by(drawn),
    "autopar.random_uniform": by(drawn),
    "autopar.random_normal": by(drawn),
    "autopar.random_integers": by(drawn),
    "aten.new_empty": by(factory_like),
    "aten.new_empty_strided": by(factory_like),
    "aten.empty_strided": texts("", "-> ..."),
    "aten.empty_permuted": texts("", "-> ..."),
    # whole: each element depends on where it stands
    **dict.fromkeys(("aten.eye", "aten.tril_indices", "aten.triu_indices"), texts("", "-> [a] [b]")),
    **{f"aten.{name}": texts("", "-> [a]") for name in _WHOLE_RANGES},
}
