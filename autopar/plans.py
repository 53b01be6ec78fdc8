"""A plan as data: everything that was chosen and what it is estimated to cost, as JSON that people read and diff.

    plan = Plan.load("plan.json")
    require_valid_for(plan, actual)     # PlanError naming each difference
    plan.save("plan.json")              # one choice a line, sorted; the old file stays until the new one is whole

Choices are keyed by node key (`"layers.0.mlp.up/linear/forward#0"` → `"dp=b tp=o"`), stages by module path.

Invariants:
- `Plan.from_json(plan.to_json()) == plan`, and the text is a function of the plan alone;
- a plan holds no code; compiling with it is deterministic;
- the mesh uses every device of the cluster and has one `StageSpan` per pipeline stage: how many stages a pipeline rank
  has follows from their number;
- `gap` is (objective − bound) / objective, and each memory row sums to its peak.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.boundary import parse_json
from autopar.cluster.cluster import FORBID_UNKNOWN_FIELDS, Cluster
from autopar.errors import PlanError, RuleError
from autopar.mesh import PIPELINE_AXIS, Mesh
from autopar.program.generators import INTERLEAVED
from autopar.rules.notation import read_rule

FORMAT_VERSION = 3
LINE_LENGTH = 120
STATUSES = ("optimal", "feasible")


@dataclass(frozen=True, slots=True)
class ValidFor:
    """What a plan was made for. An empty `cluster` or a `num_devices` of 0 is unknown and isn't compared."""

    graph_hash: str
    batch_shapes: dict[str, str] = field(hash=False)
    """Name → type text of each tensor of the whole batch: `{"tokens": "i64[8 128]"}`."""
    precision: str
    optimizer: str
    microbatches: int
    cluster: str = ""
    num_devices: int = 0

    __pydantic_config__ = FORBID_UNKNOWN_FIELDS


@dataclass(frozen=True, slots=True)
class StageSpan:
    """One pipeline stage: its first and last module path in forward order, and a text for people; stages of one kind
    choose alike for their layers."""

    first: str
    last: str
    modules: str
    kind: int = 0
    rank: int = 0
    """Its place along the axis of the pipeline."""

    __pydantic_config__ = FORBID_UNKNOWN_FIELDS


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes on one kind of rank of one stage at the moment of its peak; the five classes sum to `peak`."""

    stage: int
    ranks: str
    """Which ranks of the stage: `"all"`, or a kind such as `"dp=0"`."""
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    """Of collectives and transfers in flight."""
    peak: int
    where: str = ""
    """The moment: the call of the step, and the node that it has come to."""

    __pydantic_config__ = FORBID_UNKNOWN_FIELDS

    def __post_init__(self) -> None:
        total = self.parameters + self.gradients + self.optimizer + self.activations + self.buffers
        if total != self.peak:
            where = f"memory of stage {self.stage} ({self.ranks})"
            raise PlanError(f"{where}: the classes sum to {total} bytes, but peak is {self.peak}")


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """All collectives of one kind over one axis in one step, as one rank sees them."""

    axis: str
    kind: str
    count: int
    """Calls per step."""
    bytes_per_call: int
    """Mean bytes that a rank sends in a call."""
    bytes_per_step: int
    link: str
    step_s: float

    __pydantic_config__ = FORBID_UNKNOWN_FIELDS


@dataclass(frozen=True, slots=True)
class OverlapRow:
    """What ranks of a stage communicate over one axis in a step, by the cost model."""

    stage: int
    axis: str
    hidden_s: float
    """Behind computation beside which the program lets it run, at most as long as that takes."""
    exposed_s: float
    """Waited for, or by which it slows that computation."""

    __pydantic_config__ = FORBID_UNKNOWN_FIELDS


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """What the step spends on modules that differ in layer numbers only, and what they hold."""

    modules: str
    """Their path, `*` in place of layer numbers."""
    seconds: dict[str, float] = field(hash=False)
    """`compute`, `recompute`, or an axis and a collective → seconds; what hides isn't among them, so that all rows sum
    to the objective."""
    held_bytes: int
    """On the stage of the greatest peak, as the solver counts it: what ops need while they run comes on top."""

    __pydantic_config__ = FORBID_UNKNOWN_FIELDS


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the plan is expected to cost, and how far from the best it can be."""

    objective_s: float
    """Step time by the solver's objective: communication hides as `overlap` says."""
    bound_s: float
    """No plan of the declared search is faster, candidates cut by bound included."""
    gap: float
    status: str
    """`optimal` or `feasible`."""
    capture_s: float
    solve_s: float
    memory_limit_bytes: int
    """Of one device; every row of `memory` is within it."""
    memory: tuple[MemoryRow, ...]
    collectives: tuple[CollectiveRow, ...]
    bubble_fraction: float
    step_s: dict[str, float] = field(hash=False)
    """Parts of the step time by name (`compute`, `collectives`, `bubble`, `update`, …), summing to the objective."""
    modules: tuple[ModuleRow, ...] = ()
    """Where the seconds and the bytes go."""
    serial_s: float | None = None
    """Step time if all communication were waited for."""
    overlap: tuple[OverlapRow, ...] = ()

    __pydantic_config__ = FORBID_UNKNOWN_FIELDS

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise PlanError(f"estimate: status is {self.status!r}; expected one of {', '.join(STATUSES)}")
        gap = relative_gap(self.objective_s, self.bound_s)
        if abs(gap - self.gap) > 1e-6:
            raise PlanError(f"estimate: gap is {self.gap}, but objective_s and bound_s give {gap:.6g}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One mesh that the search looked at, and what became of it."""

    mesh: Mesh
    microbatches: int
    stages: int
    step_s: float | None
    """Estimated step time, or the bound by which it was cut; None where neither is known."""
    peak_bytes: int | None
    status: str
    """`chosen`, `slower`, `cut` (by its bound), `infeasible` (memory), …"""
    reason: str
    """Why it lost, for people; empty for the chosen one."""

    __pydantic_config__ = FORBID_UNKNOWN_FIELDS


@dataclass(frozen=True, slots=True)
class Plan:
    """What to build: mesh, stages, schedule, choices, recompute; and why: estimate, candidates."""

    valid_for: ValidFor
    cluster: Cluster
    mesh: Mesh
    microbatches: int
    schedule: str
    """Name of the pipeline schedule: see `autopar.program.generators`."""
    stages: tuple[StageSpan, ...]
    node_stage: dict[str, int] = field(hash=False)
    """Module path prefix → stage; the longest prefix of a node's path decides (`stage_of`)."""
    choices: dict[str, str] = field(hash=False)
    """Node key → axis=factor words, `"dp=b tp=o"`."""
    recomputed: tuple[str, ...]
    """Node keys, or globs of them, that run again in the backward."""
    pins: tuple[str, ...]
    estimate: Estimate
    candidates: tuple[Candidate, ...] = ()
    found_rules: dict[str, str] = field(default_factory=dict, hash=False)
    """Call of an op without a rule → the rule that was found by experiment (`autopar.rules.nodes.call_text`)."""
    registered_rules: dict[str, str] = field(default_factory=dict, hash=False)
    """The same for rules that the user set with `autopar.rule`."""
    format_version: int = FORMAT_VERSION

    __pydantic_config__ = FORBID_UNKNOWN_FIELDS

    def __post_init__(self) -> None:
        if self.mesh.num_ranks != self.cluster.num_devices:
            got, expected = self.mesh.num_ranks, self.cluster.num_devices
            raise PlanError(f"plan: mesh {self.mesh} has {got} ranks, but {self.cluster} has {expected} devices")
        if len(self.stages) != self.mesh.num_stages:
            size = self.mesh.size(PIPELINE_AXIS)
            raise PlanError(f"plan: {len(self.stages)} stages, but the mesh has {PIPELINE_AXIS}={size}")
        if (self.schedule == INTERLEAVED) != (self.mesh.virtual > 1):
            where = f"{len(self.stages)} stages on {PIPELINE_AXIS}={self.mesh.size(PIPELINE_AXIS)}"
            raise PlanError(f"plan: schedule {self.schedule!r}, but {where}; {INTERLEAVED!r} is for several a rank")
        if self.microbatches < 1:
            raise PlanError(f"plan: microbatches is {self.microbatches}; expected at least 1")
        wrong = {path: stage for path, stage in self.node_stage.items() if not 0 <= stage < len(self.stages)}
        if wrong:
            path, stage = next(iter(wrong.items()))
            raise PlanError(f"plan: node_stage[{path!r}] is {stage}, but there are {len(self.stages)} stages")
        for call, rule in self.rules.items():
            try:
                read_rule(rule)
            except RuleError as error:
                raise PlanError(f"plan: rule of {call}: {error}") from None

    @property
    def rules(self) -> dict[str, str]:
        """The rule of each call that doesn't have its rule from the table."""
        return {**self.found_rules, **self.registered_rules}

    # -- text ------------------------------------------------------------------------------------------------------
    def __str__(self) -> str:
        from autopar import show

        return show.text(self)

    def _repr_html_(self) -> str:
        from autopar import show

        return show.html(self)

    def to_json(self) -> str:
        """The plan's text: top-level entries one a line, choices sorted in natural order, short rows on one line."""
        data = _encode(self)
        return _format({"format_version": data.pop("format_version"), **data}, "", expand=2) + "\n"

    @classmethod
    def from_json(cls, text: str, what: str = "plan") -> Plan:
        """The inverse of `to_json`; `what` names the file in messages. Raises `PlanError`, one for each mistake."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise PlanError(f"{what}: not JSON: {error}") from None
        if not isinstance(data, dict):
            raise PlanError(f"{what}: expected a JSON object with a plan's fields, got {type(data).__name__}")
        if "format_version" not in data:
            raise PlanError(f"{what}: field 'format_version' is missing; is this a plan?")
        if (version := data["format_version"]) != FORMAT_VERSION:
            raise PlanError(f"{what}: format_version is {version!r}, expected {FORMAT_VERSION}; make the plan anew")
        return parse_json(cls, json.dumps(_decode(data)), what)

    def json_report(self) -> dict[str, Any]:
        """What `plan --json` prints: the estimate's fields stand at the top level beside the plan's."""
        data = _encode(self)
        estimate = data.pop("estimate")
        heads = ("mesh", "stages", "schedule", "microbatches")
        return {**{name: data.pop(name) for name in heads}, **estimate, **data}

    @property
    def fingerprint(self) -> str:
        """A hash of what compiling depends on: not of estimate and candidates, which hold measured times."""
        decisions = {name: value for name, value in _encode(self).items() if name not in ("estimate", "candidates")}
        return hashlib.sha256(json.dumps(decisions).encode()).hexdigest()

    # -- files -----------------------------------------------------------------------------------------------------
    def save(self, path: str | Path) -> None:
        """Writes the plan's file whole or not at all; raises `PlanError` where it can't be written."""
        write_whole(Path(path), self.to_json(), "plan")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan in a file; raises `PlanError` where there is none or it is no plan."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"plan file {str(path)!r}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise PlanError(f"plan file {str(path)!r}: not JSON: not text in UTF-8") from None
        return cls.from_json(text, f"plan file {str(path)!r}")


def relative_gap(objective_s: float, bound_s: float) -> float:
    """(objective − bound) / objective; 0 for an objective of 0."""
    return (objective_s - bound_s) / objective_s if objective_s else 0.0


def stage_of(node_stage: Mapping[str, int], path: str) -> int:
    """The stage of the node at module `path`: that of its longest prefix, by whole names; 0 where none matches."""
    names = path.split(".") if path else []
    for length in range(len(names), -1, -1):
        stage = node_stage.get(".".join(names[:length]))
        if stage is not None:
            return stage
    return 0


# -- validity ------------------------------------------------------------------------------------------------------
def require_valid_for(plan: Plan, actual: ValidFor) -> None:
    """Raises `PlanError` naming every difference between what `plan` was made for and what it is used with."""
    differences = "; ".join(_differences(plan.valid_for, actual))
    if differences:
        raise PlanError(f"the plan is for another step: {differences}; make a new plan for this one")


def _differences(planned: ValidFor, actual: ValidFor) -> Iterator[str]:
    for name, label in _VALID_FOR_LABELS.items():
        ours, theirs = getattr(planned, name), getattr(actual, name)
        unknown = name in ("cluster", "num_devices") and not (ours and theirs)
        if ours == theirs or unknown:
            continue
        if not isinstance(ours, dict):
            yield f"{label} was {_brief(ours)}, is {_brief(theirs)}"
            continue
        for key in sorted({*ours, *theirs}):
            if ours.get(key) != theirs.get(key):
                yield f"{label} {key!r} was {ours.get(key, 'absent')}, is {theirs.get(key, 'absent')}"


_VALID_FOR_LABELS = {
    "graph_hash": "the model's graph (hash)",
    "batch_shapes": "batch tensor",
    "precision": "precision",
    "optimizer": "optimizer",
    "microbatches": "microbatches",
    "cluster": "cluster",
    "num_devices": "number of devices",
}


def _brief(value: object) -> str:
    text = str(value)
    return f"{text[:12]}…" if re.fullmatch(r"[0-9a-f]{16,}", text) else text


# -- text ----------------------------------------------------------------------------------------------------------
def _encode(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, a mesh as axis → size in its order, other dicts in natural order."""
    if isinstance(value, Mesh):
        return dict(value.axes)
    if dataclasses.is_dataclass(value):
        return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _encode(value[key]) for key in sorted(value, key=_natural)}
    return [_encode(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _decode(data: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `_encode` for meshes; the rest is left to the validation."""
    rows = data.get("candidates")
    candidates = [_decode(row) if isinstance(row, dict) else row for row in rows] if isinstance(rows, list) else rows
    mesh = data.get("mesh")
    decoded = _decode_mesh(mesh, data.get("stages")) if isinstance(mesh, dict) else mesh
    changed = {"mesh": decoded, "candidates": candidates}
    return {name: changed.get(name, value) for name, value in data.items()}


def _decode_mesh(mesh: dict[str, Any], stages: Any) -> dict[str, Any]:
    """A mesh as its fields; `stages` are those of a plan, or their number."""
    count, ranks = len(stages) if isinstance(stages, list) else stages, mesh.get(PIPELINE_AXIS, 1)
    is_whole = isinstance(count, int) and isinstance(ranks, int) and 1 < ranks <= count and count % ranks == 0
    return {"axes": list(mesh.items()), "virtual": count // ranks if is_whole else 1}


def _format(value: Any, indent: str, expand: int) -> str:
    """JSON with one entry a line down to depth `expand`, one row of a table a line, and long entries broken up."""
    inline = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or not value:
        return inline
    if expand <= 0 and len(indent) + len(inline) <= LINE_LENGTH:
        return inline
    inner = indent + "  "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {_format(entry, inner, expand - 1)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + json.dumps(row, ensure_ascii=False) for row in value) + f"\n{indent}]"


def _natural(text: str) -> list[tuple[int, str]]:
    """A sort key by which layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


# -- files ---------------------------------------------------------------------------------------------------------
def write_whole(path: Path, text: str, what: str) -> None:
    """Writes a temporary file beside `path` and renames it, so that nobody ever sees half a file."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise PlanError(f"{what} file {str(path)!r}: can't be written: {error.strerror or error}") from None
