"""Runs of equal layers in a model, and the model with only a few layers of each.

    runs = equal_runs(model, groups)            # (Run("model.layers", first=0, period=1, count=32),)
    with shortened(model, runs):                # layers 0, 1, 30 and 31 alone, under their own names
        ...

Blocks are equal when their modules have the same classes, the same parameters and buffers by name, shape and dtype,
and the same attributes, but for numbers that count the blocks (`layer_idx`). That says nothing about what a model does
with them, so the graphs traced of them are compared, too (see `folding`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.layers import block_of

KEPT = 4
"""Periods of a run that are traced: the first, two from between, which must be alike, and the last."""
LEAST = 6
"""Periods from which on a run is worth it."""
LONGEST_PERIOD = 8


@dataclass(frozen=True, slots=True)
class Run:
    """`count` periods of `period` consecutive blocks of one module list, from its block `first` on."""

    path: str
    first: int
    period: int
    count: int

    def block(self, number: int, offset: int) -> str:
        """The module path of a block of period `number`."""
        return f"{self.path}.{self.first + number * self.period + offset}"

    def place(self, block: str | None) -> tuple[int, int] | None:
        """(period, offset in it) of a block; None for one that isn't of the run."""
        path, _, index = (block or "").rpartition(".")
        if path != self.path or not index.isdigit():
            return None
        number, offset = divmod(int(index) - self.first, self.period)
        return (number, offset) if 0 <= number < self.count else None

    @property
    def kept(self) -> tuple[int, ...]:
        """The periods that are traced."""
        return (0, 1, self.count - 2, self.count - 1)


Numbers = tuple[int, ...]
"""Periods of a run that stand for all of them."""

_Found = tuple[Run, int, int, int]
"""(run, times, period, offset) of a block of a run."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """Which blocks stand for how many: of each run the periods that are there, and for how many in a row each stands;
    of a pipeline of which some stages stand for others, too, the blocks (`twins`) that have a block's place there."""

    runs: tuple[Run, ...] = ()
    numbers: tuple[Numbers, ...] = ()
    counts: tuple[Numbers, ...] = ()
    twins: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Block → itself and those in its place."""
    stages: tuple[tuple[int, ...], ...] = ()
    """Of each stage that is there, those for which it stands; empty where all are."""

    @classmethod
    def of(cls, runs: tuple[Run, ...], numbers: tuple[Numbers, ...]) -> Repeats:
        """Each period stands for those up to the next."""
        pairs = zip(runs, numbers, strict=True)
        counts = (tuple(b - a for a, b in itertools.pairwise((*own, run.count))) for run, own in pairs)
        return cls(runs, numbers, tuple(counts))

    def first_stage(self, stage: int) -> int:
        """The first of the stages for which one stands."""
        return self.stages[stage][0] if self.stages else stage

    def times(self, block: str) -> int:
        """For how many of its stage a block stands, itself included."""
        found = self._find(block)
        return found[1] if found is not None else 1

    def between(self, low: str, high: str) -> tuple[int, str | None]:
        """How often the two blocks come one after another; and where a period stands for several, so that one like
        that of `low` follows `low`, the block that then stands in the place of `high`.

        Of blocks that don't follow each other each that one stands for meets the other."""
        here, there = self._find(low), self._find(high)
        if here is None or there is None or here[0] is not there[0] or not self._follows(here, there):
            return max(self.times(low), self.times(high)), None
        return 1, here[0].block(here[2], there[3]) if here[1] > 1 else None

    def period(self, block: str) -> tuple[str, int] | None:
        """The same for blocks that come in turn; None for one that belongs to no run."""
        found = self._find(block)
        return (found[0].path, found[2]) if found is not None else None

    def blocks(self, block: str) -> tuple[str, ...]:
        """The blocks for which a block stands."""
        found = self._find(block)
        if found is None:
            return (block,)
        run, times, number, offset = found
        near = (run.block(each, offset) for each in range(number, number + times))
        return tuple(twin for each in near for twin in self.twins.get(each, (each,)))

    def spread(self, blocks: Sequence[str]) -> Iterator[tuple[str, str]]:
        """All the blocks for which some stand, in their order, each with the one that stands for it.

        What belongs to no run stands for itself.
        """
        for _, group in itertools.groupby(blocks, lambda block: self.period(block) or block):
            members = list(group)
            for row in zip(*(self.blocks(block) for block in members), strict=True):
                yield from zip(row, members, strict=True)

    def _follows(self, here: _Found, there: _Found) -> bool:
        """Whether the period there is the next one after that here, of the same run."""
        numbers = self.numbers[self.runs.index(here[0])]
        return numbers.index(there[2]) == numbers.index(here[2]) + 1

    def _find(self, block: str) -> _Found | None:
        for run, numbers, counts in zip(self.runs, self.numbers, self.counts, strict=True):
            place = run.place(block)
            if place is not None:
                return run, counts[numbers.index(place[0])], place[0], place[1]
        return None


def equal_runs(model: nn.Module, groups: Mapping[str, int]) -> tuple[Run, ...]:
    """The runs of a model that are worth folding; `groups`: trainable parameter → its group in the optimizer."""
    groups_of = {id(parameter): groups.get(name, -1) for name, parameter in model.named_parameters()}
    shared = _shared_tensors(model)
    found: list[Run] = []
    for path, module in model.named_modules():
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        if is_list and path and block_of(path) is None and len(module) >= LEAST:
            found += _runs_in(path, list(module), functools.partial(_are_equal, groups_of), shared)
    return tuple(found)


def _shared_tensors(model: nn.Module) -> set[int]:
    """The parameters and buffers that the model has under several names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    counts = Counter(id(tensor) for _, tensor in named)
    return {key for key, count in counts.items() if count > 1}


def _runs_in(path: str, blocks: list[nn.Module], are_equal: Callable[..., bool], shared: set[int]) -> list[Run]:
    """The runs of the period that leaves the fewest blocks to be traced."""
    options = ([*_runs_of(path, blocks, period, are_equal)] for period in range(1, LONGEST_PERIOD + 1))
    best = max(options, key=lambda runs: sum((run.count - KEPT) * run.period for run in runs))
    return [run for run in best if not _holds(run, blocks, shared)]


def _runs_of(path: str, blocks: list[nn.Module], period: int, are_equal: Callable[..., bool]) -> Iterator[Run]:
    start = 0
    while start + LEAST * period <= len(blocks):
        end = start + period
        while end < len(blocks) and are_equal(blocks[end - period], blocks[end], end - period, end):
            end += 1
        count = (end - start) // period
        if count >= LEAST:
            yield Run(path, start, period, count)
        start = start + count * period if count > 1 else start + 1


def _holds(run: Run, blocks: list[nn.Module], tensors: set[int]) -> bool:
    """Whether a block of the run holds one of `tensors`."""
    members = blocks[run.first : run.first + run.count * run.period]
    return any(id(t) in tensors for block in members for t in (*block.parameters(), *block.buffers()))


# -- equality --------------------------------------------------------------------------------------------------------
_OF_TORCH = frozenset(vars(nn.Module()))
_HOOKS = tuple(sorted(name for name in _OF_TORCH if name.endswith("_hooks")))


def _are_equal(groups_of: Mapping[int, int], left: nn.Module, right: nn.Module, i: int, j: int) -> bool:
    """Whether blocks number `i` and `j` of a list are equal."""
    if type(left) is not type(right) or left.training != right.training:
        return False
    if left._modules.keys() != right._modules.keys() or any(vars(m)[name] for m in (left, right) for name in _HOOKS):
        return False
    if not _same_tensors(groups_of, left._parameters, right._parameters):
        return False
    if not _same_tensors(groups_of, left._buffers, right._buffers):
        return False
    own, other = ({name: v for name, v in vars(m).items() if name not in _OF_TORCH} for m in (left, right))
    if own.keys() != other.keys() or not all(_same_values(own[name], other[name], i, j) for name in own):
        return False
    children = zip(left._modules.values(), right._modules.values(), strict=True)
    return all(a is b or (a is not None and b is not None and _are_equal(groups_of, a, b, i, j)) for a, b in children)


def _same_tensors(
    groups_of: Mapping[int, int], left: Mapping[str, Tensor | None], right: Mapping[str, Tensor | None]
) -> bool:
    def kinds(tensors: Mapping[str, Tensor | None]) -> list[Any]:
        return [
            (name, t is not None and (tuple(t.shape), t.dtype, t.requires_grad, groups_of.get(id(t))))
            for name, t in tensors.items()
        ]

    return kinds(left) == kinds(right)


def _same_values(left: Any, right: Any, i: int, j: int) -> bool:
    """Whether two attributes are equal, or both count the blocks."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(_same_values(a, b, i, j) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same_values(left[key], right[key], i, j) for key in left)
    if isinstance(left, int) and not isinstance(left, bool):
        return bool(left == right or left - right == i - j)
    if isinstance(left, functools.partial):
        parts = [(p.func, p.args, p.keywords) for p in (left, right)]
        return _same_values(parts[0], parts[1], i, j)
    if isinstance(left, Tensor):
        kinds = ((t.shape, t.dtype, t.is_meta) for t in (left, right))
        return len(set(kinds)) == 1 and not left.is_meta and bool(torch.equal(left, right))
    plain = (float, complex, str, torch.dtype, torch.device, torch.Size)
    return isinstance(left, plain) and bool(left == right)


# -- shortening ------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def shortened(model: nn.Module, runs: Iterable[Run]) -> Iterator[None]:
    """While open, the model's lists hold only the periods of each run that are `kept`."""
    runs = tuple(runs)
    lists = {path: model.get_submodule(path) for path in {run.path for run in runs}}
    whole = {path: module._modules for path, module in lists.items()}
    try:
        for path, module in lists.items():
            own = [run for run in runs if run.path == path]
            module._modules = {n: m for n, m in whole[path].items() if _is_kept(f"{path}.{n}", own)}
        yield
    finally:
        for path, module in lists.items():
            module._modules = whole[path]


def _is_kept(block: str, runs: Iterable[Run]) -> bool:
    places = ((run, run.place(block)) for run in runs)
    return all(place is None or place[0] in run.kept for run, place in places)
