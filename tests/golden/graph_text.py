"""A graph as text that people diff: one line a node, with its layout, and a heading where the place changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.layout import Layout
from autopar.rules.nodes import op_name


def graph_text(graph: Graph) -> str:
    return "\n".join(_lines(graph)) + "\n"


def _lines(graph: Graph) -> Iterator[str]:
    place = None
    for node in graph.nodes:
        if node.op == "output":
            yield f"return {_value(node.args[0])}"
            continue
        here = (node.meta.get("phase"), node.meta.get("path"))
        if here != place:
            yield f"# {here[0]}: {here[1] or '-'}"
            place = here
        yield f"{node.name} = {_call(node)}{_type(node)}"


def _call(node: Node) -> str:
    if node.op == "placeholder":
        return str(node.meta["slot"] if "slot" in node.meta else node.meta["role"])
    overload = getattr(node.target, "_overloadname", "default")
    name = op_name(node) if overload == "default" else f"{op_name(node)}.{overload}"
    given = [*map(_value, node.args), *(f"{key}={_value(value)}" for key, value in node.kwargs.items())]
    return f"{name}({', '.join(given)})"


def _value(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_value, value))}]"
    return str(value).removeprefix("torch.")


def _type(node: Node) -> str:
    """The layout; else the local shape; else the global one."""
    layout = node.meta.get("layout")
    if layout is not None:
        stated = layout if isinstance(layout, Layout) else ", ".join(map(str, layout))
        return f"  {stated}"
    value = node.meta.get("local_val", node.meta.get("val"))
    return f"  {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
