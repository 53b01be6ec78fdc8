"""What the user's pins leave to the solver: a predicate on (node, rule, choice).

| pin               | what it asks of each node                                                                      |
|-------------------|------------------------------------------------------------------------------------------------|
| `dp=N`            | where the node has the batch, dp splits it; nothing else of the activations                    |
| `tp=N`            | matmuls with a weight split `in` or `out` over tp, attention its heads; the batch isn't split    |
| `zero=0`          | dp splits no parameter, gradient or state, and no part of the update                           |
| `zero=1`          | dp splits the optimizer state; gradients are reduced once a step                               |
| `zero=2`          | and the accumulated gradients                                                                  |
| `zero=3`          | and the parameters at rest, gathered anew by each microbatch                                   |
| `GLOB: AXIS=what` | the axis splits `what` in the nodes of the modules that match                                  |

A pin asks only where it can be met: a factor that doesn't divide, or that the rule keeps whole, is left free.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from autopar import markers
from autopar.errors import PlanError
from autopar.layout import is_worth_splitting
from autopar.mesh import Mesh
from autopar.pins import Pins
from autopar.rules.choices import Choice, Split, can_split, splittable
from autopar.rules.factors import LeafRule
from autopar.rules.nodes import node_argument, op_name, tensor_operands
from autopar.solve.costs import MATMULS

_LINEAR = ("linear", "expert_mm", "grouped_mm")
_LETTERS: dict[str, dict[str, tuple[str, ...]]] = {
    "in": {
        **{f"autopar.{op}{part}": ("i",) for op in _LINEAR for part in ("", "_dx", "_dw")},
        "aten.convolution": ("c",),
        "aten.convolution_backward": ("c",),
    },
    "out": {
        **{f"autopar.{op}{part}": ("o",) for op in _LINEAR for part in ("", "_dx", "_dw")},
        "aten.convolution": ("o",),
        "aten.convolution_backward": ("o",),
    },
    "heads": {"autopar.attention": ("k", "g"), "autopar.attention_backward": ("k", "g")},
    "experts": {f"autopar.expert_mm{part}": ("e",) for part in ("", "_dx", "_dw")},
    "vocab": {"aten.embedding": ("v",), "aten.embedding_dense_backward": ("v",)},
}
"""The letters of a rule that a pin's word means, by op."""


@dataclass(frozen=True, slots=True)
class _Want:
    """Over `axis`, a choice must split one of `factors` (or, with none, split nothing)."""

    axis: str
    factors: frozenset[int]

    def allows(self, split: Split | None) -> bool:
        factor = -1 if split is None else split.factor
        return factor in self.factors if self.factors else factor < 0


@dataclass(slots=True)
class PinRules:
    """The pins, bound to a step graph and a mesh. `matched` collects the module pins that some node met."""

    pins: Pins
    mesh: Mesh
    batch: frozenset[int]
    sequence: frozenset[int]
    weight_dims: Mapping[Node, tuple[frozenset[int], frozenset[int]]]
    of_parameters: frozenset[Node]
    """What forwards make of parameters alone: casts, say. ZeRO-3 may split it, and gather what it gives."""
    matched: set[int] = field(default_factory=set)
    _wants: dict[Node, tuple[_Want, ...]] = field(default_factory=dict)

    def __call__(self, node: Node, rule: LeafRule, choice: Choice) -> bool:
        if self.pins.splits_are_free:
            return True
        by_axis = {split.axis: split for split in choice}
        if node not in self._wants:
            self._wants[node] = tuple(self._module_wants(node, rule))
        if not all(want.allows(by_axis.get(want.axis)) for want in self._wants[node]):
            return False
        free = [axis for axis in self.mesh.spmd.names if all(want.axis != axis for want in self._wants[node])]
        return all(self._axis_allows(axis, node, rule, by_axis.get(axis)) for axis in free)

    def alike(self, node: Node, rule: LeafRule) -> Hashable:
        """Equal for nodes, of one op and equal rules, of which the pins ask the same."""
        where = tuple((factor.atom in self.batch, factor.atom in self.sequence) for factor in rule.factors)
        modules = tuple(pin.matches(node.meta.get("path", "")) for pin in self.pins.modules)
        is_activation = bool(modules) and node.target is markers.relay and not _is_parameter(node)
        return where, modules, self.weight_dims.get(node), _state_kind(node), is_activation

    # -- pins of whole axes ------------------------------------------------------------------------------------
    def _axis_allows(self, axis: str, node: Node, rule: LeafRule, split: Split | None) -> bool:
        if self.mesh.size(axis) == 1:
            return True
        if axis == "dp" and ("dp" in self.pins.axes or self.pins.zero is not None):
            return self._dp_allows(node, rule, split)
        if axis == "tp" and "tp" in self.pins.axes:
            return self._tp_allows(node, rule, split)
        return True

    def _dp_allows(self, node: Node, rule: LeafRule, split: Split | None) -> bool:
        kind = _state_kind(node)
        if kind is not None:
            return self._zero_allows(kind, rule, split)
        if node.op != "call_function":
            return True
        is_whole = split is None or split.factor < 0
        if node.meta["phase"] not in ("forward", "backward"):
            return is_whole or self.pins.zero != 0 or node.meta["phase"] == "prologue"
        batch = self._fitting(rule, "dp", self.batch)
        if batch:
            return split is not None and (split.factor in batch or (split.linear >= 0 and not _is_matmul(node)))
        is_free = node.target is markers.relay or (self.pins.zero == 3 and node in self.of_parameters)
        return is_whole or is_free

    def _zero_allows(self, kind: str, rule: LeafRule, split: Split | None) -> bool:
        zero = self.pins.zero
        is_split = split is not None and split.factor >= 0
        if zero is None:
            return True
        first = {"state": 1, "accumulator": 2, "param": 3, "gathered": 3}[kind]
        if zero < first:
            return not is_split
        return is_split or not self._usable(rule, "dp", range(len(rule.factors)))

    def _tp_allows(self, node: Node, rule: LeafRule, split: Split | None) -> bool:
        if split is not None and split.factor >= 0 and rule.factors[split.factor].atom in self.batch:
            return False
        if node.op != "call_function" or node.meta["phase"] not in ("forward", "backward"):
            return True
        wanted = self._tensor_factors(node, rule)
        return not wanted or (split is not None and split.factor in wanted)

    def _tensor_factors(self, node: Node, rule: LeafRule) -> frozenset[int]:
        """The factors of a weight's matmul, or the heads of an attention."""
        name = op_name(node)
        letters = {*_LETTERS["heads"].get(name, ()), *_LETTERS["in"].get(name, ()), *_LETTERS["out"].get(name, ())}
        if not letters and _is_matmul(node):
            ins, outs = self.weight_dims.get(node, (frozenset(), frozenset()))
            return self._usable(rule, "tp", ins | outs)
        return self._usable(rule, "tp", (f for f in range(len(rule.factors)) if rule.factors[f].letter in letters))

    # -- pins of modules ---------------------------------------------------------------------------------------
    def _module_wants(self, node: Node, rule: LeafRule) -> Iterable[_Want]:
        """What the pins of modules ask of a node; how an activation reaches its readers is the readers' affair."""
        if node.target is markers.relay and node.meta["level"] == "microbatch" and not _is_parameter(node):
            return
        for number, pin in enumerate(self.pins.modules):
            if not pin.matches(node.meta.get("path", "")) or self.mesh.size(pin.axis) == 1:
                continue
            if pin.what == "none":
                self.matched.add(number)
                yield _Want(pin.axis, frozenset())
                continue
            factors = self._usable(rule, pin.axis, self._named(pin.what, node, rule))
            if factors:
                self.matched.add(number)
                yield _Want(pin.axis, factors)

    def _named(self, what: str, node: Node, rule: LeafRule) -> Iterable[int]:
        atoms = {"batch": self.batch, "seq": self.sequence}.get(what)
        if atoms is not None:
            is_state = _state_kind(node) is not None
            return [] if is_state else [f for f, factor in enumerate(rule.factors) if factor.atom in atoms]
        letters = _LETTERS[what].get(op_name(node), ())
        found = [f for f, factor in enumerate(rule.factors) if factor.letter in letters]
        if what in ("in", "out") and not found:
            return self.weight_dims.get(node, (frozenset(), frozenset()))[what == "out"]
        return found

    def _fitting(self, rule: LeafRule, axis: str, atoms: frozenset[int]) -> frozenset[int]:
        return self._usable(rule, axis, (f for f, factor in enumerate(rule.factors) if factor.atom in atoms))

    def _usable(self, rule: LeafRule, axis: str, factors: Iterable[int]) -> frozenset[int]:
        size = self.mesh.size(axis)
        return frozenset(f for f in factors if splittable(rule, f) and can_split(rule.factors[f], (size,)))


def bind_pins(pins: Pins, graph: Graph, mesh: Mesh) -> PinRules:
    """The predicate of `pins` on an annotated step graph; raises `PlanError` where a pinned dp splits no batch."""
    _require_rows(pins, graph, mesh)
    batch: set[int] = set()
    sequence: set[int] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["role"].kind == "batch":
            dims = node.meta["rule"].results[0]
            factors = node.meta["rule"].factors
            batch.update(factors[f].atom for f in (dims[0] if dims else ()))
            sequence.update(factors[f].atom for f in (dims[1] if len(dims) > 1 else ()))
    weights = {node: dims for node in graph.nodes if (dims := _plain_weight_dims(node)) is not None}
    return PinRules(pins, mesh, frozenset(batch), frozenset(sequence), weights, frozenset(_made_of_parameters(graph)))


def _made_of_parameters(graph: Graph) -> set[Node]:
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and node.meta["phase"] == "forward":
            inputs = node.all_input_nodes
            if inputs and all(operand in found or _is_parameter(operand) for operand in inputs):
                found.add(node)
    return found


def _require_rows(pins: Pins, graph: Graph, mesh: Mesh) -> None:
    """A pinned dp that can split no row would leave its ranks with equal work."""
    ways = mesh.size("dp")
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node.meta["role"].kind == "batch"]
    batches = [node for node in inputs if node.meta["val"].dim() > 0]
    if "dp" not in pins.axes or ways == 1 or not batches:
        return
    if not any(is_worth_splitting(size, (ways,)) for node in batches for size in node.meta["factor_sizes"][0]):
        rows = int(batches[0].meta["val"].shape[0])
        raise PlanError(
            f"pin 'dp={ways}': a microbatch has {rows} rows, too few for dp={ways}: half of its ranks would have none; "
            f"use fewer microbatches, a larger batch, or a smaller dp"
        )


def require_all_matched(rules: PinRules) -> None:
    """Raises `PlanError` for the first module pin that no node met."""
    for number, pin in enumerate(rules.pins.modules):
        if number not in rules.matched and rules.mesh.size(pin.axis) > 1:
            raise PlanError(
                f"pin '{pin}': no op of a module that matches {pin.glob!r} has a {pin.what} that {pin.axis}="
                f"{rules.mesh.size(pin.axis)} can split; see `autopar explain` for the modules and their factors"
            )


def _is_matmul(node: Node) -> bool:
    return op_name(node) in MATMULS


def _state_kind(node: Node) -> str | None:
    """Which part of the training state a node stands for, in ZeRO's terms."""
    if node.op == "placeholder":
        return node.meta["role"].kind if node.meta["role"].kind in ("param", "state") else None
    if node.target is markers.relay and node.meta["phase"] == "prologue":
        return "gathered"
    return "accumulator" if node.target is markers.accumulate else None


def _plain_weight_dims(node: Node) -> tuple[frozenset[int], frozenset[int]] | None:
    """(in, out) factors of a plain `mm` with a parameter: the summed one, and the result's other dim."""
    if op_name(node) != "aten.mm":
        return None
    for i, operand in enumerate(tensor_operands(node)):
        if _is_parameter(operand):
            rule: LeafRule = node.meta["rule"]
            summed, kept = rule.operands[i] if i == 1 else rule.operands[i][::-1]
            return frozenset(summed), frozenset(kept)
    return None


def _is_parameter(node: Node) -> bool:
    while node.op == "call_function" and op_name(node) in ("relay", "aten.t", "aten.transpose", "aten._to_copy"):
        node = node_argument(node, 0)
    return node.op == "placeholder" and node.meta["role"].kind == "param"
