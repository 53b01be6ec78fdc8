"""Random valid plans, executed on the virtual mesh in float64, against the captured step: any layout is right."""

from __future__ import annotations

import random

import pytest

import passes
from autopar.compiling import annotated
from autopar.mesh import Mesh
from tests.virtual.random_plans import even_cut, random_choices, random_pipeline, wrong
from tests.virtual.step_models import step_of

# (model, mesh, microbatches, seed); a longer sweep is the same loop over more seeds
CASES = [
    ("gpt", "dp=2 tp=2", 1, 0),
    ("gpt", "dp=2", 2, 0),
    ("gpt, 3 layers", "pp=3", 2, 0),
    ("gpt, frozen, momentum", "pp=2 tp=2", 2, 1),
    ("gpt, odd sizes", "dp=2 tp=2", 2, 0),
    ("gpt, odd sizes", "tp=4", 1, 1),
    ("llama", "dp=2 tp=2", 1, 0),
    ("gpt2", "dp=2", 1, 1),
    ("gpt2", "pp=2 tp=2", 2, 0),
    ("convnet", "dp=2 tp=2", 2, 0),
    ("convnet", "dp=2", 1, 1),
    *(("squares", "dp=2 tp=3", 2, seed) for seed in range(3)),
]


@pytest.mark.parametrize(("model", "mesh", "microbatches", "seed"), CASES)
def test_random_plan(model: str, mesh: str, microbatches: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CHECK", "1")
    step = step_of(model, microbatches)
    pipeline = random_pipeline(step, Mesh.parse(mesh), seed)
    assert wrong(step, pipeline) == []


def test_random_plan_before_the_passes_on_parts() -> None:
    """Where this holds and `test_random_plan` doesn't, a pass on parts is at fault."""
    step = step_of("gpt", 2)
    assert wrong(step, random_pipeline(step, Mesh.parse("dp=2"), 1, ())) == []


def test_plans_are_random_and_repeatable() -> None:
    step, mesh = step_of("squares"), Mesh.parse("dp=2 tp=3")
    graphs = [annotated(step.capture(), 1, even_cut(step, 1)).graph for _ in range(3)]
    first, again, other = (random_choices(g, mesh, random.Random(s)) for g, s in zip(graphs, (0, 0, 1), strict=True))
    assert first == again != other
    assert len(passes.PART_PASSES) >= 5
