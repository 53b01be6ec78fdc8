"""Factor inference: dims refined until every rule's letters line up, and what can't line up whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import autopar.composites  # noqa: F401  registers torch.ops.autopar
from autopar.rules.annotate import annotate_factors
from autopar.rules.factors import Atoms

aten = torch.ops.aten


def traced(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> tuple[list[Node], list[Node]]:
    """(inputs, calls) of the annotated graph of `function`."""
    module = make_fx(function, tracing_mode="fake")(*(torch.zeros(shape) for shape in shapes))
    graph: Graph = module.graph
    annotate_factors(graph)
    return [n for n in graph.nodes if n.op == "placeholder"], [n for n in graph.nodes if n.op == "call_function"]


def sizes(node: Node) -> object:
    return node.meta["factor_sizes"]


def whole_letters(node: Node) -> set[str]:
    return {factor.name for factor in node.meta["rule"].factors if factor.is_whole}


# -- atoms -------------------------------------------------------------------------------------------------------
def test_atoms_refine_to_common_factors() -> None:
    atoms = Atoms()
    flat, rows, columns = atoms.new(24), atoms.new(4), atoms.new(6)
    assert atoms.unify([flat], [rows, columns])
    assert atoms.sizes([flat]) == (4, 6)
    assert atoms.leaves([flat]) == [*atoms.leaves([rows]), *atoms.leaves([columns])]


def test_atoms_refine_through_aliases() -> None:
    atoms = Atoms()
    a, b, c = atoms.new(24), atoms.new(24), atoms.new(24)
    assert atoms.unify([a], [b]) and atoms.unify([b], [c])
    assert atoms.unify([c], [atoms.new(2), atoms.new(12)])
    assert atoms.sizes([a]) == atoms.sizes([b]) == (2, 12)
    assert atoms.unify([a], [atoms.new(8), atoms.new(3)])
    assert atoms.sizes([c]) == (2, 4, 3)


def test_atoms_that_do_not_line_up() -> None:
    atoms = Atoms()
    left, right = [atoms.new(6), atoms.new(4)], [atoms.new(4), atoms.new(6)]
    assert not atoms.unify(left, right)
    assert atoms.sizes(left) == (6, 4) and atoms.sizes(right) == (4, 6)


def test_an_atom_twice_in_one_product() -> None:
    atoms = Atoms()
    square = atoms.new(12)
    assert atoms.unify([square, square], [atoms.new(2), atoms.new(72)])
    assert atoms.sizes([square]) in ((2, 6), (12,)) and torch.tensor(atoms.sizes([square])).prod() == 12
    assert torch.tensor(atoms.sizes([square, square])).prod() == 144


# -- whole graphs ------------------------------------------------------------------------------------------------
def test_flatten_keeps_batch_and_sequence_apart() -> None:
    (x, weight), (flat, product, back) = traced(
        lambda x, w: torch.mm(x.view(16, 6), w).view(2, 8, 5), (2, 8, 6), (6, 5)
    )
    assert sizes(flat) == ((2, 8), (6,))
    assert sizes(product) == ((2, 8), (5,))
    assert sizes(back) == ((2,), (8,), (5,))
    assert sizes(weight) == ((6,), (5,)) and sizes(x) == ((2,), (8,), (6,))


def fused_qkv(x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = F.linear(x, weight).split(12, dim=-1)
    heads = [part.view(2, 8, 4, 3) for part in (q, k, v)]
    return heads[0] + heads[1] + heads[2]


def test_fused_qkv_splits_its_weight_by_part_then_head() -> None:
    (_, weight), calls = traced(fused_qkv, (2, 8, 12), (36, 12))
    assert sizes(weight) == ((3, 4, 3), (12,))  # (q, k or v), head, width of a head
    split = next(n for n in calls if n.target in (aten.split.Tensor, aten.split_with_sizes.default))
    assert sizes(split) == (((2,), (8,), (4, 3)),) * 3
    assert whole_letters(split) == {"n"}


def test_grouped_heads_refine_the_query_by_the_groups() -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        split = [x.view(2, 8, -1, 4).transpose(1, 2) for x in (q, k, v)]
        return torch.ops.autopar.attention(*split, None, True, 0.5)[0]

    (q, k, v), calls = traced(grouped, (2, 8, 24), (2, 8, 8), (2, 8, 8))
    assert sizes(q) == ((2,), (8,), (2, 3, 4))  # groups, query heads of a group, width
    assert sizes(k) == sizes(v) == ((2,), (8,), (2, 4))
    attention = next(n for n in calls if n.target is torch.ops.autopar.attention.default)
    assert whole_letters(attention) == {"t", "d", "s"}


def test_rotary_halves_are_whole_in_one_factor_only() -> None:
    def rotate(x: Tensor) -> Tensor:
        heads = x.view(2, 4, 6)
        return torch.cat((-heads[..., 3:], heads[..., :3]), dim=-1)

    (x,), calls = traced(rotate, (2, 24))
    assert sizes(x) == ((2,), (4, 2, 3))  # head, half, width of a half
    cat = next(n for n in calls if n.target is aten.cat.default)
    assert sizes(cat) == ((2,), (4,), (2, 3))
    assert whole_letters(cat) == {"n"}


def test_ragged_slice_is_whole() -> None:
    _, (sliced,) = traced(lambda x: x[1:5], (7, 3))
    assert whole_letters(sliced) == {"x", "d0"}


def test_six_by_four_against_four_by_six_is_whole_at_the_second_view() -> None:
    def clash(x: Tensor) -> Tensor:
        return x.view(6, 4).sum(0).sum() + x.view(4, 6).sum(1).sum()

    (x,), calls = traced(clash, (24,))
    assert sizes(x) == ((6, 4),)
    views = [n for n in calls if n.target is aten.view.default]
    assert not whole_letters(views[0])
    assert {factor.is_whole for factor in views[1].meta["rule"].factors} == {True}
    assert sizes(views[1]) == ((4,), (6,))


def test_state_that_must_come_back_alike_is_refined_alike() -> None:
    module = make_fx(lambda w, g: w - g.view(24), tracing_mode="fake")(torch.zeros(24), torch.zeros(4, 6))
    weight, result = next(iter(module.graph.nodes)), list(module.graph.nodes)[-2]
    annotate_factors(module.graph, [(weight, result)])
    assert sizes(weight) == sizes(result) == ((4, 6),)


def test_equal_atoms_are_one_dim_across_the_graph() -> None:
    (x, _), (*_, back) = traced(lambda x, w: torch.mm(x.view(16, 6), w).view(2, 8, 5), (2, 8, 6), (6, 5))
    rule = back.meta["rule"]
    batch = x.meta["rule"].factors[0].atom
    assert rule.factors[rule.results[0][0][0]].atom == batch


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((4, 6), (24,), ((4, 6),)),
        ((2, 12), (2, 3, 4), ((2,), (3,), (4,))),
        ((6, 4), (3, 8), ((3,), (2, 4))),
        ((2, 6, 4), (2, 4, 6), ((2,), (4,), (6,))),
        ((1, 6), (6, 1), ((6,), ())),
        ((6,), (1, 2, 3), ((), (2,), (3,))),
        ((0, 4), (0,), ((0,),)),
    ],
)
def test_view_factors(before: tuple[int, ...], after: tuple[int, ...], expected: object) -> None:
    _, calls = traced(lambda x: aten.view.default(x, list(after)), before)
    assert sizes(calls[0]) == expected
