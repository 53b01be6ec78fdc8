"""What a user fixes before the search: one small language for `--pin` and `pin=`.

    parse_pins("tp=2 zero=3, model.layers.*.mlp: tp=out")

    AXIS=N                            the size of a mesh axis; pp is the number of pipeline stages
    zero=0..3                         how much of the state is split over data parallel ranks
    microbatches=N                    how many microbatches one optimizer step has
    virtual=N                         how many pipeline stages each rank has
    recompute=none|full|GLOB          which modules run their forward again in the backward
    GLOB: AXIS=in|out|heads|experts|vocab|batch|seq|none
                                      what the axis splits in the modules that the glob matches
    GLOB: stage=N                     the pipeline stage, from 0, of the layers that the glob matches (one stage a rank)

Invariants:
- `parse_pins(str(pins)) == pins`;
- a pin is separated from the next by commas or white space, so one string and a list of strings say the same;
- nothing is fixed twice.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import PlanError

SPLITS = ("in", "out", "heads", "experts", "vocab", "batch", "seq", "none")
"""What an axis can split in a module: the dims of its weight, attention heads, experts, vocabulary, batch, sequence."""

EXAMPLES = "tp=2, zero=3, microbatches=4, recompute=full, 'model.layers.*.mlp.up_proj: tp=out'"

_WORDS = re.compile(r"[^\s,:]+\s*:\s*[^\s,]*|[^\s,]+")
_AXIS = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class ModulePin:
    """In the modules that `glob` matches, `axis` splits `what` (one of `SPLITS`)."""

    glob: str
    axis: str
    what: str

    def __str__(self) -> str:
        return f"{self.glob}: {self.axis}={self.what}"

    def matches(self, path: str) -> bool:
        """Whether the module at `path`, or one around it, is meant."""
        return matches_module(self.glob, path)


@dataclass(frozen=True, slots=True)
class StagePin:
    """The layers of the modules that `glob` matches are on pipeline stage `stage`, counted from 0."""

    glob: str
    stage: int

    def __str__(self) -> str:
        return f"{self.glob}: stage={self.stage}"


@dataclass(frozen=True, slots=True)
class Pins:
    """All pins of one search; what is None or absent is free."""

    axes: dict[str, int] = field(default_factory=dict)
    zero: int | None = None
    microbatches: int | None = None
    virtual: int | None = None
    recompute: str | None = None
    modules: tuple[ModulePin, ...] = ()
    stages: tuple[StagePin, ...] = ()

    def __str__(self) -> str:
        words = [f"{axis}={size}" for axis, size in self.axes.items()]
        words += [f"{key}={value}" for key in _SCALARS if (value := getattr(self, key)) is not None]
        return ", ".join([*words, *map(str, self.modules), *map(str, self.stages)])

    @property
    def named_axes(self) -> set[str]:
        """The mesh axes that some pin names, which therefore can't change places."""
        zero = {"dp"} if self.zero is not None else set()
        return {*self.axes, *zero, *(pin.axis for pin in self.modules)}

    @property
    def splits_are_free(self) -> bool:
        """Whether no pin says how anything is split."""
        return self.zero is None and not self.modules and not self.axes.keys() - {"pp"}

    def check(self, axes: Iterable[str], paths: Iterable[str]) -> None:
        """Raises `PlanError` for a pin that matches none of the search's mesh axes or the model's module paths."""
        axes, paths = tuple(axes), tuple(paths)
        for axis in (*self.axes, *(pin.axis for pin in self.modules)):
            if axis not in axes:
                raise PlanError(f"pin {axis!r}: no such mesh axis; the axes of this search are {', '.join(axes)}")
        globs = [*(pin.glob for pin in self.modules), *(pin.glob for pin in self.stages)]
        if self.recompute not in (None, "none", "full"):
            globs.append(str(self.recompute))
        for glob in globs:
            if not any(matches_module(glob, path) for path in paths):
                raise PlanError(f"pin {glob!r}: matches no module of the model; {_suggest(glob, paths)}")


def matches_module(glob: str, path: str) -> bool:
    """Whether `glob` matches the module path or that of a module around it: `layers.*` takes in all below it."""
    parts = path.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[: n + 1]), glob) for n in range(len(parts)))


def parse_pins(pins: str | Sequence[str] | Pins | None) -> Pins:
    """Pins from one string or several; raises `PlanError` that names a malformed or contradictory one."""
    if isinstance(pins, Pins):
        return pins
    parsed = Pins()
    for text in [pins] if isinstance(pins, str) else pins or ():
        for word in _WORDS.findall(text):
            parsed = _add(parsed, word)
    return parsed


def _add(pins: Pins, word: str) -> Pins:
    glob, colon, setting = (part.strip() for part in word.rpartition(":"))
    key, equals, value = setting.partition("=")
    if not equals or not _AXIS.fullmatch(key) or (colon and not glob):
        raise _malformed(word, "expected AXIS=N, zero=N, microbatches=N, virtual=N, recompute=… or GLOB: AXIS=…")
    if glob and key == "stage":
        return _add_stage(pins, word, StagePin(glob, _number(word, value, at_least=0)))
    if glob:
        return _add_module(pins, word, ModulePin(glob, key, value))
    if key in _SCALARS:
        return _add_scalar(pins, word, key, value)
    if value in SPLITS:
        raise _malformed(word, f"which modules? Write 'GLOB: {word}'")
    if key == "stage":
        raise _malformed(word, f"which modules? Write 'GLOB: {word}'; their number is pp=N")
    size = _number(word, value, at_least=1)
    _refuse_twice(word, pins.axes.get(key), size)
    return replace(pins, axes={**pins.axes, key: size})


def _add_module(pins: Pins, word: str, pin: ModulePin) -> Pins:
    if pin.what not in SPLITS:
        raise _malformed(word, f"expected one of {', '.join(SPLITS)} after '{pin.axis}='")
    before = next((p.what for p in pins.modules if (p.glob, p.axis) == (pin.glob, pin.axis)), None)
    _refuse_twice(word, before, pin.what)
    return replace(pins, modules=(*pins.modules, pin)) if before is None else pins


def _add_stage(pins: Pins, word: str, pin: StagePin) -> Pins:
    before = next((p.stage for p in pins.stages if p.glob == pin.glob), None)
    _refuse_twice(word, before, pin.stage)
    return replace(pins, stages=(*pins.stages, pin)) if before is None else pins


def _add_scalar(pins: Pins, word: str, key: str, text: str) -> Pins:
    value: Any = _SCALARS[key](word, text)
    _refuse_twice(word, getattr(pins, key), value)
    return replace(pins, **{key: value})


def _zero(word: str, text: str) -> int:
    if text not in ("0", "1", "2", "3"):
        raise _malformed(word, "expected a stage from 0 to 3")
    return int(text)


def _number(word: str, text: str, at_least: int = 1) -> int:
    if not text.isdecimal() or int(text) < at_least:
        raise _malformed(word, f"expected a whole number of at least {at_least} after '='")
    return int(text)


def _glob(word: str, text: str) -> str:
    if not text:
        raise _malformed(word, "expected none, full or a glob of module paths")
    return text


_SCALARS: dict[str, Callable[[str, str], int | str]] = {
    "zero": _zero,
    "microbatches": _number,
    "virtual": _number,
    "recompute": _glob,
}


def _refuse_twice(word: str, before: object, now: object) -> None:
    if before is not None and before != now:
        raise PlanError(f"pin {word!r}: contradicts an earlier pin, which says {before}; keep one of the two")


def _malformed(word: str, expected: str) -> PlanError:
    return PlanError(f"pin {word!r}: {expected}; for example {EXAMPLES}")


def _suggest(glob: str, paths: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(glob, paths, n=3, cutoff=0.4)
    return f"modules near it: {', '.join(close or paths[:5])}"
