"""Every row of the table of rules, proven by execution: each choice on two-way, three-way and two-axis meshes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from autopar.mesh import Mesh
from autopar.rules.examples import EXAMPLES, Example
from autopar.rules.prove import prove
from autopar.rules.table import _ROWS

MESHES = ("x=2", "x=3")
TWO_AXES = "x=2 y=2"
UNSPLIT = frozenset({"aten.view.dtype", "aten.dot", "aten.scalar_tensor"})
"""Rows that may have nothing to split in a mesh: each has its reason in the table, or has no dims."""


def ties(operand: Node, generator: torch.Generator) -> Tensor:
    """Few distinct values, negative ones and zero among them."""
    value = operand.meta["val"]
    drawn = torch.randint(-2, 3, tuple(value.shape), generator=generator)
    if value.dtype == torch.bool:
        return drawn > 0
    return drawn.double() if value.dtype.is_floating_point else drawn.to(value.dtype)


def faults(case: Example, mesh: str, seed: int = 0) -> tuple[int, list[str]]:
    """Choices executed, and what differed, on random values and (first seed) on values with ties."""
    samples = (None, ties) if mesh != TWO_AXES else (None,)
    executed, wrong = 0, []
    for sample in samples:
        count, found = prove(case.node(), Mesh.parse(mesh), sample=sample, seed=seed)
        executed += count
        wrong += [f"{case} on {mesh}: {c}" for c in found if case.has_values or c.error]
    return executed, wrong


@functools.cache
def proven(name: str) -> tuple[int, int, list[str]]:
    """Choices executed, those of them that split something, and faults, over all cases of a row."""
    executed, divided, wrong = 0, 0, []
    for case in EXAMPLES[name]:
        meshes = MESHES if case is not EXAMPLES[name][0] else (*MESHES, TWO_AXES)
        for mesh in meshes:
            count, found = faults(case, mesh)
            executed += count
            divided += max(0, count - (1 if mesh == TWO_AXES else 2))
            wrong += found
    return executed, divided, wrong


@pytest.mark.parametrize("name", EXAMPLES)
def test_row(name: str) -> None:
    executed, divided, wrong = proven(name)
    assert not wrong, "\n".join(wrong)
    assert executed > 0
    assert divided > 0 or name in UNSPLIT


def test_no_row_is_left_unproven() -> None:
    assert set(EXAMPLES) == set(_ROWS)


def test_how_much_is_proven(record_property) -> None:
    calls = sum(map(len, EXAMPLES.values()))
    choices = sum(proven(name)[0] for name in EXAMPLES)
    record_property("ops", len(EXAMPLES))
    record_property("choices", choices)
    assert len(EXAMPLES) >= 65
    assert calls >= 125
    assert choices >= 2000
