"""Rankings of plans that are known come out of the cost model; all of them: `python -m tests.bench.rankings`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bench.rankings import RANKINGS, Ranking, comes_out, predicted

BY_NAME = {ranking.name: ranking for ranking in RANKINGS}


def some(name: str, *labels: str) -> Ranking:
    """A ranking of a few of its plans, in the known order."""
    ranking = BY_NAME[name]
    runs = tuple(run for run in ranking.runs if run.label in labels)
    assert len(runs) == len(labels), (ranking, labels)
    return replace(ranking, runs=runs)


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("figure 13, batch 32: pp x tp", ("8 x 8", "4 x 16", "16 x 4")),
        ("NVLink joins 8: pp x tp", ("8 x 8", "4 x 16")),
        ("NVLink joins 72: pp x tp", ("4 x 16", "8 x 8")),
    ],
)
def test_ranking(name: str, labels: tuple[str, ...]) -> None:
    found = predicted(some(name, *labels))
    assert comes_out(found), found
