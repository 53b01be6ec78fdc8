"""Calls that prove the rule of pointwise ops: one of every ATen op that bears the tag, generated from its schema.

    tagged_examples()["aten.add.Tensor"]        # [add.Tensor(f32[4, 6], f32[6])]

Tensors after the first are broadcast. Operands are floating where the op takes that, else whole numbers, else bools;
arguments that may be left out are, unless the op can't be called without them.
"""

from __future__ import annotations

import fnmatch
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from autopar.rules.examples.example import Example, Examples, t
from autopar.rules.nodes import is_pointwise

_DTYPES = (torch.float32, torch.int64, torch.bool)
_NUMBERS: dict[str, Any] = {"int": 1, "SymInt": 1, "float": 0.75, "bool": True, "str": "floor"}
_SHAPES = ((4, 6), (6,), (4, 1))


def tagged_examples(pattern: str = "*") -> Examples:
    """One call of each tagged op whose name matches the glob, if it can be run on the CPU in float64."""
    found: Examples = {}
    for target in tagged_ops():
        name = tagged_name(target)
        if fnmatch.fnmatchcase(name, pattern):
            call = next((call for call in _calls(target) if _runs(call)), None)
            found |= {} if call is None else {name: [call]}
    return found


def tagged_name(target: torch._ops.OpOverload) -> str:
    """`aten.add.Tensor`"""
    return f"aten.{target._schema.name.split('::')[1]}.{target._overloadname}"


def tagged_ops() -> list[torch._ops.OpOverload]:
    """The ops of ATen that bear the tag, give tensors, change nothing in place and draw no numbers."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    packets = sorted({name.removeprefix("aten::").partition(".")[0] for name in names})
    ops = (op for packet in packets for op in _overloads(packet))
    return [op for op in ops if is_pointwise(op) and _is_functional(op)]


def _overloads(packet: str) -> Iterator[torch._ops.OpOverload]:
    found = getattr(torch.ops.aten, packet, None)
    for name in sorted(found.overloads()) if found is not None else ():
        yield getattr(found, name)


def _is_functional(op: torch._ops.OpOverload) -> bool:
    gives_tensors = all(str(result.type) == "Tensor" for result in op._schema.returns)
    return gives_tensors and not op._schema.is_mutable and torch.Tag.nondeterministic_seeded not in op.tags


def _calls(target: torch._ops.OpOverload) -> Iterator[Example]:
    for dtype, is_full in itertools.product(_DTYPES, (False, True)):
        shapes = iter(_SHAPES)
        args, kwargs = [], {}
        for argument in target._schema.arguments:
            if argument.has_default_value() and not is_full:
                continue
            value = _value(str(argument.type), argument.name, dtype, shapes)
            if value is None and argument.has_default_value():
                continue
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        yield Example(target, tuple(args), kwargs)


def _value(kind: str, name: str, dtype: torch.dtype, shapes: Iterator[tuple[int, ...]]) -> Any:
    kind = kind.removeprefix("Optional[").removesuffix("]")
    if kind == "Tensor":
        return t(*next(shapes), dtype=torch.bool if name in ("mask", "condition") else dtype)
    if kind in ("number", "Scalar"):
        return 0.75 if dtype.is_floating_point else 1
    return _NUMBERS.get(kind)


def _runs(call: Example) -> bool:
    """Whether the op takes these arguments, on fake and on real tensors."""

    def real(argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        dtype = torch.float64 if argument.dtype.is_floating_point else argument.dtype
        return torch.ones(argument.shape, dtype=dtype)

    logging.disable(logging.ERROR)  # fake tensors log what they refuse
    try:
        call.target(*map_aggregate(call.args, real), **map_aggregate(call.kwargs, real))
        call.node()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return False
    finally:
        logging.disable(logging.NOTSET)
    return True
