"""From the text of a cluster to a `Cluster`: presets by device kind, cluster files, and `auto`.

    parse_cluster("2xcpu")          # 2 ranks of the fixed CPU preset
    parse_cluster("16x8xh100")      # 16 nodes of 8
    parse_cluster("64x4xgb200")     # nodes inside one NVLink domain are joined by it: network=4 nvlink=64
    parse_cluster("cluster.json")   # what `Cluster.to_json` writes; "device" may be the name of a kind
    parse_cluster("auto")           # this machine, measured

Invariants:
- presets never look at the machine; only `auto` does;
- each figure of `devices.json` has a source.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.boundary import json_schema
from autopar.cluster.cluster import Cluster, Device, Level
from autopar.errors import PlanError

FORMS = "NxKIND ('8xh100'), NODESxDEVICESxKIND ('16x8xh100'), 'auto', or the path of a cluster file (JSON)"


def parse_cluster(text: str) -> Cluster:
    """The cluster that `text` names; raises `PlanError` where it names none."""
    text = text.strip()
    if text == "auto":
        from autopar.cluster.auto import auto_cluster

        return auto_cluster()
    if match := re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z][\w-]*)", text):
        nodes, devices, kind = match.groups()
        return preset_cluster(int(nodes or 1), int(devices), kind.lower())
    if text.endswith(".json") or "/" in text or Path(text).is_file():
        return load_cluster(text)
    if text.lower() in known_kinds():
        raise PlanError(f"cluster {text!r}: how many devices? Write '1x{text}' or '8x{text}'")
    raise PlanError(f"cluster {text!r}: expected {FORMS}")


def known_kinds() -> tuple[str, ...]:
    """The device kinds that have a preset, sorted."""
    return tuple(sorted(_table()["kinds"]))


def preset_device(kind: str) -> Device:
    """The preset of `kind` (`"h100"`)."""
    row = _row(kind)
    fields = {field.name: row[field.name] for field in dataclasses.fields(Device) if field.name in row}
    curves = {dtype: tuple(map(tuple, points)) for dtype, points in row.get("efficiency_curves", {}).items()}
    sources = {name: _source(text) for name, text in row["sources"].items()}
    exact = {"memory_bytes": int(row["memory_bytes"]), "efficiency_curves": curves, "sources": sources}
    return Device(kind=kind, **{**fields, **exact})


def preset_cluster(nodes: int, devices: int, kind: str) -> Cluster:
    """`nodes` × `devices` of `kind`, joined by the links that are usual for it."""
    name = f"{nodes}x{devices}x{kind}" if nodes > 1 else f"{devices}x{kind}"
    if nodes < 1 or devices < 1:
        raise PlanError(f"cluster '{nodes}x{devices}x{kind}': counts must be at least 1")
    row = _row(kind)
    outer, inner = _split(name, nodes, devices, row["inside"])
    levels = (_level(row["across"], outer), _level(row["inside"], inner))
    return Cluster(name, preset_device(kind), levels if outer > 1 else levels[1:])


def load_cluster(path: str | Path) -> Cluster:
    """The cluster in a JSON file: the fields of `Cluster`, where `device` may be the name of a kind."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cluster file {str(path)!r}: {error.strerror or error}; otherwise give {FORMS}") from None
    except UnicodeDecodeError:
        raise PlanError(f"cluster file {str(path)!r}: not text in UTF-8") from None
    return Cluster.from_json(_with_device(text), f"cluster file {str(path)!r}")


def cluster_schema() -> dict[str, Any]:
    """The JSON Schema of a cluster file."""
    schema = json_schema(Cluster)
    device = schema["properties"]["device"]
    schema["properties"]["device"] = {"anyOf": [device, {"enum": list(known_kinds()), "type": "string"}]}
    return schema


def _with_device(text: str) -> str:
    """`text` with the name of a device kind replaced by its preset; malformed text is left to the validation."""
    try:
        data = json.loads(text)
    except ValueError:
        return text
    if not isinstance(data, dict) or not isinstance(data.get("device"), str):
        return text
    return json.dumps({**data, "device": dataclasses.asdict(preset_device(data["device"].lower()))})


def _split(name: str, nodes: int, devices: int, inside: Mapping[str, Any]) -> tuple[int, int]:
    """(units joined by the network, devices joined inside each)."""
    limit = inside.get("max_size", devices)
    if devices > limit:
        kind = name.rpartition("x")[2]
        parts = min(n for n in range(1, devices + 1) if devices % n == 0 and devices // n <= limit)
        example = f"{nodes * parts}x{devices // parts}x{kind}"
        raise PlanError(f"cluster {name!r}: {inside['name']} joins at most {limit} {kind}; write nodes: {example!r}")
    if devices > inside.get("node_size", 0):
        return nodes, devices
    joined = max(n for n in range(1, limit // devices + 1) if nodes % n == 0)
    return nodes // joined, devices * joined


def _level(row: Mapping[str, Any], size: int) -> Level:
    fields = {field.name: row[field.name] for field in dataclasses.fields(Level) if field.name in row}
    return Level(**{**fields, "size": size, "source": _source(row["source"])})


def _row(kind: str) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = _table()["kinds"]
    if kind not in kinds:
        near = difflib.get_close_matches(kind, kinds, n=2)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        known = ", ".join(sorted(kinds))
        raise PlanError(f"unknown device kind {kind!r}: {hint}Known kinds: {known}; others need a cluster file")
    return kinds[kind]


def _source(text: str) -> str:
    sources: dict[str, str] = _table()["sources"]
    return sources.get(text, text)


def _table() -> dict[str, Any]:
    text = importlib.resources.files("autopar.cluster").joinpath("devices.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table
