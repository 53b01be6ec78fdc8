"""Equal layers decide as one: the quotient of a built problem by its repeating blocks.

    solution = solve_shared(built, built.problem, gap=1e-3)     # layers.0 … layers.31 are one that counts 32 times

Nodes are equal when their keys differ only by the block's number and they have the same strategies, costs, row and
memory (but for how many layers theirs stands for). The quotient sums costs, memory and edges over the members, edges
from one layer to the next included, so its objective is that of the expanded choice in the whole problem.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch.fx import Graph, Node

from autopar.layers import block_of, homes_of
from autopar.rules.nodes import node_argument, op_name
from autopar.solve import problem as abstract
from autopar.solve.build import BuiltProblem, Strategy
from autopar.solve.layers_apart import of_layouts, solve_among
from autopar.solve.problem import Solution, evaluate
from autopar.solve.search import TIME_LIMIT_S, solve

SMALL = 4000
"""Nodes up to which a problem that doesn't fit with equal layers is solved with each layer free."""

HINT_TIME_S = 5.0

NEIGHBOURHOOD = 3
"""Steps within a block over which nodes that decide as one have the same surroundings."""


def solve_shared(
    built: BuiltProblem,
    problem: abstract.Problem,
    *,
    gap: float,
    time_limit_s: float = TIME_LIMIT_S,
    cutoff: float = math.inf,
    floor: float = -math.inf,
    near: Sequence[Strategy] = (),
) -> Solution:
    """`solve` over plans whose equal layers decide as one; `problem` is `built.problem` under other limits or weights.

    `near`: a strategy per node, whose layouts are tried first, with the best modes.

    Where nothing fits so, a small problem is solved with each layer free. The objective is recomputed on the whole
    problem, and asserted to be the quotient's.
    """
    shared = share(dataclasses.replace(built, problem=problem))
    hint = _with_layouts(built, shared, near, gap) if near else None
    found = solve(shared.problem, gap=gap, time_limit_s=time_limit_s, hint=hint, cutoff=cutoff, floor=floor)
    if not found.choice and cutoff <= found.bound < math.inf:
        return found
    if not found.choice:
        is_small = len(problem.nodes) <= SMALL and len(shared.problem.nodes) < len(problem.nodes)
        return solve(problem, gap=gap, time_limit_s=time_limit_s) if is_small else found
    choice = shared.expand(found.choice)
    objective = evaluate(problem, choice).objective
    assert abs(objective - found.objective) <= 1e-6 * abs(objective), (objective, found.objective)
    return dataclasses.replace(found, choice=choice)


def solve_repeated_first(
    built: BuiltProblem, problem: abstract.Problem, *, gap: float, time_limit_s: float, floor: float = -math.inf
) -> Solution:
    """A good solution, soon: what several layers have in common is solved by itself, then the rest around it.

    For problems without limits. Its bound is `floor`, where one is known already; otherwise that of the layers and of
    the rest, each by itself.
    """
    shared = share(dataclasses.replace(built, problem=problem))
    sizes = Counter(shared.group)
    inner = [group for group in sorted(sizes) if sizes[group] > 1]
    if not inner:
        return solve_shared(built, problem, gap=gap, time_limit_s=time_limit_s, floor=floor)
    layers = solve(_among(shared.problem, inner), gap=gap, time_limit_s=time_limit_s)
    kept = [np.arange(node.num_strategies) for node in shared.problem.nodes]
    for group, pick in zip(inner, layers.choice, strict=False):
        kept[group] = np.array([pick])
    found = solve_among(shared.problem, kept, gap=gap, time_limit_s=time_limit_s)
    if not found.choice:
        return solve_shared(built, problem, gap=gap, time_limit_s=time_limit_s, floor=floor)
    bound = max(layers.bound, floor)
    if math.isinf(floor):
        rest = [group for group in sorted(sizes) if sizes[group] == 1]
        bound += max(0.0, solve(_among(shared.problem, rest), gap=gap, time_limit_s=time_limit_s).bound)
    return dataclasses.replace(found, choice=shared.expand(found.choice), bound=min(bound, found.objective))


def _among(problem: abstract.Problem, kept: Sequence[int]) -> abstract.Problem:
    """The nodes `kept`, and the edges among them."""
    place = {node: number for number, node in enumerate(kept)}
    inside = (edge for edge in problem.edges if edge.source in place and edge.target in place)
    edges = tuple(dataclasses.replace(e, source=place[e.source], target=place[e.target]) for e in inside)
    return dataclasses.replace(problem, nodes=tuple(problem.nodes[node] for node in kept), edges=edges)


def _with_layouts(built: BuiltProblem, shared: Shared, near: Sequence[Strategy], gap: float) -> Sequence[int] | None:
    """The best choice of the quotient with the layouts of `near`."""
    first = {group: node for node, group in reversed(list(enumerate(shared.group)))}
    kept = [of_layouts(built.strategies[first[group]], near[first[group]]) for group in range(len(first))]
    if not all(map(len, kept)):
        return None
    return solve_among(shared.problem, kept, gap=gap, time_limit_s=HINT_TIME_S).choice or None


@dataclass(frozen=True, slots=True)
class Shared:
    """A quotient problem and the group of each node of the whole."""

    problem: abstract.Problem
    group: tuple[int, ...]

    def expand(self, choice: Sequence[int]) -> tuple[int, ...]:
        """A choice of the quotient as one of the whole problem."""
        return tuple(choice[group] for group in self.group) if choice else ()


def share(built: BuiltProblem, chosen: Sequence[int] = ()) -> Shared:
    """The quotient of `built` by its equal layers; with a choice, by those that `chosen` treats alike."""
    numbers: dict[Hashable, int] = {}
    keys = canonical_keys(built.nodes[0].graph)
    entries = zip((keys[node] for node in built.nodes), built.plain, built.strategies, strict=True)
    apart = chosen or [0] * len(built.nodes)
    signatures = ((pick, _signature(*entry)) for pick, entry in zip(apart, entries, strict=True))
    group = tuple(numbers.setdefault(each, len(numbers)) for each in signatures)
    members: dict[int, list[abstract.Node]] = defaultdict(list)
    for number, node in zip(group, built.problem.nodes, strict=True):
        members[number].append(node)
    nodes = tuple(_merged(members[number]) for number in range(len(numbers)))
    edges = _merged_edges(built.problem.edges, group)
    return Shared(dataclasses.replace(built.problem, nodes=nodes, edges=edges), group)


def _signature(key: str, priced: abstract.Node, strategies: Sequence[Hashable]) -> Hashable:
    memory = tuple((limit, used.tobytes()) for limit, used in sorted(priced.memory.items()))
    return key, priced.row, priced.cost.tobytes(), memory, tuple(strategies)


@functools.lru_cache(maxsize=4)
def canonical_keys(graph: Graph) -> Mapping[Node, str]:
    """Keys in which blocks have no number: `layers.* layers.*.mlp/linear/forward#0`, counted anew in each block.

    Nodes of one key are alike in what they read and what reads them, some steps around within the block: a layer that
    has a node more than the others doesn't shift the numbers of the rest. A node outside any block (a residual sum
    between layers) belongs to the block before it, see `layers.homes_of`. Every candidate mesh asks for them.
    """
    nodes = [node for node in graph.nodes if node.op != "output" and node.target is not operator.getitem]
    block = homes_of(graph)
    stems = {node: _stem(node, block[node]) for node in nodes}
    colors: dict[Node, Hashable] = dict(stems)
    for _ in range(NEIGHBOURHOOD):
        numbers: dict[Hashable, int] = {}
        colors = {node: numbers.setdefault(_around(node, colors, block), len(numbers)) for node in nodes}
    counts: Counter[tuple[str, Hashable]] = Counter()
    keys = {}
    for node in nodes:
        keys[node] = f"{stems[node]}#{colors[node]}.{counts[block[node], colors[node]]}"
        counts[block[node], colors[node]] += 1
    return keys


def _stem(node: Node, block: str) -> str:
    starred = block.rpartition(".")[0] + ".*" if block_of(block) else block
    if node.op != "call_function":
        return f"{starred} {node.meta['key'].replace(block, starred, 1) if block else node.meta['key']}"
    path = node.meta.get("path", "")
    return f"{starred} {path.replace(block, starred, 1) if block else path}/{op_name(node)}/{node.meta['phase']}"


def _around(node: Node, colors: Mapping[Node, Hashable], block: Mapping[Node, str]) -> Hashable:
    """A node's color with those of its operands, in order, and of its readers; other blocks' are all the same."""

    def color(other: Node) -> tuple[str, Hashable]:
        if other.target is operator.getitem:
            return f"item {other.args[1]}", color(node_argument(other, 0))[1]
        is_here = other in colors and block[other] == block[node]
        return ("", colors[other]) if is_here else ("", "elsewhere")

    readers = {user for direct in node.users for user in (_readers(direct))}
    operands = tuple(map(color, node.all_input_nodes))
    return colors[node], operands, tuple(sorted({str(color(user)) for user in readers}))


def _readers(user: Node) -> Iterable[Node]:
    return user.users if user.target is operator.getitem else (user,)


def _merged(members: list[abstract.Node]) -> abstract.Node:
    cost, memory = members[0].cost, dict(members[0].memory)
    for node in members[1:]:
        cost = cost + node.cost
        memory = {limit: used + node.memory[limit] for limit, used in memory.items()}
    return dataclasses.replace(members[0], cost=cost, memory=memory)


def _merged_edges(edges: Sequence[abstract.Edge], group: Sequence[int]) -> tuple[abstract.Edge, ...]:
    """Edges between the same groups as one; an edge inside a group is between two copies of one decision."""
    between: dict[tuple[int, int, int], np.ndarray] = {}
    for edge in edges:
        ends = (group[edge.source], group[edge.target], edge.row)
        between[ends] = between[ends] + edge.cost if ends in between else edge.cost
    return tuple(abstract.Edge(source, target, cost, row) for (source, target, row), cost in between.items())
