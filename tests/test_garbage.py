"""What was set about garbage collection comes back, also from within another block."""

import gc

import pytest

from autopar.garbage import ALLOCATIONS, collected_seldom


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    yield gc.set_threshold
    gc.set_threshold(*before)


def test_the_outermost_block_decides(thresholds):
    thresholds(700, 10, 5)
    with collected_seldom():
        assert gc.get_threshold() == (ALLOCATIONS, 10, 5)
        frozen = gc.get_freeze_count()
        with collected_seldom():
            pass
        assert gc.get_threshold() == (ALLOCATIONS, 10, 5)
        assert gc.get_freeze_count() == frozen > 0
    assert gc.get_threshold() == (700, 10, 5)
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("allocations", [0, ALLOCATIONS])
def test_who_collects_as_seldom_is_left_alone(allocations, thresholds):
    thresholds(allocations, 10, 10)
    with collected_seldom():
        assert gc.get_threshold() == (allocations, 10, 10)
        assert gc.get_freeze_count() == 0
