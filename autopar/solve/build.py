"""From a step graph to the solver's problem: strategies per node, resharding prices per edge, memory per stage.

Rows of costs: stage s at microbatch level is row s, at step level row S + s. One limit per stage.

Memory counted (bytes, per rank): parameters and optimizer state at rest; parameters gathered for the whole step;
gradients or their accumulators; forward values that the backward needs, times the microbatches in flight. The
working set of single ops and communication buffers is the margin that the caller leaves (and the accountant checks).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch.fx import Node

from autopar import markers
from autopar.joint import StepGraph
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.reshard import Resharder
from autopar.rules.choices import Choice, enumerate_choices, operand_layouts, result_layouts
from autopar.rules.factors import LeafRule
from autopar.rules.nodes import tensor_operands
from autopar.solve import problem as abstract
from autopar.solve.costs import Compute, compute_costs, is_view, local_bytes

Allowed = Callable[[Node, LeafRule, Choice], bool]


@dataclass(frozen=True, slots=True)
class Setting:
    """What one candidate is priced for."""

    mesh: Mesh
    microbatches: int
    in_flight: tuple[int, ...]
    """Microbatches whose activations a stage holds at once."""
    capacity: float
    """Bytes of one device that may be used."""
    compute: Compute
    resharder: Resharder
    transfer: Callable[[float], float]
    """Bytes → seconds, between neighbouring stages."""
    allowed: Allowed


@dataclass(frozen=True, slots=True)
class Strategy:
    """A choice, and for a step-level relay of a parameter whether it gathers (and so holds a copy)."""

    choice: Choice
    holds_copy: bool = False


@dataclass(slots=True)
class BuiltProblem:
    """The problem with what its indices mean."""

    problem: abstract.Problem
    nodes: list[Node]
    strategies: list[list[Strategy]]

    def choices(self, solution: Sequence[int]) -> dict[str, Choice]:
        """Node key → choice."""
        return {
            node.meta["key"]: options[pick].choice
            for node, options, pick in zip(self.nodes, self.strategies, solution, strict=True)
        }


def build_problem(step: StepGraph, setting: Setting) -> BuiltProblem:
    """The problem of choosing layouts for a step graph whose stages are cut."""
    return _Builder(step, setting).build()


@dataclass(slots=True)
class _Builder:
    step: StepGraph
    setting: Setting
    index: dict[Node, int] = field(default_factory=dict)
    nodes: list[abstract.Node] = field(default_factory=list)
    graph_nodes: list[Node] = field(default_factory=list)
    strategies: list[list[Strategy]] = field(default_factory=list)
    layouts: dict[tuple[Node, int], tuple[list[Layout], np.ndarray]] = field(default_factory=dict)
    matrices: dict[tuple[tuple[Layout, ...], tuple[Layout, ...], int], np.ndarray] = field(default_factory=dict)
    enumerated: dict[LeafRule, list[Choice]] = field(default_factory=dict)
    edges: list[abstract.Edge] = field(default_factory=list)

    def build(self) -> BuiltProblem:
        for node in self.step.graph.nodes:
            if node.op != "output" and node.target is not operator.getitem:
                self._add_node(node)
        self._add_memory()
        for node in self.graph_nodes:
            self._add_operand_edges(node)
        for source, result in self.step.state_pairs:
            self._add_edge(result, self._result(result), source, self._result((source)), self._row(result))
        return BuiltProblem(
            abstract.Problem(tuple(self.nodes), tuple(self.edges), self._limits(), self._objective()),
            self.graph_nodes,
            self.strategies,
        )

    # -- nodes -------------------------------------------------------------------------------------------------
    def _add_node(self, node: Node) -> None:
        rule: LeafRule = node.meta["rule"]
        choices = [c for c in self._choices(node, rule) if self.setting.allowed(node, rule, c)]
        assert choices, f"{node.meta['key']}: no choice is allowed"
        options = [Strategy(choice) for choice in choices]
        if _is_step_relay(node):
            options += [Strategy(choice, holds_copy=True) for choice in choices]
        costs = compute_costs(node, choices, self.setting.mesh, self.setting.compute)
        costs = costs * (len(options) // len(choices))
        self.index[node] = len(self.nodes)
        self.nodes.append(abstract.Node(node.meta["key"], np.array(costs), self._row(node), {}))
        self.graph_nodes.append(node)
        self.strategies.append(options)

    def _choices(self, node: Node, rule: LeafRule) -> list[Choice]:
        if node.op != "call_function":
            if node.meta["role"].kind in ("scalar", "buffer"):
                return [()]
            return enumerate_choices(rule, self.setting.mesh, allow_partial=False)
        return enumerate_choices(rule, self.setting.mesh)

    def _row(self, node: Node) -> int:
        stages = self.setting.mesh.num_stages
        return int(node.meta["stage"]) + (0 if node.meta["level"] == "microbatch" else stages)

    # -- edges -------------------------------------------------------------------------------------------------
    def _result(self, node: Node) -> tuple[list[Layout], np.ndarray]:
        """Distinct layouts of a value, and which of them each strategy of its producer leaves."""
        producer, item = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, 0)
        return self._distinct(producer, item, results=True)  # type: ignore[arg-type]

    def _distinct(self, node: Node, item: int, results: bool) -> tuple[list[Layout], np.ndarray]:
        key = (node, item if results else -1 - item)
        if key not in self.layouts:
            derive = result_layouts if results else operand_layouts
            rule: LeafRule = node.meta["rule"]
            position = _present_index(node, item) if results else item
            found: dict[Layout, int] = {}
            which = [
                found.setdefault(derive(rule, option.choice)[position], len(found))
                for option in self.strategies[self.index[node]]
            ]
            self.layouts[key] = (list(found), np.array(which))
        return self.layouts[key]

    def _add_operand_edges(self, node: Node) -> None:
        for i, operand in enumerate(tensor_operands(node)):
            self._add_edge(operand, self._result(operand), node, self._distinct(node, i, results=False), self._row(node))

    def _add_edge(
        self,
        value: Node,
        source: tuple[list[Layout], np.ndarray],
        target_node: Node,
        target: tuple[list[Layout], np.ndarray],
        row: int,
    ) -> None:
        producer = value.args[0] if value.target is operator.getitem else value
        width = value.meta["val"].element_size()
        matrix = self._prices(tuple(source[0]), tuple(target[0]), width)
        if value.meta["stage"] != target_node.meta["stage"] and value.meta.get("role") is None:
            sent = [self.setting.transfer(local_bytes(layout, width, self.setting.mesh)) for layout in source[0]]
            matrix = matrix + np.array(sent)[:, None]
        full = matrix[source[1]][:, target[1]]
        if _is_step_relay(target_node) and producer.op == "placeholder":  # type: ignore[union-attr]
            full = self._copy_rule(full, target_node)
        self.edges.append(abstract.Edge(self.index[producer], self.index[target_node], full, row))  # type: ignore[index]

    def _copy_rule(self, full: np.ndarray, relay: Node) -> np.ndarray:
        """A relay that holds no copy keeps the parameter's layout."""
        shares = np.array([not option.holds_copy for option in self.strategies[self.index[relay]]])
        return np.where(shares[None, :] & (full > 0), np.inf, full)

    def _prices(self, sources: tuple[Layout, ...], targets: tuple[Layout, ...], width: int) -> np.ndarray:
        key = (sources, targets, width)
        if key not in self.matrices:
            cost = self.setting.resharder.cost_s
            self.matrices[key] = np.array([[cost(a, b, width) for b in targets] for a in sources])
        return self.matrices[key]

    # -- memory ------------------------------------------------------------------------------------------------
    def _add_memory(self) -> None:
        for node in self.graph_nodes:
            role = node.meta.get("role")
            if role is not None and role.kind in ("param", "state"):
                self._hold(node, node.meta["stage"], 1)
            elif _is_step_relay(node):
                self._hold(node, node.meta["stage"], 1, copies_only=True)
        seen: set[tuple[Node, int]] = set()
        for node in self.step.graph.nodes:
            for value, stage, count in _kept_values(node, self.setting.in_flight):
                base = _base(value)
                if (base, stage) not in seen and base.op == "call_function" and not _is_parameter(base):
                    seen.add((base, stage))
                    self._hold(base, stage, count)

    def _hold(self, value: Node, stage: int, count: int, copies_only: bool = False) -> None:
        layouts, which = self._result(value)
        width = value.meta["val"].element_size()
        sizes = np.array([local_bytes(layout, width, self.setting.mesh) for layout in layouts])[which] * count
        producer = value.args[0] if value.target is operator.getitem else value
        at = self.index[producer]  # type: ignore[index]
        if copies_only:
            sizes = sizes * np.array([option.holds_copy for option in self.strategies[at]])
        memory = self.nodes[at].memory
        memory[stage] = memory.get(stage, 0.0) + sizes

    def _limits(self) -> tuple[abstract.Limit, ...]:
        names = [f"stage {s}" for s in range(self.setting.mesh.num_stages)]
        return tuple(abstract.Limit(name, self.setting.capacity) for name in names)

    def _objective(self) -> tuple[abstract.Term, ...]:
        """1F1B: fill and drain once through all stages, the slowest stage for the other microbatches, one update."""
        stages, count = self.setting.mesh.num_stages, self.setting.microbatches
        if stages == 1:
            return (abstract.Term(count, (0,)), abstract.Term(1.0, (1,)))
        fill = tuple(abstract.Term(1.0, (s,)) for s in range(stages))
        steady = abstract.Term(count - 1.0, tuple(range(stages)))
        return (*fill, steady, abstract.Term(1.0, tuple(range(stages, 2 * stages))))


def _is_step_relay(node: Node) -> bool:
    return node.target is markers.relay and node.meta["phase"] == "prologue"


def _present_index(node: Node, item: int) -> int:
    """The position among the rule's results of a tuple's item (absent ones have none)."""
    value = node.meta["val"]
    if not isinstance(value, (tuple, list)):
        return 0
    return sum(1 for v in value[:item] if v is not None)


def _kept_values(node: Node, in_flight: Sequence[int]) -> list[tuple[Node, int, int]]:
    """(value, stage, copies) that live beyond their part because of `node`: saved activations, gradients."""
    if node.op != "call_function":
        return []
    stage = node.meta["stage"]
    if node.target is markers.accumulate:
        return [(node, stage, 1)]
    kept = []
    for source in node.all_input_nodes:
        if source.op != "call_function" or source.target is markers.accumulate:
            continue
        phases = (source.meta["phase"], node.meta["phase"])
        if phases == ("forward", "backward"):
            kept.append((source, stage, in_flight[stage]))
        elif phases == ("backward", "update"):
            kept.append((source, source.meta["stage"], 1))
    return kept


def _base(value: Node) -> Node:
    """The value whose storage `value` shares; a relay may gather, so it counts as a storage of its own."""
    while value.op == "call_function" and value.target not in (operator.getitem, markers.relay) and is_view(value):
        value = value.args[0]  # type: ignore[assignment]
    return value


def _is_parameter(value: Node) -> bool:
    while value.target is markers.relay:
        value = value.args[0]  # type: ignore[assignment]
    return value.op != "call_function"


