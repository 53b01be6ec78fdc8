"""Which dims of an op share a letter: candidates by what touches what, each decided by `Bench.letter`.

    find_letters(Bench.of(probe))       # swiglu, f32[6 24] -> f32[6 12]: [(0) -> (0)], [2 x n of dim 1 -> n of dim 1]

Invariants:
- a dim has one letter at most, and a letter stands once in a value;
- the order of the candidates is fixed, so equal ops have equal letters.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.rules.trials import Bench, Letter, Place, places_of

_MOST_COMBINATIONS = 96
"""Of operand dims, tried for one letter."""

_LARGEST_RATIO = 8
"""Of a fused dim to its parts (gate and up; query, key and value)."""


def find_letters(bench: Bench, parts: Sequence[int] = ()) -> list[Letter]:
    """As many letters as hold, whole dims first, then factors of dims beside whole parts of these and likely sizes."""
    search = _Search(bench)
    search.dims_of_results((1,))
    search.reduced_dims()
    search.dims_of_results((1, *sorted({2, *_ratios(bench), *parts} - {1})))
    return search.letters


def _ratios(bench: Bench) -> set[int]:
    """How many times a dim of a result goes into one of an operand, or the other way round."""
    operands = {n for shape in bench.operand_shapes for n in shape if n > 1}
    results = {n for result in bench.samples[0].results if result is not None for n in result.shape if n > 1}
    pairs = ((max(a, b), min(a, b)) for a in operands for b in results)
    return {a // b for a, b in pairs if a % b == 0 and a // b <= _LARGEST_RATIO}


@dataclass(slots=True)
class _Search:
    bench: Bench
    letters: list[Letter] = field(default_factory=list)

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        return self.bench.operand_shapes

    def _free_operand_dims(self, operand: int) -> list[int]:
        taken = {place.dim for letter in self.letters if (place := letter.operands[operand]) is not None}
        return [d for d, n in enumerate(self._shapes[operand]) if n > 1 and d not in taken]

    def _free_result_dims(self) -> list[tuple[int, int, int]]:
        """(result, dim, size) of what no letter stands at."""
        taken = {
            (j, role.dim) for letter in self.letters for j, role in enumerate(letter.results) if isinstance(role, Place)
        }
        return [
            (j, e, n)
            for j, result in enumerate(self.bench.samples[0].results)
            for e, n in enumerate(result.shape if result is not None else ())
            if n > 1 and (j, e) not in taken
        ]

    def _accept(self, size: int, combination: Sequence[Place | None]) -> bool:
        """Adds the letter at these places, if it holds and nothing else stands where it does."""
        letter = self.bench.letter(size, combination)
        if letter is None:
            return False
        free = {(j, e) for j, e, _ in self._free_result_dims()}
        if not all((j, r.dim) in free for j, r in enumerate(letter.results) if isinstance(r, Place)):
            return False
        self.letters.append(letter)
        return True

    def _first(self, size: int, options: Sequence[Sequence[Place | None]]) -> None:
        """Accepts the first combination of one option an operand that holds."""
        for combination in itertools.islice(itertools.product(*options), _MOST_COMBINATIONS):
            if any(place is not None for place in combination) and self._accept(size, combination):
                return

    # -- steps -------------------------------------------------------------------------------------------------
    def dims_of_results(self, parts: Sequence[int]) -> None:
        """Letters that stand in a result, beside a whole part of the dim that has one of these sizes."""
        for (result, dim, total), part in itertools.product(self._free_result_dims(), parts):
            if total % part == 0 and total > part:
                for where in dict.fromkeys((Place(dim, major=part), Place(dim, minor=part))):
                    self._try_result(result, where, total // part, parts)

    def _try_result(self, result: int, where: Place, size: int, parts: Sequence[int]) -> None:
        if any(free[:2] == (result, where.dim) for free in self._free_result_dims()):
            self._first(size, [self._followers(i, result, where, size, parts) for i in range(len(self._shapes))])

    def _followers(
        self, operand: int, result: int, where: Place, size: int, parts: Sequence[int]
    ) -> list[Place | None]:
        """Places of the letter in an operand, as far as a few indices tell."""
        free = self._free_operand_dims(operand)
        places = [p for p in places_of(self._shapes[operand], size) if p.dim in free and p.major * p.minor in parts]
        return [*(p for p in places if self.bench.follows(operand, p, result, where, size)), None]

    def reduced_dims(self) -> None:
        """Letters that stand in no result: any free dims of one size, one an operand."""
        for operand, shape in enumerate(self._shapes):
            for dim, size in enumerate(shape):
                if dim in self._free_operand_dims(operand):
                    self._reduced(operand, dim, size)

    def _reduced(self, operand: int, dim: int, size: int) -> None:
        options: list[list[Place | None]] = []
        for i in range(len(self._shapes)):
            dims = [d for d in self._free_operand_dims(i) if self._shapes[i][d] == size]
            options.append([Place(dim)] if i == operand else [None, *map(Place, dims)])
        combinations = itertools.islice(itertools.product(*options), _MOST_COMBINATIONS)
        for combination in sorted(combinations, key=lambda c: sum(place is not None for place in c)):
            if self._accept(size, combination):
                return
