"""Turns a laid-out graph of global values into the graph that every rank runs on its local tensors.

Before: every operand has the layout that its op needs; moves are markers. After: shape arguments are local, indices
are offset and masked where what they index is split, moves are views and collectives, relays are gone, and every
node has `local_val`, a fake tensor with exactly the local shape of its layout (asserted).
Numbers: the global values are unchanged up to the order of sums.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from autopar import collectives, markers
from autopar.layout import Layout, Position, chunk_size
from autopar.mesh import Mesh
from autopar.private import as_fake, meta_twin
from autopar.rules.choices import filled
from autopar.rules.nodes import (
    argument,
    index_operands,
    is_view,
    node_argument,
    op_name,
    replace_operands,
    tensor_operands,
)
from passes.context import Context
from passes.local_arguments import OF_STORAGE, given_strides, plus
from passes.local_indices import HANDLERS, contiguous_operands, replace_node

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


def _given(value: Any) -> Any:
    """Equal for arguments of which a call's fake result is the same; a node's value by its id, as `_shared` gave it."""
    if isinstance(value, Node):
        local = value.meta["local_val"]
        return (int, local) if isinstance(local, int) else id(local)
    if isinstance(value, (tuple, list)):
        return tuple(map(_given, value))
    if isinstance(value, dict):
        return tuple((key, _given(item)) for key, item in value.items())
    return type(value), value


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        size = value.untyped_storage().nbytes()
        return value.dtype, value.device, tuple(value.shape), value.stride(), value.storage_offset(), size
    return (type(value), *map(_signature, value)) if isinstance(value, (tuple, list)) else (type(value), value)


@dataclass(slots=True)
class Localiser:
    """Localises one node at a time; new nodes are put at the graph's insertion point, right after the node."""

    graph: Graph
    mesh: Mesh
    mode: FakeTensorMode
    known: dict[Any, Any] = field(default_factory=dict)
    """What calls gave, by what they were given: equal layers ask the same."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """One value for all that are alike, so that they can be told by their ids."""
    shapes: dict[Layout, tuple[int, ...]] = field(default_factory=dict)

    def localise(self, node: Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            shape = self.local_shape(node.meta["layout"])
            node.meta["local_val"] = self._contiguous(shape, node.meta["val"].dtype)
        elif node.target is markers.relay:
            node.replace_all_uses_with(node_argument(node, 0))
            self.graph.erase_node(node)
        elif node.target in markers.MOVES:
            self._lower_move(node)
        else:
            with self.graph.inserting_before(node):
                self._localise_arguments(node)
            self.run(node)

    def _localise_arguments(self, node: Node) -> None:
        handler = HANDLERS.get(op_name(node), contiguous_operands if "found_rule" in node.meta else None)
        is_split = bool(node.meta.get("choice")) and node.target is not operator.getitem
        if is_split:
            self._fill_operands(node)
        if not is_split and op_name(node) in OF_STORAGE:
            handler = given_strides
        if handler is not None and (is_split or handler in _ALWAYS):
            handler(self, node)

    # -- local values ------------------------------------------------------------------------------------------
    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """The shape of a rank's tensor, padding included."""
        if layout not in self.shapes:
            self.shapes[layout] = layout.local_shape(self.mesh)
        return self.shapes[layout]

    def _contiguous(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        if (shape, dtype) not in self.known:
            fresh = torch.empty(shape, dtype=dtype, device="meta")
            self.known[shape, dtype] = self._shared(as_fake(self.mode, fresh))
        return self.known[shape, dtype]

    def run(self, node: Node) -> None:
        """Runs the op on its operands' fake local values and asserts that its layout's local shape comes out."""
        if op_name(node) in ("aten.view", "aten._unsafe_view") and not self._is_viewable(node):
            node.target = aten.reshape.default  # a shard may be strided where the whole was contiguous
        node.meta["local_val"] = self._evaluate(node)
        self._check(node)

    def _evaluate(self, node: Node) -> Any:
        call = (node.target, _given(node.args), _given(node.kwargs))
        if call not in self.known:
            self.known[call] = self._shared(self._called(node))
        return self.known[call]

    def _shared(self, value: Any) -> Any:
        """The first value that is like this one in all that a call may ask of it."""
        if not isinstance(value, (torch.Tensor, tuple, list)):
            return value
        return self.kept.setdefault(_signature(value), value)

    def _called(self, node: Node) -> Any:
        def local(n: Node) -> Any:
            return n.meta["local_val"]

        args: Any = torch.fx.node.map_arg(node.args, local)
        kwargs: Any = torch.fx.node.map_arg(node.kwargs, local)
        if node.target in _FAKE_NUMBERS:
            return _FAKE_NUMBERS[node.target](self.mesh, *args)
        if node.target in _SHAPES_OF_MOVED:
            return self._contiguous(tuple(_SHAPES_OF_MOVED[node.target](self.mesh, *args)), args[0].dtype)
        if node.target is collectives.shard:
            return as_fake(self.mode, _shard(self.mesh, meta_twin(args[0]), *args[1:]))
        if node.target in (aten.view.default, aten._unsafe_view.default) and self._is_fresh(*args):
            return self._contiguous(tuple(args[1]), args[0].dtype)  # under the mode, a view takes milliseconds
        with self.mode:
            assert callable(node.target), node.format_node()
            return node.target(*args, **kwargs)

    def _is_fresh(self, value: torch.Tensor, size: Any) -> bool:
        """Whether what is viewed by `size` lies as a fresh tensor does, so that the view does, too."""
        is_fresh = value is self._contiguous(tuple(value.shape), value.dtype)
        return is_fresh and not isinstance(size, torch.dtype) and all(isinstance(n, int) and n >= 0 for n in size)

    def _is_viewable(self, node: Node) -> bool:
        """Whether the strides allow the view."""
        value, size = node_argument(node, 0), argument(node, 1, "size")
        call = (_is_viewable, _given(value), _given(size))
        if call not in self.known:
            self.known[call] = _is_viewable(meta_twin(value.meta["local_val"]), size)
        found: bool = self.known[call]
        return found

    def _check(self, node: Node) -> None:
        layouts = node.meta.get("layout")
        values = node.meta["local_val"]
        if layouts is None:
            return
        pairs = zip(layouts, values, strict=True) if isinstance(layouts, tuple) else [(layouts, values)]
        for layout, value in pairs:
            if layout is not None:
                expected = self.local_shape(layout)
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

    def first(self, node: Node, size: int, axes: Sequence[str], inner: int = 1) -> Node | int:
        """This rank's first index along a factor of `size` split by `axes` (major first), each of `inner` elements."""
        return self._times(node, self.call(node, collectives.first, size, *axes), inner) if axes else 0

    def count(self, node: Node, size: int, axes: Sequence[str], inner: int = 1) -> Node | int:
        """How many elements of the factor this rank has, padding apart."""
        ways = [self.mesh.size(axis) for axis in axes]
        if size % math.prod(ways) == 0:
            return chunk_size(size, ways) * inner
        return self._times(node, self.call(node, collectives.count, size, *axes), inner)

    def _times(self, node: Node, value: Node, inner: int) -> Node:
        return value if inner == 1 else self.call(node, operator.mul, value, inner)

    def scale_result(self, node: Node, own: int, whole: int) -> None:
        """Makes the result, which speaks of `own` elements, a share of that of `whole`."""
        if own == whole:
            return
        by, number = (aten.div.Scalar, whole // own) if whole % own == 0 else (aten.mul.Scalar, own / whole)
        users = list(node.users)
        with self.graph.inserting_before(node.next):
            self.run(node)
            share = self.call(node, by, node, number, layout=node.meta["layout"])
        replace_node(node, share, users)

    # -- padding -----------------------------------------------------------------------------------------------
    def _fill_operands(self, node: Node) -> None:
        """Padding that the op would sum over becomes neutral; padding that it would take for indices becomes 0."""
        if is_view(node):
            return
        operands = tensor_operands(node)
        fills = filled(node.meta["rule"], node.meta["choice"], self.mesh, index_operands(node))
        for number, found in enumerate(fills):
            for reduction, positions in found.items():
                value = operands[number]
                fill = _neutral(reduction, value.meta["val"].dtype)
                operands[number] = self.fill_padding(node, value, positions, fill)
        if any(fills):
            replace_operands(node, operands)

    def fill_padding(self, node: Node, value: Node, positions: Iterable[Position], fill: float) -> Node:
        """`value` with `fill` in the padding of the factors at `positions`; `node` is the op that will read it."""
        layout = value.meta["layout"]
        filled = self._reshaped(node, value, layout.local_factor_shape(self.mesh))
        for position in positions:
            factor = layout.dims[position[0]][position[1]]
            size, dim = factor.local_size(self.mesh), _flat(layout, position)
            index = self.call(node, aten.arange.default, size)
            padding = self.call(node, aten.ge.Scalar, index, self.count(node, factor.size, factor.axes))
            trailing = filled.meta["local_val"].dim() - dim - 1
            if trailing:
                padding = self.call(node, aten.view.default, padding, [size, *[1] * trailing])
            filled = self.call(node, aten.masked_fill.Scalar, filled, padding, fill)
        result = self._reshaped(node, filled, self.local_shape(layout))
        result.meta.update(layout=layout, val=value.meta["val"])  # it stands for the operand, not for `node`
        return result

    # -- moves -------------------------------------------------------------------------------------------------
    def _lower_move(self, node: Node) -> None:
        value, axis = node_argument(node, 0), node.args[1]
        before, after = value.meta["layout"], node.meta["layout"]
        target, args = _lowered(node, before)
        flat = self._reshaped(node, value, before.local_factor_shape(self.mesh))
        padded = self._padded(node, flat, after.local_factor_shape(self.mesh), str(axis))
        moved = self.call(node, target, padded, axis, *args)
        cut = self._cut(node, moved, after.local_factor_shape(self.mesh))
        result = self._reshaped(node, cut, self.local_shape(after))
        result.meta["layout"] = after
        self._check(result)
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def _padded(self, node: Node, value: Node, after: Sequence[int], axis: str) -> Node:
        """`value` as long along each dim as the chunks that it is moved to, put together."""
        before, ways = value.meta["local_val"].shape, self.mesh.size(axis)
        wanted = [new * ways if new < old else old for old, new in zip(before, after, strict=True)]
        return value if tuple(before) == tuple(wanted) else self.call(node, collectives.pad, value, wanted)

    def _cut(self, node: Node, value: Node, after: Sequence[int]) -> Node:
        """`value` without the padding of the chunks that were put together."""
        for dim, (size, kept) in enumerate(zip(value.meta["local_val"].shape, after, strict=True)):
            if kept < size:
                value = self.call(node, aten.slice.Tensor, value, dim, 0, kept)
        return value

    def _reshaped(self, node: Node, value: Node, shape: tuple[int, ...]) -> Node:
        if tuple(value.meta["local_val"].shape) == shape:
            return value
        return self.call(node, aten.view.default, value, list(shape))


def _is_viewable(value: torch.Tensor, size: Any) -> bool:
    """Whether a meta tensor's strides allow the view: torch 2.13's fake tensors allow too much."""
    try:
        value.view(size)
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


def _resized(factor: Callable[[Mesh, str], tuple[int, int]]) -> Callable[..., list[int]]:
    def run(mesh: Mesh, x: torch.Tensor, axis: str, dim: int, *_: Any) -> list[int]:
        multiply, divide = factor(mesh, axis)
        shape = list(x.shape)
        shape[dim] = shape[dim] * multiply // divide
        return shape

    return run


def _exchanged(mesh: Mesh, x: torch.Tensor, axis: str, split_dim: int, concat_dim: int) -> list[int]:
    shape = list(x.shape)
    shape[split_dim] //= mesh.size(axis)
    shape[concat_dim] *= mesh.size(axis)
    return shape


def _shard(mesh: Mesh, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    return x.narrow(dim, 0, x.shape[dim] // mesh.size(axis))


_FAKE_NUMBERS: dict[Any, Callable[..., int]] = {
    collectives.coordinate: lambda mesh, axis: 0,
    collectives.first: lambda mesh, size, *axes: 0,
    collectives.count: lambda mesh, size, *axes: chunk_size(size, map(mesh.size, axes)),
}
"""What a rank is told of its place, for shapes."""

_SHAPES_OF_MOVED: dict[Any, Callable[..., Sequence[int]]] = {
    collectives.all_gather: _resized(lambda mesh, axis: (mesh.size(axis), 1)),
    collectives.reduce_scatter: _resized(lambda mesh, axis: (1, mesh.size(axis))),
    collectives.pad: lambda mesh, x, sizes: sizes,
    collectives.all_reduce: lambda mesh, x, axis, op: x.shape,
    collectives.all_to_all: _exchanged,
}
"""Of what collectives give in a tensor of its own."""


# -- padding ---------------------------------------------------------------------------------------------------------
_ALWAYS = (contiguous_operands, given_strides, plus)
"""Handlers of ops that aren't split, too: what is whole may be strided, gathered from padded chunks; sums go on."""


def _neutral(reduction: str | None, dtype: torch.dtype) -> float:
    """What changes nothing when it is reduced: 0 for sums, the least value for a max."""
    if reduction in ("max", "min") and dtype != torch.bool:
        range_ = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        ends = (-math.inf, math.inf) if dtype.is_floating_point else (range_.min, range_.max)
        return ends[reduction == "min"]
    return float(reduction in ("prod", "min"))
