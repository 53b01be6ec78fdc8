"""One thread for each process, so that the suite's workers and ranks share the cores and numbers repeat."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure():
    import torch

    torch.set_num_threads(1)
