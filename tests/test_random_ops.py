"""Random ops: the parts of a value, drawn apart and in any blocks, are the whole."""

from __future__ import annotations

import pytest
import torch

from autopar import random_ops
from autopar.mesh import Mesh
from autopar.random_ops import random_integers, random_mask, random_normal, random_uniform, shard_arguments
from autopar.randomness import bernoulli, name_word, stream_key
from autopar.rules.examples import node_of, t
from autopar.rules.examples.example import index
from autopar.rules.nodes import is_random
from autopar.rules.prove import single_op
from autopar.solve.costs import compute_costs

KEY = torch.tensor(11)


def test_an_element_is_a_function_of_its_place() -> None:
    index, stream = torch.arange(6 * 10).view(6, 10), stream_key(11, name_word("block#4"))
    assert torch.equal(random_mask(KEY, "block#4", [6, 10], 0.5), bernoulli(stream, index, 0.5))


@pytest.mark.parametrize(
    ("local", "part"),
    [
        ((2, 3, 5, 7), (slice(2, 4), slice(0, 3), slice(0, 5), slice(0, 7))),
        ((4, 1, 5, 7), (slice(0, 4), slice(2, 3), slice(0, 5), slice(0, 7))),
        ((2, 3, 1, 7), (slice(0, 2), slice(0, 3), slice(4, 5), slice(0, 7))),
        ((2, 1, 5, 1), (slice(2, 4), slice(1, 2), slice(0, 5), slice(6, 7))),
    ],
)
@pytest.mark.parametrize("block", [1, 7, 12, 40, 1 << 15])
def test_a_shard_is_its_part_in_blocks_of_any_size(local, part, block, monkeypatch) -> None:
    sizes = (4, 3, 5, 7)
    whole = random_uniform(KEY, "#0", sizes, torch.float64)
    monkeypatch.setitem(random_ops._BLOCK, "cpu", block)
    assert torch.equal(random_uniform(KEY, "#0", sizes, torch.float64), whole)
    kept, strides, own = shard_arguments(sizes, local)
    offset = sum(piece.start * stride for piece, stride in zip(part, own, strict=True))
    drawn = random_uniform(KEY, "#0", local, torch.float64, sizes=kept, strides=strides, offset=offset)
    assert torch.equal(drawn, whole[part])


def test_neighbours_that_lie_together_are_one() -> None:
    assert shard_arguments([8, 4, 6], [2, 4, 6])[:2] == ([48], [1])
    assert shard_arguments([8, 4, 6], [8, 4, 3])[:2] == ([32, 3], [6, 1])
    assert shard_arguments([8, 4, 6], [8, 1, 6])[:2] == ([8, 6], [24, 1])


def test_ops_and_keys_draw_other_numbers() -> None:
    draws = [random_normal(torch.tensor(key), name, [1000], torch.float64) for key in (1, 2) for name in ("a#0", "a#1")]
    correlations = torch.corrcoef(torch.stack(draws)) - torch.eye(4)
    assert correlations.abs().max() < 0.16  # five standard errors


def test_dtypes_and_empty_values() -> None:
    assert random_uniform(KEY, "#0", [3], torch.bfloat16).dtype == torch.bfloat16
    assert random_integers(KEY, "#0", [0, 3], 0, 2, torch.int32).shape == (0, 3)
    assert random_mask(KEY, "#0", [], 1.0).item() is True


def test_a_random_op_costs_its_passes_over_words() -> None:
    def seconds(node) -> float:
        _, probe = single_op(node)
        (cost,) = compute_costs(probe, [()], Mesh.parse("x=2"), lambda flops, num_bytes, dtype: num_bytes)
        return cost

    drawn = seconds(node_of(torch.ops.autopar.random_mask.default, index(), "#0", [6, 4], 0.5))
    assert drawn > 100 * seconds(node_of(torch.ops.aten.full.default, [6, 4], True))


def test_attention_without_dropout_is_not_random() -> None:
    attention, dropout = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten.native_dropout,
    )
    qkv = [t(2, 2, 6, 4) for _ in range(3)]
    assert not is_random(node_of(attention, *qkv)) and not is_random(node_of(attention, *qkv, 0.0, True))
    assert is_random(node_of(dropout.default, t(4, 6), 0.5, True))
    assert not is_random(node_of(dropout.default, t(4, 6), 0.5, False))
    assert not is_random(node_of(torch.ops.autopar.random_mask.default, index(), "#0", [6], 0.5))
