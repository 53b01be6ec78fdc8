"""`autopar profile`: this machine as a cluster file, measured by real processes (gloo on CPUs, NCCL on GPUs).

    found = profile(ranks=2)                # starts 2 ranks
    found = measure_here()                  # as a rank of a job that torchrun started; the first rank has the result
    print_tables(found.tables())            # each timing beside what the measured cluster says of it
    plan(step, found.cluster)               # or `found.cluster.to_json()` in a file, and --cluster FILE

All ranks measure at the same time: what one reaches while the others are busy is what a program gets. Matmuls of a few
sizes give the peak and the efficiency curve of each dtype; collectives of each kind and a few sizes, run by the very
communicator that programs use, give latency, base and bandwidth of each level of links.

Invariants:
- of all ranks the slowest counts;
- a level is measured with all of its groups communicating, as they do in a program, so its ports aren't shared further.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.boundary import parse_json
from autopar.cluster import auto, measure
from autopar.cluster.cluster import FORBID_UNKNOWN_FIELDS, Cluster, Device, Level
from autopar.cluster.collectives import collective_s
from autopar.cluster.fit import DIGITS, Sample, efficiency_curve, fitted_level
from autopar.cluster.mesh_layout import axis_link
from autopar.cluster.presets import known_kinds, preset_device
from autopar.cluster.roofline import compute_s
from autopar.errors import PlanError
from autopar.mesh import PIPELINE_AXIS, Mesh
from autopar.show import Table
from autopar.show_cluster import cluster_tables

if TYPE_CHECKING:
    import torch

Shape = tuple[int, int, int]
"""(m, k, n) of [m, k] × [k, n]."""

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}
MATMUL_SIZES = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
FLAT_SHAPES: dict[str, tuple[Shape, ...]] = {
    "cpu": ((16, 1024, 1024), (1024, 16, 1024)),
    "cuda": ((64, 8192, 8192), (8192, 64, 8192)),
}
"""Matmuls that give no point of a curve: they show what the roofline makes of other shapes."""
COLLECTIVE_BYTES = {
    "cpu": tuple(1 << e for e in (12, 14, 16, 18, 20, 22, 24)),
    "cuda": tuple(1 << e for e in (14, 18, 20, 22, 24, 26, 28)),
}
TIMEOUT_S = 600.0
UNSTEADY = 0.3
"""Median error of the fit from which on something else has kept the machine busy, by all likelihood."""
SOURCE = "measured by autopar profile"


@dataclass(frozen=True, slots=True)
class Timing:
    """Something measured, and what the measured cluster says of it."""

    what: str
    measured_s: float
    model_s: float

    __pydantic_config__ = FORBID_UNKNOWN_FIELDS


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured cluster, and the timings that it was made from."""

    cluster: Cluster
    timings: tuple[Timing, ...]

    __pydantic_config__ = FORBID_UNKNOWN_FIELDS

    def tables(self) -> list[Table]:
        """The cluster, and each timing, for `autopar.show`."""
        rows = [
            (row.what, row.measured_s, row.model_s, f"{row.model_s / row.measured_s - 1:+.0%}") for row in self.timings
        ]
        errors = [abs(row.model_s / row.measured_s - 1) for row in self.timings]
        middle = statistics.median(errors)
        hint = "; is something else running here? Measure again when it is done" if middle > UNSTEADY else ""
        caption = f"timings: the figures above are off by {middle:.0%} in the median{hint}"
        shown = Table(caption, ("what", "measured_s", "model_s", "error"), tuple(rows), "timings")
        return [*cluster_tables(self.cluster), shown]


def profile(ranks: int | None = None) -> Profile:
    """Measures this machine with `ranks` processes: by default one for each GPU, or each core where there is none.

    Raises `PlanError` where so many can't run, or one of them fails (its message is on stderr by then).
    """
    from autopar.program.launch import TIMED_OUT, run_ranks

    ranks = auto.num_devices() if ranks is None else ranks
    _require_devices(ranks)
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
        file = Path(folder) / "profile.json"
        status = run_ranks(ranks, ["-m", "autopar.profiling", str(file)], timeout_s=TIMEOUT_S)
        if status == TIMED_OUT:
            raise PlanError(f"profile: {ranks} ranks took more than {TIMEOUT_S:g} s and were stopped; try fewer ranks")
        if status:
            raise PlanError(f"profile: one of {ranks} ranks failed (status {status}); what it said stands above")
        return parse_json(Profile, file.read_text(encoding="utf-8"), "profile")


def _require_devices(ranks: int) -> None:
    import torch

    if ranks < 1:
        raise PlanError(f"profile: {ranks} ranks; expected at least 1")
    if torch.cuda.is_available() and ranks > torch.cuda.device_count():
        raise PlanError(f"profile: {ranks} ranks, but this machine has {torch.cuda.device_count()} GPUs; one rank each")


def measure_here() -> Profile | None:
    """This rank's part of a measurement that all ranks of the job make; the first rank has the result."""
    import torch.distributed as dist

    from autopar.program.ranks import join, leave, own_device

    device = own_device()
    is_made_here = join(device)
    try:
        found = _measured(device)
        return found if dist.get_rank() == 0 else None
    finally:
        if is_made_here:
            leave()


def _slowest_of(figure: float) -> float:
    """The greatest of all ranks' figures, each of which took about as long: so they are measured at the same time."""
    return _slowest([figure])[0]


def _slowest(figures: Sequence[float]) -> Sequence[float]:
    import torch
    import torch.distributed as dist

    greatest = torch.tensor(figures, dtype=torch.float64)
    dist.all_reduce(greatest, dist.ReduceOp.MAX)
    found: list[float] = greatest.tolist()
    return found


def _measured(device: torch.device) -> Profile:
    import torch.distributed as dist

    from autopar.program.timed import timed_collectives, timed_communicator

    kind = auto.own_kind()
    nodes, local = auto.counts(dist.get_world_size())
    one_device, timings = _device(device, auto.name_of(kind), local)
    usual, levels = auto.usual_levels(nodes, local, kind), []
    mesh = Mesh(tuple(zip((PIPELINE_AXIS, "tp"), (level.size for level in usual), strict=False)))
    with timed_communicator(mesh, device) as communicator:
        for axis, level in zip(mesh.names, usual, strict=True):
            sizes = COLLECTIVE_BYTES[device.type] if level.size > 1 else ()
            samples = list(timed_collectives(communicator, axis, sizes, _slowest))
            levels.append(_level(level, device, samples))
            timings += [_collective_timing(sample, levels[-1]) for sample in samples]
    return Profile(Cluster(f"profile:{nodes}x{local}x{one_device.kind}", one_device, tuple(levels)), tuple(timings))


# -- the device --------------------------------------------------------------------------------------------------
def _device(device: torch.device, kind: str, local: int) -> tuple[Device, list[Timing]]:
    clock = auto.own_clock(device, local)
    launch_s = _slowest_of(measure.launch_s(device, clock))
    seconds = {dtype: _matmuls(device, dtype, clock) for dtype in DTYPES[device.type]}
    rates, curves = _unmeasured_rates(kind), {}
    for dtype, timed in seconds.items():
        # at least half of a timing is the matmul's own, however small that is
        own = [(2.0 * m * k * n, max(s - launch_s, s / 2)) for (m, k, n), s in timed.items() if m == k == n]
        rates[dtype], curves[dtype] = efficiency_curve(own)
    figures = ("memory_bytes", "flops_per_s", "bytes_per_s", "launch_s", "efficiency_curves")
    found = Device(
        kind=kind,
        memory_bytes=auto.memory_bytes(local),
        flops_per_s=rates,
        bytes_per_s=measure.rounded(1 / _slowest_of(measure.moved_byte_s(device, clock)), DIGITS),
        launch_s=measure.rounded(launch_s, DIGITS),
        efficiency_curves=curves,
        sources=dict.fromkeys(figures, SOURCE),
    )
    return found, [_matmul_timing(found, dtype, *row) for dtype, timed in seconds.items() for row in timed.items()]


def _matmuls(device: torch.device, dtype: str, clock: measure.Clock) -> dict[Shape, float]:
    """Seconds by shape: squares of rising size until one takes long, and flat ones that take no longer."""
    import torch

    found: dict[Shape, float] = {}
    for size in MATMUL_SIZES[device.type]:
        square = (size, size, size)
        found[square] = _slowest_of(measure.matmul_s(device, getattr(torch, dtype), square, clock))
        if found[square] > measure.LONG_S:
            break
    for m, k, n in FLAT_SHAPES[device.type]:
        if m * k * n <= size**3:
            found[m, k, n] = _slowest_of(measure.matmul_s(device, getattr(torch, dtype), (m, k, n), clock))
    return found


def _unmeasured_rates(kind: str) -> dict[str, float]:
    """What a preset says of dtypes that aren't measured (fp8 has no `@`): the part that large matmuls reach."""
    if kind not in known_kinds() or kind == "cpu":
        return {}
    preset = preset_device(kind)
    return {dtype: rate * preset.matmul_efficiency for dtype, rate in preset.flops_per_s.items()}


def _matmul_timing(device: Device, dtype: str, shape: Shape, seconds: float) -> Timing:
    import torch

    m, k, n = shape
    num_bytes = (m * k + k * n + m * n) * getattr(torch, dtype).itemsize
    model_s = compute_s(device, 2.0 * m * k * n, num_bytes, dtype)
    return Timing(f"matmul {dtype} {m}x{k} @ {k}x{n}", seconds, model_s)


# -- the links ---------------------------------------------------------------------------------------------------
def _level(level: Level, device: torch.device, samples: list[Sample]) -> Level:
    """The level by its samples; one that joins nothing here keeps its usual figures, and says so."""
    if not samples:
        return dataclasses.replace(level, source=f"not measured, since it joins one; usual: {level.source}")
    measured = dataclasses.replace(level, shared=False, direct=device.type == "cpu", source=SOURCE)
    return fitted_level(measured, samples)


def _collective_timing(sample: Sample, level: Level) -> Timing:
    alone = Cluster("level", preset_device("cpu"), (level,))
    ranks = 2 if sample.kind == "p2p" else level.size
    link = axis_link(alone, Mesh(((PIPELINE_AXIS, level.size),)), PIPELINE_AXIS)
    what = f"{sample.kind} over {level.name}={level.size}, {sample.num_bytes / 1024:g} KiB"
    return Timing(what, sample.seconds, collective_s(sample.kind, sample.num_bytes, ranks, link))


def main(file: str) -> None:
    """One rank of `profile`: the first writes what was found to `file`."""
    if found := measure_here():
        Path(file).write_text(json.dumps(dataclasses.asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
