"""From a step graph to the solver's problem: strategies per node, resharding prices per edge, memory per rank.

Rows of costs: stage s at microbatch level is row s, at step level row S + s. One limit per moment of a kind of ranks.

Memory counted (bytes, per rank; see `held`): parameters and optimizer state at rest; parameters gathered for the whole
step; gradients or their accumulators; forward values that the backward needs, times the microbatches in flight. The
working set of single ops and communication buffers is the margin that the caller leaves (and the accountant checks).

What may hide behind computation (see `windows`) is priced as if there were enough of it, at the device's contention:
no choice takes less, and one with enough computation beside it all takes just that (see `beside`).

With recompute, a forward node's strategy is a choice and a mode (see `modes`). One that is computed again costs its op
and the resharding of its operands a second time; what the backward gathers of a parameter anyway serves both.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.fx import Graph, Node

from autopar import markers
from autopar.errors import PlanError
from autopar.joint import StepGraph, forward_twin, relay_to
from autopar.layers import block_of, homes_of
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.pins import matches_module
from autopar.reshard import TIE_S, Resharder
from autopar.rules.choices import Choice, enumerate_choices, operand_layouts, result_layouts
from autopar.rules.factors import LeafRule
from autopar.rules.nodes import is_view, node_argument, op_name, result_values, tensor_operands
from autopar.solve import problem as abstract
from autopar.solve.costs import Compute, compute_costs, local_bytes
from autopar.solve.held import Holdings, Moment, is_step_relay, kinds_of, moments_of
from autopar.solve.modes import Mode, Modes, Wanted, is_forward, may_be_reused, modes_of, producer
from autopar.solve.problem import Array
from autopar.solve.ranks import Ranks
from autopar.solve.windows import NO_WINDOWS, NOTHING_HIDES, Hiding, Windows, windows_of

Allowed = Callable[[Node, LeafRule, Choice], bool]


@dataclass(frozen=True, slots=True)
class Setting:
    """What one candidate is priced for."""

    mesh: Mesh
    microbatches: int
    ranks: Ranks
    """What the ranks of the pipeline have of its stages."""
    capacity: float
    """Bytes of one device that may be used."""
    compute: Compute
    resharder: Resharder
    transfer: Callable[[float], float]
    """Bytes → seconds, between neighbouring stages."""
    allowed: Allowed
    alike: Callable[[Node, LeafRule], Hashable] = lambda node, rule: node
    """Equal for nodes, of one op and equal rules, of which the same choices are allowed."""
    recompute: str = "none"
    """`none`, `auto` (where it pays), `full` (every block), or a glob of the modules that run again. `kept` is `none`
    with modes, by which limits see that what the forward's relay moved is kept in place of the value itself."""
    by_kind: bool = False
    """Whether memory is told by kind (`held.KINDS`), of one stage, not when ranks may need most."""
    contention: float = 1.0
    """Of `cluster.Device`: what a second of communication costs beside computation; 1: nothing hides."""
    is_pipelined: bool = False
    """Whether there are other stages, if not in the graph."""

    @property
    def advances(self) -> bool:
        """Whether the backward reduces gradients on their way to the update."""
        return self.microbatches == 1 and not self.is_pipelined


@dataclass(frozen=True, slots=True)
class Strategy:
    """A choice; for a step-level relay of a parameter whether it gathers (and so holds a copy); for a forward node,
    with recompute, what becomes of its value until the backward; for a backward relay whether it reads what the
    forward's relay moved (see `joint.forward_twin`), which is then kept, or moves the value anew."""

    choice: Choice
    holds_copy: bool = False
    mode: Mode | None = None
    is_reused: bool = False


@dataclass(frozen=True, slots=True)
class Moved:
    """What an edge's seconds are for: a value on its way from one layout to another (see `solve.spent`)."""

    width: int
    """Bytes of an element."""
    source: tuple[list[Layout], np.ndarray]
    """Distinct layouts, and which of them each strategy of the edge's source leaves."""
    target: tuple[list[Layout], np.ndarray]
    times: int = 1
    crosses: bool = False
    """Whether it goes on to another stage, too."""
    is_again: bool = False
    """Whether all of it is for what is computed again; then it moves from the edge's target to its source."""
    hiding: Hiding = NOTHING_HIDES
    """Behind which windows it may hide."""
    hideable: Array | None = None
    """What then may hide: seconds by strategy of the source and of the target, of which the edge costs less."""

    def between(self, ends: tuple[int, int]) -> tuple[Layout, Layout]:
        """The layouts from which, and to which, it moves under the strategies of the edge's source and target."""
        source, target = (side[0][side[1][end]] for side, end in zip((self.source, self.target), ends, strict=True))
        return (target, source) if self.is_again else (source, target)


@dataclass(slots=True)
class BuiltProblem:
    """The problem with what its indices mean."""

    problem: abstract.Problem
    """What stands for several layers counts as often."""
    plain: tuple[abstract.Node, ...]
    """Its nodes as one layer has them."""
    nodes: list[Node]
    strategies: list[list[Strategy]]
    limit_ranks: tuple[int, ...]
    """The kind of ranks of each limit, see `Ranks.kinds`."""
    moves: tuple[Moved, ...]
    """What moves on each edge."""
    setting: Setting
    """What it is priced for."""
    step: StepGraph
    """What it is made of."""
    windows: Windows
    """Of computation, behind which communication hides."""

    def choices(self, solution: Sequence[int]) -> dict[str, Choice]:
        """Node key → choice."""
        return {node.meta["key"]: strategy.choice for node, strategy in self._picked(solution).items()}

    @property
    def has_modes(self) -> bool:
        """Whether forward values may be computed again."""
        return any(options[0].mode is not None for options in self.strategies)

    def recomputed(self, solution: Sequence[int]) -> list[Node]:
        """The forward nodes that run again; views only where they'd otherwise be kept, or bring a move with them."""
        picked = self._picked(solution)
        again = [node for node, strategy in picked.items() if strategy.mode is Mode.AGAIN]
        return [node for node in again if node.target is not markers.relay and not _is_free_view(node, picked)]

    def moved_again(self, solution: Sequence[int]) -> list[Node]:
        """The forward's relays whose value the backward moves anew, though it needs what they left."""
        picked, again = self._picked(solution), []
        for node, strategy in picked.items():
            twin = forward_twin(node)
            if twin is None or strategy.is_reused:
                continue
            made, there, here = (left_layout(value, picked) for value in (node_argument(node, 0), twin, node))
            if made != there == here:
                again.append(twin)
        return again

    def kept(self, solution: Sequence[int]) -> list[Node]:
        """The forward nodes that don't run again whatever reads them; relays where what they moved is reused."""
        picked = self._picked(solution)
        reused = {forward_twin(node) for node, strategy in picked.items() if strategy.is_reused}
        is_kept = {node: is_forward(node) and strategy.mode in (None, Mode.KEPT) for node, strategy in picked.items()}
        return [node for node in picked if node in reused or (is_kept[node] and node.target is not markers.relay)]

    def picked(self, solution: Sequence[int]) -> list[Strategy]:
        """The strategy of each node."""
        return [options[pick] for options, pick in zip(self.strategies, solution, strict=True)]

    def _picked(self, solution: Sequence[int]) -> dict[Node, Strategy]:
        return dict(zip(self.nodes, self.picked(solution), strict=True))


def build_problem(step: StepGraph, setting: Setting) -> BuiltProblem:
    """The problem of choosing layouts, and with recompute modes, for a step graph whose stages are cut."""
    return _Builder(step, setting).build()


def build_part(step: StepGraph, setting: Setting, part: Collection[Node]) -> abstract.Problem:
    """The same for some nodes alone, without limits: they cost at least as much in every choice for the whole."""
    return _Builder(step, setting).build_part(part)


def wanted_again(recompute: str | None) -> Wanted | None:
    """The nodes that a pin wants computed again; None leaves it to the solver."""
    if recompute == "auto":
        return None
    if recompute == "kept":
        return lambda node: False
    if recompute == "full":
        return lambda node: block_of(node.meta.get("path", "")) is not None
    return lambda node: matches_module(str(recompute), node.meta.get("path", ""))


def require_wanted(graph: Graph, recompute: str | None) -> None:
    """Raises `PlanError` for a recompute pin that matches no forward node of a captured graph."""
    wanted = wanted_again(recompute) if recompute not in (None, "none") else None
    nodes = [n for n in graph.nodes if n.op == "call_function" and n.meta.get("phase", "forward") == "forward"]
    if wanted is None or any(wanted(node) for node in nodes):
        return
    if recompute == "full":
        raise PlanError("pin 'recompute=full': the model has no blocks (a module list); name modules: recompute=GLOB")
    paths = list(dict.fromkeys(path for node in nodes if (path := node.meta.get("path", ""))))
    raise PlanError(f"pin 'recompute={recompute}': matches no module of the model; some are {', '.join(paths[:5])}")


def _is_free_view(node: Node, picked: dict[Node, Strategy]) -> bool:
    """Whether a view is made from something kept, in the same layout: keeping it would take no memory either."""
    while is_view(node):
        source, _ = producer(node_argument(node, 0))
        if left_layout(node_argument(node, 0), picked) != operand_layouts(node.meta["rule"], picked[node].choice)[0]:
            return False
        if source.op != "call_function" or picked[source].mode is Mode.KEPT:
            return True
        node = source
    return False


def left_layout(value: Node, picked: dict[Node, Strategy]) -> Layout:
    """The layout in which its producer leaves a value."""
    maker, item = producer(value)
    return result_layouts(maker.meta["rule"], picked[maker].choice)[_present_index(maker, item)]


@dataclass(slots=True)
class _Builder:
    step: StepGraph
    setting: Setting
    index: dict[Node, int] = field(default_factory=dict)
    nodes: list[abstract.Node] = field(default_factory=list)
    graph_nodes: list[Node] = field(default_factory=list)
    strategies: list[list[Strategy]] = field(default_factory=list)
    first: dict[Hashable, Node] = field(default_factory=dict)
    """Of nodes that have the same strategies at the same costs, the first."""
    derived: dict[Hashable, Any] = field(default_factory=dict)
    """What was derived from strategies (one list object for all alike nodes), by what it is."""
    matrices: dict[tuple[tuple[Layout, ...], tuple[Layout, ...], int], np.ndarray] = field(default_factory=dict)
    edges: list[abstract.Edge] = field(default_factory=list)
    moves: list[Moved] = field(default_factory=list)
    modes: Modes | None = None
    wanted: Wanted | None = None
    moments: list[Moment] = field(default_factory=list)
    homes: dict[Node, str] = field(default_factory=dict)
    by_key: dict[str, Node] = field(default_factory=dict)
    windows: Windows = NO_WINDOWS

    def build_part(self, part: Collection[Node]) -> abstract.Problem:
        self._read_graph()
        wanted = set(part)
        for node in self.step.graph.nodes:
            if node in wanted and node.target is not operator.getitem:
                self._add_node(node)
        self._add_edges()
        return abstract.Problem(self._weighed_nodes(), tuple(self.edges), (), self._objective())

    def build(self) -> BuiltProblem:
        if self.setting.recompute != "none":
            self.wanted = wanted_again(self.setting.recompute)
            self.modes = modes_of(self.step.graph, self.wanted)
        self._read_graph()
        ranks = self.setting.ranks.kinds
        graph = self.step.graph
        self.moments = kinds_of(graph, self.modes) if self.setting.by_kind else moments_of(graph, ranks, self.modes)
        for node in self.step.graph.nodes:
            if node.op != "output" and node.target is not operator.getitem:
                self._add_node(node)
        self._add_memory()
        self._add_edges()
        return BuiltProblem(
            abstract.Problem(self._weighed_nodes(), tuple(self.edges), self._limits(), self._objective()),
            tuple(self.nodes),
            self.graph_nodes,
            self.strategies,
            tuple(moment.rank for moment in self.moments),
            tuple(self.moves),
            self.setting,
            self.step,
            self.windows,
        )

    def _read_graph(self) -> None:
        self.homes, self.by_key = homes_and_keys(self.step.graph)
        if self.setting.contention < 1:
            self.windows = windows_of(self.step, self.setting.advances)

    # -- nodes -------------------------------------------------------------------------------------------------
    def _weighed_nodes(self) -> tuple[abstract.Node, ...]:
        pairs = zip(self.nodes, self.graph_nodes, strict=True)
        return tuple(_weighed(node, self._times(of)) for node, of in pairs)

    def _add_node(self, node: Node) -> None:
        options, costs = self._options(self.first.setdefault(self._alike(node), node))
        self.index[node] = len(self.nodes)
        self.nodes.append(abstract.Node(node.meta["key"], costs, self._row(node), {}))
        self.graph_nodes.append(node)
        self.strategies.append(options)

    def _alike(self, node: Node) -> Hashable:
        """Equal for nodes that have the same strategies at the same costs."""
        rule: LeafRule = node.meta["rule"]
        kind = op_name(node) if node.op == "call_function" else node.meta["role"].kind
        values = (*(o.meta["val"] for o in tensor_operands(node)), *(v for v in result_values(node) if v is not None))
        dtypes, modes = tuple(value.dtype for value in values), self._modes(node)
        place = (node.meta["phase"], self._row(node), is_step_relay(node), may_be_reused(node, self.wanted))
        is_whole = node.meta.get("is_whole", False)
        return id(rule.memo), self.setting.alike(node, rule), kind, dtypes, modes, place, is_whole

    def _modes(self, node: Node) -> tuple[Mode | None, ...]:
        return self.modes.of[node] if self.modes is not None and is_forward(node) else (None,)

    def _options(self, node: Node) -> tuple[list[Strategy], Array]:
        if node in self.index:
            index = self.index[node]
            return self.strategies[index], self.nodes[index].cost
        rule: LeafRule = node.meta["rule"]
        choices = [c for c in self._choices(node, rule) if self.setting.allowed(node, rule, c)]
        assert choices, f"{node.meta['key']}: no choice is allowed"
        options = [Strategy(choice, mode=mode) for mode in self._modes(node) for choice in choices]
        if is_step_relay(node):
            options += [Strategy(choice, holds_copy=True) for choice in choices]
        if may_be_reused(node, self.wanted):
            options += [Strategy(choice, is_reused=True) for choice in choices]
        once = compute_costs(node, choices, self.setting.mesh, self.setting.compute) * (len(options) // len(choices))
        return options, np.array(once) * np.array([2.0 if option.mode is Mode.AGAIN else 1.0 for option in options])

    def _choices(self, node: Node, rule: LeafRule) -> list[Choice]:
        if node.meta.get("is_whole"):
            return [()]
        if node.op != "call_function":
            if node.meta["role"].kind in ("scalar", "buffer", "whole"):
                return [()]
            return enumerate_choices(rule, self.setting.mesh, allow_partial=False)
        return enumerate_choices(rule, self.setting.mesh)

    def _row(self, node: Node) -> int:
        stages = self.setting.mesh.num_stages
        return int(node.meta["stage"]) + (0 if node.meta["level"] == "microbatch" else stages)

    # -- edges -------------------------------------------------------------------------------------------------
    def _add_edges(self) -> None:
        for node in self.graph_nodes:
            self._add_operand_edges(node)
        self._add_shared_gathers()
        self._add_twins()
        for source, result in self.step.state_pairs:
            if {source, producer(result)[0]} <= self.index.keys():
                times = self._times(source)
                self._add_edge(result, self._result(result), source, self._result(source), self._row(result), times)

    def _result(self, node: Node) -> tuple[list[Layout], np.ndarray]:
        """Distinct layouts of a value, and which of them each strategy of its producer leaves."""
        maker, item = producer(node)
        return self._distinct(maker, item, results=True)

    def _distinct(self, node: Node, item: int, results: bool) -> tuple[list[Layout], np.ndarray]:
        options, position = self.strategies[self.index[node]], _present_index(node, item) if results else item
        key = ("layouts", id(options), position, results)
        if key not in self.derived:
            derive, rule = result_layouts if results else operand_layouts, node.meta["rule"]
            found: dict[Layout, int] = {}
            which = [found.setdefault(derive(rule, option.choice)[position], len(found)) for option in options]
            self.derived[key] = (list(found), np.array(which))
        layouts: tuple[list[Layout], np.ndarray] = self.derived[key]
        return layouts

    def _add_operand_edges(self, node: Node) -> None:
        for i, operand in enumerate(tensor_operands(node)):
            for value, reader, times in self._readings(operand, node):
                if producer(value)[0] not in self.index or reader not in self.index:
                    continue  # of a part of the graph
                needed = self._distinct(reader, i, results=False)
                self._add_edge(value, self._result(value), reader, needed, self._row(reader), times)

    # -- layers that stand for several -------------------------------------------------------------------------
    def _times(self, node: Node) -> int:
        return self.step.repeats.times(self.homes[node])

    def _readings(self, value: Node, reader: Node) -> Iterator[tuple[Node, Node, int]]:
        """How often `reader`, in all the layers that its own stands for, reads `value` in all of those.

        From one layer to the next this happens between each two of the layers that one stands for, and once to the
        layer that really comes next.
        """
        made, read = self.homes[producer(value)[0]], self.homes[reader]
        if made == read or not made or not read:
            yield value, reader, max(self._times(producer(value)[0]), self._times(reader))
            return
        low, high = sorted((made, read), key=lambda block: int(block.rpartition(".")[2]))
        times, again = self.step.repeats.between(low, high)
        yield value, reader, times
        if again is not None:

            def twin(node: Node) -> Node:
                there = self.homes[producer(node)[0]] == high
                return self.by_key[node.meta["key"].replace(high, again, 1)] if there else node

            yield twin(value), twin(reader), self.step.repeats.times(low) - 1

    def _add_edge(
        self,
        value: Node,
        source: tuple[list[Layout], np.ndarray],
        target_node: Node,
        target: tuple[list[Layout], np.ndarray],
        row: int,
        times: int = 1,
    ) -> None:
        maker, _ = producer(value)
        crosses = value.meta["stage"] != target_node.meta["stage"] and value.meta.get("role") is None
        from_input = is_step_relay(target_node) and maker.op == "placeholder"
        runs = self._runs(target_node) if self.modes is not None and is_forward(target_node) else 0
        ends = (id(self.strategies[self.index[n]]) for n in (maker, target_node))
        width, is_within = value.meta["val"].element_size(), self._is_within(maker, target_node)
        hiding = self.windows.hiding(maker, target_node)
        key = ("edge", *ends, id(source), id(target), width, crosses, from_input, runs, is_within)
        key = (*key, hiding.part, hiding.is_gather)
        if key not in self.derived:
            prices, hides = self._prices(tuple(source[0]), tuple(target[0]), width), None
            if hiding.shares:
                hides = self._hideable(prices, target[0], width, hiding)[source[1]][:, target[1]]
            less = 0.0 if hides is None else (1 - self.setting.contention) * hiding.part * hides
            full = self._with_modes(prices[source[1]][:, target[1]], less, maker, target_node)
            if crosses:
                sent = [self.setting.transfer(local_bytes(layout, width, self.setting.mesh)) for layout in source[0]]
                full = full + np.array(sent)[source[1]][:, None]
            if from_input:
                full = self._copy_rule(full, target_node)
            full = self._reuse_rule(full, maker, target_node)
            self.derived[key] = full, hides if hides is None else np.where(full > 0, hides, 0.0)
        if (*key, times) not in self.derived:
            self.derived[*key, times] = tuple(each if each is None else each * times for each in self.derived[key])
        cost, hides = self.derived[*key, times]
        self.edges.append(abstract.Edge(self.index[maker], self.index[target_node], cost, row))
        self.moves.append(Moved(width, source, target, times, crosses, False, hiding, hides))

    def _hideable(self, prices: np.ndarray, targets: list[Layout], width: int, hiding: Hiding) -> np.ndarray:
        """Seconds that hide where there is enough computation beside them, from layout to layout."""
        sizes = (local_bytes(layout, width, self.setting.mesh) for layout in targets)
        holds = np.array([hiding.holds(num_bytes, self.setting.capacity) for num_bytes in sizes])
        return np.where(holds[None, :] & np.isfinite(prices), np.maximum(0.0, prices - TIE_S), 0.0)

    def _runs(self, node: Node) -> int:
        """How often the backward moves the operands of what it computes again."""
        assert self.modes is not None
        return 0 if self._backward_relay(node) is not None else self.modes.runs[node]

    @staticmethod
    def _is_within(source: Node, target: Node) -> bool:
        """Whether a value passes from forward to forward within a stage, where modes couple."""
        return is_forward(source) and is_forward(target) and source.meta["stage"] == target.meta["stage"]

    def _with_modes(self, full: np.ndarray, less: np.ndarray | float, source: Node, target: Node) -> np.ndarray:
        """What is computed again needs its operand kept or computed again, and reshards it again; the first time it may
        cost `less`, as it hides."""
        again, once = self._in_mode(target, Mode.AGAIN) > 0, full - less
        if self.modes is None or not again.any():
            return once
        repeated = full * (1 + self._runs(target)) - less
        if self.setting.recompute == "kept":  # views of what is kept, as it is kept
            repeated = np.where(full > 0, np.inf, 0.0)
        full = np.where(again[None, :], repeated, once)
        if not self._is_within(source, target):
            return full
        return np.where((self._in_mode(source, Mode.DROPPED) > 0)[:, None] & again[None, :], np.inf, full)

    def _in_mode(self, node: Node, mode: Mode) -> Array:
        return self._flags(node, mode, lambda option: option.mode is mode)

    def _flags(self, node: Node, name: Hashable, holds: Callable[[Strategy], bool]) -> Array:
        """1 for the strategies of a node of which something holds, else 0."""
        options = self.strategies[self.index[node]]
        key = (name, id(options))
        if key not in self.derived:
            self.derived[key] = np.array([float(holds(option)) for option in options])
        flags: Array = self.derived[key]
        return flags

    def _backward_relay(self, node: Node) -> Node | None:
        """The relay that brings a parameter to the backward of the stage to whose forward `node` brings it."""
        if node.target is not markers.relay or not is_step_relay(node_argument(node, 0)):
            return None
        return relay_to("backward", node.meta["stage"], node_argument(node, 0))

    def _add_shared_gathers(self) -> None:
        """A parameter that is brought to the forward again comes from what the backward gathers."""
        for node in self.graph_nodes:
            if self.modes is None or not is_forward(node) or not self._in_mode(node, Mode.AGAIN).any():
                continue
            shared = self._backward_relay(node)
            if shared is None or shared not in self.index:
                continue
            (here, which_here), (there, which_there) = self._result(node), self._result(shared)
            width = node.meta["val"].element_size()
            prices = self._prices(tuple(there), tuple(here), width).T
            full = np.where(self._in_mode(node, Mode.AGAIN)[:, None] > 0, prices[which_here][:, which_there], 0.0)
            full = full * self._times(node)
            self.edges.append(abstract.Edge(self.index[node], self.index[shared], full, self._row(node)))
            self.moves.append(Moved(width, (here, which_here), (there, which_there), self._times(node), is_again=True))

    def _copy_rule(self, full: np.ndarray, relay: Node) -> np.ndarray:
        """A relay that holds no copy keeps the parameter's layout."""
        shares = self._holds_copy(relay) == 0
        return np.where(shares[None, :] & (full > 0), np.inf, full)

    def _reuse_rule(self, full: np.ndarray, source: Node, relay: Node) -> np.ndarray:
        """A relay that reads what the forward's relay moved pays nothing here; nor is there anything to reuse where
        the value is as it needs it. What was dropped can only be reused."""
        reused = self._is_reused(relay) > 0
        if not reused.any():
            return full
        dropped = (self._in_mode(source, Mode.DROPPED) > 0)[:, None]
        return np.where(reused[None, :], np.where(full > 0, 0.0, np.inf), np.where(dropped, np.inf, full))

    def _add_twins(self) -> None:
        """What is reused has the layout in which the forward's relay left it."""
        for node in self.graph_nodes:
            reused, twin = self._is_reused(node) > 0, forward_twin(node)
            if twin is None or twin not in self.index or not reused.any():
                continue
            (here, which_here), (there, which_there) = self._result(node), self._result(twin)
            same = np.array([[a == b for b in here] for a in there])[which_there][:, which_here]
            full = np.where(reused[None, :] & ~same, np.inf, 0.0)
            self.edges.append(abstract.Edge(self.index[twin], self.index[node], full, self._row(node)))
            self.moves.append(Moved(node.meta["val"].element_size(), (there, which_there), (here, which_here)))

    def _holds_copy(self, node: Node) -> Array:
        return self._flags(node, "copy", lambda option: option.holds_copy)

    def _is_reused(self, node: Node) -> Array:
        return self._flags(node, "reused", lambda option: option.is_reused)

    def _prices(self, sources: tuple[Layout, ...], targets: tuple[Layout, ...], width: int) -> np.ndarray:
        key = (sources, targets, width)
        if key not in self.matrices:
            self.matrices[key] = self.setting.resharder.matrix_s(sources, targets, width)
        return self.matrices[key]

    # -- memory ------------------------------------------------------------------------------------------------
    def _add_memory(self) -> None:
        holdings = Holdings(
            graph=self.step.graph,
            moments=self.moments,
            modes=self.modes,
            result_bytes=lambda node, item: self._bytes(node, item, _item(node, item), results=True),
            operand_bytes=lambda node, i: self._bytes(node, i, tensor_operands(node)[i].meta["val"], results=False),
            in_mode=self._in_mode,
            holds_copy=self._holds_copy,
            is_reused=self._is_reused,
        )
        for node, limit, sizes in holdings.rows():
            memory = self.nodes[self.index[node]].memory
            if sizes.any():
                memory[limit] = memory.get(limit, 0.0) + sizes

    def _bytes(self, node: Node, item: int, value: Tensor, results: bool) -> Array:
        """Bytes of one result (or operand) of a node on a rank, per strategy."""
        found, width = self._distinct(node, item, results), value.element_size()
        key = ("bytes", id(found), width)
        if key not in self.derived:
            sizes = [local_bytes(layout, width, self.setting.mesh) for layout in found[0]]
            self.derived[key] = np.array(sizes)[found[1]]
        per_strategy: Array = self.derived[key]
        return per_strategy

    def _limits(self) -> tuple[abstract.Limit, ...]:
        return tuple(abstract.Limit(moment.name, self.setting.capacity) for moment in self.moments)

    def _objective(self) -> tuple[abstract.Term, ...]:
        """1F1B: fill and drain once through all stages, the slowest stage for the other microbatches, one update; with
        several stages a rank as in `solve.ranks`."""
        stages, count = self.setting.mesh.num_stages, self.setting.microbatches
        if stages == 1:
            return (abstract.Term(count, (0,)), abstract.Term(1.0, (1,)))
        ranks = self.setting.ranks
        fill = tuple(abstract.Term(times / ranks.virtual, (s,)) for s, times in enumerate(ranks.times))
        steady = tuple(abstract.Term(weight, rows) for rows, weight in ranks.steady(count).items())
        update = tuple(abstract.Term(1.0, tuple(stages + row for row in rows)) for rows in ranks.rounds)
        return (*fill, *steady, *update)


@functools.lru_cache(maxsize=4)
def homes_and_keys(graph: Graph) -> tuple[dict[Node, str], dict[str, Node]]:
    """The layer of each node, and nodes by key: every candidate mesh asks for them."""
    return homes_of(graph), {node.meta["key"]: node for node in graph.nodes if "key" in node.meta}


def _weighed(node: abstract.Node, times: int) -> abstract.Node:
    """A node as often as its layer counts."""
    if times == 1:
        return node
    memory = {limit: used * times for limit, used in node.memory.items()}
    return replace(node, cost=node.cost * times, memory=memory)


def _item(node: Node, item: int) -> Tensor:
    value = node.meta["val"]
    return value[item] if isinstance(value, (tuple, list)) else value  # type: ignore[no-any-return]


def _present_index(node: Node, item: int) -> int:
    """The position among the rule's results of a tuple's item (absent ones have none)."""
    value = node.meta["val"]
    if not isinstance(value, (tuple, list)):
        return 0
    return sum(1 for v in value[:item] if v is not None)
