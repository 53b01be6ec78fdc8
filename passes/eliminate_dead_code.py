"""Erase nodes whose result nothing reads.

Before: any graph. After: every `call_function` and `get_attr` node reaches the output; placeholders stay, as they are
the part's slots. Numbers stay bit-equal.

Mutating ops and collectives' starts are kept only while something reads their result: in our graphs an in-place op's
result is what later nodes read, and a rank that drops a collective drops it on every rank (one graph for all).
"""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.program.parts import Part
from autopar.rules.nodes import is_random
from passes.editing import edit


def eliminate_dead_code(part: Part, context: Any = None) -> Part:
    """`part` without nodes that don't reach its output."""
    return edit(part, _erase)


def _erase(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not is_random(node):
            graph.erase_node(node)
