"""Whether an op may be split at some dims of its operands, decided by experiment.

Splitting dims is tried on random subsets of their indices and the rest: only where every subset's results are the
subset of the whole results, or add up to them (sum, maximum or minimum), may the dims be split, anywhere and any number
of ways. Chunks alone would not show it: 12 in 2 or 3 parts hides an op that works on pairs.

    bench = Bench.of(probe)                        # swiglu: f32[6 24] -> f32[6 12]
    bench.letter(12, [Place(dim=1, major=2)])      # Letter(12, …, results=(Place(dim=1),))
    bench.letter(24, [Place(dim=1)])               # None

Invariant: a letter has held on every kind of value that the op takes, and on subsets of one index.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from autopar.errors import RuleError
from autopar.layout import REDUCTIONS
from autopar.rules.aside import may_try
from autopar.rules.experiment import KINDS, Run, draw, fake_shapes, first_line, is_equal, prepare, trials

MAX_RUNS = 3000
"""Of one op: what isn't found by then is whole."""

_PARTIAL = ("sum", "max", "min")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a letter stands in a value: a dim, or its middle factor between a major and a minor part that are whole."""

    dim: int
    major: int = 1
    minor: int = 1

    def indices(self, part: Tensor, size: int) -> Tensor:
        """The dim's indices that belong to the letter's indices `part` of `size`."""
        major, minor = torch.arange(self.major), torch.arange(self.minor)
        return ((major[:, None, None] * size + part[None, :, None]) * self.minor + minor).flatten()

    def coordinate(self, index: int, size: int) -> int:
        """The letter's index at an index of the dim."""
        return index // self.minor % size


Role = Place | str | None
"""What a letter is in a result: a place, a reduction, or nothing where there is no result."""


@dataclass(frozen=True, slots=True)
class Letter:
    """One letter: its size, its place in each operand that has it, and its role in each result."""

    size: int
    operands: tuple[Place | None, ...]
    results: tuple[Role, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of the operands with the whole op's results."""

    values: list[Tensor]
    results: list[Tensor | None]


@dataclass(frozen=True, slots=True)
class _Touch:
    """What changed when an operand was drawn anew at one index of one dim."""

    index: int
    changed: tuple[tuple[frozenset[int], ...] | None, ...]
    """Per result, per dim: the indices at which something changed; None where nothing did."""


@dataclass(slots=True)
class Bench:
    """An op at given sizes, with samples of what it does whole."""

    probe: Node
    call: Run
    samples: list[Sample]
    generator: torch.Generator
    runs: int = 0
    touched: dict[tuple[int, int], list[_Touch]] = field(default_factory=dict)

    @classmethod
    def of(cls, probe: Node, kinds: Sequence[str] = KINDS, seed: int = 0) -> Bench:
        """Samples of every kind that the op takes; raises `RuleError` where it takes none, or its shapes vary."""
        generator, samples, failure = torch.Generator().manual_seed(seed), list[Sample](), ""
        expected, call = fake_shapes(probe), prepare(probe)
        for kind in kinds:
            values = draw(probe, kind, generator)
            try:
                with trials():
                    results = call(values)
            except Exception as error:
                failure = f"{type(error).__name__}: {first_line(error)}"
                continue
            shapes = [None if r is None else tuple(r.shape) for r in results]
            if shapes != expected:
                raise RuleError(f"its fake kernel says shapes {expected}, it returned {shapes}")
            samples.append(Sample(values, results))
        if not samples:
            raise RuleError(f"it can't be run on trial values ({failure})")
        if not any(r is not None and r.isfinite().any() for sample in samples for r in sample.results):
            raise RuleError("it gave no finite result on trial values")
        return cls(probe, call, samples, generator, len(samples))

    @property
    def operand_shapes(self) -> list[tuple[int, ...]]:
        return [tuple(value.shape) for value in self.samples[0].values]

    def run(self, values: Sequence[Tensor]) -> list[Tensor | None] | None:
        """The results, or None where the op refuses the values."""
        self.runs += 1
        try:
            return self.call(values)
        except Exception:
            return None

    # -- one letter --------------------------------------------------------------------------------------------
    def letter(self, size: int, operands: Sequence[Place | None]) -> Letter | None:
        """The letter that stands at these places, or None where the op can't be split there."""
        if not may_try(f"{size} at {operands} of {self.operand_shapes}"):
            return None
        roles: list[set[Place | str]] | None = None
        for sample, parts in itertools.product(self.samples, self._partitions(size)):
            if self.runs >= MAX_RUNS:
                return None
            locals_ = [self.run(_parts(sample.values, operands, part, size)) for part in parts]
            found = _roles(sample.results, locals_, parts, size)
            if found is None:
                return None
            roles = found if roles is None else [a & b for a, b in zip(roles, found, strict=True)]
            if not all(fits or r is None for fits, r in zip(roles, sample.results, strict=True)):
                return None
        assert roles is not None
        return Letter(size, tuple(operands), tuple(_preferred(fits) for fits in roles))

    def _partitions(self, size: int) -> list[list[Tensor]]:
        """Halves, thirds and one against the rest, at random; the last is last, as unchecked ops may read beyond it."""
        third = size // 3
        cuts = ([size // 2, size - size // 2], [third, third, size - 2 * third], [1, size - 1])
        return [self._partition(size, cut) for cut in cuts if all(cut)]

    def _partition(self, size: int, cut: list[int]) -> list[Tensor]:
        order = torch.randperm(size, generator=self.generator)
        return [part.sort().values for part in torch.split(order, cut)]

    # -- what depends on what ----------------------------------------------------------------------------------
    def follows(self, operand: int, place: Place, result: int, where: Place, size: int) -> bool:
        """Whether an index of a letter at `place` touches the result at that index of the letter at `where`, if at all.

        A hint about which letters to try, by a few indices.
        """
        for touch in self._touches(operand, place.dim):
            changed = touch.changed[result]
            own = place.coordinate(touch.index, size)
            if changed is not None and any(where.coordinate(i, size) != own for i in changed[where.dim]):
                return False
        return True

    def _touches(self, operand: int, dim: int) -> list[_Touch]:
        if (operand, dim) not in self.touched:
            size = self.operand_shapes[operand][dim]
            indices = sorted({0, size // 2, size - 1})
            found = [self._touch(s, operand, dim, at) for s, at in itertools.product(self.samples[:2], indices)]
            self.touched[operand, dim] = [touch for touch in found if touch is not None]
        return self.touched[operand, dim]

    def _touch(self, sample: Sample, operand: int, dim: int, index: int) -> _Touch | None:
        got = self.run(self._disturbed(sample.values, operand, dim, index))
        if got is None:
            return None
        return _Touch(index, tuple(itertools.starmap(_changed, zip(got, sample.results, strict=True))))

    def _disturbed(self, values: Sequence[Tensor], operand: int, dim: int, at: int) -> list[Tensor]:
        """The values, drawn anew at one index of one operand's dim."""
        fresh = draw(self.probe, "positive", self.generator)[operand]
        fresh = ~values[operand] if fresh.dtype == torch.bool else fresh
        fresh = fresh + 1 if fresh.is_floating_point() else fresh
        changed = values[operand].clone()
        changed.select(dim, at).copy_(fresh.select(dim, at))
        return [changed if i == operand else value for i, value in enumerate(values)]


def _changed(new: Tensor | None, old: Tensor | None) -> tuple[frozenset[int], ...] | None:
    """The indices along each dim at which two values differ; None where they don't, or can't be compared."""
    if new is None or old is None or new.shape != old.shape:
        return None
    differs = (new != old) & ~(new.isnan() & old.isnan())
    where = differs.nonzero()
    return tuple(frozenset(column.tolist()) for column in where.unbind(1)) if len(where) else None


def _parts(values: Sequence[Tensor], places: Sequence[Place | None], part: Tensor, size: int) -> list[Tensor]:
    return [
        value if place is None else value.index_select(place.dim, place.indices(part, size))
        for value, place in zip(values, places, strict=True)
    ]


def _roles(
    whole: Sequence[Tensor | None], locals_: Sequence[list[Tensor | None] | None], parts: Sequence[Tensor], size: int
) -> list[set[Place | str]] | None:
    """What the letter can be in each result, by one experiment; None where a part was refused."""
    if any(got is None or len(got) != len(whole) for got in locals_):
        return None
    found: list[set[Place | str]] = []
    for j, result in enumerate(whole):
        got = [local[j] for local in locals_ if local is not None]
        if result is None or any(g is None for g in got):
            found.append(set())
            continue
        found.append(_fits(result, [g for g in got if g is not None], parts, size))
    return found


def _fits(whole: Tensor, got: Sequence[Tensor], parts: Sequence[Tensor], size: int) -> set[Place | str]:
    if all(g.shape == whole.shape for g in got):
        return {op for op in _PARTIAL if whole.dtype != torch.bool and is_equal(_reduced(op, got), whole)}
    return {
        place
        for place in places_of(tuple(whole.shape), size)
        if all(
            is_equal(g, whole.index_select(place.dim, place.indices(part, size)))
            for g, part in zip(got, parts, strict=True)
        )
    }


def _reduced(op: str, parts: Sequence[Tensor]) -> Tensor:
    combine, (total, *rest) = REDUCTIONS[op](), parts
    for part in rest:
        total = combine(total, part)
    return total


def places_of(shape: Sequence[int], size: int) -> Iterator[Place]:
    """Where a letter of this size may stand: a dim of its size, or the minor or major factor of a larger one."""
    for dim, total in enumerate(shape):
        if total == size:
            yield Place(dim)
        elif total % size == 0:
            yield Place(dim, major=total // size)
            yield Place(dim, minor=total // size)


def _preferred(fits: set[Place | str]) -> Role:
    places = sorted((p for p in fits if isinstance(p, Place)), key=lambda p: (p.dim, p.major))
    return places[0] if places else next((op for op in _PARTIAL if op in fits), None)
