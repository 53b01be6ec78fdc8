"""What the solver chooses at a node: for each mesh axis a factor of the node's rule, nothing, or partial.

    "dp=b tp=o"      dp splits factor b, tp splits factor o
    "tp=o dp=o"      both split o, tp major
    "dp=b tp=+0"     over tp the op passes partial sums through its first set of linear operands

All layouts of the node's operands and results follow from the rule and the choice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.layout import Layout, Position, is_worth_splitting
from autopar.mesh import Mesh
from autopar.rules.factors import LeafRule, OpFactor, Sizes


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """`axis` splits factor number `factor`, or passes partial sums through linear set number `linear`."""

    axis: str
    factor: int = -1
    linear: int = -1


Choice = tuple[Split, ...]
"""Splits in the order in which axes that share a factor lie on it, major first."""
Fills = dict[str | None, list[Position]]


def splittable(rule: LeafRule, factor: int) -> bool:
    """Whether an axis may split the factor (its size aside): not whole, and contiguous where values index it."""
    f = rule.factors[factor]
    needs_range = any(letter == f.letter for _, letter in rule.indexes) or _is_only_in_results(rule, factor)
    return not f.is_whole and (f.is_major or not needs_range)


def can_split(factor: OpFactor, ways: Sequence[int]) -> bool:
    """Whether axes of these sizes may share a factor: they divide it, or most of what the ranks get is content."""
    return factor.size % math.prod(ways) == 0 or (not factor.must_divide and is_worth_splitting(factor.size, ways))


def _is_only_in_results(rule: LeafRule, factor: int) -> bool:
    return not any(factor in dim for dims in rule.operands for dim in dims)


def enumerate_choices(rule: LeafRule, mesh: Mesh, allow_partial: bool = True) -> list[Choice]:
    """Every valid choice of the rule on the SPMD axes of `mesh`, nothing split first."""
    key = ("choices", mesh, allow_partial)
    if key not in rule.memo:
        rule.memo[key] = _enumerate(rule, mesh, allow_partial)
    return list(rule.memo[key])


def _enumerate(rule: LeafRule, mesh: Mesh, allow_partial: bool) -> list[Choice]:
    factors = [f for f in range(len(rule.factors)) if splittable(rule, f)]
    sets = range(len(rule.linear)) if allow_partial else range(0)
    options: list[list[Split | None]] = []
    for axis, size in mesh.spmd.axes:
        fits = [Split(axis, factor=f) for f in factors if can_split(rule.factors[f], (size,))]
        options.append([None, *fits, *(Split(axis, linear=k) for k in sets)] if size > 1 else [None])
    choices: list[Choice] = []
    for picks in itertools.product(*options):
        splits = tuple(s for s in picks if s is not None)
        choices.extend(order for order in _orders(splits) if _is_worth_it(rule, order, mesh))
    return choices


def _orders(splits: Choice) -> list[Choice]:
    """The orders that differ: only axes that share a factor have one."""
    shared = [s.factor for s in splits if s.factor >= 0]
    if len(set(shared)) == len(shared):
        return [splits]
    seen: dict[tuple[tuple[str, ...], ...], Choice] = {}
    for order in itertools.permutations(splits):
        key = tuple(tuple(s.axis for s in order if s.factor == f) for f in sorted(set(shared)))
        seen.setdefault(key, order)
    return list(seen.values())


def _is_worth_it(rule: LeafRule, splits: Choice, mesh: Mesh) -> bool:
    return all(can_split(rule.factors[factor], ways) for factor, ways in ways_of(splits, mesh).items())


def axes_of(choice: Choice, factor: int) -> tuple[str, ...]:
    """The axes that split a factor, major first."""
    return tuple(split.axis for split in choice if split.factor == factor)


def ways_of(choice: Choice, mesh: Mesh) -> dict[int, list[int]]:
    """Factor → sizes of the axes that split it, major first."""
    ways: dict[int, list[int]] = {}
    for split in choice:
        if split.factor >= 0:
            ways.setdefault(split.factor, []).append(mesh.size(split.axis))
    return ways


def filled(rule: LeafRule, choice: Choice, mesh: Mesh, indices: Collection[int] = ()) -> tuple[Fills, ...]:
    """Per operand, what must stand in its padding: reduction → the positions that it is neutral for.

    The reduction is the one by which a padded factor leaves a result. Of the operands numbered `indices`, which hold
    indices, padded factors that no result lacks are under None: any index will do there.
    """
    lost: dict[int, str | None] = {}
    for factor, ways in ways_of(choice, mesh).items():
        if rule.factors[factor].size % math.prod(ways):
            lost[factor] = _reduced_by(rule, factor)
    found: list[Fills] = [{} for _ in rule.operands]
    for operand, dims in enumerate(rule.operands if lost else ()):
        for d, factors in enumerate(dims):
            for i, factor in enumerate(factors):
                if lost.get(factor) is not None or (operand in indices and factor in lost):
                    found[operand].setdefault(lost[factor], []).append((d, i))
    return tuple(found)


def _reduced_by(rule: LeafRule, factor: int) -> str | None:
    """The reduction by which a factor leaves a result; None where none lacks it, or what it indexes is masked."""
    if any(letter == rule.factors[factor].letter for _, letter in rule.indexes):
        return None
    results = zip(rule.results, rule.reductions, strict=True)
    return next((by for dims, by in results if not any(factor in dim for dim in dims)), None)


def operand_layouts(rule: LeafRule, choice: Choice) -> tuple[Layout, ...]:
    """The layouts that the op needs its operands in."""
    key = ("operands", choice)
    if key not in rule.memo:
        rule.memo[key] = _operand_layouts(rule, choice)
    layouts: tuple[Layout, ...] = rule.memo[key]
    return layouts


def _operand_layouts(rule: LeafRule, choice: Choice) -> tuple[Layout, ...]:
    layouts = []
    for i, dims in enumerate(rule.operands):
        layout = Layout.whole(rule.factor_sizes(dims))
        for split in choice:
            if split.factor >= 0:
                layout = _split(layout, dims, split)
            elif i in rule.linear[split.linear]:
                layout = layout.add_partial(split.axis)
        layouts.append(layout)
    return tuple(layouts)


def result_layouts(rule: LeafRule, choice: Choice) -> tuple[Layout, ...]:
    """The layouts in which the op leaves its results."""
    key = ("results", choice)
    if key not in rule.memo:
        rule.memo[key] = _result_layouts(rule, choice)
    layouts: tuple[Layout, ...] = rule.memo[key]
    return layouts


def _result_layouts(rule: LeafRule, choice: Choice) -> tuple[Layout, ...]:
    layouts = []
    for dims, reduction, same in zip(rule.results, rule.reductions, rule.same, strict=True):
        layout = Layout.whole(rule.factor_sizes(dims))
        for split in choice:
            if split.factor < 0:
                layout = layout.add_partial(split.axis)
            elif any(split.factor in dim for dim in dims):
                layout = _split(layout, dims, split)
            elif rule.factors[split.factor].letter not in same:
                layout = layout.add_partial(split.axis, reduction)
        layouts.append(layout)
    return tuple(layouts)


def _split(layout: Layout, dims: tuple[tuple[int, ...], ...], split: Split) -> Layout:
    for d, dim in enumerate(dims):
        for i, factor in enumerate(dim):
            if factor == split.factor:
                layout = layout.split(split.axis, (d, i))
    return layout


def choice_text(rule: LeafRule, choice: Choice) -> str:
    """`"dp=b tp=o"`; `""` when nothing is split."""
    return " ".join(f"{s.axis}={rule.factors[s.factor].name if s.factor >= 0 else f'+{s.linear}'}" for s in choice)


def parse_choice(rule: LeafRule, text: str, where: str = "") -> Choice:
    """The inverse of `choice_text`; raises `PlanError` naming the factors that the op has."""
    names = {f.name: i for i, f in enumerate(rule.factors)}
    splits = []
    for word in text.split():
        axis, _, what = word.partition("=")
        if what.startswith("+") and what[1:].isdigit() and int(what[1:]) < len(rule.linear):
            splits.append(Split(axis, linear=int(what[1:])))
        elif what in names:
            splits.append(Split(axis, factor=names[what]))
        else:
            raise PlanError(f"{where}: choice {word!r} names no factor of the op; it has {', '.join(names) or 'none'}")
    return tuple(splits)


def input_rule(factor_sizes: Sizes, atoms: Sizes) -> LeafRule:
    """The rule of an input of the step: any factor may be split; factors are named `d0`, `d0.1`, …"""
    factors: list[OpFactor] = []
    dims = []
    for d, sizes in enumerate(factor_sizes):
        start = len(factors)
        for i, size in enumerate(sizes):
            name = f"d{d}" if len(sizes) == 1 else f"d{d}.{i}"
            factors.append(OpFactor(name, size, name, False, True, atom=atoms[d][i]))
        dims.append(tuple(range(start, len(factors))))
    return LeafRule(tuple(factors), (), (tuple(dims),), (), ("sum",), (), (frozenset(),))
