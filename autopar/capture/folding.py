"""A captured step in which runs of equal layers stand for more layers than were traced.

    folded = Folded(captured, runs)         # traced with periods 0, 1, n-2 and n-1 of each run
    folded.whole                            # the step with all layers, as if it had been traced
    folded.at([(0, 1, 2, 16, 30, 31)])      # some of them, each of which stands for those up to the next

The periods 1 and n-2 must be alike, node by node: the same ops and arguments, the same reads of what is outside the
run, and of the periods before and after. The first and the last may differ (positions that only the first makes,
gradients that the last begins to sum). Periods between are copies: they read the one before as n-2 reads 1, and the one
after as 1 reads n-2. A layer's random draws are named by its path; what is drawn between layers by a module outside of
them (a dropout that all share) is counted on from layer to layer.

Invariant: what `whole` gives is what tracing all layers gives, as far as the model treats equal layers alike; `compile`
traces all of them and compares.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autopar.capture.graphs import Captured, Role, Uncompiled, assign_keys
from autopar.capture.running import draw_name, parsed_draw_name
from autopar.capture.runs import Numbers, Repeats, Run
from autopar.layers import block_of, blocks_of
from autopar.private import rename
from autopar.random_ops import LOWERED as RANDOM_OPS


class UnequalError(Exception):
    """The periods of a run aren't alike."""


@dataclass(frozen=True, slots=True)
class Folded:
    """A step traced with the `kept` periods of each run; without runs it is the step as it is."""

    captured: Captured
    runs: tuple[Run, ...] = ()

    def at(self, numbers: Sequence[Numbers]) -> Captured:
        """The step with the given periods of each run, at least four."""
        captured = self.captured
        for run, wanted in zip(self.runs, numbers, strict=True):
            if wanted != run.kept:
                captured = _Unfolding(captured, run, tuple(wanted)).captured()
        return captured

    @property
    def repeats(self) -> Repeats:
        """What the traced layers stand for."""
        return Repeats.of(self.runs, tuple(run.kept for run in self.runs))

    def check(self) -> None:
        """Raises `UnequalError` where the layers of a run aren't alike."""
        for run in self.runs:
            _Unfolding(self.captured, run, run.kept).captured()

    @property
    def whole(self) -> Captured:
        """The step with all of its layers."""
        return self.at([tuple(range(run.count)) for run in self.runs]) if self.runs else self.captured


@dataclass(frozen=True, slots=True)
class _Near:
    """A node of the pattern as one of its readers sees it: `step` periods on, the `index`-th of a part of the graph."""

    step: int
    part: str
    index: int


_OUTSIDE = (-1, "", 0)
"""The place of a node that belongs to no period."""


@dataclass(slots=True)
class _Unfolding:
    """One run of a captured step, and the periods that are wanted of it."""

    old: Captured
    run: Run
    numbers: Numbers
    place: dict[Node, tuple[int, str, int]] = field(default_factory=dict)
    """Node → its period, the part of the graph (a kind of input, a phase), and its position there in the period."""
    members: dict[tuple[int, str], list[Node]] = field(default_factory=dict)
    pattern: dict[str, list[Any]] = field(default_factory=dict)
    """Part → for each of its nodes the arguments that a period between has."""
    counted: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Module outside of the layers → how often it draws in each period, and the first draw in the last of the pattern.
    """
    graph: Graph = field(default_factory=Graph)
    env: dict[Node, Node] = field(default_factory=dict)
    copies: list[dict[tuple[str, int], Node]] = field(default_factory=list)
    """What was made of each node of the pattern, for each period between."""

    def captured(self) -> Captured:
        """The step with the periods that are wanted; raises `UnequalError`."""
        assert len(self.numbers) >= len(self.run.kept) and self.numbers[0] == 0, self.numbers
        self._find_places()
        self._find_pattern()
        self.copies = [{} for _ in self.numbers[4:]]
        for node in self.old.gradient.graph.nodes:
            if node.op != "output":
                self._visit(node)
        roles = self._output()
        self.graph.lint()
        module = Uncompiled(self.old.gradient, self.graph)
        assign_keys(module.graph)
        old = self.old
        return replace(
            old,
            gradient=module,
            gradient_outputs=roles,
            update_of=self._with_copies(old.update_of),
            initial_state=self._with_copies(old.initial_state),
        )

    # -- what is alike -----------------------------------------------------------------------------------------
    @property
    def _first(self) -> int:
        return self.run.kept[1]

    @property
    def _last(self) -> int:
        return self.run.kept[2]

    def _find_places(self) -> None:
        blocks = blocks_of(self.old.gradient.graph)
        for node in self.old.gradient.graph.nodes:
            is_input = node.op == "placeholder"
            block = block_of(node.meta["role"].name) if is_input else blocks.get(node)
            part = node.meta["role"].kind if is_input else node.meta.get("phase", "")
            found = self.run.place(block)
            if found is not None:
                members = self.members.setdefault((found[0], part), [])
                self.place[node] = (found[0], part, len(members))
                members.append(node)

    def _find_pattern(self) -> None:
        order = {node: i for i, node in enumerate(self.old.gradient.graph.nodes)}
        for part in dict.fromkeys(part for _, part in self.members):
            one, other = (self.members.get((number, part), []) for number in (self._first, self._last))
            if len(one) != len(other):
                raise self._unequal(f"{len(one)} nodes in the {part} of one, {len(other)} of another")
            if not one:
                continue
            ends = (one[-1], other[0]) if part != "backward" else (other[-1], one[0])
            if order[ends[0]] > order[ends[1]]:
                raise self._unequal(f"their nodes in the {part} stand between each other's")
            for node in (*one, *other):
                self._check_readers(node)
            pairs = [*zip(one, other, strict=True)]
            for a, b in pairs:
                if a.target == b.target and a.target in RANDOM_OPS:
                    self._count_draws(a, b)
            self.pattern[part] = [self._alike(self._call(a), self._call(b)) for a, b in pairs]
        if self.old.whole is not None:
            paths = (node.meta.get("path", "") for node in self.old.whole.graph.nodes)
            if any(self.run.place(block_of(path)) for path in paths):
                raise self._unequal("counts of the whole batch need them")

    def _check_readers(self, node: Node) -> None:
        """A period is read by itself and those next to it, the last but one by what follows the run, too (a residual
        sum after the last layer), and its results are returned."""
        number, outside = self.place[node][0], _OUTSIDE[0]
        near = (0, self._first, self._last) if number == self._first else (self._first, *self.run.kept[2:], outside)
        for user in node.users:
            if user.op != "output" and self.place.get(user, _OUTSIDE)[0] not in near:
                raise self._unequal(f"{user.name}, which is far from it, reads {node.name}")

    def _call(self, node: Node) -> tuple[Any, ...]:
        """What must be alike of two nodes; a draw has the name that it would have in period 0."""
        value = node.meta.get("val")
        kind = (value.shape, value.dtype) if isinstance(value, Tensor) else None
        args = self._with_draw(node, node.args, 0)
        return node.target if node.op == "call_function" else kind, args, node.kwargs

    def _alike(self, one: Any, other: Any) -> Any:
        """What the first and the last of the pattern have in one place, in the terms of any period between."""
        if isinstance(one, Node) and isinstance(other, Node):
            return self._near(one, other)
        if isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
            items = [self._alike(a, b) for a, b in zip(one, other, strict=True)]
            return tuple(items) if isinstance(one, tuple) else items
        if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
            return {key: self._alike(one[key], other[key]) for key in one}
        if type(one) is not type(other) or one != other:
            raise self._unequal(f"{one} in one, {other} in another")
        return one

    def _near(self, one: Node, other: Node) -> Node | _Near:
        here, there = self.place.get(one, _OUTSIDE), self.place.get(other, _OUTSIDE)
        if here[0] == self._first and there == (self._last, *here[1:]):
            return _Near(0, *here[1:])
        if there[0] == self._first and here[0] in (-1, 0):
            return _Near(-1, *there[1:])
        if here[0] == self._last and there[0] in (-1, self.run.count - 1):
            return _Near(1, *here[1:])
        if one is other:
            return one
        raise self._unequal(f"one reads {one.name} where another reads {other.name}")

    def _unequal(self, why: str) -> UnequalError:
        return UnequalError(f"the layers of {self.run.path} are not alike: {why}")

    # -- copying -----------------------------------------------------------------------------------------------
    def _visit(self, node: Node) -> None:
        """Copies a node of the trace, and next to the first of the pattern the periods between."""
        number, part, index = self.place.get(node, _OUTSIDE)
        runs_back, size = part == "backward", len(self.members.get((number, part), ()))
        if number == self._first and runs_back and index == 0:
            self._add_copies(part)
        self._copy(node, number)
        if number == self._first and not runs_back and index == size - 1:
            self._add_copies(part)

    def _copy(self, node: Node, number: int) -> None:
        def resolve(other: Node) -> Node:
            there = self.place.get(other, _OUTSIDE)
            crosses = {number, there[0]} == {self._first, self._last}
            if crosses and self.copies:
                return self.copies[0 if number == self._first else -1][there[1:]]
            return self.env[other]

        args, kwargs = map_arg((node.args, node.kwargs), resolve)
        self.env[node] = self._make(node, args, kwargs, self._wanted(number))

    def _add_copies(self, part: str) -> None:
        count = len(self.copies)
        for which in reversed(range(count)) if part == "backward" else range(count):
            for index, (_, args, kwargs) in enumerate(self.pattern[part]):
                args, kwargs = self._resolved((args, kwargs), which)
                node = self.members[self._first, part][index]
                self.copies[which][part, index] = self._make(node, args, kwargs, self.numbers[2 + which])

    def _resolved(self, pattern: Any, which: int) -> Any:
        """The pattern's arguments for the period `which` of those between."""
        if isinstance(pattern, _Near):
            there = which + pattern.step
            if 0 <= there < len(self.copies):
                return self.copies[there][pattern.part, pattern.index]
            number = self._first if there < 0 else self._last
            return self.env[self.members[number, pattern.part][pattern.index]]
        if isinstance(pattern, Node):
            return self.env[pattern]
        if isinstance(pattern, (list, tuple)):
            items = [self._resolved(item, which) for item in pattern]
            return tuple(items) if isinstance(pattern, tuple) else items
        if isinstance(pattern, dict):
            return {key: self._resolved(item, which) for key, item in pattern.items()}
        return pattern

    def _make(self, node: Node, args: Any, kwargs: Any, wanted: int) -> Node:
        """A node like `node`, for period `wanted`."""
        args = self._with_draw(node, args, wanted)
        new = self.graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        new.meta = copy.copy(node.meta)
        new.meta["path"] = self._renamed(node.meta.get("path", ""), wanted)
        if "role" in new.meta:
            role = new.meta["role"] = Role(node.meta["role"].kind, self._renamed(node.meta["role"].name, wanted))
            if role != node.meta["role"]:
                rename(new, re.sub(r"\W", "_", role.name))
        return new

    def _wanted(self, number: int) -> int:
        """The period for which period `number` of the trace stands."""
        ends = (*self.numbers[:2], *self.numbers[-2:])
        return ends[self.run.kept.index(number)] if number >= 0 else -1

    def _renamed(self, path: str, wanted: int) -> str:
        block = block_of(path)
        found = self.run.place(block)
        return path if block is None or found is None else self.run.block(wanted, found[1]) + path[len(block) :]

    # -- random draws ------------------------------------------------------------------------------------------
    def _count_draws(self, one: Node, other: Node) -> None:
        """Notes how a module outside of the layers counts on from layer to layer, by its draws in two of them."""
        (path, here), (_, there) = (parsed_draw_name(node.args[1]) for node in (one, other))  # type: ignore[arg-type]
        if self.run.place(block_of(path)) is None and there > here:
            _, begin = self.counted.get(path, (0, there))
            self.counted[path] = (there - here, min(begin, there))

    def _with_draw(self, node: Node, args: tuple[Any, ...], wanted: int) -> tuple[Any, ...]:
        """The arguments of a node like `node` for period `wanted`, a draw's with its name there."""
        if node.target not in RANDOM_OPS:
            return args
        path, occurrence = parsed_draw_name(node.args[1])  # type: ignore[arg-type]
        number, place = self.place.get(node, _OUTSIDE)[0], self.run.place(block_of(path))
        if place is not None and place[0] == number:
            path = self._renamed(path, wanted)
        each, begin = self.counted.get(path, (0, 0))
        if number < 0 and occurrence >= begin:
            number, wanted = self.run.kept[-1], self.numbers[-1]
        if number >= 0:
            occurrence += each * (wanted - self.run.kept.index(number))
        return args[0], draw_name(path, occurrence), *args[2:]

    # -- what is returned --------------------------------------------------------------------------------------
    def _output(self) -> tuple[Role, ...]:
        old = next(iter(reversed(self.old.gradient.graph.nodes)))
        nodes = dict(zip(self.old.gradient_outputs, old.args[0], strict=True))
        roles: list[Role] = []
        values: list[Node] = []
        for role, like, which in self._spread(list(nodes)):
            node = nodes[like]
            place = self.place.get(node, _OUTSIDE)
            if which is not None and place[0] != self._first:
                raise self._unequal(f"{like} isn't made by its layer")
            roles.append(role)
            values.append(self.env[node] if which is None else self.copies[which][place[1:]])
        new = self.graph.output(tuple(values))
        new.meta = copy.copy(old.meta)
        return tuple(roles)

    def _with_copies(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Entries by parameter, with those of all periods."""
        roles = [Role("param", name) for name in entries]
        return {role.name: entries[like.name] for role, like, _ in self._spread(roles)}

    def _spread(self, roles: Sequence[Role]) -> Iterator[tuple[Role, Role, int | None]]:
        """Roles in order, those of the first of the pattern once more for each period between: (new, old, which)."""
        for (kind, number), group in itertools.groupby(roles, lambda role: (role.kind, self._number(role))):
            members = list(group)
            for role in members:
                yield Role(kind, self._renamed(role.name, self._wanted(number))), role, None
            for which in range(len(self.copies)) if number == self._first else ():
                for role in members:
                    yield Role(kind, self._renamed(role.name, self.numbers[2 + which])), role, which

    def _number(self, role: Role) -> int:
        found = self.run.place(block_of(role.name))
        return found[0] if found is not None else -1
