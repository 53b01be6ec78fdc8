"""Units: the blocks between which a model is cut into stages."""

from __future__ import annotations

import pytest

from autopar.errors import PlanError
from autopar.layers import Cut, block_of, units_of
from tests.virtual.step_models import step_of


@pytest.mark.parametrize(
    ("path", "block"),
    [
        ("model.layers.3.mlp.up_proj", "model.layers.3"),
        ("h.0", "h.0"),
        ("blocks.1.experts.7.up", "blocks.1"),
        ("model.embed_tokens", None),
        ("", None),
        ("layer1.conv2", None),
    ],
)
def test_block_of(path: str, block: str | None) -> None:
    assert block_of(path) == block


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gpt, 3 layers", ["tokens", "blocks.0", "blocks.1", "blocks.2", "norm"]),
        ("llama, 2 layers", ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]),
        ("gpt2", ["transformer.wte", "transformer.h.0", "transformer.ln_f"]),
    ],
)
def test_units_are_what_runs_before_the_blocks_each_block_and_what_runs_after(model: str, expected: list[str]) -> None:
    names, unit = units_of(step_of(model).capture().gradient.graph)
    assert [name for name in names if block_of(name)] == [name for name in expected if block_of(name)]
    assert len(names) == len(expected)
    order = [unit[node] for node in step_of(model).capture().gradient.graph.nodes if node in unit]
    assert set(order) == set(range(len(names)))


def test_without_module_lists_the_modules_of_the_first_level_are_units() -> None:
    graph = step_of("convnet").capture().gradient.graph
    names, unit = units_of(graph)
    assert names == ("conv", "norm", "head", "output")
    order = [unit[node] for node in graph.nodes if node in unit]
    assert order == sorted(order) and set(order) == {0, 1, 2, 3}


def test_a_model_without_modules_is_one_unit() -> None:
    names, unit = units_of(step_of("squares").capture().gradient.graph)
    assert len(names) == 1 and set(unit.values()) == {0}


def test_cuts() -> None:
    units = ("embed", "layers.0", "layers.1", "layers.2", "head")
    assert Cut.single(units).stages == (0, 0, 0, 0, 0)
    cut = Cut.from_boundaries(units, [0, 2, 4])
    assert cut.stages == (0, 0, 1, 1, 2) and cut.num_stages == 3


def test_more_stages_than_units() -> None:
    with pytest.raises(PlanError, match="4 stages asked for, but the model has 3 units"):
        Cut.from_boundaries(("a", "b", "c"), [0, 1, 2, 3])
