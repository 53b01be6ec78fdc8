"""The text of a rule that was found: its letters as the notation's words.

Invariants:
- letters are named in the order in which they first stand;
- whole dims of one size that align from the right share a letter.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch.fx import Node

from autopar.rules.nodes import result_values, shapes_of
from autopar.rules.notation import Linear, Shape, rule_text
from autopar.rules.trials import Letter, Place


def found_text(node: Node, probe: Node, letters: Sequence[Letter], linear: Linear) -> str:
    """The rule in the notation: letters in the order in which they first stand, whole dims in brackets."""
    names, kept = _Names(), _without_conflicts(letters)
    (real_operands, real_results), (operand_shapes, result_shapes) = shapes_of(node), shapes_of(probe)
    given = [j for j, result in enumerate(result_values(probe)) if result is not None]
    operands = [
        names.words(shape, real, [(x, x.operands[i]) for x in kept])
        for i, (shape, real) in enumerate(zip(operand_shapes, real_operands, strict=True))
    ]
    results = [
        names.words(shape, real, [(x, x.results[j]) for x in kept])
        for j, shape, real in zip(given, result_shapes, real_results, strict=True)
    ]
    reductions = [next((role for x in kept if isinstance(role := x.results[j], str)), "") for j in given]
    return rule_text(operands, results, reductions, linear)


def _without_conflicts(letters: Sequence[Letter]) -> list[Letter]:
    """The letters that can stand in one rule: a result is partial in one way."""
    kept: list[Letter] = []
    for letter in letters:
        pairs = [zip(letter.results, other.results, strict=True) for other in kept]
        if all(a == b for a, b in itertools.chain(*pairs) if isinstance(a, str) and isinstance(b, str)):
            kept.append(letter)
    return kept


class _Names:
    """One name a letter, and one for whole dims of one size that align from the right."""

    def __init__(self) -> None:
        self.letters: dict[Letter, str] = {}
        self.whole: dict[tuple[int, int, int], str] = {}

    def words(self, shape: Shape, real: Shape, roles: Sequence[tuple[Letter, object]]) -> list[str]:
        """The words of one value's dims; `shape` is the probe's, `real` the node's."""
        places = {place.dim: (letter, place) for letter, place in roles if isinstance(place, Place)}
        words = []
        for dim, (size, real_size) in enumerate(zip(shape, real, strict=True)):
            if real_size == 1:
                words.append("1")
            elif dim in places:
                words.append(self._word(*places[dim]))
            else:
                words.append(f"[{self.whole.setdefault((len(shape) - dim, size, real_size), self._next())}]")
        return words

    def _word(self, letter: Letter, place: Place) -> str:
        name = self.letters.setdefault(letter, self._next())
        before, after = (f"[{n}]" if n > 1 else "" for n in (place.major, place.minor))
        return f"({before} {name} {after})".replace("( ", "(").replace(" )", ")") if before or after else name

    def _next(self) -> str:
        count = len(self.letters) + len(self.whole)
        return chr(ord("a") + count) if count < 26 else f"d{count}"
