"""How long this machine takes: matmuls, copies and launches of one device, timed.

    best_s(lambda: left @ right, torch.device("cpu"))       # seconds of one call
    matmul_s(torch.device("cpu"), torch.float32, (512, 512, 512), time.perf_counter)

Invariants:
- of many short batches of calls the fastest counts: noise only adds time, and a short batch may escape it;
- a rank that has a core to itself times its own work by what that core gave it, whatever else runs on the machine;
- ranks that work together (`slowest` gives them all the greatest of their figures) call equally often, and of each
  batch the rank counts that took longest: one that comes late to a collective finds it nearly done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Slowest = Callable[[Sequence[float]], Sequence[float]]
"""Figures of this rank → of each the greatest of all ranks'."""

Clock = Callable[[], float]

BUDGET_S = 0.1
"""About how long a figure may take, if a few calls aren't longer."""
BATCH_S = 2e-3
FIRST_CALLS = 3
CLOCK_S = 1e-7
"""A coarse clock may say that nothing has passed."""
LONG_S = 0.01
"""Where sizes rise, one that takes longer is the last: the next takes several times as long."""
COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}


def alone(figures: Sequence[float]) -> Sequence[float]:
    """`Slowest` of a rank that works by itself."""
    return figures


def own_clock(device: torch.device, num_ranks: int, num_cores: int) -> Clock:
    """For the work of one of `num_ranks` ranks by itself: the processor time of its one thread, where each rank has a
    core; else the wall clock."""
    import torch

    has_core = device.type == "cpu" and torch.get_num_threads() == 1 and num_ranks <= num_cores
    return time.thread_time if has_core else time.perf_counter


def best_s(
    work: Callable[[], object], device: torch.device, slowest: Slowest = alone, clock: Clock = time.perf_counter
) -> float:
    """Seconds of one call of `work`, in the fastest of several batches."""
    _timed(work, 1, device, clock)
    once_s = max(CLOCK_S, min(slowest([_timed(work, 1, device, clock) for _ in range(FIRST_CALLS)])))
    calls = max(1, round(BATCH_S / once_s))
    batches = max(1, round(BUDGET_S / (calls * once_s)))
    return min(once_s, *slowest([_timed(work, calls, device, clock) / calls for _ in range(batches)]))


def _timed(work: Callable[[], object], calls: int, device: torch.device, clock: Clock) -> float:
    import torch

    start = clock()
    for _ in range(calls):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def matmul_s(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], clock: Clock) -> float:
    """Seconds of [m, k] × [k, n], where `shape` is (m, k, n), of random numbers: a GPU is faster with equal ones."""
    import torch

    m, k, n = shape
    generator = torch.Generator(device).manual_seed(0)
    left = torch.randn(m, k, device=device, generator=generator).to(dtype)
    right = torch.randn(k, n, device=device, generator=generator).to(dtype)
    return best_s(lambda: left @ right, device, clock=clock)


def moved_byte_s(device: torch.device, clock: Clock) -> float:
    """Seconds of each byte that a copy too large for a cache reads or writes; it reads and writes each byte once."""
    import torch

    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return best_s(lambda: target.copy_(source), device, clock=clock) / (2 * source.numel())


def launch_s(device: torch.device, clock: Clock) -> float:
    """Seconds of an op that has nearly nothing to do."""
    import torch

    small = torch.ones(16, device=device)
    return best_s(lambda: small.add_(1), device, clock=clock)


def rounded(value: float, digits: int) -> float:
    """`value` to so many significant digits: no more than a measurement gives."""
    return float(f"{value:.{digits}g}")
