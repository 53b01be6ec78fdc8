"""The cheapest Python spelling of an ATen call: `x.mm(w)` takes 0.7 of the time of `torch.ops.aten.mm.default(x, w)`.

    aten.mul.Tensor(x, 2.0)                 ->  x * 2.0
    aten.native_layer_norm.default(x, ...)  ->  _native_layer_norm(x, ...)       # torch.native_layer_norm, bound once

Measured on one core, 8x8 operands, under inference mode: operator 0.8, method 0.7-0.9, `torch.f` 0.9, overload 1.3 µs.

Invariants:
- a spelling from the general candidates is used only after a trial on meta tensors has shown that it dispatches to the
  node's overload, once, with the node's arguments; otherwise the overload itself is called;
- `REWRITES` spell what no public function dispatches to exactly; each is tested by its numbers.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.program.storages import local_value

INFIX: dict[str, tuple[str, Callable[..., Any]]] = {
    "aten::add": ("+", operator.add),
    "aten::sub": ("-", operator.sub),
    "aten::mul": ("*", operator.mul),
    "aten::div": ("/", operator.truediv),
}
"""ATen operators that Python has an operator for."""

PYTHON_INFIX: dict[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.truediv: "/",
}
"""Arithmetic on plain numbers (coordinates, offsets)."""

SPREAD_METHODS = {"view", "expand", "permute", "reshape", "repeat"}
"""Methods that take their sizes as separate arguments."""

MODULES: tuple[tuple[str, Any], ...] = (
    ("torch", torch),
    ("torch._C._nn", torch._C._nn),
)
"""Where functions are looked for, in order."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """How an op is written: `form` is "infix", "method" or "function"; `text` the operator or the name."""

    form: str
    text: str
    binding: str = ""
    """For a function: the expression that it is bound to at import, `"torch.mm"`."""


@dataclass(slots=True)
class Speller:
    """Spells nodes, remembering trials within one generation of source and collecting the names to bind."""

    lowered: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    bindings: dict[str, str] = field(default_factory=dict)
    """Bound name → expression, in the order of first use."""
    trials: dict[Any, Spelling] = field(default_factory=dict)

    def call(self, node: fx.Node, name_of: Callable[[fx.Node], str]) -> str:
        """The expression that computes the node (a `call_function` of an overload, a plain function or an operator)."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return self._plain_call(node, name_of)
        rewrite = REWRITES.get(str(node.target))
        text = rewrite(node, lambda value: self.literal(value, name_of)) if rewrite else None
        if text is not None:
            return text
        key = (node.target, _signature(node))
        if key not in self.trials:
            self.trials[key] = self._lowered_spelling(node) or _spelling(node)
        return self._write(self.trials[key], node, name_of)

    def literal(self, value: Any, name_of: Callable[[fx.Node], str]) -> str:
        """A Python literal, or the name of a node."""
        if isinstance(value, fx.Node):
            return name_of(value)
        if isinstance(value, (tuple, list)):
            items = ", ".join(self.literal(item, name_of) for item in value)
            plain = all(isinstance(item, (int, float, fx.Node)) for item in value) and _all_numbers(value)
            return f"({items}{',' if len(value) == 1 else ''})" if plain else f"[{items}]"
        if isinstance(value, torch.device):
            return "device"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if isinstance(value, str):
            return json.dumps(value)
        assert isinstance(value, (int, float, bool, type(None), torch.dtype, torch.layout, torch.memory_format)), value
        return repr(value)

    def bind(self, expression: str, wanted: str) -> str:
        """A name bound to `expression` at the top of the module."""
        name = f"_{wanted.lstrip('_')}"
        while self.bindings.get(name, expression) != expression:
            name += "_"
        self.bindings[name] = expression
        return name

    def _plain_call(self, node: fx.Node, name_of: Callable[[fx.Node], str]) -> str:
        if node.target in PYTHON_INFIX and len(node.args) == 2:
            left, right = (self.literal(a, name_of) for a in node.args)
            return f"({left} {PYTHON_INFIX[node.target]} {right})"
        module, name = getattr(node.target, "__module__", ""), getattr(node.target, "__qualname__", "")
        assert module and name.isidentifier(), f"{node.format_node()}: can't be imported by name"
        return f"{self.bind(f'{module}.{name}', name)}({self._arguments(node.args, node.kwargs, name_of)})"

    def _lowered_spelling(self, node: fx.Node) -> Spelling | None:
        function = self.lowered.get(node.target)
        if function is None:
            return None
        module, name = function.__module__, function.__name__
        return Spelling("function", name, f"{module}.{name}")

    def _write(self, spelling: Spelling, node: fx.Node, name_of: Callable[[fx.Node], str]) -> str:
        kwargs = _kept_kwargs(node)
        if spelling.form == "infix":
            left, right = (self.literal(a, name_of) for a in node.args)
            return f"({left} {spelling.text} {right})"
        if spelling.form == "function":
            name = self.bind(spelling.binding, spelling.text)
            return f"{name}({self._arguments(node.args, kwargs, name_of)})"
        owner, rest = self.literal(node.args[0], name_of), node.args[1:]
        if spelling.text in SPREAD_METHODS and len(rest) == 1 and rest[0]:
            rest = tuple(rest[0])  # type: ignore[arg-type]
        return f"{owner}.{spelling.text}({self._arguments(rest, kwargs, name_of)})"

    def _arguments(self, args: Any, kwargs: dict[str, Any], name_of: Callable[[fx.Node], str]) -> str:
        words = [self.literal(a, name_of) for a in args]
        return ", ".join(words + [f"{key}={self.literal(value, name_of)}" for key, value in kwargs.items()])


def _all_numbers(values: Any) -> bool:
    return all(not isinstance(v, fx.Node) or not isinstance(local_value(v), torch.Tensor) for v in values)


def _signature(node: fx.Node) -> tuple[Any, ...]:
    """What a trial depends on: the kinds of the arguments and which keywords are given."""

    def kind(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            value = local_value(argument)
            return ("tensor", value.dim() == 0) if isinstance(value, torch.Tensor) else "number"
        if isinstance(argument, (tuple, list)):
            return ("list", *(kind(item) for item in argument[:1]))
        return type(argument).__name__

    return (*map(kind, node.args), *((k, kind(v)) for k, v in _kept_kwargs(node).items()))


def _kept_kwargs(node: fx.Node) -> dict[str, Any]:
    """The keyword arguments without those that say nothing (defaults, strided layout, …); factories get a device."""
    assert isinstance(node.target, torch._ops.OpOverload)
    noise = {"layout": torch.strided, "pin_memory": False}
    defaults = {a.name: a.default_value for a in node.target._schema.arguments}
    kept = {
        key: value
        for key, value in node.kwargs.items()
        if value is not None and value != noise.get(key) and not _is_same(value, defaults.get(key))
    }
    makes_from_nothing = node.target.namespace == "autopar" or not any(map(_is_tensor, node.all_input_nodes))
    return {**kept, "device": _DEVICE} if "device" in defaults and makes_from_nothing else kept


_DEVICE = torch.device("cpu")
"""Stands for the rank's device, whatever the graph was captured on; written as `device`."""


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(local_value(node), torch.Tensor)


def _is_same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and not isinstance(left, fx.Node) and bool(left == right)


# -- trials ----------------------------------------------------------------------------------------------------
class _SecondCallError(Exception):
    """Raised once a second op is dispatched: the candidate does more than the overload."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the first dispatched call and answers it with a prepared result; a second one stops the trial."""

    def __init__(self, result: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.result = result
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.calls:
            raise _SecondCallError
        self.calls.append((func, _bound(func, args, kwargs or {})))
        return args[0] if func._opname.endswith("_") else self.result


def _bound(target: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, defaults filled in."""
    named = {a.name: a.default_value for a in target._schema.arguments}
    named.update(zip((a.name for a in target._schema.arguments), args, strict=False))
    named.update(kwargs)
    return named


def _spelling(node: fx.Node) -> Spelling:
    """The first candidate whose trial dispatches to exactly the node's call."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    for spelling, function in _candidates(node):
        if _is_exact(node, function):
            return spelling
    namespace, name, overload = target._schema.name.split("::")[0], target._opname, target._overloadname
    return Spelling("function", name, f"torch.ops.{namespace}.{name}.{overload}")


def _candidates(node: fx.Node) -> Iterator[tuple[Spelling, Callable[..., Any]]]:
    assert isinstance(node.target, torch._ops.OpOverload)
    full, name = node.target._schema.name, node.target._opname
    first = local_value(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if isinstance(first, torch.Tensor):
        if full in INFIX and len(node.args) == 2 and not _kept_kwargs(node):
            yield Spelling("infix", INFIX[full][0]), INFIX[full][1]
        method: Any = getattr(torch.Tensor, name, None)
        if type(method).__name__ == "method_descriptor":
            yield Spelling("method", name), method
    for module, namespace in MODULES:
        function: Any = getattr(namespace, name, None)
        if type(function).__name__ == "builtin_function_or_method":
            yield Spelling("function", name, f"{module}.{name}"), function


def _is_exact(node: fx.Node, function: Callable[..., Any]) -> bool:
    """Whether `function` on meta tensors dispatches once, to the node's overload, with the node's arguments."""
    assert isinstance(node.target, torch._ops.OpOverload)
    known: dict[fx.Node, Any] = {}
    args, kwargs = _on_meta(node.args, known), _on_meta(_kept_kwargs(node), known)
    expected = _bound(node.target, args, _on_meta(node.kwargs, known))
    recorder = _Recorder(_on_meta(local_value(node), known))
    try:
        with torch.no_grad(), recorder:
            function(*args, **kwargs)
    except Exception:  # any refusal means only that the candidate doesn't fit
        return False
    ((called, got),) = recorder.calls or [(None, {})]
    return called is node.target and all(_agrees(name, got.get(name), expected[name]) for name in expected)


def _on_meta(value: Any, known: dict[fx.Node, Any]) -> Any:
    """`value` with a meta tensor for each tensor, the same one wherever a node stands."""
    if isinstance(value, fx.Node):
        if value not in known:
            known[value] = _on_meta(local_value(value), known)
        return known[value]
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        return {key: _on_meta(item, known) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_on_meta(item, known) for item in value)
    return torch.device("meta") if isinstance(value, torch.device) else value


def _agrees(name: str, got: Any, expected: Any) -> bool:
    if name in ("layout", "pin_memory", "device"):
        return True
    if isinstance(expected, torch.Tensor) or isinstance(got, torch.Tensor):
        return got is expected
    if isinstance(expected, (tuple, list)) and isinstance(got, (tuple, list)):
        return len(got) == len(expected) and all(map(_agrees, [name] * len(got), got, expected))
    return type(got) is type(expected) and (got == expected or (got != got and expected != expected))


# -- rewrites --------------------------------------------------------------------------------------------------
Literal = Callable[[Any], str]


def _to_copy(node: fx.Node, literal: Literal) -> str | None:
    """`_to_copy` is `to` where the dtype changes (else `to` would give the tensor itself)."""
    source, dtype = node.args[0], node.kwargs.get("dtype")
    assert isinstance(source, fx.Node)
    known = {"dtype", "device", "layout", "pin_memory", "non_blocking"}
    if {k for k, v in node.kwargs.items() if v is not None} - known:
        return None
    changes = dtype is not None and local_value(source).dtype != dtype
    return f"{literal(source)}.to({dtype})" if changes else f"{literal(source)}.clone()"


def _unsafe_view(node: fx.Node, literal: Literal) -> str:
    source, sizes = node.args
    assert isinstance(sizes, (tuple, list))
    return f"{literal(source)}.view({', '.join(map(literal, sizes))})"


def _slice(node: fx.Node, literal: Literal) -> str | None:
    """A slice of step 1 with plain bounds is `narrow`."""
    given: tuple[Any, ...] = node.args
    source, dim, start, end, step = given + (0, None, None, 1)[len(given) - 1 :]
    if step != 1 or node.kwargs or not isinstance(start, int | None) or not isinstance(end, int | None):
        return None
    begin, stop, _ = slice(start, end).indices(local_value(source).shape[dim])
    return f"{literal(source)}.narrow({dim}, {begin}, {max(stop - begin, 0)})"


def _scalar(sign: str) -> Callable[[fx.Node, Literal], str | None]:
    """`mul.Scalar` wraps the number and calls `mul.Tensor`, as the operator does."""

    def infix(node: fx.Node, literal: Literal) -> str | None:
        if len(node.args) != 2 or node.kwargs:
            return None
        left, right = map(literal, node.args)
        return f"({left} {sign} {right})"

    return infix


def _scalar_in_place(name: str) -> Callable[[fx.Node, Literal], str | None]:
    """`mul_.Scalar` likewise calls `mul_.Tensor`, as the method does."""

    def method(node: fx.Node, literal: Literal) -> str | None:
        if len(node.args) != 2 or node.kwargs:
            return None
        left, right = map(literal, node.args)
        return f"{left}.{name}({right})"

    return method


def _linear(node: fx.Node, literal: Literal) -> str | None:
    given = [argument for argument in node.args if argument is not None]
    return None if node.kwargs else f"torch.nn.functional.linear({', '.join(map(literal, given))})"


def _linear_dx(node: fx.Node, literal: Literal) -> str:
    dy, weight = map(literal, node.args)
    return f"{dy}.matmul({weight})"


def _linear_dw(node: fx.Node, literal: Literal) -> str:
    x, dy = node.args
    return f"{_as_rows(dy, literal)}.t().mm({_as_rows(x, literal)})"


def _as_rows(node: Any, literal: Literal) -> str:
    """The operand as a matrix; `reshape`, as a local tensor need not be contiguous."""
    assert isinstance(node, fx.Node)
    value = local_value(node)
    return literal(node) if value.dim() == 2 else f"{literal(node)}.reshape(-1, {value.shape[-1]})"


REWRITES: dict[str, Callable[[fx.Node, Literal], str | None]] = {
    **{f"{name.replace('::', '.')}.Scalar": _scalar(sign) for name, (sign, _) in INFIX.items()},
    **{f"{name.replace('::', '.')}_.Scalar": _scalar_in_place(f"{name[6:]}_") for name in INFIX},
    "aten._to_copy.default": _to_copy,
    "aten._unsafe_view.default": _unsafe_view,
    "aten.slice.Tensor": _slice,
    "autopar.linear.default": _linear,
    "autopar.linear_dx.default": _linear_dx,
    "autopar.linear_dw.default": _linear_dw,
}
"""Overload → spelling, or None where the rewrite doesn't hold for the node."""
