"""What the program will run on, as data: a device kind, and levels of links between the devices.

    Cluster("2x8xh100", h100, (Level("network", 2, 50e9, 4e-6), Level("nvlink", 8, 450e9, nccl="nvlink")))

Invariants:
- levels stand outermost first; the number of devices is the product of their sizes;
- devices are numbered row-major over the levels, like the ranks of a mesh over its axes;
- a bandwidth is in bytes/s, in one direction, as on the data sheet; `efficiency` is the part of it that is reached.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from autopar.boundary import parse_json
from autopar.errors import PlanError

FORBID_UNKNOWN_FIELDS: Any = {"extra": "forbid"}
_FROM_FILES: Any = {**FORBID_UNKNOWN_FIELDS, "use_attribute_docstrings": True}
"""Of what people write: the schema says what each field means, in the words that stand below it here."""

Curve = tuple[tuple[float, float], ...]
"""Rising (operations of one op, part of the peak that it reaches)."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device kind. Rates are peaks; the `*_efficiency` fields say which part of a peak large ops reach."""

    kind: str
    """What it is called; `cpu` says that programs run on processors."""
    memory_bytes: int
    """What a program may use of it."""
    flops_per_s: dict[str, float] = field(hash=False)
    """Dense peak by dtype name as torch spells it (`float32`, `bfloat16`, …); `float32` is always there."""
    bytes_per_s: float
    """Memory bandwidth."""
    launch_s: float
    """Fixed time of one op beside its work: dispatch, launch, ramp."""
    matmul_efficiency: float = 1.0
    """Of large matmuls, in dtypes without an efficiency curve."""
    memory_efficiency: float = 1.0
    """Of large transfers to and from memory."""
    contention: float = 1.0
    """What each second in which computation and a collective run together costs more: 0, one hides behind the other; 1,
    it is as if one came after the other."""
    efficiency_curves: dict[str, Curve] = field(default_factory=dict, hash=False)
    """By dtype: what matmuls of rising size reach. Smaller and larger ones are as efficient as the first and last."""
    sources: dict[str, str] = field(default_factory=dict, hash=False)
    """Where each figure comes from, by field name."""

    __pydantic_config__ = _FROM_FILES

    def __post_init__(self) -> None:
        where = f"device {self.kind!r}"
        _require_positive(where, "memory_bytes", self.memory_bytes)
        _require_positive(where, "bytes_per_s", self.bytes_per_s)
        _require_fraction(where, "matmul_efficiency", self.matmul_efficiency)
        _require_fraction(where, "memory_efficiency", self.memory_efficiency)
        _require(self.launch_s >= 0, where, "launch_s", self.launch_s, "at least 0")
        _require(0 <= self.contention <= 1, where, "contention", self.contention, "a number from 0 to 1")
        _require("float32" in self.flops_per_s, where, "flops_per_s", sorted(self.flops_per_s), "a rate for float32")
        for dtype, rate in self.flops_per_s.items():
            _require_positive(where, f"flops_per_s.{dtype}", rate)
        for dtype, curve in self.efficiency_curves.items():
            _require(dtype in self.flops_per_s, where, f"efficiency_curves.{dtype}", "there", "a rate in flops_per_s")
            _check_curve(where, f"efficiency_curves.{dtype}", curve)

    def peak_flops_per_s(self, dtype: str) -> float:
        """Peak of `dtype` (`"bfloat16"` or `"torch.bfloat16"`); a dtype without a figure runs at float32's rate."""
        return self.flops_per_s[self.rated_dtype(dtype)]

    def rated_dtype(self, dtype: str) -> str:
        """The dtype whose rate, and efficiency curve, `dtype` runs at."""
        name = dtype.removeprefix("torch.")
        return name if name in self.flops_per_s else "float32"


@dataclass(frozen=True, slots=True)
class Level:
    """One level of links: `size` units (devices, or groups of the next level) joined by links of one speed."""

    name: str
    """What it is called in messages: `nvlink`, `network`, `rail`, `spine`."""
    size: int
    """How many units it joins."""
    bytes_per_s: float | tuple[float, ...]
    """Per device where each device has a port of its own, per unit of this level where `shared`; one direction.

    One figure for all units, or one for each. Ranks run in lock-step: the slowest is what all wait for.
    """
    latency_s: float | None = None
    """Of one hop: the alpha of the alpha-beta model. To be given unless `nccl` is."""
    base_s: float = 0.0
    """Fixed time of one collective call, whatever the number of hops; a message from rank to rank has none."""
    efficiency: float = 1.0
    """The part of `bytes_per_s` that large messages reach."""
    shared: bool = False
    """Whether `bytes_per_s` is that of one unit (all NICs of a node together), which the devices inside it share."""
    direct: bool = False
    """Whether an all-reduce may send each rank's whole tensor to every other at once, where that is faster."""
    nccl: Literal["", "nvlink", "pcie", "network"] = ""
    """The links whose latencies in NCCL's own model are these, instead of `latency_s` and `base_s`.

    Collectives then take what the cheapest of NCCL's algorithms and protocols takes.
    """
    switch_bytes_per_s: float = 0.0
    """Bytes of tensor per second of an all-reduce that the switch sums (NVLink SHARP); 0 where it can't."""
    switch_s: float = 0.0
    """Fixed time of such an all-reduce."""
    source: str = ""
    """Where the figures come from."""

    __pydantic_config__ = _FROM_FILES

    def __post_init__(self) -> None:
        where = f"level {self.name!r}"
        _require(self.size >= 1, where, "size", self.size, "at least 1")
        ports = self.bytes_per_s if isinstance(self.bytes_per_s, tuple) else (self.bytes_per_s,) * self.size
        _require(len(ports) == self.size, where, "bytes_per_s", f"{len(ports)} figures", f"one, or {self.size}")
        for port in ports:
            _require_positive(where, "bytes_per_s", port)
        _require_fraction(where, "efficiency", self.efficiency)
        _require(self.switch_bytes_per_s >= 0, where, "switch_bytes_per_s", self.switch_bytes_per_s, "at least 0")
        _require(self.switch_s >= 0, where, "switch_s", self.switch_s, "at least 0")
        if self.nccl:
            given = self.latency_s is None and self.base_s == 0
            _require(given, where, "nccl", repr(self.nccl), "no latency_s and base_s beside it: it stands for both")
        else:
            latency_s = "missing" if self.latency_s is None else self.latency_s
            _require((self.latency_s or 0) >= 0, where, "latency_s", latency_s, "at least 0")
            _require(self.latency_s is not None, where, "latency_s", latency_s, "the seconds of a hop, or nccl")
            _require(self.base_s >= 0, where, "base_s", self.base_s, "at least 0")

    @property
    def reached_bytes_per_s(self) -> float:
        """What large messages reach on the slowest link."""
        slowest = min(self.bytes_per_s) if isinstance(self.bytes_per_s, tuple) else self.bytes_per_s
        return slowest * self.efficiency


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices joined by levels of links, outermost first."""

    name: str
    """What plans call it: a plan is for the cluster of one name."""
    device: Device
    """One for all; in a cluster file also the name of a kind that has a preset."""
    levels: tuple[Level, ...]
    """Outermost first."""

    __pydantic_config__ = _FROM_FILES

    def __post_init__(self) -> None:
        names = [level.name for level in self.levels]
        _require(bool(names), f"cluster {self.name!r}", "levels", "none", "at least one level")
        _require(len(set(names)) == len(names), f"cluster {self.name!r}", "levels", names, "distinct names")

    def __str__(self) -> str:
        return self.name

    @property
    def num_devices(self) -> int:
        return math.prod(level.size for level in self.levels)

    @property
    def levels_text(self) -> str:
        """`"network=2 nvlink=8"`: the levels as they stand in messages."""
        return " ".join(f"{level.name}={level.size}" for level in self.levels)

    def to_json(self) -> str:
        """The text of a cluster file, each point of a curve on a line."""
        text = json.dumps(dataclasses.asdict(self), indent=2)
        return re.sub(r"\[\n\s+([\d.e+-]+),\n\s+([\d.e+-]+)\n\s+\]", r"[\1, \2]", text)

    @classmethod
    def from_json(cls, text: str, what: str = "cluster") -> Cluster:
        """The inverse of `to_json`; raises `PlanError` naming the field that is wrong."""
        return parse_json(cls, text, what)


def _check_curve(where: str, name: str, curve: Curve) -> None:
    """Larger ops are as efficient or more, and take as long or longer: what bounds of a plan's time rest on."""
    _require(bool(curve), where, name, "empty", "at least one [operations, efficiency]")
    for flops, efficiency in curve:
        _require_positive(where, f"{name}: operations", flops)
        _require_fraction(where, f"{name}: efficiency", efficiency)
    for (small, low), (large, high) in itertools.pairwise(curve):
        got = f"{low:g} at {small:g} operations, then {high:g} at {large:g}"
        _require(small < large, where, name, got, "rising numbers of operations")
        _require(low <= high, where, name, got, "efficiencies that don't fall: a part of an op is never more efficient")
        _require(small / low <= large / high * (1 + 1e-9), where, name, got, "larger ops that take no less time")


def _require(holds: bool, where: str, name: str, got: object, expected: str) -> None:
    if not holds:
        raise PlanError(f"{where}: {name} is {got}; expected {expected}")


def _require_positive(where: str, name: str, value: float) -> None:
    _require(0 < value < math.inf, where, name, value, "a positive number")


def _require_fraction(where: str, name: str, value: float) -> None:
    _require(0 < value <= 1, where, name, value, "a number above 0 and at most 1")
