"""`localise_shapes`: the laid-out graph of global values as the graph that every rank runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from autopar import collectives, markers
from autopar.layout import Layout
from autopar.mesh import Mesh
from passes.insert_moves import insert_moves
from passes.lay_out import lay_out
from passes.localise_shapes import localise_shapes

sys.path.insert(0, str(Path(__file__).parent))
from small_graphs import context_of, executed, kinds, step_graph

COLLECTIVES = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shard"}


def localised(function: Callable[..., Tensor], inputs: dict[str, Tensor], mesh: str, choices: dict[str, str]) -> Graph:
    graph = step_graph(function, inputs)
    context = context_of(graph, mesh, choices)
    graph = localise_shapes(insert_moves(lay_out(graph, context), context), context)
    graph.lint()
    return graph


def checked(function: Callable[..., Tensor], inputs: dict[str, Tensor], mesh: str, choices: dict[str, str]) -> Graph:
    """Localised, and run on all ranks: the same global value."""
    graph = localised(function, inputs, mesh, choices)
    expected = function(*inputs.values())
    factors = tuple((n,) if n != 1 else () for n in expected.shape)
    (got,) = executed(graph, Mesh.parse(mesh), inputs, [Layout.whole(factors)])
    assert got.dtype == expected.dtype
    assert torch.allclose(got.double(), expected.double(), rtol=1e-6, atol=1e-6, equal_nan=True)
    return graph


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def test_relays_and_markers_are_gone_and_every_node_has_its_local_value() -> None:
    graph = checked(
        lambda x, w: torch.relu(torch.mm(markers.relay(x), w)),
        {"x": floats(4, 6), "w": floats(6, 8)},
        "dp=2 tp=2",
        {"batch:x": "tp=d1", "aten.mm#0": "dp=m tp=n"},
    )
    targets = {node.target for node in graph.nodes}
    assert not targets & (markers.MOVES | markers.IDENTITIES)
    assert all("local_val" in node.meta for node in graph.nodes if node.op != "output")


def test_a_wrong_local_shape_is_an_assertion() -> None:
    graph = step_graph(lambda x: torch.relu(x), {"x": floats(4, 6)})
    context = context_of(graph, "tp=2", {"batch:x": "tp=d0", "aten.relu#0": "tp=d0"})
    lay_out(graph, context)
    next(n for n in graph.nodes if n.meta.get("key") == "aten.relu#0").meta["layout"] = Layout.parse("[4 6@tp]")
    with pytest.raises(AssertionError, match=r"aten\.relu#0"):
        localise_shapes(graph, context)


# -- moves -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("source", "kind"),
    [("tp=d0", "all_gather"), ("tp=d1", "all_gather"), ("", None)],
)
def test_moves_become_collectives(source: str, kind: str | None) -> None:
    graph = checked(lambda x: torch.cumsum(x.t(), 1), {"x": floats(4, 6)}, "tp=2", {"batch:x": source})
    found = [name for name in kinds(graph) if name in COLLECTIVES]
    assert found == ([kind] if kind else [])


def test_a_collective_runs_on_the_factors_and_leaves_the_dims() -> None:
    """Sequence parallelism: (batch sequence) flattened, the sequence gathered in the middle of a dim."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(x.view(24, 5), w)

    graph = checked(
        function, {"x": floats(4, 6, 5), "w": floats(5, 3)}, "tp=2", {"batch:x": "tp=d1", "aten.view#0": "tp=g1_0"}
    )
    (gather,) = [node for node in graph.nodes if node.target is collectives.all_gather]
    assert gather.args[1:] == ("tp", 1)
    assert tuple(gather.args[0].meta["local_val"].shape) == (4, 3, 5)


# -- ops whose arguments speak of global sizes ---------------------------------------------------------------------
SIZED: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], dict[str, str]]] = {
    "view": (lambda x: x.view(2, 2, 6), (4, 6), {"batch:x": "tp=d0.0", "aten.view#0": "tp=g1_0"}),
    "view of a strided shard": (lambda x: x.view(24), (4, 6), {"batch:x": "tp=d1", "aten.view#0": "tp=g0_0"}),
    "expand": (lambda x: x.expand(3, 4, 6), (4, 6), {"aten.expand#0": "tp=d2"}),
    "expand along the split": (lambda x: x.expand(4, 6), (1, 6), {"aten.expand#0": "tp=d0"}),
    "slice": (lambda x: x[:, 2:4], (4, 6), {"aten.slice#0": "tp=d1"}),
    "slice to the end": (lambda x: x[2:], (4, 6), {"aten.slice#0": "tp=d0"}),
    "squeeze": (lambda x: x.squeeze(), (2, 1, 6), {"aten.squeeze#0": "tp=g2_0"}),
    "split": (lambda x: x.split(2, 1)[1] * 2, (4, 6), {"aten.split#0": "tp=d1"}),
    "mean": (lambda x: x.mean(0), (4, 6), {"aten.mean#0": "tp=d0"}),
    "mean of all": (lambda x: x.mean(), (4, 6), {"aten.mean#0": "tp=d1"}),
}


@pytest.mark.parametrize("name", SIZED)
def test_sizes_are_made_local(name: str) -> None:
    function, shape, choices = SIZED[name]
    graph = step_graph(function, {"x": floats(*shape)})
    keys = {node.meta["key"]: node for node in graph.nodes if "key" in node.meta}
    fitting = {key: _fitting(keys[key], text) for key, text in choices.items() if key in keys}
    assert any(fitting.values())
    checked(function, {"x": floats(*shape)}, "tp=2", fitting)


def _fitting(node: object, text: str) -> str:
    """The choice as named, or over the first factor that two divides where a view names its factors otherwise."""
    rule = node.meta["rule"]  # type: ignore[attr-defined]
    names = [factor.name for factor in rule.factors if factor.size % 2 == 0 and not factor.is_whole]
    return text if text.partition("=")[2] in names else f"tp={names[0]}"


# -- indices -----------------------------------------------------------------------------------------------------
TABLE, ROWS = floats(8, 3), torch.tensor([7, 0, 3, 3, 4, 1])


def test_an_index_into_a_split_table_is_offset_and_masked() -> None:
    graph = checked(
        lambda table, rows: torch.nn.functional.embedding(rows, table),
        {"table": TABLE, "rows": ROWS},
        "dp=2 tp=2",
        {"batch:table": "tp=d0 dp=d0", "aten.embedding#0": "tp=v dp=v"},
    )
    assert kinds(graph).count("first") == 1


def test_what_is_masked_out_may_be_infinite() -> None:
    """Row 4 is first on the second rank: what falls outside is looked up there, and must not leave a NaN."""
    table = TABLE.clone()
    table[4] = torch.inf
    choices = {"batch:table": "tp=d0", "aten.embedding#0": "tp=v"}
    rows = torch.tensor([7, 0, 3, 3, 1, 1])
    checked(
        lambda table, rows: torch.nn.functional.embedding(rows, table), {"table": table, "rows": rows}, "tp=2", choices
    )


def test_what_localising_adds_runs_where_its_op_does() -> None:
    """The index is a batch, which stands in no part: computed with it, each microbatch would have got the first's."""
    graph = step_graph(lambda table, rows: torch.nn.functional.embedding(rows, table), {"table": TABLE, "rows": ROWS})
    context = context_of(graph, "tp=2", {"batch:table": "tp=d0", "aten.embedding#0": "tp=v"})
    lay_out(graph, context)
    before = {node.name for node in graph.nodes}
    localise_shapes(graph, context)
    added = [node for node in graph.nodes if node.name not in before]
    assert added and {node.meta["phase"] for node in added} == {"forward"}


def test_a_bias_is_added_once() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.ops.autopar.linear(x, w, b)

    import autopar.composites  # noqa: F401

    inputs = {"x": floats(4, 6), "w": floats(3, 6), "b": floats(3)}
    graph = checked(function, inputs, "tp=2", {"batch:x": "tp=d1", "batch:w": "tp=d1", "autopar.linear#0": "tp=i"})
    assert kinds(graph).count("coordinate") == 1
    checked(function, inputs, "dp=2 tp=3", {"autopar.linear#0": "tp=i dp=i"})


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.arange(12),
        lambda x: x + torch.arange(3, 27, 2),
        lambda x: x + torch.arange(12, dtype=torch.bfloat16) * 1000,
        lambda x: x + torch.arange(0.0, 1.2, 0.1),
        lambda x: x + torch.arange(12, 0, -1, dtype=torch.int32),
    ],
)
def test_a_range_starts_at_the_rank_s_offset(function: Callable[[Tensor], Tensor]) -> None:
    graph = checked(
        function, {"x": torch.zeros(12)}, "dp=2 tp=3", {"aten.arange#0": "tp=a dp=a", "aten.add#0": "tp=d0 dp=d0"}
    )
    assert "all_gather" in kinds(graph)


def test_a_range_split_and_whole_are_equal_bit_for_bit() -> None:
    """A bfloat16 range counted in bfloat16 from an offset would round twice."""
    for make in (lambda: torch.arange(0, 3000, 500, dtype=torch.bfloat16), lambda: torch.arange(0.0, 0.6, 0.1)):
        graph = localised(lambda x, make=make: x + make(), {"x": torch.zeros(6)}, "tp=2", {"aten.arange#0": "tp=a"})
        (got,) = executed(graph, Mesh.parse("tp=2"), {"x": torch.zeros(6)}, [Layout.whole(((6,),))])
        assert torch.equal(got, torch.zeros(6) + make())


def test_an_op_of_storage_finds_the_strides_it_was_captured_with() -> None:
    """A gathered value is contiguous, where the captured one was transposed."""
    graph = checked(
        lambda x: torch.as_strided(torch.relu(x.t()), [6, 3], [1, 6]),
        {"x": floats(4, 6)},
        "tp=2",
        {"batch:x": "tp=d1", "aten.t#0": "tp=d1", "aten.relu#0": "tp=d0"},
    )
    assert "all_gather" in {node.target.__name__ for node in graph.nodes if node.op == "call_function"}


def test_a_contiguous_as_strided_is_split_as_the_view_that_it_is() -> None:
    graph = checked(
        lambda x: torch.as_strided(x, [6, 4], [1, 6]) * 2,
        {"x": floats(4, 6)},
        "tp=2",
        {"batch:x": "tp=d1", "aten.as_strided#0": "tp=g0_0", "aten.mul#0": "tp=d0"},
    )
    assert "aten.permute" in kinds(graph)


# -- random ops ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("mesh", "choice"),
    [("tp=2", "tp=d0.0"), ("tp=3", "tp=d0.1"), ("tp=2", "tp=d1"), ("dp=2 tp=3", "dp=d0.0 tp=d0.1"),
     ("dp=2 tp=2", "tp=d0.0 dp=d0.0"), ("dp=3 tp=2", "dp=d0.1 tp=d1")],
)  # fmt: skip
def test_a_shard_of_a_mask_is_that_part_of_the_whole_mask(mesh: str, choice: str) -> None:
    """A dim that is a product, split at its minor factor: the shard's elements lie apart in the whole."""

    def function(key: Tensor, x: Tensor) -> Tensor:
        return torch.ops.autopar.random_mask(key, "#1", [24, 8], 0.5).view(4, 6, 8) * x

    inputs = {"key": torch.tensor(7), "x": floats(4, 6, 8)}
    graph = checked(function, inputs, mesh, {"autopar.random_mask#0": choice})
    (drawn,) = [node for node in graph.nodes if node.target is torch.ops.autopar.random_mask.default]
    assert drawn.meta["local_val"].numel() < 24 * 8


def test_numbers_of_other_kinds_by_the_global_index() -> None:
    def function(key: Tensor) -> Tensor:
        uniform = torch.ops.autopar.random_uniform(key, "#1", [4, 6], torch.float64)
        normal = torch.ops.autopar.random_normal(key, "#2", [4, 6], torch.float64)
        return uniform + normal + torch.ops.autopar.random_integers(key, "#3", [4, 6], -9, 9, torch.int64)

    choices = {
        f"autopar.random_{kind}#0": f"tp=d{dim}" for kind, dim in (("uniform", 0), ("normal", 1), ("integers", 1))
    }
    checked(function, {"key": torch.tensor(-3)}, "tp=2", choices)


def test_local_values_are_what_calls_give_under_the_fake_mode() -> None:
    """Plain views, shards and fresh tensors are made without it, and equal ones shared."""
    graph = localised(
        lambda x, w: torch.mm(torch.mm(x, w).view(4, 3, 4).transpose(0, 1).reshape(12, 4), w[:4]),
        {"x": floats(6, 8), "w": floats(8, 8)},
        "dp=2 tp=2",
        {"batch:x": "dp=d0", "aten.mm#0": "tp=n"},
    )
    nodes = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert {"aten.view.default", "aten.transpose.int"} <= {str(node.target) for node in nodes}
    for node in nodes:
        value = node.meta["local_val"]
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["local_val"])
        with value.fake_mode:
            expected = node.target(*args, **kwargs)
        for of in (lambda t: t.dtype, lambda t: t.shape, lambda t: t.stride(), lambda t: t.storage_offset()):
            assert of(value) == of(expected), node.format_node()
