"""Turns a laid-out graph of global values into the graph that every rank runs on its local tensors.

Before: every operand has the layout that its op needs; moves are markers. After: shape arguments are local, indices
are offset and masked where what they index is split, moves are views and collectives, relays are gone, and every
node has `local_val`, a fake tensor with exactly the local shape of its layout (asserted).
Numbers: the global values are unchanged up to the order of sums.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from autopar import collectives, markers
from autopar.layout import Layout, Position
from autopar.mesh import Mesh
from autopar.random_ops import shard_arguments
from autopar.rules.factors import LeafRule
from autopar.rules.nodes import argument, node_argument, op_name, tensor_operands
from passes import local_arguments
from passes.context import Context
from passes.local_arguments import local_result, once, set_argument, split_axes

aten = torch.ops.aten


def localise_shapes(graph: Graph, context: Context) -> Graph:
    """Rewrites `graph` in place; see the module's docstring."""
    return localise_graph(graph, context.mesh)


def localise_graph(graph: Graph, mesh: Mesh) -> Graph:
    """`localise_shapes` where there is nothing but a laid-out graph."""
    localiser = Localiser(graph, mesh.spmd, _fake_mode(graph))
    for node in list(graph.nodes):
        if node.op == "output":
            continue
        with graph.inserting_before(node.next):
            localiser.localise(node)
    return graph


def _fake_mode(graph: Graph) -> FakeTensorMode:
    for node in graph.nodes:
        if hasattr(node.meta.get("val"), "fake_mode"):
            mode: FakeTensorMode = node.meta["val"].fake_mode
            return mode
    return FakeTensorMode()


@dataclass(slots=True)
class Localiser:
    """Localises one node at a time; new nodes are put at the graph's insertion point, right after the node."""

    graph: Graph
    mesh: Mesh
    mode: FakeTensorMode

    def localise(self, node: Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            node.meta["local_val"] = self._empty(node)
        elif node.target is markers.relay:
            node.replace_all_uses_with(node_argument(node, 0))
            self.graph.erase_node(node)
        elif node.target in markers.MOVES:
            self._lower_move(node)
        elif node.target is not operator.getitem and node.meta.get("choice"):
            handler = _HANDLERS.get(op_name(node), _contiguous_operands if "found_rule" in node.meta else None)
            if handler is not None:
                with self.graph.inserting_before(node):
                    handler(self, node)
            self.run(node)
        else:
            if op_name(node) in local_arguments.OF_STORAGE:
                with self.graph.inserting_before(node):
                    local_arguments.given_strides(self, node)
            self.run(node)

    # -- local values ------------------------------------------------------------------------------------------
    def _empty(self, node: Node) -> torch.Tensor:
        with self.mode:
            return torch.empty(node.meta["layout"].local_shape(self.mesh), dtype=node.meta["val"].dtype)

    def run(self, node: Node) -> None:
        """Runs the op on its operands' fake local values and asserts that its layout's local shape comes out."""
        if op_name(node) in ("aten.view", "aten._unsafe_view") and not _is_viewable(node):
            node.target = aten.reshape.default  # a shard may be strided where the whole was contiguous
        node.meta["local_val"] = self._evaluate(node)
        self._check(node)

    def _evaluate(self, node: Node) -> Any:
        def local(n: Node) -> Any:
            return n.meta["local_val"]

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), local)
        if node.target is collectives.coordinate:
            return 0
        if node.target in _FAKE_COLLECTIVES:
            with self.mode:
                return _FAKE_COLLECTIVES[node.target](self.mesh, *args)
        assert callable(node.target), node.format_node()
        with self.mode:
            return node.target(*args, **kwargs)

    def _check(self, node: Node) -> None:
        layouts = node.meta.get("layout")
        values = node.meta["local_val"]
        if layouts is None:
            return
        pairs = zip(layouts, values, strict=True) if isinstance(layouts, tuple) else [(layouts, values)]
        for layout, value in pairs:
            if layout is not None:
                expected = layout.local_shape(self.mesh)
                assert tuple(value.shape) == expected, f"{node.meta.get('key')}: {tuple(value.shape)} is not {layout}"

    # -- building ----------------------------------------------------------------------------------------------
    def call(self, like: Node, target: Callable[..., Any], *args: Any, layout: Layout | None = None) -> Node:
        """A new node at the insertion point that runs where `like` does: in its part of its stage.

        `like` is the op that is rewritten, never its operand: a batch stands in no part of its own.
        """
        node = self.graph.call_function(target, args)
        for key in ("path", "phase", "level", "stage", "source"):
            node.meta[key] = like.meta.get(key, "")
        node.meta["val"] = like.meta["val"]
        if layout is not None:
            node.meta["layout"] = layout
        self.run(node)
        return node

    def cast(self, value: Node, dtype: torch.dtype) -> Node:
        cast = self.call(value, aten._to_copy.default, value, layout=value.meta["layout"])
        cast.kwargs = {"dtype": dtype}
        self.run(cast)
        return cast

    def offset(self, node: Node, axes: list[str], local_size: int) -> Node | int:
        """This rank's first index along a factor split by `axes` (major first)."""
        if not axes:
            return 0
        index: Node | None = None
        for axis in axes:
            position = self.call(node, collectives.coordinate, axis)
            if index is None:
                index = position
            else:
                scaled = self.call(node, operator.mul, index, self.mesh.size(axis))
                index = self.call(node, operator.add, scaled, position)
        assert index is not None
        return self.call(node, operator.mul, index, local_size)

    def scale_result(self, node: Node, divisor: int) -> None:
        """Divides the node's result, which is one of `divisor` shares."""
        users = list(node.users)
        with self.graph.inserting_before(node.next):
            self.run(node)
            share = self.call(node, aten.div.Scalar, node, divisor, layout=node.meta["layout"])
        _replace(node, share, users)

    # -- moves -------------------------------------------------------------------------------------------------
    def _lower_move(self, node: Node) -> None:
        value, axis = node_argument(node, 0), node.args[1]
        before, after = value.meta["layout"], node.meta["layout"]
        target, args = _lowered(node, before)
        flat = self._reshaped(node, value, before.local_factor_shape(self.mesh))
        moved = self.call(node, target, flat, axis, *args)
        result = self._reshaped(node, moved, after.local_shape(self.mesh))
        result.meta["layout"] = after
        self._check(result)
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def _reshaped(self, node: Node, value: Node, shape: tuple[int, ...]) -> Node:
        if tuple(value.meta["local_val"].shape) == shape:
            return value
        return self.call(node, aten.view.default, value, list(shape))


def _is_viewable(node: Node) -> bool:
    """Whether the strides allow the view. Asked of a meta tensor: torch 2.13's fake tensors allow too much."""
    value = node_argument(node, 0).meta["local_val"]
    try:
        torch.empty_strided(value.shape, value.stride(), device="meta").view(argument(node, 1, "size"))
    except RuntimeError:
        return False
    return True


def _flat(layout: Layout, position: Position) -> int:
    dim, factor = position
    return sum(len(factors) for factors in layout.dims[:dim]) + factor


def _lowered(node: Node, layout: Layout) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The collective of a move, with its arguments after tensor and axis; dims count factors."""
    rest: tuple[Any, ...] = node.args[2:]
    if node.target is markers.gather:
        return collectives.all_gather, (_flat(layout, rest[:2]),)
    if node.target is markers.narrow:
        return collectives.shard, (_flat(layout, rest[:2]),)
    if node.target is markers.reduce:
        return collectives.all_reduce, (rest[0],)
    if node.target is markers.reduce_scatter:
        return collectives.reduce_scatter, (_flat(layout, rest[1:3]), rest[0])
    return collectives.all_to_all, (_flat(layout, rest[2:4]), _flat(layout, rest[:2]))


def _resized(factor: Callable[[Mesh, str], tuple[int, int]]) -> Callable[..., torch.Tensor]:
    def run(mesh: Mesh, x: torch.Tensor, axis: str, dim: int, *_: Any) -> torch.Tensor:
        multiply, divide = factor(mesh, axis)
        shape = list(x.shape)
        shape[dim] = shape[dim] * multiply // divide
        return x.new_empty(shape)

    return run


def _fake_all_to_all(mesh: Mesh, x: torch.Tensor, axis: str, split_dim: int, concat_dim: int) -> torch.Tensor:
    shape = list(x.shape)
    shape[split_dim] //= mesh.size(axis)
    shape[concat_dim] *= mesh.size(axis)
    return x.new_empty(shape)


_FAKE_COLLECTIVES: dict[Any, Callable[..., torch.Tensor]] = {
    collectives.all_gather: _resized(lambda mesh, axis: (mesh.size(axis), 1)),
    collectives.reduce_scatter: _resized(lambda mesh, axis: (1, mesh.size(axis))),
    collectives.shard: lambda mesh, x, axis, dim: x.narrow(dim, 0, x.shape[dim] // mesh.size(axis)),
    collectives.all_reduce: lambda mesh, x, axis, op: x.new_empty(x.shape),
    collectives.all_to_all: _fake_all_to_all,
}


# -- ops with arguments that speak of global sizes ---------------------------------------------------------------
def _scaled(localiser: Localiser, layout: Layout, dim: int, index: int) -> int:
    """A bound along `dim` in local terms: chunks shrink with the dim; the far end (2**63 - 1) stays."""
    whole, local = layout.global_shape[dim], layout.local_shape(localiser.mesh)[dim]
    if index >= whole:
        return local
    if index < 0:
        index += whole
    return index * local // whole


def _slice(localiser: Localiser, node: Node) -> None:
    layout = tensor_operands(node)[0].meta["layout"]
    dim = argument(node, 1, "dim", 0) % len(layout.dims)
    for index, name in ((2, "start"), (3, "end")):
        bound = argument(node, index, name)
        if bound is not None:
            set_argument(node, index, name, _scaled(localiser, layout, dim, bound))


def _slice_backward(localiser: Localiser, node: Node) -> None:
    layout = node.meta["layout"]
    dim = argument(node, 2, "dim") % len(layout.dims)
    bounds = (argument(node, 3, "start"), argument(node, 4, "end"))
    start, end = (_scaled(localiser, layout, dim, bound) for bound in bounds)
    node.args = (node.args[0], local_result(localiser, node), dim, start, end, node.args[5])


def _split(localiser: Localiser, node: Node) -> None:
    dim = argument(node, 2, "dim", 0)
    sizes = [layout.local_shape(localiser.mesh)[dim] for layout in node.meta["layout"]]
    has_sizes = isinstance(node.args[1], (list, tuple))
    node.args = (node.args[0], sizes if has_sizes else sizes[0], *node.args[2:])


def _mean(localiser: Localiser, node: Node) -> None:
    """The mean of a shard is `n` times its share of the whole mean."""
    operand, result = tensor_operands(node)[0].meta["layout"], node.meta["layout"]
    reduced = [axis for axis, _ in result.partial if operand.position(axis) is not None]
    if reduced:
        localiser.scale_result(node, math.prod(localiser.mesh.size(axis) for axis in reduced))


def _replace(node: Node, result: Node, users: list[Node]) -> None:
    """`result` stands for the step graph's node from now on: it has its key and its readers."""
    if "key" in node.meta:
        result.meta["key"] = node.meta.pop("key")
    for user in users:
        user.replace_input_with(node, result)


def _localised_index(localiser: Localiser, node: Node, index: Node, axes: list[str], size: int) -> tuple[Node, Node]:
    """Indices into this rank's range (0 where outside), and where they are inside."""
    first = localiser.offset(node, axes, size)
    shifted = localiser.call(node, aten.sub.Tensor, index, first)
    above = localiser.call(node, aten.ge.Scalar, shifted, 0)
    below = localiser.call(node, aten.lt.Scalar, shifted, size)
    inside = localiser.call(node, aten.bitwise_and.Tensor, above, below)
    clamped = localiser.call(node, aten.mul.Tensor, shifted, inside)
    return clamped, inside


def _masked(localiser: Localiser, node: Node, value: Node, inside: Node) -> Node:
    """`value` where `inside`, else 0: chosen, not multiplied, since what is masked out may be infinite."""
    missing = value.meta["local_val"].dim() - inside.meta["local_val"].dim()
    for _ in range(missing):
        inside = localiser.call(node, aten.unsqueeze.default, inside, -1)
    nothing = False if value.meta["local_val"].dtype == torch.bool else 0
    return localiser.call(node, aten.where.ScalarOther, inside, value, nothing)


def _index_axes(node: Node) -> tuple[list[str], Layout]:
    rule: LeafRule = node.meta["rule"]
    axes = [axis for _, letter in rule.indexes[:1] for axis in split_axes(rule, node, letter)]
    return axes, tensor_operands(node)[0].meta["layout"]


def _contiguous_operands(localiser: Localiser, node: Node) -> None:
    """For kernels that read operands as if they were contiguous: wrong numbers from a strided shard.

    Torch 2.13's reads statistics so; what a user's kernel does isn't known.
    """
    for operand in tensor_operands(node):
        if not operand.meta["local_val"].is_contiguous():
            dense = localiser.call(node, aten.clone.default, operand)
            dense.kwargs = {"memory_format": torch.contiguous_format}
            localiser.run(dense)
            dense.meta["layout"] = operand.meta["layout"]
            node.replace_input_with(operand, dense)


def _embedding(localiser: Localiser, node: Node) -> None:
    axes, table = _index_axes(node)
    if axes:
        size = table.local_shape(localiser.mesh)[0]
        index, inside = _localised_index(localiser, node, node_argument(node, 1), axes, size)
        node.args = (node.args[0], index)
        _mask_result(localiser, node, inside)


def _mask_result(localiser: Localiser, node: Node, inside: Node) -> None:
    users = list(node.users)
    with localiser.graph.inserting_before(node.next):
        localiser.run(node)
        result = _masked(localiser, node, node, inside)
    result.meta["layout"] = node.meta["layout"]
    _replace(node, result, users)


def _embedding_backward(localiser: Localiser, node: Node) -> None:
    axes, _ = _index_axes(node)
    if not axes:
        return
    gradient, index, padding = node_argument(node, 0), node_argument(node, 1), node.args[3]
    size = local_result(localiser, node)[0]
    if isinstance(padding, int) and padding >= 0:
        kept = localiser.call(node, aten.ne.Scalar, index, padding)
        gradient = _masked(localiser, node, gradient, kept)
    index, inside = _localised_index(localiser, node, index, axes, size)
    gradient = _masked(localiser, node, gradient, inside)
    node.args = (gradient, index, size, -1, *node.args[4:])


def _gather(localiser: Localiser, node: Node) -> None:
    axes, table = _index_axes(node)
    if axes:
        size = table.local_shape(localiser.mesh)[argument(node, 1, "dim")]
        index, inside = _localised_index(localiser, node, node_argument(node, 2), axes, size)
        node.args = (node.args[0], node.args[1], index, *node.args[3:])
        _mask_result(localiser, node, inside)


def _scatter_add(localiser: Localiser, node: Node) -> None:
    axes, table = _index_axes(node)
    if axes:
        size = table.local_shape(localiser.mesh)[argument(node, 1, "dim")]
        index, inside = _localised_index(localiser, node, node_argument(node, 2), axes, size)
        node.args = (*node.args[:2], index, _masked(localiser, node, node_argument(node, 3), inside))
    once(0)(localiser, node)


def _linear(localiser: Localiser, node: Node) -> None:
    """A partial result takes the bias once."""
    if len(node.args) > 2 and node.args[2] is not None:
        _take_once(localiser, node, 2, [axis for axis, _ in node.meta["layout"].partial])


def _take_once(localiser: Localiser, node: Node, index: int, axes: list[str]) -> None:
    """Operand `index` counts on the rank at 0 of each of `axes` alone."""
    for axis in axes:
        position = localiser.call(node, collectives.coordinate, axis)
        first = localiser.call(node, operator.eq, position, 0)
        scaled = localiser.call(node, aten.mul.Tensor, node.args[index], first)
        node.args = (*node.args[:index], scaled, *node.args[index + 1 :])


def _squeeze(localiser: Localiser, node: Node) -> None:
    """A view: a dim that only a shard has of size 1 must stay."""
    node.target, node.args, node.kwargs = aten.view.default, (node.args[0], local_result(localiser, node)), {}


def _arange(localiser: Localiser, node: Node) -> None:
    """`start + step * (offset + i)`, counted as torch does: in whole numbers or in float64, then cast.

    Counting in the result's own dtype would round twice.
    """
    (whole,), (local,) = node.meta["layout"].global_shape, node.meta["layout"].local_shape(localiser.mesh)
    if whole == local:
        return
    numbers = [a for a in node.args if isinstance(a, (int, float))]
    start, step = (numbers[0] if len(numbers) > 1 else 0), (numbers[2] if len(numbers) > 2 else 1)
    axes = [axis for factor in node.meta["layout"].dims[0] for axis in factor.axes]
    first = localiser.offset(node, axes, local)
    dtype = node.meta["val"].dtype
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    node.target, node.args, node.kwargs = aten.arange.default, (local,), {**node.kwargs, "dtype": wide}
    users, layout = list(node.users), node.meta["layout"]
    with localiser.graph.inserting_before(node.next):
        localiser.run(node)
        value = localiser.call(node, aten.add.Tensor, node, first, layout=layout)
        if step != 1:
            value = localiser.call(node, aten.mul.Tensor, value, step, layout=layout)
        if start != 0:
            value = localiser.call(node, aten.add.Tensor, value, start, layout=layout)
        if wide != dtype:
            value = localiser.cast(value, dtype)
    _replace(node, value, users)


def _drawn(localiser: Localiser, node: Node) -> None:
    """A random op draws by the global index: its shard's factors, their steps in the whole, and where it begins."""
    layout = node.meta["layout"]
    sizes, strides, own = shard_arguments(
        [f.size for _, f in layout.positions()], layout.local_factor_shape(localiser.mesh)
    )
    begin: Node | int = 0
    for (_, factor), stride in zip(layout.positions(), own, strict=True):
        first = localiser.offset(node, list(factor.axes), factor.local_size(localiser.mesh) * stride)
        begin = first if begin == 0 else begin if first == 0 else localiser.call(node, operator.add, begin, first)
    set_argument(node, 2, "shape", local_result(localiser, node))
    node.kwargs = {**node.kwargs, "sizes": sizes, "strides": strides, "offset": begin}


_HANDLERS: dict[str, Callable[[Localiser, Node], None]] = {
    **local_arguments.HANDLERS,
    "aten.slice": _slice,
    "aten.slice_backward": _slice_backward,
    **dict.fromkeys(("aten.split", "aten.split_with_sizes"), _split),
    **dict.fromkeys(("aten.unsafe_split", "aten.unsafe_split_with_sizes"), _split),
    "aten.mean": _mean,
    "aten.native_layer_norm_backward": _contiguous_operands,
    "aten.squeeze": _squeeze,
    "aten.embedding": _embedding,
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.gather": _gather,
    "aten.scatter_add": _scatter_add,
    "autopar.linear": _linear,
    "aten.arange": _arange,
    **dict.fromkeys(("autopar.random_mask", "autopar.random_uniform"), _drawn),
    **dict.fromkeys(("autopar.random_normal", "autopar.random_integers"), _drawn),
}
"""Ops whose arguments speak of global sizes or indices, with the rewrite that makes them local."""
