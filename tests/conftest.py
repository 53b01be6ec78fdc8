"""One thread for each process, so that the suite's workers and ranks share the cores and numbers repeat; garbage is
collected seldom, as while a plan is made."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure():
    import torch

    from autopar.garbage import ALLOCATIONS

    torch.set_num_threads(1)
    gc.set_threshold(ALLOCATIONS, *gc.get_threshold()[1:])
