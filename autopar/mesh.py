"""A mesh: named axes over ranks, outermost first.

    Mesh.parse("pp=2 dp=2 tp=4")        # 16 ranks; rank = (pp * 2 + dp) * 4 + tp
    Mesh.parse("pp=2 dp=2 virtual=3")   # 4 ranks, 6 pipeline stages: 0, 2 and 4 at pp=0

Invariants:
- ranks are numbered row-major over the axes, the last axis varying fastest;
- `pp` numbers the ranks of a pipeline and splits no tensor; every other axis is an SPMD axis;
- stage s is at pp = s mod the size of `pp`: each has one stage, or several *virtual* ones (Narayanan et al., SC'21).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from autopar.errors import PlanError

PIPELINE_AXIS = "pp"
VIRTUAL = "virtual"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axis names with their sizes, outermost first."""

    axes: tuple[tuple[str, int], ...]
    virtual: int = 1
    """Pipeline stages of each rank."""

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """`"dp=2 tp=4"` as a mesh; raises `PlanError` when malformed."""
        try:
            pairs = tuple((name, int(size)) for name, size in (part.split("=") for part in text.split()))
        except ValueError:
            raise PlanError(f"mesh {text!r}: expected AXIS=SIZE pairs such as 'dp=2 tp=4'") from None
        names = [name for name, _ in pairs]
        if not all(names) or len(set(names)) < len(names) or any(size < 1 for _, size in pairs):
            raise PlanError(f"mesh {text!r}: expected distinct axes with sizes of at least 1, such as 'dp=2 tp=4'")
        return cls(tuple(pair for pair in pairs if pair[0] != VIRTUAL), dict(pairs).get(VIRTUAL, 1))

    def __str__(self) -> str:
        words = [f"{name}={size}" for name, size in self.axes]
        return " ".join([*words, f"{VIRTUAL}={self.virtual}"] if self.virtual > 1 else words)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def num_ranks(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def num_stages(self) -> int:
        return self.size(PIPELINE_AXIS) * self.virtual

    def stages_at(self, coordinate: int) -> tuple[int, ...]:
        """The pipeline stages of the ranks at a coordinate of `pp`."""
        return tuple(range(coordinate, self.num_stages, self.size(PIPELINE_AXIS)))

    @property
    def spmd(self) -> Mesh:
        """The mesh of one pipeline stage."""
        kept = tuple(pair for pair in self.axes if pair[0] != PIPELINE_AXIS)
        return self if len(kept) == len(self.axes) and self.virtual == 1 else Mesh(kept)

    def with_stages(self, count: int) -> Mesh:
        """The same with `count` pipeline stages, one a rank, where it has any."""
        return Mesh(tuple((name, count if name == PIPELINE_AXIS else size) for name, size in self.axes))

    def size(self, axis: str) -> int:
        """Number of ranks along `axis` (1 when the mesh has no such axis)."""
        for name, size in self.axes:  # asked in every inner loop
            if name == axis:
                return size
        return 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's position along each axis."""
        position: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, position[name] = divmod(rank, size)
        return {name: position[name] for name in self.names}

    def rank(self, coordinates: dict[str, int]) -> int:
        """The rank at `coordinates` (missing axes count as 0)."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinates.get(name, 0)
        return rank

    def groups(self, axis: str) -> list[list[int]]:
        """The rank lists along `axis`, each in the order of its coordinate, sorted by first rank."""
        others = [(name, size) for name, size in self.axes if name != axis]
        groups = []
        for position in itertools.product(*(range(size) for _, size in others)):
            fixed = dict(zip((name for name, _ in others), position, strict=True))
            groups.append([self.rank({**fixed, axis: i}) for i in range(self.size(axis))])
        return sorted(groups)
