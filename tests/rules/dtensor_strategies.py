"""What PyTorch's DTensor allows at an example's shapes on one axis of two devices, and whether it is right.

A strategy is the placements of an op's tensor operands and of its results: `("S(0)", "R") -> ("S(0)",)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.fx import Node
from torch.fx.node import map_aggregate

from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.program.promote import default_float64, promoted_dtype
from autopar.rules.choices import enumerate_choices, operand_layouts, result_layouts
from autopar.rules.examples import Example
from autopar.rules.experiment import difference
from autopar.rules.nodes import result_values, tensor_operands
from autopar.rules.prove import draw, single_op

MESH = Mesh.parse("x=2")
Strategy = tuple[tuple[str, ...], tuple[str | None, ...]]
"""Placements of the operands, and of the results (None where one is absent): `R`, `S(dim)`, `P(op)`."""


# -- DTensor's ---------------------------------------------------------------------------------------------------
def strategies(example: Example, mesh: DeviceMesh) -> set[Strategy] | None:
    """All that DTensor allows for the call; None where it has none for the op."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    node = example.node()
    if example.target in propagator.op_single_dim_strategy_funcs:
        return _of_one_dim(propagator.op_single_dim_strategy_funcs[example.target], example, node)
    if example.target in propagator.op_strategy_funcs:
        return _of_mesh(propagator.op_strategy_funcs[example.target], example, node, mesh)
    return None


def _meta(value: Tensor) -> TensorMeta:
    return TensorMeta(value.shape, torch.empty(value.shape, device="meta").stride(), value.dtype)


def _of_one_dim(function: Any, example: Example, node: Node) -> set[Strategy]:
    args, kwargs = map_aggregate((example.args, example.kwargs), lambda a: _meta(a) if isinstance(a, Tensor) else a)
    count = len(tensor_operands(node))
    found = set()
    for row in function(example.target, args, kwargs):
        placements = [_text(p) for p in row]
        outs = placements[: len(placements) - count]
        found.add((tuple(placements[len(placements) - count :]), _of_results(outs, node)))
    return found


def _of_results(placements: list[str | None], node: Node) -> tuple[str | None, ...]:
    """A placement for each result: one may be meant for all, and absent ones have none."""
    values = result_values(node)
    each = placements * len(values) if len(placements) == 1 else placements
    return tuple(None if value is None else p for p, value in zip(each, values, strict=False))


def _candidates(value: Tensor, mesh: DeviceMesh) -> OpStrategy:
    placements = [Replicate(), Partial(), *(Shard(d) for d in range(value.dim()))]
    return OpStrategy([OpSpec(DTensorSpec(mesh, (p,), tensor_meta=_meta(value))) for p in placements])


def _of_mesh(function: Any, example: Example, node: Node, mesh: DeviceMesh) -> set[Strategy]:
    def strategy(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return _candidates(argument, mesh)
        if isinstance(argument, (list, tuple)) and any(isinstance(item, Tensor) for item in argument):
            return TupleStrategy([_candidates(item, mesh) for item in argument])
        return argument

    args = tuple(map(strategy, example.args))
    kwargs = {name: strategy(value) for name, value in example.kwargs.items()}
    found = set()
    answer = function(OpSchema(example.target, args, kwargs))
    specs = answer.strategies if isinstance(answer, OpStrategy) else []
    for spec in specs:
        outs = spec.output_specs if isinstance(spec.output_specs, (tuple, list)) else (spec.output_specs,)
        ins = spec.input_specs or outs[:1]
        placed = [None if s is None else _text(s.placements[0]) for s in outs]
        found.add((tuple(_text(s.placements[0]) for s in ins), _of_results(placed, node)))
    return found


def _text(placement: Any) -> str | None:
    if placement is None or isinstance(placement, Replicate):
        return None if placement is None else "R"
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})" if type(placement) is Partial else "P(masked)"
    return f"S({placement.dim})"


# -- ours --------------------------------------------------------------------------------------------------------
def allowed(example: Example) -> set[Strategy]:
    """What the table's rule allows."""
    _, probe = single_op(example.node())
    rule = probe.meta["rule"]
    return {
        (tuple(map(_placement, operand_layouts(rule, c))), tuple(map(_placement, result_layouts(rule, c))))
        for c in enumerate_choices(rule, MESH)
    }


def _placement(layout: Layout) -> str:
    position = layout.position("x")
    if position is not None:
        return f"S({position[0]})" if position[1] == 0 else f"S({position[0]}).{position[1]}"
    op = layout.partial_op("x")
    return "R" if op is None else f"P({op})"


# -- execution ---------------------------------------------------------------------------------------------------
def is_right(example: Example, strategy: Strategy) -> bool | None:
    """Whether the op on two shards gives the whole op's results; None where it refuses them, or sizes are odd."""
    operands, results = strategy
    with default_float64():
        values = draw(example.node(), example.samples[0], torch.Generator().manual_seed(0))
        if len(values) != len(operands) or any(not _divides(v, p) for v, p in zip(values, operands, strict=True)):
            return None
        whole = _run(example, values)
        noise = [torch.randn(v.shape, generator=torch.Generator().manual_seed(1)).to(v.dtype) for v in values]
        try:
            parts = [
                _run(example, [_part(v, p, rank, n) for v, p, n in zip(values, operands, noise, strict=True)])
                for rank in (0, 1)
            ]
        except Exception:
            return None
    pairs = zip(results, *parts, whole, strict=False)
    return all(p is None or w is None or _combines(a, b, p, w) for p, a, b, w in pairs)


def _divides(value: Tensor, placement: str) -> bool:
    return not placement.startswith("S") or value.shape[int(placement[2:-1])] % 2 == 0


def _part(value: Tensor, placement: str, rank: int, noise: Tensor) -> Tensor:
    if placement.startswith("S"):
        return value.chunk(2, int(placement[2:-1]))[rank].contiguous()
    if placement == "P(sum)":
        return value + noise if rank == 0 else -noise
    return value


def _combines(a: Tensor, b: Tensor, placement: str, whole: Tensor) -> bool:
    if placement == "R":
        return difference(a, whole) < 1e-9 and difference(b, whole) < 1e-9
    if placement.startswith("S"):
        return difference(torch.cat([a, b], int(placement[2:-1])), whole) < 1e-9
    combine = {
        "P(sum)": torch.add,
        "P(avg)": lambda x, y: (x + y) / 2,
        "P(max)": torch.maximum,
        "P(min)": torch.minimum,
    }
    return placement in combine and difference(combine[placement](a, b), whole) < 1e-9


_COMBINED = {
    "P(sum)": torch.add,
    "P(avg)": lambda a, b: (a + b) / 2,
    "P(max)": torch.maximum,
    "P(min)": torch.minimum,
}


def _run(example: Example, values: list[Tensor]) -> list[Any]:
    waiting, seen = iter(values), dict[int, Tensor]()

    def place(argument: Any) -> Any:
        if isinstance(argument, torch.dtype):
            return promoted_dtype(argument)
        if not isinstance(argument, Tensor):
            return argument
        if id(argument) not in seen:
            seen[id(argument)] = next(waiting)
        return seen[id(argument)]

    args, kwargs = map_aggregate((example.args, example.kwargs), place)
    result = example.target(*args, **kwargs)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def compared(example: Example, mesh: DeviceMesh) -> Iterator[tuple[Strategy, bool, bool | None]]:
    """Each strategy of DTensor's, whether our rule allows it, and (where it doesn't) whether it is right."""
    ours = allowed(example)
    for strategy in sorted(strategies(example, mesh) or (), key=str):
        operands, results = strategy
        if "P(masked)" in operands:
            continue  # what DTensor carries from an embedding to its reduction: ours is a masked sum
        present = tuple("P(sum)" if p == "P(avg)" else p for p in results if p is not None)
        is_ours = (operands, present) in ours
        yield strategy, is_ours, None if is_ours else is_right(example, strategy)
