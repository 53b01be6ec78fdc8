"""explain: what was chosen at the nodes of a module, what each alternative would have cost, and why it lost.

    explanation = explain(step, plan, "model.layers.*.mlp")
    print(explanation)
    explanation.nodes[0].alternatives[0].more_s, explanation.nodes[0].alternatives[0].why

Each alternative is priced by solving the plan's own problem (its mesh, stages and microbatches) once more, that node
forced to take it and all others chosen anew around it, under the plan's memory. Equal layers that were treated alike
decide as one, as in the search: `count` says how many nodes would take it.

Invariants:
- the chosen one costs what the plan's estimate says, and every figure is what the step of a whole solution takes;
- where computation is too short to hide all that it may, an alternative's plan need not be the best one with it;
- an alternative is "as fast" where it costs less than the search's gap more.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar import show
from autopar.capture.step import ForwardStep
from autopar.fitting import GAP
from autopar.garbage import collected_seldom
from autopar.plans import Plan
from autopar.repriced import Priced, reprice
from autopar.rules.choices import choice_text
from autopar.rules.factors import LeafRule
from autopar.solve import spent
from autopar.solve.beside import step_s
from autopar.solve.build import Strategy
from autopar.solve.forced import Forced
from autopar.solve.layers_apart import restricted
from autopar.solve.modes import Mode
from autopar.solve.problem import Index, Limit, Problem, Solution, evaluate, unlimited
from autopar.solve.search import least_overflow
from autopar.solve.share import Shared, share
from autopar.units import format_bytes, format_seconds, signed_seconds

_MODES: dict[Mode | None, str] = {Mode.KEPT: "kept", Mode.AGAIN: "recomputed"}
_COLUMNS = ("node", "stage", "choice", "step_s", "more_s", "over_bytes", "why")
WHOLE = "whole"
"""How a choice that splits nothing is shown."""
TOLD = 0.02
"""Part of the seconds that move in all below which a part of them isn't told."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One choice of a node (`"dp=b tp=o"`, `"whole"`), or what becomes of its value until the backward."""

    choice: str
    step_s: float | None
    """Of the best plan with it; None where none fits."""
    more_s: float | None
    """Beyond the plan's; not above 0 where it is as good."""
    over_bytes: int
    """By how much the leanest plan with it breaks the limit of `stage`; 0 where one fits."""
    stage: int | None
    why: str


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """What a node does, and what else it might do, the best first."""

    node: str
    count: int
    """Nodes that decide as one with it, itself included."""
    stage: int
    choice: str
    alternatives: tuple[Alternative, ...]

    @property
    def name(self) -> str:
        return f"{self.node} ({self.count} alike)" if self.count > 1 else self.node


@dataclass(frozen=True, slots=True)
class Explanation:
    """The nodes of one module of a plan, or one node."""

    plan: Plan
    target: str
    step_s: float
    nodes: tuple[NodeChoice, ...]

    def __str__(self) -> str:
        return show.tables_text(self.tables())

    def tables(self) -> list[show.Table]:
        """What was chosen and a row for each alternative."""
        nodes = f"{len(self.nodes)} node{'s' * (len(self.nodes) != 1)} with alternatives"
        told = f"{nodes}, in a step of {format_seconds(self.step_s)}" if self.nodes else "nothing has an alternative"
        return [
            show.Table(f"{self.target}: {told}"),
            show.Table("choices and what else there was", _COLUMNS, tuple(self._rows()), "alternatives"),
        ]

    def _rows(self) -> Iterator[show.Row]:
        """Nodes that stand before the same alternatives share theirs."""
        alike: dict[tuple[str, int, tuple[Alternative, ...]], list[NodeChoice]] = {}
        for node in self.nodes:
            alike.setdefault((node.choice, node.stage, node.alternatives), []).append(node)
        for (choice, stage, alternatives), nodes in alike.items():
            for node in nodes[:-1]:
                yield node.name, stage, choice, "", "", "", "as below"
            yield nodes[-1].name, stage, choice, self.step_s, 0.0, "", "chosen"
            for other in alternatives:
                step_s, more_s = (value if value is not None else "" for value in (other.step_s, other.more_s))
                yield "", stage, other.choice, step_s, more_s, other.over_bytes or "", other.why


@collected_seldom()
def explain(
    step: ForwardStep, plan: Plan, target: str, *, progress: Callable[[str], None] = lambda _: None
) -> Explanation:
    """What each choice of `target` would have cost: a module's path or a glob, or the key of a node.

    Raises `PlanError` where the plan is for another step, or nothing in it is called so.
    """
    priced = reprice(step, plan)
    numbers = {key: number for key, number in priced.nodes_by_key().items() if show.is_meant(target, key)}
    if not numbers:
        raise show.nothing_meant(plan, target)
    in_order = dict(sorted(numbers.items(), key=lambda entry: entry[1]))
    return _Asking.of(priced, plan).explained(target, in_order, progress)


@dataclass(slots=True)
class _Asking:
    priced: Priced
    plan: Plan
    shared: Shared
    problem: Problem
    """The quotient under the limits that the plan met, less what they don't see of it."""
    choice: tuple[int, ...]
    """The plan's, of the quotient."""
    first: dict[int, int]
    """Group → a node of it."""
    counts: Counter[int]
    """Group → its nodes, in all layers."""
    spent_s: dict[tuple[int, ...], dict[str, float]] = field(default_factory=dict)
    """Choice → what its seconds are for, of those seen by now."""

    @classmethod
    def of(cls, priced: Priced, plan: Plan) -> _Asking:
        built = priced.built
        problem = replace(built.problem, limits=_limits(priced, plan))
        shared = share(dataclasses.replace(built, problem=problem), priced.choice)
        first = {group: number for number, group in reversed(list(enumerate(shared.group)))}
        choice = tuple(priced.choice[first[group]] for group in range(len(first)))
        counts = Counter(shared.group[number] for number in priced.nodes_by_key().values())
        return cls(priced, plan, shared, shared.problem, choice, first, counts)

    def explained(self, target: str, numbers: Mapping[str, int], tell: Callable[[str], None]) -> Explanation:
        groups: dict[int, list[str]] = {}
        for key, number in numbers.items():
            groups.setdefault(self.shared.group[number], []).append(key)
        asked = {group: keys[0] for group, keys in groups.items() if len(self._options(group)) > 1}
        forced, free = Forced.of(self.problem, asked), Forced.of(unlimited(self.problem), asked)
        nodes = []
        for group, key in asked.items():
            ways = self._others(group, free.allowed(group))
            if ways:
                tell(key)
                nodes.append(self._node(group, key, forced.only(group), ways))
        return Explanation(self.plan, target, self.step_s, tuple(nodes))

    @property
    def step_s(self) -> float:
        return self.of_step_s(self.choice)

    def of_step_s(self, choice: tuple[int, ...]) -> float:
        """What the step takes under a choice of the quotient."""
        return step_s(self.priced.built, self.shared.expand(choice))

    def seconds(self, choice: tuple[int, ...]) -> dict[str, float]:
        """What the seconds of a choice of the quotient are for."""
        if choice not in self.spent_s:
            found: dict[str, float] = {}
            for part in spent.seconds(self.priced.built, self.shared.expand(choice)):
                found[part.what] = found.get(part.what, 0.0) + part.seconds
            self.spent_s[choice] = found
        return self.spent_s[choice]

    # -- one node ----------------------------------------------------------------------------------------------
    def _options(self, group: int) -> list[Strategy]:
        return self.priced.built.strategies[self.first[group]]

    def _chosen(self, group: int) -> tuple[str, str]:
        rule, mine = self._rule(group), self._options(group)[self.choice[group]]
        return choice_text(rule, mine.choice) or WHOLE, _MODES.get(mine.mode, "")

    def _others(self, group: int, possible: Index) -> dict[str, Index]:
        """What else a node might do → its strategies that do so, of those that its neighbours can live with."""
        rule, options, found = self._rule(group), self._options(group), dict[str, list[int]]()
        for number in possible.tolist():
            option = options[number]
            found.setdefault(choice_text(rule, option.choice) or WHOLE, []).append(number)
            if option.mode in _MODES:
                found.setdefault(_MODES[option.mode], []).append(number)
        chosen = self._chosen(group)
        return {text: np.array(numbers) for text, numbers in found.items() if text not in chosen}

    def _stage(self, there: int) -> int:
        """The first stage for which one of the graph's stands."""
        return self.priced.likeness.kept[there]

    def _rule(self, group: int) -> LeafRule:
        rule: LeafRule = self.priced.built.nodes[self.first[group]].meta["rule"]
        return rule

    def _node(self, group: int, key: str, forced: Forced, ways: Mapping[str, Index]) -> NodeChoice:
        stage = self._stage(self.priced.built.nodes[self.first[group]].meta["stage"])
        found = [self._alternative(group, text, strategies, forced) for text, strategies in ways.items()]
        text = ", ".join(filter(None, self._chosen(group)))
        return NodeChoice(key, self.counts[group], stage, text, tuple(sorted(found, key=_rank)))

    def _alternative(self, group: int, text: str, strategies: Index, forced: Forced) -> Alternative:
        found = forced.best(group, strategies, self.choice)
        if found.choice:
            return self._slower(text, found)
        kept = [np.arange(node.num_strategies) for node in self.problem.nodes]
        kept[group] = strategies
        alone = restricted(self.problem, kept)
        leanest = least_overflow(alone)
        assert leanest, (self.priced.built.nodes[self.first[group]], text)
        return self._too_large(text, alone, leanest)

    def _slower(self, text: str, found: Solution) -> Alternative:
        seconds = self.of_step_s(found.choice)
        more_s = seconds - self.step_s
        if more_s <= GAP * self.step_s:
            return Alternative(text, seconds, more_s, 0, None, "as fast")
        before, after = self.seconds(self.choice), self.seconds(found.choice)
        moved = {what: after.get(what, 0.0) - before.get(what, 0.0) for what in {**before, **after}}
        return Alternative(text, seconds, more_s, 0, None, _why_slower(more_s, moved))

    def _too_large(self, text: str, problem: Problem, leanest: Sequence[int]) -> Alternative:
        used = evaluate(problem, leanest).usage
        overs = [usage - limit.capacity for usage, limit in zip(used, problem.limits, strict=True)]
        over, limit = max((over, number) for number, over in enumerate(overs))
        stage = self.priced.built.setting.ranks.kinds[self.priced.built.limit_ranks[limit]].rank
        why = f"memory: at least {format_bytes(over)} over the limit of stage {stage}, {_moment(problem.limits[limit])}"
        return Alternative(text, None, None, math.ceil(over), stage, why)


def _limits(priced: Priced, plan: Plan) -> tuple[Limit, ...]:
    """The plan's limits, less what its peaks on each stage have beyond what the limits count of it."""
    built, ranks = priced.built, priced.built.setting.ranks
    used, counted, peaks = (
        evaluate(built.problem, priced.choice).usage,
        [0.0] * len(ranks.kinds),
        [0] * len(ranks.kinds),
    )
    for kind, usage in zip(built.limit_ranks, used, strict=True):
        counted[kind] = max(counted[kind], usage)
    for row in plan.estimate.memory:
        peaks[ranks.like[row.stage]] = max(peaks[ranks.like[row.stage]], row.peak)
    pairs = zip(built.problem.limits, built.limit_ranks, strict=True)
    return tuple(replace(limit, constant=max(0.0, peaks[kind] - counted[kind])) for limit, kind in pairs)


def _moment(limit: Limit) -> str:
    return "at the end of its backward" if limit.name.endswith(" end") else "at the start of its backward"


def _why_slower(more_s: float, moved: Mapping[str, float]) -> str:
    """`"2.10 ms more: tp all_gather +3.00 ms, compute -0.90 ms"`, the greatest first."""
    told = sorted(((seconds, what) for what, seconds in moved.items()), key=lambda part: -abs(part[0]))
    least = TOLD * sum(abs(seconds) for seconds, _ in told)
    parts = ", ".join(f"{what} {signed_seconds(seconds)}" for seconds, what in told if abs(seconds) > least)
    return f"{format_seconds(more_s)} more: {parts}"


def _rank(alternative: Alternative) -> tuple[bool, float]:
    """The fastest first, then what doesn't fit, the leanest first."""
    return alternative.step_s is None, alternative.over_bytes if alternative.step_s is None else alternative.step_s
