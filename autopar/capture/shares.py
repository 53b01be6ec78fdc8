"""A microbatch's share of the whole batch's loss: what one device would have computed, in pieces.

    loss = sum(losses) / count      the whole batch's:   sum over microbatches of  sum(losses) / total count

With microbatches of unequal counts a mean of their means is another number. So the loss is traced a second time, on the
whole batch, and the two traces are compared along the scalars that lead to the loss:
- a sum over samples (its operand grows with the batch) is shared out as it is, a mean by 1 / microbatches;
- a factor or a divisor that depends on the batch but on no parameter (a count of tokens) is taken from the whole batch:
  it becomes an input, made once a step by the graph `whole`;
- a number that differs between the traces (a count of rows) gives its ratio.

Invariants:
- the loss and the gradients of the microbatches add up to those of the whole batch, each sample computed by itself;
- a term that isn't such a sum (a router's load) is computed for each microbatch and averaged, and is named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.clean import insert
from autopar.capture.graphs import Role, op_name
from autopar.capture.terms import TERM, TERM_BACKWARD, WHOLE

aten = torch.ops.aten
_PASS = {"neg", "_to_copy", "view", "clone", "squeeze", "unsqueeze", "alias", "detach", "expand"}


@dataclass(frozen=True, slots=True)
class Shares:
    """What the loss of a microbatch needs of the whole batch."""

    totals: dict[str, fx.Node]
    """Name of a total → the node of the whole batch's trace that makes it."""
    averaged: tuple[str, ...]
    """The lines of terms that are averaged over microbatches."""


def share_out(graph: fx.GraphModule, whole: fx.GraphModule, loss: fx.Node, microbatches: int, mode: Any) -> Shares:
    """Rewrites the gradient graph of a microbatch in place; `whole` is the trace of the loss of all samples.

    `loss` is the marked loss among the outputs of `graph`; all marks are gone afterwards.
    """
    (whole_loss,) = next(iter(reversed(whole.graph.nodes))).args[0]
    reader = _Reader(microbatches, _by_kind(graph), _by_kind(whole))
    reader.factors[WHOLE] = reader.term(loss, whole_loss)
    totals = _take_totals(graph, reader.taken)
    _apply(graph, reader.factors, mode)
    return Shares(totals, tuple(dict.fromkeys(reader.averaged)))


# -- reading ---------------------------------------------------------------------------------------------------------


def _by_kind(graph: fx.GraphModule) -> dict[fx.Node, frozenset[str]]:
    """The kinds of inputs that each node depends on."""
    kinds: dict[fx.Node, frozenset[str]] = {}
    for node in graph.graph.nodes:
        own = {_kind(node.meta["role"])} if node.op == "placeholder" else set()
        kinds[node] = frozenset(own).union(*(kinds[n] for n in node.all_input_nodes))
    return kinds


def _kind(role: Role) -> str:
    """A constant made in the forward is none of the model's buffers: another trace numbers its own."""
    return "constant" if role.kind == "buffer" and role.name.startswith("_constant") else role.kind


@dataclass(slots=True)
class _Reader:
    """Walks both traces from the loss down, as long as they are linear in what depends on parameters."""

    microbatches: int
    kinds: dict[fx.Node, frozenset[str]]
    whole_kinds: dict[fx.Node, frozenset[str]]
    factors: dict[int, float] = field(default_factory=dict)
    """Index of a mark → what its term is multiplied by, beside what the sum around it is."""
    taken: list[tuple[fx.Node, int, fx.Node]] = field(default_factory=list)
    """(node, argument, the whole batch's value for it)."""
    averaged: list[str] = field(default_factory=list)

    def term(self, node: fx.Node, whole: fx.Node) -> float:
        """`factor`, or where there is none that of an average, and what was found on the way forgotten."""
        factors, num_taken, num_averaged = dict(self.factors), len(self.taken), len(self.averaged)
        found = self.factor(node, whole)
        if found is not None:
            return found
        self.factors = factors
        del self.taken[num_taken:], self.averaged[num_averaged:]
        label = node.meta.get("custom", {})
        self.averaged.append(label.get("source") or label.get("path") or op_name(node))
        return 1.0 / self.microbatches

    def factor(self, node: fx.Node, whole: fx.Node) -> float | None:
        """What the microbatch's value is to be multiplied by, to be its share of the whole batch's value."""
        name = op_name(node)
        if node.op != "call_function" or node.target != whole.target:
            return None
        if name in _PASS or node.target == TERM:
            return self.factor(_node(node, 0), _node(whole, 0))
        if name in ("sum", "mean") and self._is_over_samples(node, whole):
            return 1.0 if name == "sum" else 1.0 / self.microbatches
        if name in ("mul", "div"):
            return self._of_product(node, whole, name)
        return self._of_sum(node, whole) if name in ("add", "sub") else None

    def _is_over_samples(self, node: fx.Node, whole: fx.Node) -> bool:
        part, all_samples = (_node(n, 0).meta["val"].numel() for n in (node, whole))
        return bool(node.meta["val"].numel() == 1 and all_samples == part * self.microbatches)

    def _of_product(self, node: fx.Node, whole: fx.Node, name: str) -> float | None:
        dependent = [i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and self._is_dependent(arg)]
        if len(dependent) != 1 or len(node.args) != 2 or node.kwargs or (name == "div" and dependent != [0]):
            return None
        at, other = dependent[0], 1 - dependent[0]
        mine, theirs = node.args[other], whole.args[other]
        inner = self.factor(_node(node, at), _node(whole, at))
        if isinstance(mine, fx.Node) and isinstance(theirs, fx.Node):
            if not self._can_take(node, mine, theirs):
                return None
            if not _is_same_input(mine, theirs):
                self.taken.append((node, other, theirs))
            return inner
        if inner is None or not isinstance(mine, (int, float)) or not isinstance(theirs, (int, float)):
            return None
        if mine == theirs:
            return inner
        return inner * (theirs / mine if name == "mul" else mine / theirs) if mine and theirs else None

    def _can_take(self, node: fx.Node, mine: fx.Node, theirs: fx.Node) -> bool:
        """Whether a factor's value of the whole batch can be made before the step, and only the loss reads it."""
        known = {"batch", "buffer"}
        if not (self.kinds[mine] <= known and self.whole_kinds[theirs] <= known) or theirs.meta["val"].numel() != 1:
            return False
        forward = [user for user in mine.users if user.meta.get("custom", {}).get("phase") != "backward"]
        return forward == [node] or mine.op == "placeholder"

    def _of_sum(self, node: fx.Node, whole: fx.Node) -> float | None:
        """The factor of the first summand; that of the second, where it is another, is put at its mark."""
        if node.args[1:] == whole.args[1:] == (0,):  # as `sum` of a list begins
            return self.factor(_node(node, 0), _node(whole, 0))
        if len(node.args) != 2 or not all(isinstance(arg, fx.Node) and self._is_dependent(arg) for arg in node.args):
            return None
        first, second = (self.term(_node(node, i), _node(whole, i)) for i in range(2))
        if math.isclose(first, second, rel_tol=1e-12):
            return first
        mark = _node(node, 1)
        if mark.target != TERM:
            return None
        index: Any = mark.args[1]
        self.factors[index] = second / first
        return first

    def _is_dependent(self, node: fx.Node) -> bool:
        return "param" in self.kinds[node]


def _node(node: fx.Node, index: int) -> fx.Node:
    found = node.args[index]
    assert isinstance(found, fx.Node), node.format_node()
    return found


def _is_same_input(mine: fx.Node, theirs: fx.Node) -> bool:
    """An input that all microbatches share, such as a count that the batch holds."""
    return mine.op == theirs.op == "placeholder" and mine.meta["role"] == theirs.meta["role"]


# -- rewriting -------------------------------------------------------------------------------------------------------


def _take_totals(graph: fx.GraphModule, taken: Sequence[tuple[fx.Node, int, fx.Node]]) -> dict[str, fx.Node]:
    """Factors become inputs with the whole batch's value, in the loss and in its backward."""
    totals: dict[str, fx.Node] = {}
    inputs: dict[fx.Node, fx.Node] = {}
    last = [n for n in graph.graph.nodes if n.op == "placeholder"][-1]
    for node, at, theirs in taken:
        mine = _node(node, at)
        if theirs not in inputs:
            name = f"total{len(totals)}"
            with graph.graph.inserting_after(last):
                last = inputs[theirs] = graph.graph.placeholder(name)
            last.meta.update(val=mine.meta["val"], role=Role("total", name), custom=mine.meta.get("custom", {}))
            totals[name] = theirs
        for user in list(mine.users):
            if user is node or user.meta.get("custom", {}).get("phase") == "backward":
                user.replace_input_with(mine, inputs[theirs])
    return totals


def _apply(graph: fx.GraphModule, factors: dict[int, float], mode: Any) -> None:
    """Each mark becomes a multiplication by its factor, or nothing."""
    for node in list(graph.graph.nodes):
        if node.target not in (TERM, TERM_BACKWARD):
            continue
        value, factor = _node(node, 0), factors.get(node.args[1], 1.0)
        if factor != 1.0 and value.target == aten.full.default and value.args[1] == 1.0:
            value = insert(node, mode, aten.full.default, [], factor, dtype=value.meta["val"].dtype)
        elif factor != 1.0:
            value = insert(node, mode, aten.mul.Tensor, value, factor)
        node.replace_all_uses_with(value)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()


def totals_graph(whole: fx.GraphModule, totals: dict[str, fx.Node]) -> fx.GraphModule | None:
    """The whole batch's trace cut down to what makes `totals`, in place; None where there are none."""
    if not totals:
        return None
    output = next(iter(reversed(whole.graph.nodes)))
    output.args = (tuple(totals.values()),)
    whole.graph.eliminate_dead_code()
    for node in [n for n in whole.graph.nodes if n.op == "placeholder" and not n.users]:
        whole.graph.erase_node(node)
    return whole
