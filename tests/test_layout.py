"""Layouts over factors: text, local shapes, and sharding as the inverse of unsharding."""

from __future__ import annotations

import math
import random

import pytest
import torch

from autopar.layout import Factor, Layout, is_worth_splitting
from autopar.mesh import Mesh
from tests.random_layouts import SHAPES, random_layout

MESHES = ["dp=2 tp=3", "a=2 b=3 c=2", "dp=2"]


# -- text --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[1024]",
        "[(8@dp 4096@tp) 1024]",
        "[(8@dp 4096) 1024] +tp",
        "[4096@tp.dp 1]",
        "[1 1 6] +dp +max:tp",
        "[(2 12@a.b.c) 6] +min:d",
    ],
)
def test_text_parses_back(text: str) -> None:
    layout = Layout.parse(text)
    assert str(layout) == text
    assert Layout.parse(str(layout)) == layout


def test_what_the_text_means() -> None:
    layout = Layout.parse("[(8@dp 4096@tp) 1024] +cp")
    assert layout.dims == ((Factor(8, ("dp",)), Factor(4096, ("tp",))), (Factor(1024),))
    assert layout.partial == (("cp", "sum"),)
    assert layout.global_shape == (8 * 4096, 1024)
    assert layout.position("tp") == (0, 1) and layout.position("cp") is None
    assert layout.partial_op("cp") == "sum" and layout.partial_op("tp") is None
    assert layout.split_axes == ("dp", "tp") and not layout.is_replicated


def test_a_factor_of_size_one_does_not_exist() -> None:
    assert Layout.parse("[(1 8) 1]") == Layout.parse("[8 1]")
    assert Layout.parse("[8 1]").factor_sizes == ((8,), ())


@pytest.mark.parametrize("mesh_text", MESHES)
def test_random_text_parses_back(mesh_text: str) -> None:
    rng, mesh = random.Random(0), Mesh.parse(mesh_text)
    for sizes in SHAPES:
        for _ in range(20):
            layout = random_layout(sizes, mesh, rng)
            assert Layout.parse(str(layout)) == layout


# -- editing -----------------------------------------------------------------------------------------------------
def test_split_is_minor_to_the_axes_already_there() -> None:
    layout = Layout.whole(((12,),)).split("tp", (0, 0)).split("dp", (0, 0))
    assert str(layout) == "[12@tp.dp]"
    assert str(layout.drop("tp")) == "[12@dp]"


def test_drop_takes_a_partial_away() -> None:
    assert str(Layout.parse("[12@dp] +tp").drop("tp")) == "[12@dp]"


def test_layouts_are_equal_whatever_the_order_in_which_partials_came() -> None:
    whole = Layout.whole(((6,),))
    assert whole.add_partial("b").add_partial("a") == whole.add_partial("a").add_partial("b")


# -- tensors -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mesh_text", MESHES)
def test_unshard_is_the_inverse_of_shard(mesh_text: str) -> None:
    rng, mesh = random.Random(1), Mesh.parse(mesh_text)
    for sizes in SHAPES:
        for _ in range(12):
            layout = random_layout(sizes, mesh, rng)
            whole = torch.randn(layout.global_shape, dtype=torch.float64)
            shards = [layout.shard(whole, mesh, mesh.coordinates(rank)) for rank in range(mesh.num_ranks)]
            assert all(tuple(shard.shape) == layout.local_shape(mesh) for shard in shards)
            back = layout.unshard(lambda at, shards=shards: shards[mesh.rank(at)], mesh)
            assert torch.equal(back, whole), str(layout)


def test_every_element_lies_on_as_many_ranks_as_axes_leave() -> None:
    rng, mesh = random.Random(2), Mesh.parse("a=2 b=3 c=2")
    for sizes in SHAPES:
        for _ in range(8):
            layout = random_layout(sizes, mesh, rng, partial=False)
            numbers = torch.arange(torch.Size(layout.global_shape).numel()).reshape(layout.global_shape)
            shards = [layout.shard(numbers, mesh, mesh.coordinates(rank)) for rank in range(mesh.num_ranks)]
            content = [layout.content(s, mesh, mesh.coordinates(rank)) for rank, s in enumerate(shards)]
            counts = torch.bincount(torch.cat([own.flatten() for own in content]))
            assert counts.eq(mesh.num_ranks // math.prod(map(mesh.size, layout.split_axes))).all()


def test_a_middle_factor_gives_a_strided_shard() -> None:
    """What a fused qkv split by heads needs: rows of each of q, k and v."""
    layout, mesh = Layout.parse("[(3 4@tp 2)]"), Mesh.parse("tp=2")
    assert layout.shard(torch.arange(24), mesh, {"tp": 1}).tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]


def test_a_factor_that_an_axis_does_not_divide_is_padded() -> None:
    layout, mesh, whole = Layout.parse("[5@tp]"), Mesh.parse("tp=2"), torch.arange(1, 6)
    shards = [layout.shard(whole, mesh, {"tp": i}) for i in range(2)]
    assert [shard.tolist() for shard in shards] == [[1, 2, 3], [4, 5, 0]]
    assert [layout.content(shard, mesh, {"tp": i}).tolist() for i, shard in enumerate(shards)] == [[1, 2, 3], [4, 5]]
    assert layout.is_padded(mesh) and not Layout.parse("[6@tp]").is_padded(mesh)
    poisoned = [shards[0], torch.tensor([4, 5, 99])]
    assert torch.equal(layout.unshard(lambda at: poisoned[at["tp"]], mesh), whole)


def test_a_second_axis_splits_the_chunks_of_the_first() -> None:
    """Chunks of chunks: 5 over a is 3 and 2, each over b is 2 and 1, or 2 and nothing."""
    layout, mesh = Layout.parse("[5@a.b]"), Mesh.parse("a=2 b=2")
    content = [
        layout.content(layout.shard(torch.arange(5), mesh, at), mesh, at).tolist()
        for at in map(mesh.coordinates, range(4))
    ]
    assert content == [[0, 1], [2], [3, 4], []]
    assert layout.local_shape(mesh) == (2,)


@pytest.mark.parametrize(("size", "ways", "fits"), [(6, [4], True), (2, [4], False), (2, [3], True), (5, [2, 2], True)])
def test_a_split_that_leaves_more_padding_than_content_is_not_worth_it(size: int, ways: list[int], fits: bool) -> None:
    assert is_worth_splitting(size, ways) == fits


def test_the_first_axis_of_a_factor_is_major() -> None:
    mesh, numbers = Mesh.parse("dp=2 tp=2"), torch.arange(8)
    at = {"dp": 0, "tp": 1}
    assert Layout.parse("[8@tp.dp]").shard(numbers, mesh, at).tolist() == [4, 5]
    assert Layout.parse("[8@dp.tp]").shard(numbers, mesh, at).tolist() == [2, 3]


@pytest.mark.parametrize(("op", "expected"), [("sum", 9.0), ("max", 5.0), ("min", 4.0), ("prod", 20.0)])
def test_partials_combine_by_their_reduction(op: str, expected: float) -> None:
    layout, mesh = Layout.whole(((2,),)).add_partial("tp", op), Mesh.parse("tp=2")
    parts = [torch.full((2,), 4.0), torch.full((2,), 5.0)]
    assert layout.unshard(lambda at: parts[at["tp"]], mesh).tolist() == [expected] * 2


def test_a_partial_sum_of_infinity_is_nowhere_not_a_number() -> None:
    layout, mesh = Layout.parse("[2] +tp"), Mesh.parse("tp=2")
    whole = torch.tensor([1.0, -torch.inf])
    shards = [layout.shard(whole, mesh, {"tp": i}) for i in range(2)]
    assert torch.equal(layout.unshard(lambda at: shards[at["tp"]], mesh), whole)


def test_scalars_have_a_layout() -> None:
    layout, mesh = Layout.parse("[] +tp"), Mesh.parse("tp=2")
    assert layout.global_shape == () == layout.local_shape(mesh)
    shards = [layout.shard(torch.tensor(3.0), mesh, {"tp": i}) for i in range(2)]
    assert [s.item() for s in shards] == [3.0, 0.0]
    assert layout.unshard(lambda at: shards[at["tp"]], mesh).item() == 3.0
