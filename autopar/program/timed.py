"""Collectives of one rank, timed: each kind over an axis of the mesh, by the communicator that programs run on.

    with timed_communicator(Mesh.parse("pp=4"), torch.device("cpu")) as communicator:
        samples = list(timed_collectives(communicator, "pp", sizes=(1 << 12, 1 << 20), slowest=slowest))

Invariant: all ranks call the same collectives equally often.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from autopar.cluster.fit import Sample
from autopar.cluster.measure import LONG_S, Slowest, best_s
from autopar.mesh import PIPELINE_AXIS, Mesh
from autopar.program.communicator import Edge, ProcessCommunicator

Work = Callable[[], object]


@contextlib.contextmanager
def timed_communicator(mesh: Mesh, device: torch.device) -> Iterator[ProcessCommunicator]:
    """A communicator with an edge each way between the first two stages, closed in the end."""
    communicator = ProcessCommunicator(mesh, device, [(0, 1), (1, 0)] if mesh.num_stages > 1 else [])
    try:
        yield communicator
    finally:
        communicator.close()


def timed_collectives(
    communicator: ProcessCommunicator, axis: str, sizes: Sequence[int], slowest: Slowest
) -> Iterator[Sample]:
    """Each kind over `axis`, all of its groups at once, at each of `sizes` (bytes of the whole tensor, rising), two
    at least, until one takes long; point to point where the axis is the pipeline's."""
    ranks = communicator.mesh.size(axis)
    for kind, prepare in _WORK.items():
        for count, size in enumerate(sizes if kind != "p2p" or axis == PIPELINE_AXIS else (), start=1):
            elements = max(1, size // 4 // ranks**2) * ranks**2
            seconds = best_s(prepare(communicator, axis, elements), communicator.device, slowest)
            yield Sample(kind, 4 * elements, seconds / 2 if kind == "p2p" else seconds)
            if count > 1 and seconds > LONG_S:
                break


def _all_gather(communicator: ProcessCommunicator, axis: str, elements: int) -> Work:
    own = torch.ones(elements // communicator.mesh.size(axis), device=communicator.device)
    return lambda: communicator.all_gather(own, axis, 0)


def _reduce_scatter(communicator: ProcessCommunicator, axis: str, elements: int) -> Work:
    whole = torch.ones(elements, device=communicator.device)
    return lambda: communicator.reduce_scatter(whole, axis, 0)


def _all_reduce(communicator: ProcessCommunicator, axis: str, elements: int) -> Work:
    whole = torch.ones(elements, device=communicator.device)
    return lambda: communicator.all_reduce(whole, axis)


def _all_to_all(communicator: ProcessCommunicator, axis: str, elements: int) -> Work:
    own = torch.ones(elements // communicator.mesh.size(axis), device=communicator.device)
    return lambda: communicator.all_to_all(own, axis, 0, 0)


def _there_and_back(communicator: ProcessCommunicator, axis: str, elements: int) -> Work:
    """A message from the first stage to the second, and another back; other stages do nothing."""
    x = torch.ones(elements, device=communicator.device)
    there, back = Edge(0, 1, 0), Edge(1, 0, 1)

    def first() -> None:
        communicator.send(x, there).wait()
        communicator.receive(x, back).wait()

    def second() -> None:
        communicator.receive(x, there).wait()
        communicator.send(x, back).wait()

    return {0: first, 1: second}.get(communicator.stage, lambda: None)


_WORK: dict[str, Callable[[ProcessCommunicator, str, int], Work]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "p2p": _there_and_back,
}
