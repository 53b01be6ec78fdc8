"""Runs one op on values of one's own, at sizes of one's own: what rules are found and proven by.

    probe = at_shapes(node, [(6, 12), (12,)])         # the same call on other sizes, each operand a placeholder
    values = draw(probe, "ties", generator)           # float64, integers in range of every dim
    results = run(probe, values)

Invariants:
- attributes are the node's own, dtype arguments promoted to float64 as `verify` promotes them;
- the global random state is the same before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autopar import private
from autopar.errors import RuleError
from autopar.program.promote import default_float64, promoted_dtype
from autopar.rules.nodes import replace_operands, result_values, tensor_operands
from autopar.rules.notation import Shape

TOLERANCE = 1e-9
"""Of float64 results, relative to one plus their largest."""

KINDS = ("normal", "positive", "ties", "large")
"""Kinds of values: bell-shaped, within [0.5, 1.5), few and often zero, and in the thousands."""


def at_shapes(node: Node, shapes: Sequence[Shape]) -> Node:
    """The call of `node` on operands of these shapes, alone in a graph of its own; raises what the op raises."""
    graph, mode = Graph(), private.new_fake_mode()
    operands = tensor_operands(node)
    copies = [graph.placeholder(f"x{i}") for i in range(len(operands))]
    for copy, operand, shape in zip(copies, operands, shapes, strict=True):
        with mode:
            copy.meta = {"val": torch.empty(shape, dtype=operand.meta["val"].dtype)}
    env = dict(zip(operands, copies, strict=False))
    probe = graph.node_copy(node, env.__getitem__)
    replace_operands(probe, copies)
    args, kwargs = map_arg((probe.args, probe.kwargs), lambda n: n.meta["val"])
    target: Any = node.target
    with mode, torch.no_grad():
        probe.meta = {**node.meta, "val": target(*args, **kwargs)}
    return probe


def draw(probe: Node, kind: str, generator: torch.Generator) -> list[Tensor]:
    """Values for the probe's operands."""
    sizes = [n for operand in tensor_operands(probe) for n in operand.meta["val"].shape if n > 1]
    limit = 2 if kind in ("normal", "ties") else min(sizes, default=2)
    return [draw_like(operand, kind, generator, limit) for operand in tensor_operands(probe)]


def draw_like(operand: Node, kind: str, generator: torch.Generator, limit: int = 2) -> Tensor:
    """Values for one operand: floats in float64, integers below `limit`."""
    value = operand.meta["val"]
    shape, dtype = tuple(map(int, value.shape)), value.dtype
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if not dtype.is_floating_point:
        return torch.randint(0, limit, shape, generator=generator).to(dtype)
    if kind == "positive":
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    if kind == "ties":
        return torch.randint(-2, 3, shape, generator=generator).double()
    scale = 1e4 if kind == "large" else 1.0
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


Run = Callable[[Sequence[Tensor]], list[Tensor | None]]


def prepare(probe: Node) -> Run:
    """The call as a function of its operands' values (it gets copies: an op may write to what it is given)."""
    leaves, spec = pytree.tree_flatten((probe.args, probe.kwargs), is_leaf=lambda a: isinstance(a, Node))
    leaves = [promoted_dtype(leaf) if isinstance(leaf, torch.dtype) else leaf for leaf in leaves]
    operands = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Node)]
    target: Any = probe.target

    def call(values: Sequence[Tensor]) -> list[Tensor | None]:
        given = list(leaves)
        for i, value in zip(operands, values, strict=True):
            given[i] = value
        args, kwargs = pytree.tree_unflatten(given, spec)
        got = target(*args, **kwargs)
        return [
            item if isinstance(item, Tensor) else None for item in (got if isinstance(got, (tuple, list)) else [got])
        ]

    return call


@contextmanager
def trials() -> Iterator[None]:
    """Inside, ops run as `verify` runs them, and leave the global random state as it was."""
    with torch.random.fork_rng(devices=[]), default_float64(), torch.no_grad():
        yield


def run(probe: Node, values: Sequence[Tensor]) -> list[Tensor | None]:
    """The call's results on these values."""
    with trials():
        return prepare(probe)(values)


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest difference relative to one plus the largest expected value; infinite where they can't be equal."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    a, b, finite = got.to(wide), expected.to(wide), expected.isfinite()
    if not torch.allclose(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    a, b = a[finite], b[finite]
    relative = float((a - b).abs().max() / (1 + b.abs().max())) if a.numel() else 0.0
    return relative if relative == relative else float("inf")


def is_equal(got: Tensor | None, expected: Tensor | None) -> bool:
    """Equal up to rounding; two absent results are."""
    if got is None or expected is None:
        return got is expected
    return difference(got, expected) <= TOLERANCE


# -- what an op does besides returning results --------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Observed:
    """What one op was seen to do on trial values."""

    draws: bool
    """It advanced the random state."""
    repeats: bool
    """Two runs on equal operands gave the same."""
    writes: int | None
    """The first operand that it wrote to."""
    varying: tuple[bool, ...]
    """Per result, whether it has two values: a kernel may give zeros, and no error, at sizes that it isn't made for."""


def observed(probe: Node) -> Observed:
    """What the call does on each kind of values; raises `RuleError` where it takes none."""
    generator, failure = torch.Generator().manual_seed(0), ""
    seen, results = list[Observed](), list[list[Tensor | None]]()
    for kind in KINDS:
        values = draw(probe, kind, generator)
        try:
            if not seen:
                seen.append(_observe(probe, values))
            results.append(run(probe, values))
        except Exception as error:  # whatever the op raises: other values may do
            failure = f"{type(error).__name__}: {first_line(error)}"
    if not results:
        raise RuleError(f"it can't be run on trial values ({failure})")
    return replace(seen[0], varying=tuple(map(_varies, zip(*results, strict=True))))


def _varies(results: Sequence[Tensor | None]) -> bool:
    values = [r.double().flatten() for r in results if r is not None]
    if not values:
        return True
    together = torch.cat(values)
    finite = together[together.isfinite()]
    return bool(finite.numel()) and bool((finite != finite[0]).any())


def first_line(error: Exception) -> str:
    """Of the error's message."""
    return str(error).strip().partition("\n")[0]


def _observe(probe: Node, values: Sequence[Tensor]) -> Observed:
    call = prepare(probe)
    given = [value.clone() for value in values]
    with trials():
        before = torch.get_rng_state()
        first = [None if result is None else result.clone() for result in call(given)]
        draws = not torch.equal(before, torch.get_rng_state())
        second = call([value.clone() for value in values])
    written = [i for i, (new, old) in enumerate(zip(given, values, strict=True)) if not is_equal(new, old)]
    return Observed(draws, draws or all(map(is_equal, first, second)), written[0] if written else None, ())


def fake_shapes(probe: Node) -> list[Shape | None]:
    """The shapes of the probe's results by its fake kernel, None where one is absent."""
    return [None if r is None else tuple(map(int, r.shape)) for r in result_values(probe)]


def num_elements(probe: Node) -> int:
    """Of all operands and results together."""
    values = [operand.meta["val"] for operand in tensor_operands(probe)]
    return sum(value.numel() for value in (*values, *result_values(probe)) if value is not None)
