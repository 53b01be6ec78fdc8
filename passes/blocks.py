"""Blocks: the repeated modules of a model, which passes take as the grain of time."""

from __future__ import annotations

import re


def block_of(path: str) -> str:
    """`"model.layers.3.mlp"` → `"model.layers.3"`; a path without a number → its first name."""
    numbered = re.match(r"(.*?\.\d+)(\.|$)", path)
    return numbered.group(1) if numbered else path.partition(".")[0]
