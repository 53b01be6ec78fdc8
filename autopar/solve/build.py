"""From a step graph to the solver's problem: strategies per node, resharding prices per edge, memory per stage.

Rows of costs: stage s at microbatch level is row s, at step level row S + s. One limit per moment of a stage.

Memory counted (bytes, per rank): parameters and optimizer state at rest; parameters gathered for the whole step;
gradients or their accumulators; forward values that the backward needs, times the microbatches in flight. The
working set of single ops and communication buffers is the margin that the caller leaves (and the accountant checks).

With recompute, a forward node's strategy is a choice and a mode (`modes`). One that is computed again costs its op and
the resharding of its operands a second time; a parameter that the backward gathers anyway is gathered once for both.
What a stage computes again for its last block is there at the moment of its peak, together with all that is kept; the
blocks before it only reach that level as what is kept for later ones has been freed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor
from torch.fx import Node

from autopar import markers
from autopar.joint import StepGraph
from autopar.layers import block_of
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.pins import matches_module
from autopar.reshard import Resharder
from autopar.rules.choices import Choice, enumerate_choices, operand_layouts, result_layouts
from autopar.rules.factors import LeafRule
from autopar.rules.nodes import tensor_operands
from autopar.solve import problem as abstract
from autopar.solve.costs import Compute, compute_costs, is_view, local_bytes
from autopar.solve.modes import Mode, Modes, is_forward, modes_of, producer

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
    recompute: str = "none"
    """`none`, `auto` (where it pays), `full` (every block), or a glob of the modules that run again."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A choice; for a step-level relay of a parameter whether it gathers (and so holds a copy); for a forward node,
    with recompute, what becomes of its value until the backward."""

    choice: Choice
    holds_copy: bool = False
    mode: Mode | None = None


@dataclass(frozen=True, slots=True)
class _Moment:
    """When a stage may need most: at the start of the backward of `block`, what `freed` kept being gone."""

    stage: int
    block: str = ""
    freed: str | None = None

    @property
    def name(self) -> str:
        return f"stage {self.stage} {self.block}".rstrip()


@dataclass(slots=True)
class BuiltProblem:
    """The problem with what its indices mean."""

    problem: abstract.Problem
    nodes: list[Node]
    strategies: list[list[Strategy]]
    limit_stages: tuple[int, ...]
    """The stage of each limit."""

    def choices(self, solution: Sequence[int]) -> dict[str, Choice]:
        """Node key → choice."""
        return {
            node.meta["key"]: options[pick].choice
            for node, options, pick in zip(self.nodes, self.strategies, solution, strict=True)
        }


    def recomputed(self, solution: Sequence[int]) -> list[Node]:
        """The forward nodes that run again; views only where they'd otherwise be kept, or bring a move with them."""
        options = [options[pick] for options, pick in zip(self.strategies, solution, strict=True)]
        picked = dict(zip(self.nodes, options, strict=True))
        again = [node for node, strategy in picked.items() if strategy.mode is Mode.AGAIN]
        return [node for node in again if node.target is not markers.relay and not _is_free_view(node, picked)]

    def kept(self, solution: Sequence[int]) -> list[Node]:
        """The forward nodes whose values are kept for the backward."""
        picked = zip(self.nodes, self.strategies, solution, strict=True)
        return [node for node, options, pick in picked if options[pick].mode is Mode.KEPT]


def build_problem(step: StepGraph, setting: Setting) -> BuiltProblem:
    """The problem of choosing layouts, and with recompute modes, for a step graph whose stages are cut."""
    return _Builder(step, setting).build()


def wanted_again(recompute: str) -> Callable[[Node], bool] | None:
    """The nodes that a pin wants computed again; None leaves it to the solver."""
    if recompute == "auto":
        return None
    if recompute == "full":
        return lambda node: block_of(node.meta.get("path", "")) is not None
    return lambda node: matches_module(recompute, node.meta.get("path", ""))


def _is_free_view(node: Node, picked: dict[Node, Strategy]) -> bool:
    """Whether a view is made from something kept, in the same layout: keeping it would take no memory either."""
    while is_view(node):
        source, item = producer(node.args[0])  # type: ignore[arg-type]
        left = result_layouts(source.meta["rule"], picked[source].choice)[_present_index(source, item)]
        if left != operand_layouts(node.meta["rule"], picked[node].choice)[0]:
            return False
        if source.op != "call_function" or picked[source].mode is Mode.KEPT:
            return True
        node = source
    return False


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
    modes: Modes | None = None
    moments: list[_Moment] = field(default_factory=list)

    def build(self) -> BuiltProblem:
        if self.setting.recompute != "none":
            self.modes = modes_of(self.step.graph, wanted_again(self.setting.recompute))
        self.moments = [moment for stage in range(self.setting.mesh.num_stages) for moment in self._moments(stage)]
        for node in self.step.graph.nodes:
            if node.op != "output" and node.target is not operator.getitem:
                self._add_node(node)
        self._add_memory()
        for node in self.graph_nodes:
            self._add_operand_edges(node)
        self._add_shared_gathers()
        for source, result in self.step.state_pairs:
            self._add_edge(result, self._result(result), source, self._result(source), self._row(result))
        return BuiltProblem(
            abstract.Problem(tuple(self.nodes), tuple(self.edges), self._limits(), self._objective()),
            self.graph_nodes,
            self.strategies,
            tuple(moment.stage for moment in self.moments),
        )

    # -- nodes -------------------------------------------------------------------------------------------------
    def _add_node(self, node: Node) -> None:
        rule: LeafRule = node.meta["rule"]
        choices = [c for c in self._choices(node, rule) if self.setting.allowed(node, rule, c)]
        assert choices, f"{node.meta['key']}: no choice is allowed"
        modes = self.modes.of[node] if self.modes is not None and is_forward(node) else (None,)
        options = [Strategy(choice, mode=mode) for mode in modes for choice in choices]
        if _is_step_relay(node):
            options += [Strategy(choice, holds_copy=True) for choice in choices]
        once = compute_costs(node, choices, self.setting.mesh, self.setting.compute) * (len(options) // len(choices))
        costs = np.array(once) * np.array([2.0 if option.mode is Mode.AGAIN else 1.0 for option in options])
        self.index[node] = len(self.nodes)
        self.nodes.append(abstract.Node(node.meta["key"], costs, self._row(node), {}))
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
        maker, item = producer(node)
        return self._distinct(maker, item, results=True)

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
        maker, _ = producer(value)
        width = value.meta["val"].element_size()
        matrix = self._prices(tuple(source[0]), tuple(target[0]), width)
        full = self._with_modes(matrix[source[1]][:, target[1]], maker, target_node)
        if value.meta["stage"] != target_node.meta["stage"] and value.meta.get("role") is None:
            sent = [self.setting.transfer(local_bytes(layout, width, self.setting.mesh)) for layout in source[0]]
            full = full + np.array(sent)[source[1]][:, None]
        if _is_step_relay(target_node) and maker.op == "placeholder":
            full = self._copy_rule(full, target_node)
        self.edges.append(abstract.Edge(self.index[maker], self.index[target_node], full, row))

    def _with_modes(self, full: np.ndarray, source: Node, target: Node) -> np.ndarray:
        """What is computed again needs its operand kept or computed again, and reshards it again."""
        again = self._in_mode(target, Mode.AGAIN)
        if self.modes is None or not again.any():
            return full
        runs = 0 if self._backward_relay(target) is not None else self.modes.runs[target]
        full = np.where(again[None, :], full * (1 + runs), full)
        if not is_forward(source) or source.meta["stage"] != target.meta["stage"]:
            return full
        return np.where(self._in_mode(source, Mode.DROPPED)[:, None] & again[None, :], np.inf, full)

    def _in_mode(self, node: Node, mode: Mode) -> np.ndarray:
        return np.array([option.mode is mode for option in self.strategies[self.index[node]]])

    def _backward_relay(self, node: Node) -> Node | None:
        """The relay that brings a parameter to the backward of the stage to whose forward `node` brings it."""
        if node.target is not markers.relay or not _is_step_relay(node.args[0]):  # type: ignore[arg-type]
            return None
        place = ("backward", node.meta["stage"])
        return next((user for user in node.args[0].users if (user.meta["phase"], user.meta["stage"]) == place), None)  # type: ignore[union-attr]

    def _add_shared_gathers(self) -> None:
        """A parameter that is brought to the forward again comes from what the backward gathers."""
        for node in self.graph_nodes:
            if self.modes is None or not is_forward(node) or not self._in_mode(node, Mode.AGAIN).any():
                continue
            shared = self._backward_relay(node)
            if shared is None:
                continue
            (here, which_here), (there, which_there) = self._result(node), self._result(shared)
            prices = self._prices(tuple(there), tuple(here), node.meta["val"].element_size()).T
            full = np.where(self._in_mode(node, Mode.AGAIN)[:, None], prices[which_here][:, which_there], 0.0)
            self.edges.append(abstract.Edge(self.index[node], self.index[shared], full, self._row(node)))

    def _copy_rule(self, full: np.ndarray, relay: Node) -> np.ndarray:
        """A relay that holds no copy keeps the parameter's layout."""
        shares = np.array([not option.holds_copy for option in self.strategies[self.index[relay]]])
        return np.where(shares[None, :] & (full > 0), np.inf, full)

    def _prices(self, sources: tuple[Layout, ...], targets: tuple[Layout, ...], width: int) -> np.ndarray:
        key = (sources, targets, width)
        if key not in self.matrices:
            self.matrices[key] = self.setting.resharder.matrix_s(sources, targets, width)
        return self.matrices[key]

    # -- memory ------------------------------------------------------------------------------------------------
    def _moments(self, stage: int) -> list[_Moment]:
        """The start of the backward; with recompute, that of the last blocks: a head after them may be small."""
        if self.modes is None:
            return [_Moment(stage)]
        nodes = [n for n in self.step.graph.nodes if is_forward(n) and n.meta["stage"] == stage]
        blocks = list(dict.fromkeys(self.modes.block[n] for n in nodes if n.target is not markers.relay)) or [""]
        last = [_Moment(stage, blocks[-1])]
        return last if len(blocks) == 1 or blocks[-1] != "after" else [*last, _Moment(stage, blocks[-2], blocks[-1])]

    def _add_memory(self) -> None:
        for node in self.graph_nodes:
            role = node.meta.get("role")
            if role is not None and role.kind in ("param", "state"):
                self._hold(node, node.meta["stage"])
            elif _is_step_relay(node):
                self._hold(node, node.meta["stage"], np.array([s.holds_copy for s in self.strategies[self.index[node]]]))
            elif self.modes is not None and is_forward(node):
                self._hold_by_mode(node, self.modes)
        seen: set[tuple[Node, int]] = set()
        for node in self.step.graph.nodes:
            for value, stage in _outliving(node):
                if self.modes is not None and value.meta["phase"] == "forward":
                    continue
                base = _base(value)
                if (base, stage) not in seen and base.op == "call_function" and not _is_parameter(base):
                    seen.add((base, stage))
                    self._hold(base, stage, self._copies(base, stage))
        for value, stage in sorted(self.modes.foreign, key=lambda pair: pair[0].name) if self.modes is not None else ():
            self._hold(value, stage, self._copies(value, stage))

    def _copies(self, value: Node, stage: int) -> int:
        return self.setting.in_flight[stage] if value.meta["phase"] == "forward" else 1

    def _hold_by_mode(self, node: Node, modes: Modes) -> None:
        stage = node.meta["stage"]
        kept, again = self._in_mode(node, Mode.KEPT), self._in_mode(node, Mode.AGAIN)
        for limit, moment in enumerate(self.moments):
            if moment.stage != stage:
                continue
            count = self.setting.in_flight[stage] - (moment.freed == modes.block[node])
            here = again * (moment.block == modes.block[node] and not is_view(node))
            for item in modes.items[node]:
                self._add_bytes(node, limit, self._bytes(node, item) * (kept * count + here))
        for value in tensor_operands(node):
            if self._comes_from_elsewhere(value, node, modes):
                self._hold(value, stage, again * self.setting.in_flight[stage], on=node)

    def _comes_from_elsewhere(self, value: Node, reader: Node, modes: Modes) -> bool:
        """Whether another stage makes `value`, and this one needs it later only to compute `reader` again."""
        stage = reader.meta["stage"]
        return is_forward(producer(value)[0]) and value.meta["stage"] != stage and (value, stage) not in modes.foreign

    def _hold(self, value: Node, stage: int, count: int | np.ndarray = 1, on: Node | None = None) -> None:
        """Counts `value` at every moment of a stage: `count` times (per strategy), on its maker or on a reader."""
        node, item = producer(value)
        if on is None:
            sizes = self._bytes(node, item)
        else:
            layouts, which = self._distinct(on, tensor_operands(on).index(value), results=False)
            sizes = self._sizes(layouts, value)[which]
        for limit, moment in enumerate(self.moments):
            if moment.stage == stage:
                self._add_bytes(on or node, limit, sizes * count)

    def _bytes(self, node: Node, item: int) -> np.ndarray:
        """Bytes of one of a node's results on a rank, per strategy."""
        value = node.meta["val"]
        layouts, which = self._distinct(node, item, results=True)
        return self._sizes(layouts, value[item] if isinstance(value, (tuple, list)) else value)[which]

    def _sizes(self, layouts: list[Layout], value: Tensor | Node) -> np.ndarray:
        width = (value.meta["val"] if isinstance(value, Node) else value).element_size()
        return np.array([local_bytes(layout, width, self.setting.mesh) for layout in layouts])

    def _add_bytes(self, node: Node, limit: int, sizes: np.ndarray) -> None:
        memory = self.nodes[self.index[node]].memory
        if sizes.any():
            memory[limit] = memory.get(limit, 0.0) + sizes

    def _limits(self) -> tuple[abstract.Limit, ...]:
        return tuple(abstract.Limit(moment.name, self.setting.capacity) for moment in self.moments)

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


def _outliving(node: Node) -> list[tuple[Node, int]]:
    """(value, stage) that live beyond their part because of `node`: saved activations, gradients."""
    if node.op != "call_function":
        return []
    stage = node.meta["stage"]
    if node.target is markers.accumulate:
        return [(node, stage)]
    found = []
    for source in node.all_input_nodes:
        if source.op != "call_function" or source.target is markers.accumulate:
            continue
        phases = (source.meta["phase"], node.meta["phase"])
        if phases == ("forward", "backward"):
            found.append((source, stage))
        elif phases == ("backward", "update"):
            found.append((source, source.meta["stage"]))
    return found


def _base(value: Node) -> Node:
    """The value whose storage `value` shares; a relay may gather, so it counts as a storage of its own."""
    while value.op == "call_function" and value.target not in (operator.getitem, markers.relay) and is_view(value):
        value = value.args[0]  # type: ignore[assignment]
    return value


def _is_parameter(value: Node) -> bool:
    while value.target is markers.relay:
        value = value.args[0]  # type: ignore[assignment]
    return value.op != "call_function"


