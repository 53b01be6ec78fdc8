"""Random ops drawn by the element's index, whatever runs them: the eager model, and the trace that captures it.

    with reference_rng(seed=0, step=3):         # the eager single-device model draws what a compiled step 3 draws
        loss = model(batch)
        loss.backward()

A dispatch mode answers each random op of ATen with `autopar.random_ops`. What tells two draws of a microbatch apart is
their name: the path of the module that draws, and how many draws that module made before ("blocks.3.attention#0"). So
equal layers draw alike but for their paths, and what stands for several (`folding`) knows the draws of all of them.

Draws are counted by the seed of torch's own CPU generator: what saves and restores that generator's state, as
`torch.utils.checkpoint` does around what it runs again, restores the count with it, and a count that has had its draw
has its name.

Invariants:
- an op draws one stream, over the row-major index of its result; so capture may draw another op's numbers for it, as
  long as there are as many draws of the same shapes in the same order;
- a random op that isn't in the table (`distributions`) is refused, never left to a generator of its own;
- torch's generator is put back as it was.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

import autopar.random_ops  # noqa: F401  (registers the ops)
from autopar.capture.distributions import DRAWS
from autopar.capture.labels import caller_source
from autopar.capture.running import Running, draw_name
from autopar.errors import CaptureError
from autopar.private import OpOverload, TorchDispatchMode
from autopar.randomness import microbatch_key
from autopar.rules.nodes import is_certain

Device = torch.device | None
Shape = Sequence[int]


@contextlib.contextmanager
def reference_rng(
    seed: int = 0, step: int = 0, microbatch: int = 0, *, model: nn.Module | None = None
) -> Iterator[None]:
    """Inside, an eager model draws the numbers that a compiled one draws in that step and microbatch.

    `seed`: as given to `program.start`; `step`: how many optimizer steps were made before; `microbatch`: which
    contiguous slice of the batch the model is given. Forward and backward both belong inside. Attention is computed by
    its definition on GPUs: fused kernels drop weights by numbers of their own.
    `model`: what the step was made of; to be given where the first module that is called inside is another (a wrapper
    of the model, or a part of it), as draws are named by paths in it.
    Raises `CaptureError` where a module draws that isn't part of the model.
    """
    key = torch.tensor(microbatch_key(seed, step, microbatch))
    with contextlib.ExitStack() as stack:
        if torch.cuda.is_available():
            from torch.nn.attention import SDPBackend, sdpa_kernel

            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(drawing(key, drawing.__code__, model))
        yield


@contextlib.contextmanager
def drawing(key: Tensor, root: CodeType, model: nn.Module | None = None) -> Iterator[Draws]:
    """Inside, random ops draw from `key` (an int64 scalar on the CPU).

    `root`: the code of the function in whose frames the user's line is looked for. `model`: by whose modules' paths
    draws are named; by default the first module that is called.
    """
    running = Running(model)
    mode = Draws(key, root, running)
    with torch.random.fork_rng(devices=[]), running.followed(), mode:
        torch.default_generator.manual_seed(0)
        yield mode


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws numbers, and answers random ops with them."""

    def __init__(self, key: Tensor, root: CodeType, running: Running) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key, self.root, self.running = key, root, running
        self._names: dict[int, str] = {}
        """By the count at which they were drawn."""
        self._counts: Counter[str] = Counter()
        """By path."""

    # -- numbers -------------------------------------------------------------------------------------------------
    def mask(self, shape: Shape, keep: float, device: Device = None) -> Tensor:
        """Bool, True with probability `keep`."""
        drawn: Tensor = torch.ops.autopar.random_mask(self.key, self._name(), shape, keep, device=device)
        return drawn

    def uniform(self, shape: Shape, dtype: torch.dtype, device: Device = None) -> Tensor:
        """In [0, 1)."""
        drawn: Tensor = torch.ops.autopar.random_uniform(self.key, self._name(), shape, dtype, device=device)
        return drawn

    def normal(self, shape: Shape, dtype: torch.dtype, device: Device = None) -> Tensor:
        """Standard normal."""
        drawn: Tensor = torch.ops.autopar.random_normal(self.key, self._name(), shape, dtype, device=device)
        return drawn

    def integers(self, shape: Shape, low: int, high: int, dtype: torch.dtype, device: Device = None) -> Tensor:
        """In [low, high)."""
        name = self._name()
        drawn: Tensor = torch.ops.autopar.random_integers(self.key, name, shape, low, high, dtype, device=device)
        return drawn

    def _name(self) -> str:
        generator = torch.default_generator
        count = generator.initial_seed()
        generator.manual_seed(count + 1)
        if count not in self._names:
            path = self.running.path
            self._names[count] = draw_name(path, self._counts[path])
            self._counts[path] += 1
        return self._names[count]

    # -- ops -----------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _may_draw(func) or is_certain(func, args, kwargs):
            return func(*args, **kwargs)
        generator = kwargs.pop("generator", None)
        if generator is not None or any(isinstance(argument, torch.Generator) for argument in args):
            raise CaptureError(
                f"{self._place(func)} draws from a generator of its own, which other ranks can't follow; "
                "use torch's default generator"
            )
        if func in DRAWS:
            return DRAWS[func](self, *args, **kwargs)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            known = sorted({str(op.overloadpacket.__name__) for op in DRAWS})
            raise CaptureError(
                f"{self._place(func)} draws numbers that can't be told from the element's index, so no two ranks would "
                f"agree on them; use one of {', '.join(known)}, or draw them outside and pass them in the batch"
            )
        return result

    def _place(self, func: OpOverload) -> str:
        where = caller_source(sys._getframe(1), self.root)
        return f"{func.overloadpacket.__name__} ({where or 'the model'})"


_UNTAGGED = {"random", "random_", "binomial", "_sample_dirichlet"}
"""Random ops that torch 2.13 doesn't tag as such."""


@functools.cache
def _may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket.__name__ in _UNTAGGED
