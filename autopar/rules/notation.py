"""The one-line notation of sharding rules, and its binding to the shapes at a node.

    "m k, k n -> m n"        a letter on both sides may be split; `k` vanishes: split, it leaves a partial sum
    "... [d] -> ... [d]"     `[d]` is whole on every device; `...` stands for the leading dims
    "(a b) -> a b"           a dim that is a product of factors, major to minor
    "v d, {v}... -> ... d"   the second operand's values index `v`: localised by offset and mask
    "a b -> a +max"          the reduction of what vanishes, when it isn't a sum
    "a b, b -> a, b =a"      the second result doesn't depend on `a`: where `a` is split, every device has it whole
    "1 -> a"                 a letter only on the right: the value is constant along it, or the op knows its offset
    "([2] a) -> ([2] a)"     a number is a whole part of that size
    "a, () -> a; linear 0"   `()` has no dims; partial sums pass through operand 0 (`read_rule`)

Invariants of a `BoundRule`:
- every dim of every operand and result is a tuple of letters whose sizes multiply to the dim's size;
- a dim of size 1 has no letters.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.errors import RuleError
from autopar.layout import REDUCTIONS

Shape = tuple[int, ...]
Linear = tuple[tuple[int, ...], ...]
"""Sets of operands through which partial sums pass: each set alone, its members jointly."""
Dims = tuple[tuple[str, ...], ...]
"""The letters of each dim of one value."""

_TOKEN = re.compile(r"\.\.\.|\{\w+\}|[+=]\w+|\(|\)|\[\w+\]|\w+")


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """One operand or result as written: dims of letters, `...` as the dim `("...",)`."""

    dims: Dims
    whole: frozenset[str] = frozenset()
    indexes: str | None = None
    reduction: str = "sum"
    same: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule as written in the table. `linear` lists the sets of operands through which partial sums pass."""

    operands: tuple[ValueSpec, ...]
    results: tuple[ValueSpec, ...]
    linear: Linear = ()


@dataclass(frozen=True, slots=True)
class BoundRule:
    """A rule at a node: letters with sizes."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: dict[str, int]
    whole: frozenset[str] = frozenset()
    indexes: dict[int, str] = field(default_factory=dict)
    reductions: tuple[str, ...] = ()
    linear: Linear = ()
    anywhere: frozenset[str] = frozenset()
    """Letters only on the right of which the op makes any part, not just a contiguous one."""
    divided: frozenset[str] = frozenset()
    """Letters that an axis must divide: it isn't known what padding would add to a sum over them."""
    same: tuple[frozenset[str], ...] = ()
    """For each result the letters on which it doesn't depend, though they vanish."""


@functools.cache
def parse_rule(text: str, linear: Linear = ()) -> Rule:
    """Parses the notation; raises `RuleError` with the text when it is malformed."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"rule {text!r}: expected 'operands -> results'")
    operands = tuple(_parse_value(part, text) for part in left.split(",")) if left.strip() else ()
    rule = Rule(operands, tuple(_parse_value(part, text) for part in right.split(",")), linear)
    _require_sound(rule, text)
    return rule


def read_rule(text: str) -> Rule:
    """A rule with its linear operands: the inverse of `rule_text`."""
    body, mark, linear = text.partition("; linear")
    return parse_rule(body, parse_linear(linear.strip()) if mark else ())


def rule_text(
    operands: Sequence[Sequence[str]], results: Sequence[Sequence[str]], reductions: Sequence[str], linear: Linear = ()
) -> str:
    """`"a k, k -> a +max; linear 0"` from the words of each value's dims, and the reduction of each result or ""."""
    left = ", ".join(" ".join(words) or "()" for words in operands)
    marks = [f"+{op}" if op not in ("", "sum") else "" for op in reductions]
    right = ", ".join(" ".join([*words, mark]).strip() or "()" for words, mark in zip(results, marks, strict=True))
    return f"{left} -> {right}" + (f"; linear {linear_text(linear)}" if linear else "")


def linear_text(linear: Linear) -> str:
    """The inverse of `parse_linear`: `"0|1"`."""
    return "|".join("".join(map(str, g)) if max(g) < 10 else ",".join(map(str, (*g, ""))) for g in linear)


def parse_linear(text: str) -> Linear:
    """`"0|1"`: linear in each alone; `"01"` or `"0,1"`: in both jointly. Raises `RuleError`."""
    groups = [part.split(",") if "," in part else list(part) for part in text.split("|")] if text else []
    words = [[word.strip() for word in group if word.strip()] for group in groups]
    if not all(group and all(word.isdigit() for word in group) for group in words):
        raise RuleError(
            f"linear operands {text!r}: expected numbers of operands, as in '0|1' (each alone) or '01' (both)"
        )
    return tuple(tuple(map(int, group)) for group in words)


def _require_sound(rule: Rule, text: str) -> None:
    """Raises `RuleError` for what parses but means nothing."""
    for spec in (*rule.operands, *rule.results):
        letters = [letter for dim in spec.dims for letter in dim if not letter.isdigit()]
        twice = next((letter for letter in letters if letters.count(letter) > 1), None)
        if twice is not None:
            raise RuleError(f"rule {text!r}: {twice!r} stands twice in one value; give each dim a letter of its own")
        if spec.reduction not in REDUCTIONS:
            raise RuleError(
                f"rule {text!r}: +{spec.reduction} is no reduction; expected one of {', '.join(REDUCTIONS)}"
            )
    beyond = [i for group in rule.linear for i in group if i >= len(rule.operands)]
    if beyond:
        raise RuleError(f"rule {text!r}: linear in operand {beyond[0]}, but it has {len(rule.operands)} (from 0 on)")


def _parse_value(part: str, text: str) -> ValueSpec:
    tokens = _TOKEN.findall(part)
    if "".join(tokens) != re.sub(r"\s", "", part):
        raise RuleError(f"rule {text!r}: can't read {part.strip()!r}")
    dims: list[tuple[str, ...]] = []
    whole, same, indexes, reduction = set(), set(), None, "sum"
    group: list[str] | None = None
    for token in tokens:
        if token == "(" and group is None:
            group = []
        elif token == ")" and group is not None:
            if not group and len(tokens) > 2:
                raise RuleError(f"rule {text!r}: () has no dims, so that it stands alone; got {part.strip()!r}")
            dims.extend([tuple(group)] if group else [])
            group = None
        elif token in "()":
            raise RuleError(f"rule {text!r}: parentheses don't match in {part.strip()!r}")
        elif token[0] == "{":
            indexes = token[1:-1]
        elif token[0] == "+":
            reduction = token[1:]
        elif token[0] == "=":
            same.add(token[1:])
        else:
            if token[0] == "[":
                whole.add(token[1:-1])
            name = token.strip("[]")
            if group is not None:
                group.append(name)
            else:
                dims.append(() if name == "1" else (name,))
    if group is not None:
        raise RuleError(f"rule {text!r}: parentheses don't match in {part.strip()!r}")
    return ValueSpec(tuple(dims), frozenset(whole), indexes, reduction, frozenset(same))


def bind(
    rule: Rule, operand_shapes: tuple[Shape, ...], result_shapes: tuple[Shape, ...], sizes: dict[str, int] | None = None
) -> BoundRule:
    """Binds letters to the sizes at a node; `sizes` gives those that products leave open.

    Raises `RuleError` when the shapes contradict the rule.
    """
    if len(rule.operands) != len(operand_shapes) or len(rule.results) != len(result_shapes):
        raise RuleError(
            f"rule has {len(rule.operands)} operands and {len(rule.results)} results, "
            f"the op has {len(operand_shapes)} and {len(result_shapes)}"
        )
    specs = [*rule.operands, *rule.results]
    numbers = {letter: int(letter) for spec in specs for dim in spec.dims for letter in dim if letter.isdigit()}
    known = {**numbers, **(sizes or {})}
    shapes = [*operand_shapes, *result_shapes]
    dots = max(len(shape) - len(spec.dims) + 1 for spec, shape in zip(specs, shapes, strict=True))
    expanded = [_expand_dots(spec.dims, shape, dots) for spec, shape in zip(specs, shapes, strict=True)]
    _solve_sizes(expanded, shapes, known)
    bound = tuple(_drop_ones(dims, shape, known) for dims, shape in zip(expanded, shapes, strict=True))
    count = len(operand_shapes)
    return BoundRule(
        operands=bound[:count],
        results=bound[count:],
        sizes=known,
        whole=frozenset(numbers).union(*(spec.whole for spec in specs)),
        indexes={i: spec.indexes for i, spec in enumerate(rule.operands) if spec.indexes},
        reductions=tuple(spec.reduction for spec in rule.results),
        linear=rule.linear,
        same=tuple(spec.same for spec in rule.results),
    )


def bound_text(rule: BoundRule) -> str:
    """The rule in the notation: `"m k, k n -> m n"`. Reductions stand where a letter can vanish."""
    vanishing = {letter for dims in rule.operands for dim in dims for letter in dim} - rule.whole
    results, reductions = [], []
    for dims, reduction, same in zip(rule.results, rule.reductions, rule.same, strict=True):
        gone = vanishing - {letter for dim in dims for letter in dim}
        results.append([*_dim_words(dims, rule.whole), *(f"={letter}" for letter in sorted(gone & same))])
        reductions.append(reduction if gone - same else "")
    operands = [_dim_words(dims, rule.whole, rule.indexes.get(i)) for i, dims in enumerate(rule.operands)]
    return rule_text(operands, results, reductions).strip()


def _dim_words(dims: Dims, whole: frozenset[str], indexes: str | None = None) -> list[str]:
    def word(dim: tuple[str, ...]) -> str:
        words = " ".join(f"[{letter}]" if letter in whole else letter for letter in dim)
        return "1" if not dim else words if len(dim) == 1 else f"({words})"

    return [*([f"{{{indexes}}}"] if indexes else []), *map(word, dims)]


def fits(rule: Rule, operand_shapes: tuple[Shape, ...], result_shapes: tuple[Shape, ...]) -> bool:
    """Whether the rule has as many operands and results as the op, each of its rank."""

    def alike(specs: tuple[ValueSpec, ...], shapes: tuple[Shape, ...]) -> bool:
        return len(specs) == len(shapes) and all(map(_has_rank, specs, shapes))

    return alike(rule.operands, operand_shapes) and alike(rule.results, result_shapes)


def _has_rank(spec: ValueSpec, shape: Shape) -> bool:
    rank = len(spec.dims)
    return len(shape) >= rank - 1 if ("...",) in spec.dims else len(shape) == rank


def _expand_dots(dims: Dims, shape: Shape, most: int) -> Dims:
    """Replaces `...` by the last of `d0 d1 …` (`most` of them), as many as there are dims left: aligned right."""
    if ("...",) not in dims:
        return dims
    at = dims.index(("...",))
    count = len(shape) - (len(dims) - 1)
    return (*dims[:at], *((f"d{i}",) for i in range(most - count, most)), *dims[at + 1 :])


def _solve_sizes(all_dims: list[Dims], shapes: list[Shape], known: dict[str, int]) -> None:
    pairs = [(dim, size) for dims, shape in zip(all_dims, shapes, strict=True) for dim, size in _zip_dims(dims, shape)]
    for dim, size in sorted(pairs, key=lambda pair: len(pair[0])):
        open_letters = [letter for letter in dim if letter not in known]
        rest = math.prod(known[letter] for letter in dim if letter in known)
        if len(open_letters) == 1 and size % rest == 0:
            known[open_letters[0]] = size // rest
        elif len(dim) == 1 and known[dim[0]] != size and 1 in (size, known[dim[0]]):
            known[dim[0]] = max(size, known[dim[0]])  # a broadcast dim
        elif open_letters or (rest != size and size != 1):
            raise RuleError(f"a dim of size {size} is not the product of {dim} with sizes {known}")


def _zip_dims(dims: Dims, shape: Shape) -> list[tuple[tuple[str, ...], int]]:
    if len(dims) != len(shape):
        raise RuleError(f"the rule has {len(dims)} dims where the value has shape {list(shape)}")
    return list(zip(dims, shape, strict=True))


def _drop_ones(dims: Dims, shape: Shape, sizes: dict[str, int]) -> Dims:
    return tuple(
        () if size == 1 else tuple(letter for letter in dim if sizes[letter] != 1)
        for dim, size in zip(dims, shape, strict=True)
    )
