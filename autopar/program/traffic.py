"""What a pipeline sends: its collectives and transfers, counted from the parts that ranks run.

    [(row.axis, row.kind, row.count, row.bytes_sent) for row in traffic(pipeline)]

Volumes are bytes that one rank sends (ring algorithms, `cluster.collectives`), so that the field's 2Ψ and 3Ψ come out.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from autopar import collectives
from autopar.cluster.collectives import collective_bytes_sent
from autopar.mesh import PIPELINE_AXIS, Mesh
from autopar.program.parts import Pipeline, Value, phase_of
from autopar.rules.nodes import node_argument

_PER_STEP = ("prologue", "norm", "update")

_KINDS = {
    name: kind
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    for name in (kind, f"{kind}_start")
    if hasattr(collectives, name)
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """All calls of one kind over one axis in one step, as a rank of `stage` sends them."""

    stage: int
    axis: str
    kind: str
    count: int
    bytes_sent: int
    whole_bytes: int
    """Sum over the calls of the whole tensor's bytes, as the cost model counts them."""


@dataclass(frozen=True, slots=True)
class Call:
    """One collective of a lowered part."""

    axis: str
    kind: str
    whole_bytes: int
    """Of the whole tensor, as the cost model counts them."""


def collective_of(node: Node, mesh: Mesh) -> Call | None:
    """What a node of a lowered part calls, or starts; None where it is no collective."""
    kind = _KINDS.get(getattr(node.target, "__name__", "")) if node.op == "call_function" else None
    if kind is None:
        return None
    axis = str(node.args[1])
    return Call(axis, kind, _whole_bytes(node, kind, mesh.size(axis)))


def traffic(pipeline: Pipeline, min_bytes: int = 0) -> tuple[Traffic, ...]:
    """One row per stage, axis and kind; calls that send fewer than `min_bytes` are left out (scalars)."""
    counts: Counter[tuple[int, str, str]] = Counter()
    sent: Counter[tuple[int, str, str]] = Counter()
    whole: Counter[tuple[int, str, str]] = Counter()
    for stage, axis, kind, bytes_whole, times, ranks in _calls(pipeline):
        each = collective_bytes_sent(kind, bytes_whole, ranks)
        if each >= min_bytes:
            counts[stage, axis, kind] += times
            sent[stage, axis, kind] += each * times
            whole[stage, axis, kind] += bytes_whole * times
    return tuple(Traffic(*key, counts[key], sent[key], whole[key]) for key in sorted(counts))


def _calls(pipeline: Pipeline) -> list[tuple[int, str, str, int, int, int]]:
    """(stage, axis, kind, bytes of the whole tensor, calls per step, ranks)."""
    calls = []
    for stage in pipeline.stages:
        for part in stage.parts.values():
            times = 1 if phase_of(part.name) in _PER_STEP else pipeline.microbatches
            for node in part.graph.graph.nodes:
                call = collective_of(node, pipeline.mesh)
                if call is not None:
                    ranks = pipeline.mesh.size(call.axis)
                    calls.append((stage.index, call.axis, call.kind, call.whole_bytes, times, ranks))
    for transfer in pipeline.transfers:
        is_once = phase_of(transfer.part) in _PER_STEP or transfer.slot.kind == "accumulator"
        times = 1 if is_once else pipeline.microbatches
        sent = _local_bytes(pipeline.stages[transfer.source].values[transfer.slot], pipeline.mesh)
        calls.append((transfer.source, PIPELINE_AXIS, "p2p", sent, times, 2))
    return calls


def _local_bytes(value: Value, mesh: Mesh) -> int:
    return math.prod(value.layout.local_shape(mesh.spmd)) * value.dtype.itemsize


def _whole_bytes(node: Node, kind: str, ranks: int) -> int:
    local: Tensor = node_argument(node, 0).meta["local_val"]
    size = local.numel() * local.element_size()
    return size * ranks if kind in ("all_gather", "all_to_all") else size
