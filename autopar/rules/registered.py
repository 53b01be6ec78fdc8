"""Rules that users give for ops: for their own, or instead of the table's.

    autopar.rule("mylib::norm", "... [d], [d] -> ... [d]")
    autopar.rule("mylib::scale", "b s d, d -> b s d", linear="0|1")

A rule is proven at each call of its op that planning meets; a wrong one is refused with the counterexample.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.errors import RuleError
from autopar.private import OpOverload, schema_of
from autopar.rules.notation import parse_linear, parse_rule

_REGISTERED: dict[str, str] = {}
"""Op name, with its overload or without, → rule in the form of `notation.read_rule`."""


def rule(name: str, text: str, linear: str = "") -> None:
    """Sets the rule of the op `name`: "mylib::op", or "mylib::op.overload"; an earlier rule of that name is replaced.

    `linear`: operands through which partial sums pass, "0|1" each alone, "01" both jointly. Raises `RuleError` when the
    text is malformed, or there is no such op.
    """
    _require_op(name)
    parse_rule(text, parse_linear(linear))
    _REGISTERED[name] = f"{text}; linear {linear}" if linear else text


def registered_rule(target: Any) -> str | None:
    """The rule that was set for this overload, or for its op."""
    if not isinstance(target, OpOverload):
        return None
    name, overload = schema_of(target).name, schema_of(target).overload_name or "default"
    return _REGISTERED.get(f"{name}.{overload}") or _REGISTERED.get(name)


def _require_op(name: str) -> None:
    namespace, colons, rest = name.partition("::")
    op, dot, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), op, None) if colons and namespace and op else None
    if packet is None:
        raise RuleError(f"autopar.rule: there is no op {name!r}; expected one that is defined, such as 'aten::mm'")
    if dot and overload not in packet.overloads():
        raise RuleError(f"autopar.rule: {namespace}::{op} has no overload {overload!r}; it has {packet.overloads()}")
