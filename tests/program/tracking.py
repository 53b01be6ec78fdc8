"""Measures allocations on the CPU: which storages are alive after each dispatched op."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tracker(TorchDispatchMode):
    """`peak`: the most bytes of storages alive at once, of those given to `watch` and those made inside the mode."""

    def __init__(self):
        super().__init__()
        self.known, self.peak, self.at = {}, 0, ""

    def watch(self, *tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def live(self):
        self.known = {key: entry for key, entry in self.known.items() if not entry[0].expired()}
        return sum(size for _, size in self.known.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.live()
        self.watch(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)))
        now = self.live()
        if now > self.peak:
            self.peak, self.at = now, str(func)
        return result
