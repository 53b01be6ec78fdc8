"""What passes are given beside the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from autopar.mesh import Mesh
from autopar.reshard import Resharder
from autopar.rules.choices import Choice
from autopar.solve.windows import SMALL_BYTES


@dataclass(frozen=True, slots=True)
class Overlap:
    """How far communication may run ahead."""

    gathered_bytes: int = 1 << 30
    """Greatest total of gathered buffers whose first reader hasn't run yet; and of what is reduced at one time."""
    outstanding: int = 64
    """Greatest number of collectives in flight."""
    blocks_ahead: int = 1
    small_bytes: int = SMALL_BYTES
    """Largest tensor (whole) whose gather may come long before its use, with those of other blocks."""
    bucket_bytes: int = 1 << 21
    """Largest tensor (whole) that travels with others of its block."""


@dataclass(frozen=True, slots=True)
class Context:
    """The plan's part of a lowering: choices by node key, what is recomputed, and where it will run."""

    mesh: Mesh
    microbatches: int
    choices: Mapping[str, Choice]
    state_pairs: tuple[tuple[Node, Node], ...]
    resharder: Resharder
    recomputed: frozenset[str] = frozenset()
    overlap: Overlap = Overlap()
