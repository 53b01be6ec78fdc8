"""What is asked of an FX node: its op's name and properties, its tensor operands and results, their shapes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autopar.private import OpOverload, schema_of
from autopar.rules.notation import Linear, Shape

_POINTWISE_LINEAR: dict[str, Linear] = {
    "aten.add.Tensor": ((0, 1),),
    "aten.sub.Tensor": ((0, 1),),
    "aten.mul.Tensor": ((0,), (1,)),
    "aten.mul.Scalar": ((0,),),
    "aten.div.Tensor": ((0,),),
    "aten.div.Scalar": ((0,),),
    "aten.neg": ((0,),),
    "aten.positive": ((0,),),
    "aten.deg2rad": ((0,),),
    "aten.rad2deg": ((0,),),
    "aten.true_divide.Tensor": ((0,),),
    "aten.rsub.Tensor": ((0, 1),),
    "aten.lerp.Scalar": ((0, 1),),
    "aten.addcmul": ((0, 1), (0, 2)),
    "aten.where.self": ((1, 2),),
    "aten.copy": ((1,),),
}
"""Pointwise ops through which partial sums pass, and in which operands; all others take whole values."""


def op_name(node: Node) -> str:
    """`aten.mm`: the op without its overload; a plain function's own name."""
    return _name_of(node.target)


@functools.cache
def _name_of(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[1]}"
    return getattr(target, "__name__", str(target))


def tensor_operands(node: Node) -> list[Node]:
    """The node's tensor arguments in order, those inside lists included."""
    return [n for n in _nodes_in((*node.args, node.kwargs)) if isinstance(n.meta.get("val"), torch.Tensor)]


def index_operands(node: Node) -> tuple[int, ...]:
    """The numbers of the operands that an op may take for indices: integers, unless it is pointwise."""
    if is_pointwise(node.target):
        return ()
    dtypes = [operand.meta["val"].dtype for operand in tensor_operands(node)]
    plain = [not (d.is_floating_point or d.is_complex or d == torch.bool) for d in dtypes]
    return tuple(number for number, is_index in enumerate(plain) if is_index)


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """The argument `name`, which stands at `index` where it is positional."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def node_argument(node: Node, index: int) -> Node:
    """Positional argument `index`, which is a node."""
    found = node.args[index]
    assert isinstance(found, Node), f"{node.format_node()}: argument {index} is {found!r}"
    return found


def copy_graph(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """A copy with the same names and a `meta` of its own for each node; and node → copy."""
    copy, known = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        known[node] = copy_node(copy, node, known.__getitem__)
    return copy, known


def copy_node(graph: Graph, node: Node, operand: Callable[[Node], Any]) -> Node:
    """What `Graph.node_copy` adds, in half of its time: arguments that are put in afterwards aren't searched for sizes
    without a value, which captured steps don't have."""
    args, kwargs = map_arg(node.args, operand), map_arg(node.kwargs, operand)
    new = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    if args:
        new.args = args
    if kwargs:
        new.kwargs = kwargs
    new.meta.update(node.meta)
    return new


def _nodes_in(arguments: Iterable[Any]) -> list[Node]:
    """The nodes among arguments, in order; lists and dicts are searched."""
    found: list[Node] = []
    for argument in arguments:
        if isinstance(argument, Node):
            found.append(argument)
        elif isinstance(argument, (tuple, list)):
            found += _nodes_in(argument)
        elif isinstance(argument, dict):
            found += _nodes_in(argument.values())
    return found


def replace_operands(node: Node, operands: Sequence[Node]) -> None:
    """Puts `operands` in the places of `tensor_operands(node)`: one value in two places may become two."""
    remaining = iter(operands)

    def placed(argument: Node) -> Node:
        return next(remaining) if isinstance(argument.meta.get("val"), torch.Tensor) else argument

    node.args = map_arg(node.args, placed)
    if node.kwargs:
        node.kwargs = map_arg(node.kwargs, placed)


def result_values(node: Node) -> list[torch.Tensor | None]:
    """The node's results: one tensor, or the items of its tuple (None where an op returns none)."""
    value = node.meta["val"]
    items = list(value) if isinstance(value, (tuple, list)) else [value]
    return [item if isinstance(item, torch.Tensor) else None for item in items]


_VIEWS = frozenset(
    {
        *("aten.view", "aten._unsafe_view", "aten.reshape", "aten.t", "aten.transpose", "aten.permute"),
        *("aten.unsqueeze", "aten.squeeze", "aten.expand", "aten.slice", "aten.select", "aten.split"),
        *("aten.split_with_sizes", "aten.alias", "aten.detach", "relay"),
    }
)


def is_view(node: Node) -> bool:
    """Whether the node's result shares its operand's storage."""
    return node.target is operator.getitem or op_name(node) in _VIEWS


def is_pointwise(target: Any) -> bool:
    """Whether each element of the result depends on one element of each operand (ATen's tag)."""
    return torch.Tag.pointwise in getattr(target, "tags", ())


def takes_gradient(target: Any) -> bool:
    """Whether the op is a backward, by its schema: linear in its first operand, the gradient."""
    arguments: list[Any] = list(getattr(getattr(target, "_schema", None), "arguments", ()))
    return bool(arguments) and arguments[0].name in ("grad_output", "grad_out", "grad")


def is_random(node: Node) -> bool:
    """Whether two equal calls may give different values."""
    tagged = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return tagged and not is_certain(node.target, node.args, node.kwargs)


def is_certain(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call of an op that may draw random numbers draws none: attention without dropout, for one."""
    named = {argument.name: argument.default_value for argument in target._schema.arguments}
    named |= {**dict(zip(named, args, strict=False)), **kwargs}
    probability = named.get("dropout_p", named.get("dropout"))
    return probability == 0 or named.get("train", named.get("training")) is False


def shapes_of(node: Node) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    """Shapes of the tensor operands and of the tensor results."""
    operands = tuple(tuple(map(int, o.meta["val"].shape)) for o in tensor_operands(node))
    results = tuple(tuple(map(int, r.shape)) for r in result_values(node) if r is not None)
    return operands, results


def pointwise_linear(node: Node) -> Linear:
    """The operand sets through which a pointwise op passes partial sums."""
    target: Any = node.target
    name = op_name(node)
    overload = getattr(target, "_overloadname", "")
    if takes_gradient(target):
        return ((0,),)
    linear = _POINTWISE_LINEAR.get(f"{name}.{overload}", _POINTWISE_LINEAR.get(name, ()))
    count = len(tensor_operands(node))
    if name in ("aten.add", "aten.sub") and count == 1:
        return ()  # a constant is added: affine, not linear
    return tuple(group for group in linear if all(i < count for i in group))


# -- text ----------------------------------------------------------------------------------------------------------
def user_name(node: Node) -> str:
    """The op as users write it: "mylib::norm", "aten::var.correction"; of a call that was made functional, the op's."""
    inner = next((a for a in (node.target, *node.args) if isinstance(a, OpOverload)), None)
    if inner is None:
        return str(getattr(node.target, "__name__", node.target))
    schema = schema_of(inner)
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


def call_text(node: Node) -> str:
    """One call, its tensors by their types: "mylib::norm(f32[8 64], f32[64], eps=1e-05)"."""
    words = [*map(_argument_text, node.args), *(f"{k}={_argument_text(v)}" for k, v in node.kwargs.items())]
    return f"{user_name(node)}({', '.join(words)})"


def _argument_text(argument: Any) -> str:
    if isinstance(argument, Node):
        return type_text(argument.meta.get("val"))
    if isinstance(argument, (tuple, list)):
        return f"[{', '.join(map(_argument_text, argument))}]"
    return str(argument)


def type_text(value: Any) -> str:
    """`f32[8 64]`; for what is no tensor, its class."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    kind = str(value.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i")
    return f"{kind}[{' '.join(map(str, value.shape))}]"
