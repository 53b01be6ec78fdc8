"""This process as one rank of a job: its device, and joining and leaving torch's default process group.

Invariants:
- a group that was made here is left at the interpreter's exit at the latest: gloo's threads must not outlive it;
- a group that the caller made is the caller's to end.
"""

from __future__ import annotations

import atexit
import importlib
import os

import torch
import torch.distributed as dist


def own_device(device: str | torch.device | None = None) -> torch.device:
    """`device`, by default this rank's GPU (by `LOCAL_RANK`) or the processor; a GPU becomes the current one."""
    if device is None:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def join(device: torch.device) -> bool:
    """Joins the default process group; whether it had to be made."""
    if dist.is_initialized():
        return False
    # Its functions have the world's group as default arguments: imported later, they would keep it beyond its end.
    importlib.import_module("torch.distributed.nn.functional")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    atexit.register(leave)
    return True


def leave() -> None:
    """Ends the default process group, if there still is one."""
    atexit.unregister(leave)
    if dist.is_initialized():
        dist.destroy_process_group()
