"""Every strategy of PyTorch's DTensor that is right is allowed by the table, at every example's shapes.

What isn't is named with its reason; what DTensor allows wrongly is left out by execution.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.rules.examples import EXAMPLES
from autopar.rules.examples.tagged import tagged_examples
from tests.rules.dtensor_strategies import Strategy, compared, strategies

FACTORIES = ("full_like", "zeros_like", "ones_like", "empty_like", "new_full", "new_zeros", "new_ones", "new_empty")
REASONS: dict[str, str] = {
    **dict.fromkeys((f"aten.{name}" for name in FACTORIES), "takes only the dtype: capture makes it a plain factory"),
    "aten.new_empty_strided": "takes only the dtype",
    "aten._linalg_solve_ex": "partial sums pass to one of several results: not in the notation",
    **dict.fromkeys(
        ("aten.addmm", "aten.baddbmm"), "an axis that splits the sum and finds a partial addend: two roles of one axis"
    ),
    "aten.nansum": "addends of a partial value may be NaN where the value is not",
    "aten.any": "a sum of bools: there is no collective of bools",
    "aten.index_put": "which of two equal indices wins may differ from rank to rank",
    "aten.cat": "an operand of the old-style shape [0]",
    "aten.index_fill": "a number that is put into every addend",
    **dict.fromkeys(
        ("aten._native_batch_norm_legit_functional", "aten._native_batch_norm_legit_no_training"),
        "splits a result without elements",
    ),
    "aten.native_batch_norm_backward": "splits an operand without elements",
    "aten.lu_unpack": "splits a result without elements",
    "aten.special_xlog1py": "0 times infinity: wrong on values that are zero",
    "aten.xlogy": "0 times infinity: wrong on values that are zero",
}
"""Ops of which DTensor allows more than the table, and why."""


def passes_on_other_than_sums(strategy: Strategy) -> bool:
    """Only sums pass through ops here; a partial maximum or mean is reduced before it is read."""
    return any(p in ("P(avg)", "P(max)", "P(min)", "P(product)") for p in strategy[0])


@pytest.fixture(scope="module")
def mesh() -> Iterator[object]:
    """An axis of two devices without processes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@functools.cache
def examples() -> dict:
    return {**EXAMPLES, **tagged_examples()}


def test_every_right_strategy_is_allowed(mesh, record_property) -> None:
    counts: Counter[str] = Counter()
    missing = []
    for op, calls in examples().items():
        for example in calls:
            try:
                found = [c for c in compared(example, mesh) if not passes_on_other_than_sums(c[0])]
            except (KeyError, IndexError, RuntimeError):
                counts["refused"] += 1  # DTensor's own functions refuse some placements that they are asked about
                continue
            for strategy, is_ours, is_right in found:
                counts["allowed" if is_ours else "wrong" if is_right is False else "more"] += 1
                if is_right and not any(op == name or op.startswith(f"{name}.") for name in REASONS):
                    missing.append(f"{example}: {strategy}")
    for name, count in counts.items():
        record_property(name, count)
    assert not missing, "\n".join(missing)
    assert counts["allowed"] >= 1000


def test_ops_that_dtensor_lacks(mesh, record_property) -> None:
    def is_known(op: str) -> bool:
        try:
            return strategies(EXAMPLES[op][0], mesh) is not None
        except (KeyError, IndexError, RuntimeError):
            return True

    lacking = [op for op in EXAMPLES if op.startswith("aten.") and not is_known(op)]
    record_property("lacking", len(lacking))
    assert len(lacking) >= 100
