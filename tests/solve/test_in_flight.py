"""What ranks hold moment by moment, counted along the rows of the schedule."""

from __future__ import annotations

import random

import pytest

from autopar.program.actions import Action
from autopar.program.generators import make_schedule
from autopar.solve.in_flight import fullest, held_at

SIZES = [(2, 1, 4), (4, 1, 2), (4, 1, 9), (2, 2, 4), (2, 6, 4), (4, 3, 32), (8, 4, 64), (3, 2, 8), (4, 2, 4)]


@pytest.mark.parametrize(("p", "v", "m"), SIZES)
def test_no_moment_of_the_schedule_holds_more(p: int, v: int, m: int) -> None:
    """However much each stage keeps of a microbatch, and its gradients take."""
    rng = random.Random(p * v * m)
    rows = make_schedule("1f1b" if v == 1 else "interleaved_1f1b", p, m, v)
    for _ in range(5):
        kept, gradients = ([rng.choice([0.0, rng.random()]) for _ in range(v)] for _ in range(2))
        for rank, row in enumerate(rows):
            now, begun, most = [0] * v, [0] * v, 0.0
            for action in map(Action.parse, row):
                stage = action.stage // p
                if action.kind == "B":
                    there = sum(a * b for a, b in zip(now, kept, strict=True))
                    there += sum(a * b for a, b in zip(begun, gradients, strict=True))
                    most = max(most, there)
                    begun[stage] = 1
                now[stage] += {"F": 1, "B": -1}[action.kind]

            def of(held: object, kept: list[float] = kept, gradients: list[float] = gradients) -> float:
                own = zip(held.kept, held.summed, kept, gradients, strict=True)  # type: ignore[attr-defined]
                return sum(a * k + b * g for a, b, k, g in own)

            for moments in (fullest(p, m, v)[rank], held_at(p, m, v)[rank]):
                assert max(map(of, moments)) == pytest.approx(most)
            assert {held.at for held in held_at(p, m, v)[rank]} == set(range(v))
