"""Meshes: text, the numbering of ranks, groups."""

from __future__ import annotations

import itertools
import random

import pytest

from autopar.errors import PlanError
from autopar.mesh import Mesh

MESHES = ["dp=2", "dp=2 tp=3", "pp=2 dp=3 tp=2", "pp=4 a=2 b=1 c=3"]


@pytest.mark.parametrize("text", MESHES)
def test_text_parses_back(text: str) -> None:
    assert str(Mesh.parse(text)) == text
    assert Mesh.parse(str(Mesh.parse(text))) == Mesh.parse(text)


@pytest.mark.parametrize("text", ["dp", "dp=two", "dp=2=3", "dp:2", "=2", "dp=0", "dp=-1", "dp=2 dp=2"])
def test_malformed_is_refused(text: str) -> None:
    with pytest.raises(PlanError) as error:
        Mesh.parse(text)
    assert text in str(error.value) and error.value.exit_status == 2


@pytest.mark.parametrize("text", MESHES)
def test_ranks_and_coordinates_are_inverse_and_the_last_axis_runs_fastest(text: str) -> None:
    mesh = Mesh.parse(text)
    positions = list(itertools.product(*(range(size) for _, size in mesh.axes)))
    assert mesh.num_ranks == len(positions)
    for rank, position in enumerate(positions):
        assert mesh.coordinates(rank) == dict(zip(mesh.names, position, strict=True))
        assert mesh.rank(mesh.coordinates(rank)) == rank


@pytest.mark.parametrize("text", MESHES)
def test_groups_partition_the_ranks_in_order_of_the_coordinate(text: str) -> None:
    mesh = Mesh.parse(text)
    for axis in mesh.names:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.num_ranks))
        assert groups == sorted(groups)
        for group in groups:
            assert [mesh.coordinates(rank)[axis] for rank in group] == list(range(mesh.size(axis)))
            others = {tuple(v for k, v in mesh.coordinates(rank).items() if k != axis) for rank in group}
            assert len(others) == 1


def test_stage_mesh_and_missing_axes() -> None:
    mesh = Mesh.parse("pp=2 dp=3")
    assert mesh.num_stages == 2
    assert str(mesh.spmd) == "dp=3" and mesh.spmd.num_stages == 1
    assert mesh.size("tp") == 1
    assert mesh.rank({"dp": 2}) == 2


def test_rank_formula_of_the_docstring() -> None:
    mesh = Mesh.parse("pp=2 dp=2 tp=4")
    rng = random.Random(0)
    for _ in range(10):
        pp, dp, tp = rng.randrange(2), rng.randrange(2), rng.randrange(4)
        assert mesh.rank({"pp": pp, "dp": dp, "tp": tp}) == (pp * 2 + dp) * 4 + tp
