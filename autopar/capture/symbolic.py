"""Sizes as formulas: a second trace in which the batch and the sequence are symbols.

    symbolic_shapes(request, graph)["linear_3"]     # (b, s, 256)

Invariants:
- `b` is the microbatch's number of samples, `s` the length of dim 1 of integer inputs (and of what shares it);
- a formula gives the static shape at the sizes of the step; where the model fixes a size, it is an int.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autopar.capture.gradient import Request, trace_gradient
from autopar.capture.graphs import Role
from autopar.errors import CaptureError
from autopar.private import size_expression

BATCH, SEQUENCE = sympy.Symbol("b", integer=True, positive=True), sympy.Symbol("s", integer=True, positive=True)

Shape = tuple[Any, ...]


def symbolic_shapes(request: Request, graph: fx.GraphModule) -> dict[str, Shape]:
    """Shape per node name of `graph`, the static trace of `request`; values without a shape are absent."""
    sizes = _symbolic_sizes(request.inputs)
    static = {node: shape for node in graph.graph.nodes if (shape := _shape(node)) is not None}
    try:
        names, formulas = _traced_formulas(request, sizes)
    except CaptureError:
        return {node.name: shape for node, shape in static.items()}
    at = {symbol: sizes[symbol] for symbol in sizes}
    found = {}
    for node, shape in static.items():
        formula = _renamed(formulas.get(node.meta["key"]), names)
        fits = formula is not None and _value_at(formula, at) == shape
        found[node.name] = formula if fits and formula is not None else shape
    return found


def _traced_formulas(
    request: Request, sizes: dict[sympy.Symbol, int]
) -> tuple[dict[Any, sympy.Symbol], dict[str, Shape]]:
    """The tracer's symbols → ours, and the shape by node key."""
    hints = _hints(request.inputs, sizes)
    inputs, dims = {}, {}
    for role, value in request.inputs.items():
        symbols = _dims_of(role, value, sizes)
        sizes_used = [hints[symbols[d]] if d in symbols else n for d, n in enumerate(value.shape)]
        inputs[role] = torch.empty(sizes_used, dtype=value.dtype, device="meta")
        if role.kind == "batch":
            dims[role] = tuple(symbols)
    traced = trace_gradient(dataclasses.replace(request, inputs=inputs, symbolic_dims=dims)).graph
    names: dict[Any, sympy.Symbol] = {}
    formulas = {}
    for node in traced.graph.nodes:
        shape = _shape(node)
        if shape is None:
            continue
        formulas[node.meta["key"]] = shape
        role = node.meta.get("role")
        if role is not None and role.kind == "batch":
            for dim, symbol in _dims_of(role, request.inputs[role], sizes).items():
                names[shape[dim]] = symbol
    return names, formulas


# -- which dims ------------------------------------------------------------------------------------------------------


def _symbolic_sizes(inputs: dict[Role, Tensor]) -> dict[sympy.Symbol, int]:
    """b and s with their sizes in the static trace."""
    batch = [value for role, value in inputs.items() if role.kind == "batch" and value.dim()]
    sizes = {BATCH: batch[0].shape[0]} if batch else {}
    lengths = [v.shape[1] for v in batch if v.dim() >= 2 and not v.is_floating_point() and not v.is_complex()]
    return {**sizes, SEQUENCE: lengths[0]} if lengths else sizes


def _dims_of(role: Role, value: Tensor, sizes: dict[sympy.Symbol, int]) -> dict[int, sympy.Symbol]:
    """Dim → symbol of an input."""
    if role.kind != "batch":
        return {}
    found = {0: BATCH} if value.dim() and value.shape[0] == sizes.get(BATCH) else {}
    if value.dim() >= 2 and value.shape[1] == sizes.get(SEQUENCE):
        found[1] = SEQUENCE
    return found


def _hints(inputs: dict[Role, Tensor], sizes: dict[sympy.Symbol, int]) -> dict[sympy.Symbol, int]:
    """Sizes to trace with: equal sizes would share a symbol, so each must differ from all of the model's."""
    taken = {n for value in inputs.values() for n in value.shape} - set(sizes.values()) | {0, 1}
    length = sizes.get(SEQUENCE, 0)
    hints = {SEQUENCE: _first_free(taken, itertools.chain([length], range(length - 1, 1, -1), itertools.count(2)))}
    batch = sizes.get(BATCH, 0)
    hints[BATCH] = _first_free(taken | {hints[SEQUENCE]}, itertools.chain([batch], itertools.count(3)))
    return hints


def _first_free(taken: set[int], candidates: Iterable[int]) -> int:
    return next(n for n in candidates if n not in taken)


# -- shapes ----------------------------------------------------------------------------------------------------------


def _shape(node: fx.Node) -> Shape | None:
    value = node.meta.get("val")
    return tuple(size_expression(size) for size in value.shape) if isinstance(value, Tensor) else None


def _renamed(shape: Shape | None, names: dict[Any, sympy.Symbol]) -> Shape | None:
    if shape is None:
        return None
    return tuple(size.xreplace(names) if isinstance(size, sympy.Expr) else size for size in shape)


def _value_at(shape: Shape, sizes: dict[sympy.Symbol, int]) -> Shape:
    values = (size.subs(sizes) if isinstance(size, sympy.Expr) else size for size in shape)
    return tuple(int(value) if getattr(value, "is_number", True) else value for value in values)
