"""Each kind of row, changed in one place, is caught: what isn't caught when it is wrong isn't proven when it is right.

That the row as it is has no counterexample, `test_table` says.

A change frees a whole letter, drops or adds what a result doesn't depend on, adds or loosens linear operands, exchanges
the factors of a product, or takes another reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.mesh import Mesh
from autopar.rules.entries import Entry
from autopar.rules.examples import EXAMPLES, Example
from autopar.rules.notation import BoundRule, Linear
from autopar.rules.prove import prove
from autopar.rules.table import _ROWS, rule_of

Change = Callable[[BoundRule], BoundRule]


def freed(*letters: str) -> Change:
    def change(rule: BoundRule) -> BoundRule:
        assert rule.whole >= set(letters), rule
        return replace(rule, whole=rule.whole - set(letters))

    return change


def linear(sets: Linear) -> Change:
    return lambda rule: replace(rule, linear=sets)


def summed(rule: BoundRule) -> BoundRule:
    """What doesn't depend on a vanished letter is taken for a partial sum."""
    assert any(rule.same), rule
    return replace(rule, same=(frozenset(),) * len(rule.results))


def same(result: int, *letters: str) -> Change:
    """A partial sum is taken for what doesn't depend on the letters."""
    return lambda rule: replace(
        rule, same=tuple(s | set(letters) if i == result else s for i, s in enumerate(rule.same))
    )


def reduced(op: str) -> Change:
    return lambda rule: replace(rule, reductions=(op,) * len(rule.results))


def reversed_products(rule: BoundRule) -> BoundRule:
    return replace(rule, results=tuple(tuple(dim[::-1] for dim in dims) for dims in rule.results))


def reversed_operands(rule: BoundRule) -> BoundRule:
    return replace(rule, operands=tuple(tuple(dim[::-1] for dim in dims) for dims in rule.operands))


def unindexed(rule: BoundRule) -> BoundRule:
    assert rule.indexes
    return replace(rule, indexes={})


CHANGES: list[tuple[str, int, Change]] = [
    # matmul
    ("aten.addmm", 0, linear(((0,), (1,), (2,)))),
    ("aten.addmm", 0, linear(((1, 2),))),
    ("aten.baddbmm", 0, same(0, "k")),
    ("aten._addmm_activation", 0, freed("k")),
    # attention
    ("autopar.attention", 1, freed("t")),
    ("autopar.attention", 0, freed("s")),
    ("autopar.attention_backward", 1, same(1, "g")),
    ("aten._scaled_dot_product_flash_attention_for_cpu", 1, freed("s")),
    # views and rearrangements
    ("aten.as_strided", 1, reversed_operands),
    ("aten.repeat", 0, reversed_products),
    ("aten.pixel_shuffle", 0, reversed_products),
    ("aten.pixel_shuffle", 0, freed("r", "q")),
    ("aten.channel_shuffle", 0, reversed_products),
    ("aten.unfold", 1, freed("d1", "n")),
    ("aten.im2col", 0, reversed_products),
    ("aten.diagonal", 0, freed("x0_0", "k")),
    ("aten.view_as_real", 0, freed("z")),
    # pieces
    ("aten.narrow_copy", 2, freed("x", "d1")),
    ("aten.cat", 0, linear(((0,), (1,)))),
    ("aten.constant_pad_nd", 2, freed("d1", "y1")),
    # reductions
    ("aten.amin", 0, reduced("max")),
    ("aten.aminmax", 0, reduced("max")),
    ("aten.std", 0, freed("d1")),
    ("aten.prod", 0, freed("d1")),
    ("aten.argmax", 0, freed("d1")),
    ("aten.linalg_vector_norm", 0, freed("d1")),
    ("aten.linalg_vector_norm", 1, reduced("sum")),
    ("aten.median", 1, freed("d0")),
    ("aten.histc", 0, reduced("max")),
    # normalisation
    ("aten.native_layer_norm", 1, freed("d1")),
    ("aten.native_layer_norm_backward", 0, same(1, "d0", "d1")),
    ("aten.native_group_norm", 0, freed("p")),
    ("aten.native_group_norm_backward", 0, same(1, "n")),
    ("aten._native_batch_norm_legit_functional", 0, freed("n")),
    ("aten._native_batch_norm_legit_functional", 1, summed),
    ("aten.native_batch_norm_backward", 0, freed("n")),
    ("aten.native_batch_norm_backward", 1, same(1, "n")),
    ("aten._weight_norm_interface", 0, freed("d1")),
    ("aten._fused_rms_norm", 1, freed("d1")),
    # along dims
    ("aten._log_softmax", 0, freed("x0_0", "x1_0")),
    ("aten.cummax", 0, freed("x0_1", "x1_1", "x2_1")),
    ("aten.flip", 0, freed("x0_1", "x1_1")),
    ("aten.glu", 0, freed("halves")),
    ("aten.glu", 0, reversed_operands),
    ("aten.renorm", 0, freed("d0")),
    ("aten.tril", 0, freed("d1")),
    # convolution, pooling, resampling, Fourier
    ("aten.convolution", 0, freed("k1")),
    ("aten.convolution", 4, reversed_products),
    ("aten.convolution_backward", 1, summed),
    ("aten.convolution_backward", 0, same(1, "n")),
    ("aten.max_pool2d_with_indices", 0, freed("h", "y")),
    ("aten.max_pool2d_with_indices", 0, linear(((0,),))),
    ("aten.reflection_pad1d", 0, freed("w", "x")),
    ("aten.upsample_bilinear2d", 0, freed("h", "w")),
    ("aten.grid_sampler_2d_backward", 0, same(0, "y", "x")),
    ("aten.grid_sampler_2d_backward", 0, same(1, "c")),
    ("aten._fft_c2c", 0, freed("x0_1", "x1_1")),
    # linear algebra
    ("aten.cholesky", 0, freed("n")),
    ("aten._linalg_solve_ex", 0, summed),
    ("aten.triangular_solve", 0, linear(((0,),))),
    ("aten._cdist_backward", 0, same(0, "r")),
    # losses
    ("aten.mse_loss", 1, reduced("max")),
    ("aten.nll_loss_forward", 1, freed("d0")),
    ("aten.nll_loss_backward", 0, linear(((1,),))),
    ("aten.nll_loss_forward", 2, freed("d1")),
    # indexing, scattering
    ("aten.embedding", 0, unindexed),
    ("aten.gather", 0, unindexed),
    ("aten.index", 0, freed("x0_0")),
    ("aten._embedding_bag", 0, summed),
    ("aten.searchsorted", 1, same(0, "s")),
    ("aten.index_add", 0, freed("x0_1")),
    ("aten.index_add", 0, same(0, "i")),
    ("aten.index_put", 1, freed("i0")),
    ("aten.index_put", 0, linear(((0,), (2,)))),
    ("aten.scatter", 0, freed("d1")),
    # factories and copies
    ("aten.new_full", 0, summed),
    ("aten.eye", 0, freed("a")),
    ("aten.linspace", 0, freed("a")),
    ("aten._to_copy", 2, linear(((0,),))),
    ("aten.log_sigmoid_backward", 0, linear(((1,),))),
    ("aten.constant_pad_nd", 1, linear(((0,),))),
]


def counterexamples(example: Example) -> list[str]:
    return list(map(str, prove(example.node(), Mesh.parse("x=2"), sample=example.samples[0])[1]))


@pytest.mark.parametrize(("name", "which", "change"), CHANGES)
def test_change_is_caught(name: str, which: int, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    example = EXAMPLES[name][which]
    right = rule_of(example.node())
    wrong = change(right)
    assert wrong != right
    monkeypatch.setitem(_ROWS, name, Entry(function=lambda node: wrong))
    assert counterexamples(example)
