"""Forward and backward of ops as one graph: every op in it has a rule, and its shards combine under random choices.

Of the rows that share a rule one is taken. Values meet what single ops don't show: a gradient in the layout that the
forward left, moves between ops, partial results of which some are read whole.
"""

from __future__ import annotations

import operator

import pytest

from autopar.mesh import Mesh
from autopar.rules.entries import Entry
from autopar.rules.examples import EXAMPLES
from autopar.rules.nodes import op_name
from autopar.rules.prove import TOLERANCE
from autopar.rules.table import _ROWS, has_rule
from tests.rules.joint_graphs import differences, joint_graph

WITHOUT_RULE = {"aten._embedding_bag_backward"}
"""Its fake kernel gives the counts of bags other sizes than the real one."""

WITHOUT_GRADIENT = frozenset(
    f"aten.{name}"
    for name in (
        *("_addmm_activation", "_stack", "_aminmax", "linalg__powsum", "_logcumsumexp", "_cholesky_solve_helper"),
        *("geqrf", "linalg_ldl_factor_ex", "copy", "_add_relu", "floor_divide", "_standard_gamma_grad"),
        *("_embedding_bag_forward_only", "_native_batch_norm_legit_functional"),
        *("_native_batch_norm_legit_no_training", "fractional_max_pool2d", "fractional_max_pool3d"),
        *("soft_margin_loss",),
    )
)
"""Ops that autograd refuses, or that want no gradient for one of the floating operands."""


def kind(entry: Entry) -> object:
    """What rows of one rule have in common: the texts, or the function (with the values that it was made with)."""
    function = entry.function
    if function is None:
        return entry.texts, entry.linear
    made_with = [repr(cell.cell_contents) for cell in function.__closure__ or ()]
    return function.__code__, tuple(made_with)


def one_of_each() -> list[str]:
    backward = tuple(f"autopar.{op}_d" for op in ("linear", "expert_mm", "grouped_mm"))
    names = [name for name in EXAMPLES if name not in WITHOUT_GRADIENT and not name.startswith(backward)]
    forward = [name for name in names if "backward" not in name]
    found: dict[object, str] = {}
    for name in forward:
        found.setdefault(kind(_ROWS[name]), name)
    return list(found.values())


@pytest.mark.parametrize("name", one_of_each())
def test_joint_graph(name: str) -> None:
    example = EXAMPLES[name][0]
    graph = joint_graph(example)
    if graph is None:
        return  # whole numbers or bools come out: there is no gradient
    called = [n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    assert {op_name(node) for node in called if not has_rule(node)} <= WITHOUT_RULE
    found = differences(graph, example, Mesh.parse("x=2 y=2" if len(called) < 12 else "x=2"), seed=1)
    assert max(found) <= TOLERANCE


def test_how_many_have_a_gradient() -> None:
    assert len(one_of_each()) >= 100
