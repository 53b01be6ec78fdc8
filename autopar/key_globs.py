"""Few globs for many node keys: what a plan lists of forward nodes, as lines that people read.

    forward_globs({"h.0.up/linear/forward#0", "h.1.up/linear/forward#0"}, keep_out=set())    # ("h.*/forward#*",)

Invariants:
- each wanted key matches one of the globs, and no key of `keep_out` does;
- a module is named whole where that is right, all layers at once where they agree, single keys where nothing else is.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Collection, Iterable, Iterator


def forward_globs(wanted: Collection[str], keep_out: Collection[str]) -> tuple[str, ...]:
    """Globs that match all of `wanted` (keys of forward nodes) and none of `keep_out`, the broadest first tried."""
    left = dict.fromkeys(wanted)
    tried: dict[str, bool] = {}
    globs: list[str] = []
    while left:
        key = next(iter(left))
        glob = next(g for g in _candidates(key) if _keeps_out(g, keep_out, tried))
        globs.append(glob)
        matches = re.compile(fnmatch.translate(glob)).match
        left = {other: None for other in left if not matches(other) and other != key}
    return tuple(globs)


def matches_any(key: str, globs: Iterable[str]) -> bool:
    """Whether a key is one of `globs`, or matches one."""
    globs = tuple(globs)
    return key in globs or _any_of(globs).match(key) is not None


@functools.lru_cache(maxsize=64)
def _any_of(globs: tuple[str, ...]) -> re.Pattern[str]:
    """What matches one of `globs`; without any, nothing."""
    return re.compile("|".join(map(fnmatch.translate, globs)) or r"(?!)")


def class_of(name: str) -> str:
    """A module path or node key with `*` for the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=[./]|$)|^\d+(?=[./])", "*", name)


def _keeps_out(glob: str, keep_out: Collection[str], tried: dict[str, bool]) -> bool:
    if glob not in tried:
        matches = re.compile(fnmatch.translate(glob)).match
        tried[glob] = not any(matches(key) for key in keep_out)
    return tried[glob]


def _candidates(key: str) -> Iterator[str]:
    """From the broadest to the key itself: modules around it in all layers, its op in all layers, then in its own."""
    path, _, rest = key.partition("/")
    op, _, occurrence = rest.rpartition("/forward#")
    anywhere = ".".join("*" if name.isdigit() else name for name in path.split("."))
    for names in dict.fromkeys((anywhere, path)):
        parts = names.split(".") if names else []
        yield from (".".join(parts[:count]) + ".*/forward#*" for count in range(1, len(parts)))
        if names:
            yield f"{names}/*/forward#*"
        yield f"{names}/{op}/forward#*"
        yield f"{names}/{op}/forward#{occurrence}"
    yield key
