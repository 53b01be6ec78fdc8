"""Which storage each value of a flat graph lies in, and how long each storage lives.

    view = x.view(8, 4); y = view.t(); z = y + 1      # x, view and y lie in one storage, z in another

What code generation frees, what may be overwritten in place and what memory is needed all follow from this.

Invariants:
- a value that a schema marks as a view, an in-place result, or `_unsafe_view`, lies in its operand's storage;
- what a `*_start` collective returns holds its input's storage and its own buffers; `wait` gives a storage of its own,
  except that of an all-gather along dim 0, which gathers in place, and of an all-reduce in place;
- collectives stand for axes of more than one rank (else their result could be their operand);
- placeholders are taken to lie in distinct storages (the caller knows whether slots share one).
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

Origin = tuple[fx.Node, int]
"""(node, index of its output): where a storage was made."""

Origins = tuple[frozenset[Origin], ...]
"""Per output of a node, the storages that it keeps alive."""

_UNMARKED_VIEWS = ("aten::_unsafe_view",)
_COLLECTIVES = "autopar.collectives"


def local_value(node: fx.Node) -> Any:
    """The node's local fake value: `meta["local_val"]` once the graph is localised, else `meta["val"]`."""
    return node.meta.get("local_val", node.meta.get("val"))


def target_name(node: fx.Node) -> str:
    """The bare name of what the node calls: `"mm"`, `"all_gather_start"`, `"getitem"`."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._opname)
    return getattr(node.target, "__name__", str(node.target))


def is_collective(node: fx.Node) -> bool:
    """Whether the node is one of `autopar.collectives` (start and wait included)."""
    return node.op == "call_function" and _is_of_collectives(node.target)


def is_start(node: fx.Node) -> bool:
    """Whether the node starts a collective."""
    return is_collective(node) and target_name(node).endswith("_start")


def is_wait(node: fx.Node) -> bool:
    """Whether the node awaits a started collective."""
    return is_collective(node) and target_name(node) == "wait"


def _is_of_collectives(target: Any) -> bool:
    is_op = isinstance(target, torch._ops.OpOverload)  # asked of every node: its attributes are dear
    return not is_op and getattr(target, "__module__", None) == _COLLECTIVES


def gathers_in_place(node: fx.Node) -> bool:
    """Whether a collective's buffer is its result: chunks along dim 0 lie one after the other."""
    dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else None)
    return target_name(node).startswith("all_gather") and isinstance(dim, int) and dim == 0


def reduces_in_place(node: fx.Node) -> bool:
    """Whether a collective's result is its operand, overwritten."""
    return target_name(node).startswith("all_reduce") and bool(node.kwargs.get("inplace"))


def is_unpacked(node: fx.Node) -> bool:
    """Whether only single items of the node's tuple are read, so that it is taken apart at once."""
    return bool(node.users) and all(
        user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users
    )


def output_values(graph: fx.Graph) -> tuple[Any, ...]:
    """What the graph returns, as a flat tuple of nodes (and constants)."""
    (result,) = graph.output_node().args
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def is_view(node: fx.Node) -> bool:
    """Whether the node's only effect is another view of its first operand's storage."""
    return isinstance(node.target, torch._ops.OpOverload) and _is_view(node.target)


@functools.cache
def _is_view(target: torch._ops.OpOverload) -> bool:
    return not target._schema.is_mutable and _aliased_argument(target, 0) == 0


def _is_unmarked_view(target: torch._ops.OpOverload) -> bool:
    return target._schema.name in _UNMARKED_VIEWS


@functools.cache
def _aliased_argument(target: torch._ops.OpOverload, output: int) -> int | None:
    """Index of the argument in whose storage the output lies, by the schema's alias sets."""
    if _is_unmarked_view(target):
        return 0
    returns = target._schema.returns
    info = returns[min(output, len(returns) - 1)].alias_info if returns else None
    if info is None:
        return None
    for index, argument in enumerate(target._schema.arguments):
        theirs = argument.alias_info
        if theirs is not None and theirs.before_set & info.before_set:
            return index
    return None


def written_operand(node: fx.Node) -> fx.Node | None:
    """The operand that an in-place or `out=` call writes and returns."""
    target = node.target
    if (
        not isinstance(target, torch._ops.OpOverload)
        or not target._schema.is_mutable
        or len(target._schema.returns) != 1
    ):
        return None
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            operand = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            return operand if isinstance(operand, fx.Node) else None
    return None


def _num_outputs(node: fx.Node) -> int:
    value = local_value(node)
    return len(value) if isinstance(value, (tuple, list)) else 1


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Storages of a graph in program order; `position[node]` counts from 0."""

    position: dict[fx.Node, int]
    origins: dict[fx.Node, Origins]
    last_use: dict[fx.Node, int]
    """Position of the last reader of the value itself (its own position when nothing reads it)."""
    death: dict[Origin, int]
    """Position after which no value lies in the storage; the output node's for what is returned."""

    def of(self, node: fx.Node) -> frozenset[Origin]:
        """Every storage that the node's value keeps alive."""
        return _union(self.origins[node])


def _union(origins: Iterable[frozenset[Origin]]) -> frozenset[Origin]:
    """All of several sets: nearly always there is one."""
    first, *rest = [*origins] or [frozenset[Origin]()]
    return first.union(*rest) if rest else first


def lifetimes(graph: fx.Graph) -> Lifetimes:
    """Where each value of `graph` lies and when each storage dies."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    origins: dict[fx.Node, Origins] = {}
    last_use: dict[fx.Node, int] = {}
    death: dict[Origin, int] = {}
    for node in graph.nodes:
        origins[node] = _origins(node, origins)
        readers = () if is_unpacked(node) else node.users
        last = last_use[node] = max(map(position.__getitem__, readers), default=position[node])
        for origin in itertools.chain.from_iterable(origins[node]):
            death[origin] = max(death.get(origin, 0), last)
    return Lifetimes(position, origins, last_use, death)


def _origins(node: fx.Node, known: dict[fx.Node, Origins]) -> Origins:
    """The storages of the node's outputs, from those of its operands."""
    if node.op == "output":
        return ()
    if node.op != "call_function":
        return (frozenset({(node, 0)}),)
    if node.target is operator.getitem:
        return (_item(known[_operand(node, 0)], node.args[1]),)
    if is_collective(node):
        return (_collective_origins(node, known),)
    if isinstance(node.target, torch._ops.OpOverload):
        return tuple(_output_origins(node, index, known) for index in range(_num_outputs(node)))
    return tuple(frozenset({(node, index)}) for index in range(_num_outputs(node)))


def _item(origins: Origins, index: Any) -> frozenset[Origin]:
    return origins[index] if isinstance(index, int) and index < len(origins) else _union(origins)


def _operand(node: fx.Node, index: int) -> fx.Node:
    operand = node.args[index]
    assert isinstance(operand, fx.Node), node.format_node()
    return operand


def _collective_origins(node: fx.Node, known: dict[fx.Node, Origins]) -> frozenset[Origin]:
    own = frozenset({(node, 0)})
    if is_start(node) and reduces_in_place(node):
        return _union(known[_operand(node, 0)])
    if is_start(node):
        return own.union(*known[_operand(node, 0)])
    if is_wait(node):
        pending = _operand(node, 0)
        if reduces_in_place(pending):
            return _union(known[pending])
        return frozenset({(pending, 0)}) if gathers_in_place(pending) else own
    if target_name(node) == "shard":
        return _union(known[_operand(node, 0)])
    return own


def _output_origins(node: fx.Node, output: int, known: dict[fx.Node, Origins]) -> frozenset[Origin]:
    assert isinstance(node.target, torch._ops.OpOverload)
    argument = _aliased_argument(node.target, output)
    if argument is None:
        return frozenset({(node, output)})
    name = node.target._schema.arguments[argument].name
    operand = node.args[argument] if argument < len(node.args) else node.kwargs[name]
    if isinstance(operand, fx.Node):
        return _union(known[operand])
    return _union(origin for source in nodes_in(operand) for origin in known[source])


def nodes_in(argument: Any) -> Iterator[fx.Node]:
    """The nodes in an argument, in order; lists and tuples are searched."""
    if isinstance(argument, fx.Node):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            yield from nodes_in(item)
    elif isinstance(argument, dict):
        for item in argument.values():
            yield from nodes_in(item)


def nbytes(value: Any) -> int:
    """Bytes of the tensors in a (fake) value, each with a storage of its own."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(nbytes(item) for item in value) if isinstance(value, (tuple, list)) else 0
