"""Globs of node keys: many at once match what each alone does."""

from __future__ import annotations

import fnmatch

import pytest

from autopar.key_globs import matches_any

KEYS = (
    "h.0.up/linear/forward#0",
    "h.0.up/linear/forward#10",
    "h.12.up/add/forward#0",
    "h[0]/add/forward#0",
    "a\nb",
    "",
)


@pytest.mark.parametrize(
    "globs",
    [(), ("",), ("*",), ("h.*/forward#0", "a*"), ("h[0]/add/forward#0",), ("h.0.up/*#1?", "nothing"), ("h.[!0]*",)],
)
def test_a_key_matches_where_one_of_the_globs_does_or_is_it(globs: tuple[str, ...]) -> None:
    expected = [any(key == glob or fnmatch.fnmatchcase(key, glob) for glob in globs) for key in KEYS]
    assert [matches_any(key, globs) for key in KEYS] == expected
    assert [matches_any(key, iter(globs)) for key in KEYS] == expected
