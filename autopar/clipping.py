"""Clipping by the global norm of all gradients, as nodes of the step graph (Pascanu et al. 2013, algorithm 1).

    total = g0·g0 + g1·g1 + …;  norm = sqrt(total);  g ← g * min(1, limit / (norm + 1e-6))

The numbers are those of `torch.nn.utils.clip_grad_norm_` on one device. A gradient's sum of squares is partial over the
axes that split the gradient, and partial sums are added before they are reduced: so a stage has one scalar all-reduce
per axis, not one per parameter. Each stage's sum goes, reduced, to every other stage, which adds them up itself.

Invariants:
- a gradient counts once, tied parameters as the one parameter that they are;
- with several stages, sums of squares stand in a phase of their own, `norm`, that no stage's update precedes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.markers import plus, relay

aten = torch.ops.aten

EPSILON = 1e-6
"""What torch adds to the norm."""


def clip_by_norm(graph: Graph, gradients: Mapping[str, Node], limit: float) -> tuple[dict[str, Node], Node]:
    """The clipped gradients by parameter, and the norm before clipping, on the first stage that has parameters.

    `gradients` are whole sums over microbatches, in the phase in which their squares are to be summed.
    """
    totals: dict[int, Node] = {}
    for name, gradient in gradients.items():
        stage, squares = gradient.meta["stage"], _squares(graph, gradient, name)
        before = totals.get(stage)
        totals[stage] = squares if before is None else _call(graph, plus, (before, squares), squares, path=name)
    if len(totals) > 1:  # reduced once, by the stage's own ranks, before others get it
        totals = {stage: _call(graph, relay, (own,), own, path="", is_whole=True) for stage, own in totals.items()}
    norms = {stage: _norm(graph, stage, list(totals.values())) for stage in sorted(totals)}
    scales = {stage: _scale(graph, norm, limit) for stage, norm in norms.items()}
    clipped = {
        name: _call(graph, aten.mul.Tensor, (gradient, scales[gradient.meta["stage"]]), gradient, phase="update")
        for name, gradient in gradients.items()
    }
    return clipped, norms[min(norms)]


def _squares(graph: Graph, gradient: Node, name: str) -> Node:
    """The sum of a gradient's squares, in fp32 at least."""
    wide = gradient
    if gradient.meta["val"].element_size() < 4:
        wide = _call(graph, aten._to_copy.default, (gradient,), gradient, path=name, dtype=torch.float32)
    squares = _call(graph, aten.mul.Tensor, (wide, wide), wide, path=name)
    return _call(graph, aten.sum.default, (squares,), squares, path=name)


def _norm(graph: Graph, stage: int, totals: list[Node]) -> Node:
    """The norm, as `stage` computes it from every stage's total."""
    here = {"phase": "update", "stage": stage, "path": "", "is_whole": True}
    total = functools.reduce(lambda a, b: _call(graph, plus, (a, b), a, **here), totals)
    return _call(graph, aten.sqrt.default, (total,), total, **here)


def _scale(graph: Graph, norm: Node, limit: float) -> Node:
    positive = _call(graph, aten.add.Tensor, (norm, EPSILON), norm)
    inverse = _call(graph, aten.reciprocal.default, (positive,), norm)
    scale = _call(graph, aten.mul.Tensor, (inverse, limit), norm)
    return _call(graph, aten.clamp.default, (scale, None, 1.0), norm)


def _call(graph: Graph, target: Any, args: tuple[Any, ...], like: Node, dtype: Any = None, **changes: Any) -> Node:
    """A step-level node where `like` runs but for `changes` of its metadata."""
    node = graph.call_function(target, args, {} if dtype is None else {"dtype": dtype})
    values, kwargs = torch.fx.node.map_arg((args, node.kwargs), lambda n: n.meta["val"])
    with like.meta["val"].fake_mode, torch.no_grad():
        node.meta["val"] = target(*values, **kwargs)
    node.meta.update({key: like.meta[key] for key in ("path", "phase", "stage")}, source="", level="step")
    node.meta.update(changes)
    return node
