"""Sizes at which an op is tried: small ones that stand for its real ones, and real ones one at a time.

    probe = small(node)                     # f32[8 512 4096] at f32[6 12 48]
    at_real(node, probe, [4096])            # at f32[6 12 4096]

Invariants:
- equal real sizes have equal stand-ins, and a size of 1 stays 1;
- the op runs at whatever is returned, with as many results of the same ranks as at its own sizes, and no constant ones
  where they vary there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping

from torch.fx import Node

from autopar.errors import RuleError
from autopar.rules.aside import may_try
from autopar.rules.experiment import at_shapes, first_line, num_elements, observed
from autopar.rules.nodes import result_values, shapes_of
from autopar.rules.notation import Rule, bind

MAX_ELEMENTS, _MANY_ELEMENTS = 1 << 22, 1 << 19
"""Of all operands and results of one trial; and of the operands, from which on trials take long."""

MAX_SIZE = 1 << 20
"""Of one dim: larger ones are tried at this."""

_SMALL, _TINY = 6, 2
"""The smallest stand-ins: with two and three ways to split, and where those are too large."""

_LARGEST_RATIO = 8
"""Of two sizes, up to which their stand-ins have it, too."""

_MOST_SIZES = 5
"""Distinct sizes up to which every set of them is tried small."""


def small(node: Node, rule: Rule | None = None) -> Node:
    """The call at the smallest sizes that it (and `rule`) takes: equal ones where they were equal, or real ones.

    Raises `RuleError` where no sizes are both taken and small enough to be tried.
    """
    sizes = sorted({n for shape in shapes_of(node)[0] for n in shape if n > 1})
    stand_ins, varying = stand_ins_for(sizes, _SMALL), _varying(node)
    numbers = range(len(sizes)) if len(sizes) <= _MOST_SIZES else (0, 1)
    for real in itertools.chain.from_iterable(itertools.combinations(sizes, n) for n in numbers):
        mixed = {n: m for n, m in stand_ins.items() if n not in real}
        if accepts(node, mixed, varying, rule):
            return at_sizes(node, mixed)
    return at_sizes(node, {})


def stand_ins_for(sizes: Collection[int], smallest: int) -> dict[int, int]:
    """Small sizes in the order of the real ones (ascending), each a multiple where the real one is."""
    found: dict[int, int] = {}
    for size in sizes:
        divisor = max((n for n in found if size % n == 0), default=None)
        step = smallest if divisor is None else found[divisor]
        ratio = size // divisor if divisor is not None else 1
        first = step * ratio if ratio <= _LARGEST_RATIO else step
        found[size] = next(n for n in itertools.count(first, step) if n not in found.values())
    return found


def _varying(node: Node) -> tuple[bool, ...]:
    """Which results vary at the call's own sizes: all, where it is too large to be run."""
    try:
        return observed(at_sizes(node, {})).varying if may_try("its own sizes") else ()
    except RuleError:
        return (True,) * len(result_values(node))


def _count(node: Node, sizes: Mapping[int, int]) -> int:
    return sum(math.prod(sizes.get(n, n) for n in shape) for shape in shapes_of(node)[0])


def at_sizes(node: Node, sizes: Mapping[int, int]) -> Node:
    """The call with sizes replaced; raises `RuleError` where that fails, or is too large to be tried."""
    operands, _ = shapes_of(node)
    try:
        probe = at_shapes(node, [tuple(sizes.get(n, n) for n in shape) for shape in operands])
    except Exception as error:
        raise RuleError(f"its fake kernel fails ({type(error).__name__}: {first_line(error)})") from None
    if num_elements(probe) > MAX_ELEMENTS:
        raise RuleError(
            f"it takes {num_elements(probe)} elements at the smallest sizes; up to {MAX_ELEMENTS} are tried"
        )
    return probe


def accepts(node: Node, sizes: Mapping[int, int], varying: tuple[bool, ...], rule: Rule | None = None) -> bool:
    """Whether the op runs at these sizes, and gives results like those at its own: as many, of these ranks, varying."""
    try:
        probe = at_sizes(node, sizes)
        if _ranks(probe) != _ranks(node) or any(0 in shape for shape in shapes_of(probe)[1]):
            return False
        if rule is not None:
            bind(rule, *shapes_of(probe))
        return may_try(f"shapes {shapes_of(probe)}") and observed(probe).varying == varying
    except RuleError:
        return False


def _ranks(node: Node) -> list[int | None]:
    return [None if result is None else result.dim() for result in result_values(node)]


def stand_ins_of(node: Node, probe: Node) -> dict[int, int]:
    """Real size → the probe's, of the sizes that the op let be replaced."""
    pairs = zip(shapes_of(node)[0], shapes_of(probe)[0], strict=True)
    return {n: m for real, tried in pairs for n, m in zip(real, tried, strict=True) if n != m}


def at_real(node: Node, probe: Node, sizes: Collection[int], rule: Rule | None = None) -> Node | None:
    """The call with these sizes real (`MAX_SIZE` at most) and the others small, tiny, or real, as it can be tried."""
    stand_ins, varying = stand_ins_of(node, probe), observed(probe).varying
    large = {n: min(n, MAX_SIZE) for n in sizes if n in stand_ins}
    for smallest, most in ((_SMALL, _MANY_ELEMENTS), (_TINY, MAX_ELEMENTS)):
        others = stand_ins_for(sorted(n for n in stand_ins if n not in large), smallest)
        mixed = {**others, **large}
        if _count(node, mixed) <= most and accepts(node, mixed, varying, rule):
            return at_sizes(node, mixed)
    return at_sizes(node, {}) if accepts(node, {}, varying, rule) else None
