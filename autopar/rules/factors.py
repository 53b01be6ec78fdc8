"""Leaf factors: the dims of all values of a graph, refined until every rule's letters line up.

Each dim of each value is a list of atoms; a rule says which atoms are the same. Where one side knows a dim as 64 and
the other as 4 x 16, the atom of 64 is refined into (4, 16), everywhere it stands. What cannot be lined up
(6 x 4 against 4 x 6) is whole at that op.

Invariants:
- the factor sizes of a value are the same at its producer and at every consumer;
- factors of size 1 don't exist.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from autopar.rules.notation import BoundRule

Sizes = tuple[tuple[int, ...], ...]

_MAX_ROUNDS = 8
"""An atom that stands twice in one product may need refining more than once; no real graph needs more than two."""


class Atoms:
    """A union-find of atoms that can be refined into (major, …, minor) parts."""

    def __init__(self) -> None:
        self._size: list[int] = []
        self._parts: list[list[int] | None] = []

    def new(self, size: int) -> int:
        self._size.append(size)
        self._parts.append(None)
        return len(self._size) - 1

    def leaves(self, atoms: list[int]) -> list[int]:
        """The leaf atoms, major to minor; the same list where they are leaves, which most are."""
        if len(atoms) == 1 and self._parts[atoms[0]] is None:
            return atoms
        found: list[int] = []
        for atom in atoms:
            parts = self._parts[atom]
            if parts is None:
                found.append(atom)
                continue
            resolved = self.leaves(parts)
            self._parts[atom] = resolved
            found.extend(resolved)
        return found

    def sizes(self, atoms: list[int]) -> tuple[int, ...]:
        return tuple(self._size[leaf] for leaf in self.leaves(atoms))

    def unify(self, left: list[int], right: list[int]) -> bool:
        """Makes two products the same list of leaves; False (and nothing changed) where sizes don't line up."""
        for _ in range(_MAX_ROUNDS):
            left, right = self.leaves(left), self.leaves(right)
            if len(left) == len(right) == 1 and self._size[left[0]] == self._size[right[0]]:
                self._merge(left, right)
                return True
            left_cuts, right_cuts = self._cuts(left), self._cuts(right)
            if left_cuts == right_cuts:
                self._merge(left, right)
                return True
            cuts = sorted({*left_cuts, *right_cuts})
            if cuts[0] == 0 or any(b % a for a, b in itertools.pairwise(cuts)):
                return False
            self._refine(left, cuts)
            self._refine(right, cuts)
        return False

    def _merge(self, left: list[int], right: list[int]) -> None:
        for a, b in zip(left, right, strict=True):
            (a,), (b,) = self.leaves([a]), self.leaves([b])
            if a != b:
                self._parts[b] = [a]

    def _cuts(self, leaves: list[int]) -> list[int]:
        product, cuts = 1, [1]
        for leaf in reversed(leaves):
            product *= self._size[leaf]
            cuts.append(product)
        return cuts

    def _refine(self, leaves: list[int], cuts: list[int]) -> None:
        inner = 1
        for leaf in reversed(leaves):
            outer = inner * self._size[leaf]
            inside = [c for c in cuts if inner <= c <= outer]
            sizes = [b // a for a, b in itertools.pairwise(inside)]
            if len(sizes) > 1 and self._parts[leaf] is None:
                self._parts[leaf] = [self.new(size) for size in reversed(sizes)]
            inner = outer


@dataclass(frozen=True, slots=True)
class OpFactor:
    """One leaf of a letter of a rule: what a mesh axis may split. Equal `atom`s are one dim across the graph."""

    name: str
    size: int
    letter: str
    is_whole: bool
    is_major: bool
    must_divide: bool = False
    atom: int = field(default=-1, compare=False)


@dataclass(frozen=True, slots=True)
class LeafRule:
    """A node's rule at leaf level. Operands and results are dims of indices into `factors`."""

    factors: tuple[OpFactor, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    indexes: tuple[tuple[int, str], ...]
    reductions: tuple[str, ...]
    linear: tuple[tuple[int, ...], ...]
    same: tuple[frozenset[str], ...]
    """For each result the letters on which it doesn't depend, though they vanish."""
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What was derived from the rule, by what it was derived with; equal rules of a graph share it."""

    def factor_sizes(self, dims: tuple[tuple[int, ...], ...]) -> Sizes:
        return tuple(tuple(self.factors[f].size for f in dim) for dim in dims)


@dataclass(slots=True)
class _Link:
    """A node's letters as atoms, before the leaves are final."""

    rule: BoundRule
    letters: dict[str, list[int]]
    operands: list[list[list[tuple[str, list[int]]]]]
    results: list[list[list[tuple[str, list[int]]]]]
    whole: set[str]


class FactorInference:
    """Adds nodes in topological order, then reads off each node's `LeafRule`."""

    def __init__(self) -> None:
        self.atoms = Atoms()
        self._links: list[_Link] = []

    def value(self, shape: tuple[int, ...]) -> list[list[int]]:
        """Fresh dims for an input value."""
        return [[] if size == 1 else [self.atoms.new(size)] for size in shape]

    def add(self, rule: BoundRule, operands: list[list[list[int]]]) -> tuple[int, list[list[list[int]]]]:
        """Links a node's operands; returns the node's handle and the dims of its results."""
        letters = {letter: [self.atoms.new(size)] for letter, size in rule.sizes.items() if size != 1}
        whole = set(rule.whole)
        link = _Link(rule, letters, [], [], whole)
        for spec, dims in zip(rule.operands, operands, strict=True):
            link.operands.append([self._link_dim(names, dim, link) for names, dim in zip(spec, dims, strict=True)])
        results = []
        for spec in rule.results:
            link.results.append([[(name, letters[name]) for name in names] for names in spec])
            results.append([[atom for name in names for atom in letters[name]] for names in spec])
        self._links.append(link)
        return len(self._links) - 1, results

    def _link_dim(self, names: tuple[str, ...], dim: list[int], link: _Link) -> list[tuple[str, list[int]]]:
        if self.atoms.unify(dim, [atom for name in names for atom in link.letters[name]]):
            return [(name, link.letters[name]) for name in names]
        link.whole.update(names)
        anonymous = f"whole{len(link.whole)}"
        link.whole.add(anonymous)
        return [(anonymous, dim)]

    def leaf_rule(self, handle: int) -> LeafRule:
        """The node's rule over leaves; call once all nodes were added."""
        link = self._links[handle]
        factors: list[OpFactor] = []
        index: dict[str, tuple[int, ...]] = {}

        def indices(entries: list[tuple[str, list[int]]]) -> tuple[int, ...]:
            return tuple(i for name, atoms in entries for i in self._leaf_indices(name, atoms, link, factors, index))

        operands = tuple(tuple(indices(dim) for dim in dims) for dims in link.operands)
        results = tuple(tuple(indices(dim) for dim in dims) for dims in link.results)
        rule = link.rule
        return LeafRule(
            tuple(factors),
            operands,
            results,
            tuple(sorted(rule.indexes.items())),
            rule.reductions,
            rule.linear,
            rule.same,
        )

    def _leaf_indices(
        self, name: str, atoms: list[int], link: _Link, factors: list[OpFactor], index: dict[str, tuple[int, ...]]
    ) -> tuple[int, ...]:
        if name not in index:
            leaves = self.atoms.leaves(atoms)
            sizes = self.atoms.sizes(leaves)
            start, is_anywhere = len(factors), name in link.rule.anywhere
            for i, (leaf, size) in enumerate(zip(leaves, sizes, strict=True)):
                label = name if len(sizes) == 1 else f"{name}.{i}"
                is_major, must_divide = i == 0 or is_anywhere, name in link.rule.divided
                factors.append(OpFactor(label, size, name, name in link.whole, is_major, must_divide, leaf))
            index[name] = tuple(range(start, len(factors)))
        return index[name]
