"""The update graphs: the optimizer's own `step()`, traced once per template (shape, dtype, group).

    templates[update_of["wte.weight"]]   # param, grad, exp_avg, …, lr, weight_decay → new param, new exp_avg, …

The optimizer's code runs on fake tensors. What it reads with `.item()` stays a 0-d float64 tensor, so Python's double
numerics are kept and nothing is baked in: step counts, learning rate, weight decay, momentum and the first of Adam's
betas are inputs.

Invariants:
- templates are functional, clean, and carry the metadata of `graphs` with phase "update" and path "";
- initial state is what the optimizer itself makes at its first step; where that depends on the gradient (SGD's
  momentum) it is zeros, which is equal without dampening;
- a scalar that is zero at capture (weight decay) stays a constant: the optimizer skips its ops.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from autopar import private
from autopar.capture.clean import ADDED_PRODUCTS, clean
from autopar.capture.gradient import finish
from autopar.capture.graphs import Role, StateInit, UpdateGraph, op_name
from autopar.errors import CaptureError

Optimizer = torch.optim.Optimizer

LIVE_SCALARS = ("lr", "weight_decay", "momentum", "betas.0")
"""Entries of a parameter group that schedulers change between steps; with an index, an item of a tuple."""

PLAIN_SCALARS = LIVE_SCALARS[:3]
"""Those of them that every optimizer's code takes as tensors; some compute with `math` on their betas."""


@dataclass(frozen=True, slots=True)
class Updates:
    """The fields of `Captured` about the optimizer."""

    templates: tuple[UpdateGraph, ...]
    update_of: dict[str, int]
    scalars: dict[str, float]
    options: dict[str, dict[str, Any]]
    initial_state: dict[str, dict[str, StateInit]]


def capture_updates(optimizer: Optimizer, wanted: Mapping[str, tuple[Tensor, int]], *, mixed: bool = False) -> Updates:
    """Update graphs for `wanted`: name → (parameter, group index). `mixed`: bf16 parameters, fp32 master copies."""
    try:
        return _captured(optimizer, wanted, mixed, LIVE_SCALARS)
    except CaptureError:
        return _captured(optimizer, wanted, mixed, PLAIN_SCALARS)


def _captured(
    optimizer: Optimizer, wanted: Mapping[str, tuple[Tensor, int]], mixed: bool, live: Sequence[str]
) -> Updates:
    found: dict[Any, int] = {}
    templates: list[UpdateGraph] = []
    states: list[dict[str, StateInit]] = []
    update_of: dict[str, int] = {}
    for name, (parameter, group) in wanted.items():
        kind = (tuple(parameter.shape), parameter.dtype, group)
        if kind not in found:
            found[kind] = len(templates)
            template = _Template(optimizer, group, parameter, mixed and parameter.is_floating_point(), live)
            states.append(template.initial_state())
            templates.append(template.graph(states[-1]))
        update_of[name] = found[kind]
    groups = {f"group{i}": group for i, group in enumerate(optimizer.param_groups)}
    scalars = {
        f"{name}.{key}": value for name, group in groups.items() for key, value in live_scalars(group, live).items()
    }
    options = {name: _options(group) for name, group in groups.items()}
    return Updates(tuple(templates), update_of, scalars, options, {name: states[i] for name, i in update_of.items()})


def live_scalars(group: Mapping[str, Any], live: Sequence[str] = LIVE_SCALARS) -> dict[str, float]:
    """The entries of a parameter group, of those named by `live`, that are inputs of the update."""
    found = {}
    for name in live:
        key, _, index = name.partition(".")
        value = group.get(key)
        if index:
            value = value[int(index)] if isinstance(value, (tuple, list)) and len(value) > int(index) else None
        value = _number(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and (value != 0 or key == "lr"):
            found[name] = float(value)
    return found


def _number(value: Any) -> Any:
    """A tensor without dims as its number."""
    is_scalar = isinstance(value, Tensor) and value.dim() == 0 and not value.is_meta
    return value.item() if is_scalar else value


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a parameter group that JSON has a form for."""

    def is_plain(value: Any) -> bool:
        items = value if isinstance(value, list) else [value]
        return all(item is None or isinstance(item, (bool, int, float, str)) for item in items)

    listed = {
        key: [_number(item) for item in value] if isinstance(value, (tuple, list)) else _number(value)
        for key, value in group.items()
        if key != "params"
    }
    return {key: value for key, value in listed.items() if is_plain(value)}


def _with_scalars(group: dict[str, Any], scalars: Mapping[str, Tensor]) -> dict[str, Any]:
    """The group with tensors in the places of its live scalars."""
    changed = dict(group)
    for name, tensor in scalars.items():
        key, _, index = name.partition(".")
        if index:
            changed[key] = tuple(tensor if i == int(index) else item for i, item in enumerate(changed[key]))
        else:
            changed[key] = tensor
    return changed


class _Template:
    """The optimizer's step for one parameter."""

    def __init__(
        self, optimizer: Optimizer, group: int, parameter: Tensor, mixed: bool, live: Sequence[str] = LIVE_SCALARS
    ) -> None:
        self.optimizer = optimizer
        self.group = group
        self.shape = tuple(parameter.shape)
        self.mixed = mixed
        self.dtype = torch.float32 if mixed else parameter.dtype
        self.initial = live_scalars(optimizer.param_groups[group], live)
        self.scalars = tuple(self.initial)
        self.mode = private.new_fake_mode()

    def initial_state(self) -> dict[str, StateInit]:
        """Traces the first step and reads how each entry was made when it was first set."""
        keys: list[str] = []

        def first_step(parameter: Tensor, grad: Tensor, *scalars: Tensor) -> list[Tensor]:
            state = _FirstValues()
            self._step(parameter, grad, state, scalars)
            keys.extend(state.first)
            return list(state.first.values())

        arguments = [self._fake(), self._fake(), *self._fake_scalars()]
        graph = self._trace(first_step, arguments, functional=False)
        made = next(iter(reversed(graph.graph.nodes))).args[0]
        grad = [node for node in graph.graph.nodes if node.op == "placeholder"][1]
        master = {"master": StateInit(self.shape, torch.float32, None)} if self.mixed else {}
        return {**{key: self._read(key, node, grad) for key, node in zip(keys, made, strict=True)}, **master}

    def graph(self, state: dict[str, StateInit]) -> UpdateGraph:
        """The functional step: param, grad, state, scalars → new param, new state."""
        keys = [key for key in state if key != "master"]
        with self.mode:
            entries = [torch.empty(state[key].shape, dtype=state[key].dtype) for key in state]
            param = torch.empty(self.shape, dtype=torch.bfloat16) if self.mixed else self._fake()
        roles = [Role("param", ""), Role("grad", ""), *(Role("state", key) for key in state)]
        roles += [Role("scalar", f"group{self.group}.{key}") for key in self.scalars]

        def step(param: Tensor, grad: Tensor, *rest: Tensor) -> list[Tensor]:
            old = dict(zip(state, rest, strict=False))
            weight = old.pop("master", param)
            live = {key: value.clone() for key, value in old.items()}
            new = self._step(weight, grad, live, rest[len(state) :])
            tail = [new] if self.mixed else []
            return [new.to(param.dtype), *(live[key] for key in keys), *tail]

        graph = self._trace(step, [param, self._fake(), *entries, *self._fake_scalars()])
        for node, role in zip(_placeholders(graph), roles, strict=True):
            node.meta["role"] = role
        finish(graph, phase="update")
        return UpdateGraph(graph, (Role("param", ""), *(Role("state", key) for key in state)))

    def _step(self, weight: Tensor, grad: Tensor, state: dict[str, Any], scalars: tuple[Tensor, ...]) -> Tensor:
        """Runs the real optimizer's `step()` on a copy of `weight`; `state` is updated in place."""
        optimizer, parameter = self.optimizer, weight.clone()
        parameter.grad = grad
        groups, saved = optimizer.param_groups, optimizer.state
        own = _with_scalars(groups[self.group], dict(zip(self.scalars, scalars, strict=True)))
        own["params"] = [parameter]
        own |= {key: False for key in ("foreach", "fused") if key in own}
        own |= {"capturable": True} if type(optimizer).__name__ == "RAdam" else {}
        holder: defaultdict[Any, Any] = defaultdict(dict)
        holder[parameter] = state
        optimizer.param_groups, optimizer.state = [own], holder
        try:
            known = {id(tensor): self.initial[key] for key, tensor in zip(self.scalars, scalars, strict=True)}
            with private.traceable_optimizer(optimizer), ScalarMode(known):
                optimizer.step()
        finally:
            optimizer.param_groups, optimizer.state = groups, saved
        return parameter

    def _trace(
        self, function: Callable[..., list[Tensor]], arguments: list[Tensor], *, functional: bool = True
    ) -> fx.GraphModule:
        try:
            with self.mode, torch.no_grad():
                graph = (private.trace_functional if functional else private.trace)(function, arguments)
            return clean(graph, self.mode, kept=ADDED_PRODUCTS) if functional else graph
        except Exception as error:
            name = type(self.optimizer).__name__
            raise CaptureError(
                f"{name}.step() can't be captured for a parameter of shape {list(self.shape)}: "
                f"{type(error).__name__}: {error}; its code must not branch on the values of tensors"
            ) from error

    def _fake(self) -> Tensor:
        with self.mode:
            return torch.empty(self.shape, dtype=self.dtype)

    def _fake_scalars(self) -> list[Tensor]:
        with self.mode:
            return [torch.empty((), dtype=torch.float64) for _ in self.scalars]

    def _read(self, key: str, node: fx.Node, grad: fx.Node) -> StateInit:
        """How the entry `key`, first set to the value of `node`, starts."""
        value: Tensor = node.meta["val"]
        shape, sources = tuple(value.shape), _sources(node)
        name = type(self.optimizer).__name__
        if grad in sources:
            if self.optimizer.param_groups[self.group].get("dampening", 0):
                raise CaptureError(f"{name}: dampening with momentum isn't supported (its first step differs); use 0")
            return StateInit(shape, value.dtype, 0.0)
        if not sources:
            return StateInit(shape, value.dtype, _constant(node))
        if node.op == "placeholder" or (node.target == torch.ops.aten._to_copy.default and shape == self.shape):
            return StateInit(shape, value.dtype, None)
        raise CaptureError(f"{name}: the initial value of state {key!r} isn't a constant or a copy of the parameter")


class _FirstValues(dict[str, Any]):
    """An optimizer state that keeps a copy of the first value of each entry."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Tensor] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = torch.full((), float(value), dtype=torch.float64)
        if key not in self.first and isinstance(value, Tensor):
            self.first[key] = value.detach().clone()
        super().__setitem__(key, value)


# -- scalars as tensors ----------------------------------------------------------------------------------------------


class ScalarMode(TorchFunctionMode):
    """Lets an optimizer's scalar arithmetic be traced: `.item()` gives a 0-d float64 tensor, and scalar arguments that
    torch wants as numbers (`alpha=`, `value=`) are multiplied in instead."""

    def __init__(self, known: dict[int, float]) -> None:
        """`known`: id of a scalar input → its value at capture, by which comparisons with constants are decided."""
        super().__init__()
        self.known = known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "item":
            return args[0].double()
        if name == "to" and id(args[0]) in self.known:
            return args[0]  # Adam casts a tensor beta to the parameter's dtype, in which 1 - beta would be rounded
        if name in _COMPARISONS:
            plain = [self.known.get(id(arg), arg) for arg in args]
            if not any(isinstance(value, Tensor) for value in plain):
                return _COMPARISONS[name](*plain)
        if name in _WITH_FACTOR:
            return _with_factor(func, name, args, kwargs)
        if name in ("lerp", "lerp_") and isinstance(args[2] if len(args) > 2 else kwargs.get("weight"), Tensor):
            weight = args[2] if len(args) > 2 else kwargs["weight"]
            return func(args[0], args[1], weight.to(args[0].dtype))
        return func(*args, **kwargs)


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    spelling: getattr(operator, name)
    for name in ("eq", "ne", "lt", "gt", "le", "ge")
    for spelling in (name, f"__{name}__")
}
_WITH_FACTOR = {"add": "alpha", "add_": "alpha", "sub": "alpha", "sub_": "alpha"}
_WITH_FACTOR |= dict.fromkeys(("addcmul", "addcmul_", "addcdiv", "addcdiv_"), "value")


def _with_factor(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    factor = kwargs.get(_WITH_FACTOR[name])
    if not isinstance(factor, Tensor):
        return func(*args, **kwargs)
    target, *others = args
    wide = torch.promote_types(target.dtype, torch.float32)  # kernels round once: not the operand, not its multiple
    first, *rest = (other.to(wide) if isinstance(other, Tensor) else other for other in others)
    increment = first * factor
    if rest:
        increment = increment / rest[0] if name.startswith("addcdiv") else increment * rest[0]
    plus = name.startswith("add")
    if name.endswith("_"):
        return target.add_(increment) if plus else target.sub_(increment)
    return (target + increment if plus else target - increment).to(torch.result_type(target, others[0]))


# -- reading initial state -------------------------------------------------------------------------------------------


def _sources(node: fx.Node) -> set[fx.Node]:
    """The placeholders whose values (not only shapes) `node` depends on."""
    found: set[fx.Node] = set()
    pending, seen = [node], set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op == "placeholder":
            found.add(current)
        elif "_like" not in str(current.target) and ".new_" not in str(current.target):
            pending.extend(current.all_input_nodes)
    return found


_FILLS = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "ones": 1.0, "ones_like": 1.0, "new_ones": 1.0}
_COPIES = {"clone", "_to_copy", "detach", "alias", "expand", "lift_fresh_copy"}


def _constant(node: fx.Node) -> float:
    """The one value that all elements of a constant node have."""
    name = op_name(node)
    args: Any = node.args
    if name in _FILLS:
        return _FILLS[name]
    if name in ("full", "full_like", "new_full", "fill"):
        return float(args[2 if name == "new_full" else 1])
    if name == "scalar_tensor":
        return float(args[0])
    if name in _COPIES and isinstance(args[0], fx.Node):
        return _constant(args[0])
    if node.op == "get_attr" and (value := getattr(node.graph.owning_module, str(node.target))).numel() == 1:
        return float(value)
    raise CaptureError(f"the initial optimizer state made by {name!r} isn't one value; fill it with a constant")


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]
