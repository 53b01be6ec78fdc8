"""Clusters from text: presets, files, and one clear message for each mistake."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cluster import Cluster, Device, Level, axis_link, cluster_schema, known_kinds, parse_cluster, preset_device
from autopar.errors import PlanError
from autopar.mesh import Mesh


def test_cpu_preset_is_fixed():
    cluster = parse_cluster("2xcpu")
    assert (cluster.name, cluster.num_devices, cluster.levels_text) == ("2xcpu", 2, "loopback=2")
    assert cluster.device.memory_bytes == 4 * 2**30
    assert cluster.device.flops_per_s["float32"] == 50e9
    assert cluster.device.bytes_per_s == 10e9
    assert cluster.levels[0] == Level("loopback", 2, 2e9, 100e-6, direct=True, source=cluster.levels[0].source)


@pytest.mark.parametrize(
    ("text", "levels", "num_devices"),
    [
        ("8xh100", "nvlink=8", 8),
        ("1x8xh100", "nvlink=8", 8),
        ("8xH100", "nvlink=8", 8),
        ("16x8xh100", "network=16 nvlink=8", 128),
        ("2x1xa100", "network=2 nvlink=1", 2),
        ("2x4xcpu", "network=2 loopback=4", 8),
        ("4xrtx4090", "pcie=4", 4),
        ("8xl40s", "pcie=8", 8),
        ("72xgb200", "nvlink=72", 72),
        ("18x4xgb200", "nvlink=72", 72),
        ("64x4xgb200", "network=4 nvlink=64", 256),
        ("2x72xgb200", "network=2 nvlink=72", 144),
        ("8x8xa100-40gb", "network=8 nvlink=8", 64),
    ],
)
def test_forms(text, levels, num_devices):
    cluster = parse_cluster(text)
    assert (cluster.levels_text, cluster.num_devices) == (levels, num_devices)


def test_data_sheet_figures():
    peaks = {"a100": 312e12, "h100": 989.4e12, "h200": 989.4e12, "b200": 2250e12, "gb200": 2500e12, "l40s": 362e12}
    for kind, flops_per_s in {**peaks, "rtx4090": 165.2e12}.items():
        assert preset_device(kind).flops_per_s["bfloat16"] == flops_per_s
    memory = {"a100": 80, "h100": 80, "h200": 141, "b200": 180, "gb200": 186, "l40s": 48, "rtx4090": 24}
    assert {kind: preset_device(kind).memory_bytes / 1e9 for kind in memory} == memory
    assert parse_cluster("2x8xh100").levels[0].bytes_per_s == 50e9
    assert parse_cluster("8xh100").levels[0].bytes_per_s == 450e9


@pytest.mark.parametrize("kind", known_kinds())
def test_each_figure_has_a_source(kind):
    device = preset_device(kind)
    figures = {field.name for field in dataclasses.fields(Device)} - {"kind", "sources"}
    given = {name for name in figures if getattr(device, name) not in (1.0, {})}
    assert given <= set(device.sources)
    assert all(" " in source for source in device.sources.values()), "a source key that the table lacks"
    assert all(level.source for level in parse_cluster(f"2x1x{kind}").levels)


def test_dtypes():
    device = preset_device("h100")
    assert device.peak_flops_per_s("torch.bfloat16") == device.peak_flops_per_s("bfloat16") == 989.4e12
    assert device.peak_flops_per_s("int64") == device.flops_per_s["float32"]


@pytest.mark.parametrize("text", ["2xcpu", "16x8xh100", "64x4xgb200"])
@pytest.mark.parametrize("curves", [{}, {"float32": ((1e6, 0.25), (1e9, 0.75))}])
def test_json_round_trip(text, curves):
    cluster = parse_cluster(text)
    cluster = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, efficiency_curves=curves))
    again = Cluster.from_json(cluster.to_json())
    assert again == cluster
    assert hash(again) == hash(cluster)


def test_file(tmp_path):
    path = tmp_path / "mine.json"
    levels = [{"name": "spine", "size": 2, "bytes_per_s": 25e9, "latency_s": 5e-6, "shared": True},
              {"name": "rail", "size": 4, "bytes_per_s": 50e9, "latency_s": 4e-6},
              {"name": "nvlink", "size": 8, "bytes_per_s": 450e9, "latency_s": 2e-6}]  # fmt: skip
    path.write_text(json.dumps({"name": "mine", "device": "h100", "levels": levels}))
    cluster = parse_cluster(str(path))
    assert cluster.device == preset_device("h100")
    assert (cluster.num_devices, cluster.levels_text) == (64, "spine=2 rail=4 nvlink=8")
    assert cluster.levels[0].shared and not cluster.levels[1].shared
    path.write_text(cluster.to_json())
    assert parse_cluster(str(path)) == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xh10", "unknown device kind 'h10': did you mean h100"),
        ("8xtoaster", "unknown device kind 'toaster': Known kinds: a100, a100-40gb, b200, cpu"),
        ("0xcpu", "cluster '1x0xcpu': counts must be at least 1"),
        ("0x8xh100", "cluster '0x8xh100': counts must be at least 1"),
        ("-1xcpu", "cluster '-1xcpu': expected NxKIND ('8xh100'), NODESxDEVICESxKIND"),
        ("2.5xcpu", "expected NxKIND"),
        ("8", "expected NxKIND"),
        ("", "cluster '': expected NxKIND"),
        ("h100", "cluster 'h100': how many devices? Write '1xh100' or '8xh100'"),
        ("16xh100", "cluster '16xh100': nvlink joins at most 8 h100; write nodes: '2x8xh100'"),
        ("12xl40s", "cluster '12xl40s': pcie joins at most 8 l40s; write nodes: '2x6xl40s'"),
        ("nowhere.json", "cluster file 'nowhere.json': No such file or directory; otherwise give NxKIND"),
    ],
)
def test_bad_text(text, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        parse_cluster(text)


GOOD = json.loads(parse_cluster("2x8xh100").to_json())
PLAIN = json.loads(parse_cluster("2x2xcpu").to_json())["levels"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"levels": None}, "field 'levels': input should be a valid"),
        ({"levels": []}, "cluster '2x8xh100': levels is none; expected at least one level"),
        ({"name": 5}, "field 'name': input should be a valid string, got 5"),
        ({"extra": 5}, "unknown field 'extra'"),
        ({"device": "h10"}, "unknown device kind 'h10'"),
        ({"device": 3}, "field 'device' must be an object, got 3"),
        ({"device": {**GOOD["device"], "memory_bytes": 0}}, "device 'h100': memory_bytes is 0; expected a positive"),
        ({"device": {**GOOD["device"], "memory_bytes": "80"}}, "field 'device.memory_bytes': input should be a valid"),
        ({"device": {**GOOD["device"], "launch_s": -1}}, "device 'h100': launch_s is -1.0; expected at least 0"),
        (
            {"device": {**GOOD["device"], "matmul_efficiency": 1.5}},
            "matmul_efficiency is 1.5; expected a number above 0",
        ),
        ({"device": {**GOOD["device"], "flops_per_s": {"bfloat16": 1}}}, "expected a rate for float32"),
        (
            {"device": {**GOOD["device"], "flops_per_s": {"float32": 0}}},
            "flops_per_s.float32 is 0.0; expected a positive",
        ),
        ({"levels": [{**GOOD["levels"][0], "size": 0}]}, "level 'network': size is 0; expected at least 1"),
        ({"levels": [{**GOOD["levels"][0], "size": 2.5}]}, "field 'levels.0.size': input should be a valid integer"),
        ({"levels": [{**GOOD["levels"][0], "bytes_per_s": 0}]}, "bytes_per_s is 0.0; expected a positive number"),
        ({"levels": [{**PLAIN, "latency_s": -1}]}, "latency_s is -1.0; expected at least 0"),
        ({"levels": [{**PLAIN, "base_s": -1}]}, "base_s is -1.0; expected at least 0"),
        ({"levels": [{**GOOD["levels"][0], "efficiency": 0}]}, "efficiency is 0.0; expected a number above 0"),
        ({"levels": [{**GOOD["levels"][0], "speed": 1}]}, "unknown field 'levels.0.speed'"),
        ({"levels": [{"name": "a", "size": 2}]}, "field 'levels.0.bytes_per_s' is missing"),
        (
            {"levels": [{"name": "a", "size": 2, "bytes_per_s": 1e9}]},
            "level 'a': latency_s is missing; expected the seconds of a hop, or nccl",
        ),
        (
            {"levels": [{**GOOD["levels"][0], "latency_s": 1e-6}]},
            "level 'network': nccl is 'network'; expected no latency_s and base_s beside it",
        ),
        ({"levels": [{**GOOD["levels"][0], "nccl": "wire"}]}, "field 'levels.0.nccl': input should be '', 'nvlink'"),
        (
            {"levels": [{**GOOD["levels"][0], "bytes_per_s": [1e9, 2e9, 3e9]}]},
            "level 'network': bytes_per_s is 3 figures; expected one, or 2",
        ),
        ({"levels": [{**GOOD["levels"][0], "switch_bytes_per_s": -1}]}, "switch_bytes_per_s is -1.0; expected at"),
        ({"levels": [GOOD["levels"][0]] * 2}, "levels is ['network', 'network']; expected distinct names"),
    ],
)
def test_bad_file(tmp_path, change, message):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(PlanError, match=re.escape(message)):
        parse_cluster(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"{", "not JSON: "), (b"[]", "the whole must be an object, got []"), (b"\xff", "not text in UTF-8")],
)
def test_file_that_is_no_cluster(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_bytes(text)
    with pytest.raises(PlanError, match=re.escape(f"cluster file {str(path)!r}: {message}")):
        parse_cluster(str(path))


def test_nothing_heavy_is_imported():
    imports = "import sys, autopar.cluster, autopar.plans, autopar.program.schedule"
    code = f"{imports}; print({{'torch', 'pydantic'}} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_the_file_in_the_readme(tmp_path):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (text,) = re.findall(r"```json\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "mine.json").write_text(text)
    cluster = parse_cluster(str(tmp_path / "mine.json"))
    assert cluster.levels_text == "spine=4 rail=2 nvlink=8"
    assert axis_link(cluster, Mesh.parse("dp=8 tp=8"), "dp").bytes_per_s == 12.5e9  # 8 groups share the spine's ports


# -- the schema ------------------------------------------------------------------------------------------------------
def test_the_schema_says_what_each_field_means():
    schema = cluster_schema()
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["required"] == ["name", "device", "levels"] and schema["additionalProperties"] is False
    assert {"a100", "h100", "cpu"} <= set(schema["properties"]["device"]["anyOf"][1]["enum"])
    for cls in (Device, Level):
        described = schema["$defs"][cls.__name__]["properties"]
        assert set(described) == {field.name for field in dataclasses.fields(cls)}
        assert all(field.get("description") for field in described.values())


def conforms(value, schema, root):
    """Whether `value` is what `schema` describes: as much of JSON Schema as ours uses."""
    if "$ref" in schema:
        return conforms(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(conforms(value, one, root) for one in schema["anyOf"])
    if "enum" in schema and value not in schema["enum"]:
        return False
    match schema["type"]:
        case "object":
            known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
            return isinstance(value, dict) and all(
                conforms(entry, known[name], root) if name in known else others and conforms(entry, others, root)
                for name, entry in value.items()
            ) and set(schema.get("required", ())) <= set(value)  # fmt: skip
        case "array":
            if not isinstance(value, list) or ("minItems" in schema and len(value) != schema["minItems"]):
                return False
            items = schema.get("prefixItems") or [schema["items"]] * len(value)
            return all(conforms(entry, item, root) for entry, item in zip(value, items, strict=True))
        case kind:
            types = {"string": str, "boolean": bool, "integer": int, "number": (int, float), "null": type(None)}
            return isinstance(value, types[kind]) and (kind == "boolean" or not isinstance(value, bool))


@pytest.mark.parametrize("text", ["2x8xh100", "2xcpu", "8xa100"])
def test_clusters_conform_to_the_schema(text):
    schema, cluster = cluster_schema(), json.loads(parse_cluster(text).to_json())
    assert conforms(cluster, schema, schema)
    assert conforms({**cluster, "device": "h100"}, schema, schema)
    level = cluster["levels"][0]
    assert conforms({**cluster, "levels": [{**level, "bytes_per_s": [1e9, 2e9]}]}, schema, schema)
    for wrong in ({"device": "h10"}, {"levels": [{**level, "nccl": "wire"}]}, {"extra": 1}, {"levels": [{"size": 2}]}):
        assert not conforms({**cluster, **wrong}, schema, schema)
