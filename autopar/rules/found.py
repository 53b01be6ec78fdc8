"""The rules of calls that the table doesn't cover: registered by the user, found by experiment, or given by a plan.

    found = find_rules([captured.gradient.graph, …])
    found.by_experiment       # {"mylib::norm(f32[8 64], f32[64], 1e-05)": "a [b], [b] -> a [b]"}
    write_rules(graph, found.all)

Metadata written: `found_rule` (str, in the form of `notation.read_rule`), which `rule_of` puts before the table.

Invariants:
- a rule is for one call: op, attributes, dtypes and shapes; so equal graphs have equal rules;
- no rule is used that wasn't proven by execution in this process;
- ops that draw random numbers, or write to their operands, without saying so are refused.
"""

from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from autopar.errors import CaptureError, PlanError, RuleError
from autopar.private import HigherOrderOperator, OpOverload
from autopar.rules.discover import Discovery, Memory, discover, tried
from autopar.rules.nodes import call_text, is_random, user_name
from autopar.rules.registered import registered_rule
from autopar.rules.table import has_rule

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class FoundRules:
    """Rules by call."""

    by_experiment: dict[str, str] = field(default_factory=dict)
    registered: dict[str, str] = field(default_factory=dict)

    @property
    def all(self) -> dict[str, str]:
        return {**self.by_experiment, **self.registered}


def find_rules(graphs: Iterable[Graph], progress: Progress = lambda _: None) -> FoundRules:
    """A rule for each call that has a registered one, or none in the table; warns of those that run whole.

    Raises `RuleError` for a registered rule that is wrong, `CaptureError` for an op that isn't what it says it is.
    """
    found, told, known, memory = FoundRules(), set[str](), set[str](), Memory()
    for node in _calls(graphs):
        call, text = call_text(node), registered_rule(node.target)
        if call in known or (text is None and has_rule(node)) or is_random(node):
            continue
        known.add(call)
        started = time.perf_counter()
        discovery = discover(node, memory) if text is None else tried(node, text, thorough=True)
        _require_honest(node, discovery)
        _require_right(node, text, discovery)
        if discovery.rule and text is not None:
            found.registered[call] = text
        elif discovery.rule:
            found.by_experiment[call] = discovery.rule
            progress(f"found by experiment in {time.perf_counter() - started:.1f} s: {call}: {discovery.rule}")
        warning = _warning(node, text, discovery)
        if warning and user_name(node) not in told:
            told.add(user_name(node))
            warnings.warn(warning, RuntimeWarning, stacklevel=3)
    return found


def write_rules(graph: Graph, rules: Mapping[str, str]) -> None:
    """Puts each call's rule on its nodes."""
    ops = {call.partition("(")[0] for call in rules}
    for node in _calls([graph]):
        rule = rules.get(call_text(node)) if user_name(node) in ops else None
        if rule is not None:
            node.meta["found_rule"] = rule


def require_proven(graphs: Iterable[Graph], rules: Mapping[str, str]) -> None:
    """Proves a plan's rules anew at the calls that they are for; raises `PlanError` with the counterexample."""
    ops, known = {call.partition("(")[0] for call in rules}, set[str]()
    for node in _calls(graphs):
        call = call_text(node) if user_name(node) in ops else ""
        if call in rules and call not in known:
            known.add(call)
            found = tried(node, rules[call])
            fault = "is wrong" if found.is_refuted else "can't be proven"
            if not found.rule:
                raise PlanError(f"plan: the rule {rules[call]!r} of {call} {fault}: {found.reason}; make the plan anew")


# -- calls ---------------------------------------------------------------------------------------------------------
def _calls(graphs: Iterable[Graph]) -> Iterator[Node]:
    """Calls of ops, plain functions of ours and `getitem` aside."""
    for graph in graphs:
        for node in graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem and _is_op(node.target):
                yield node


def _is_op(target: Any) -> bool:
    return isinstance(target, (OpOverload, HigherOrderOperator))


# -- what is refused, and what is told ----------------------------------------------------------------------------
def _where(node: Node) -> str:
    return f"{user_name(node)} ({node.meta.get('source') or node.meta.get('path') or 'the model'})"


def _require_right(node: Node, text: str | None, discovery: Discovery) -> None:
    if text is None or not discovery.is_refuted:
        return
    raise RuleError(
        f"{_where(node)}: the rule {text!r} is wrong: {discovery.reason}; correct it, or take it out: without "
        "one, a rule is looked for by experiment"
    )


def _require_honest(node: Node, discovery: Discovery) -> None:
    seen = discovery.seen
    if seen is None:
        return
    is_undefined = user_name(node).startswith("aten::") and not seen.draws  # memory that nothing was written to
    if seen.draws or not (seen.repeats or is_undefined):
        fault = "draws random numbers" if seen.draws else "gave two results for equal operands"
        raise CaptureError(
            f"{_where(node)}: it {fault} without saying so, so every rank would get its own; draw them with torch's "
            "functions in the model and hand them to the op"
        )
    if seen.writes is not None:
        raise CaptureError(
            f"{_where(node)}: it writes to its tensor operand {seen.writes} without saying so; name it in the op's "
            "mutates_args, or write to a copy"
        )


def _warning(node: Node, text: str | None, discovery: Discovery) -> str:
    """What to tell of an op that runs whole, or splits less than it could."""
    if not discovery.rule and text is not None:
        return f"{_where(node)}: its rule {text!r} can't be proven, since {discovery.reason}: it isn't used"
    if not discovery.rule:
        hint = f'; autopar.rule("{user_name(node)}", …) sets one' if isinstance(node.target, OpOverload) else ""
        return f"{_where(node)} has no sharding rule: it runs whole on every rank, since {discovery.reason}{hint}"
    if discovery.rounds:
        return (
            f"{_where(node)} computes in {discovery.rounds} whatever it is given, so that sums over its shards can't "
            f"be proven in float64; its rule is {discovery.rule}; let it compute in the dtype of its operands"
        )
    return ""
