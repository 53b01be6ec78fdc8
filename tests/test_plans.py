"""Plans as text: round trip, what a diff shows, what is refused."""

import dataclasses
import json
import re

import pytest

from autopar.cluster import parse_cluster
from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.plans import (
    Candidate,
    CollectiveRow,
    Estimate,
    MemoryRow,
    OverlapRow,
    Plan,
    StageSpan,
    ValidFor,
    relative_gap,
    require_valid_for,
    stage_of,
)

VALID_FOR = ValidFor(
    graph_hash="0123456789abcdef" * 4,
    batch_shapes={"tokens": "i64[8 128]", "targets": "i64[8 128]"},
    precision="fp32",
    optimizer="AdamW",
    microbatches=4,
    cluster="4xcpu",
    num_devices=4,
)
ESTIMATE = Estimate(
    objective_s=0.5,
    bound_s=0.4,
    gap=0.2,
    status="feasible",
    capture_s=1.5,
    solve_s=2.5,
    memory_limit_bytes=4 << 30,
    memory=(MemoryRow(0, "all", 10, 20, 30, 40, 50, 150), MemoryRow(1, "all", 1, 2, 3, 4, 5, 15)),
    collectives=(CollectiveRow("tp", "all_reduce", 16, 1024, 16384, "loopback 2 GB/s 100 us", 0.01),),
    bubble_fraction=0.2,
    step_s={"compute": 0.3, "collectives": 0.1, "bubble": 0.1},
    serial_s=0.54,
    overlap=(OverlapRow(0, "tp", 0.04, 0.06),),
)
PLAN = Plan(
    valid_for=VALID_FOR,
    cluster=parse_cluster("4xcpu"),
    mesh=Mesh.parse("pp=2 dp=1 tp=2"),
    microbatches=4,
    schedule="1f1b",
    stages=(
        StageSpan("embed", "layers.1", "embed, layers.0-1"),
        StageSpan("layers.2", "head", "layers.2-3, head", rank=1),
    ),
    node_stage={"": 0, "layers.2": 1, "layers.10": 1, "head": 1},
    choices={
        "layers.10.up/linear/forward#0": "dp=b tp=o",
        "layers.2.up/linear/forward#0": "dp=b tp=o",
        "embed/embedding/forward#0": "dp=b",
    },
    recomputed=("layers.0/*",),
    pins=("pp=2",),
    estimate=ESTIMATE,
    candidates=(
        Candidate(Mesh.parse("pp=2 dp=1 tp=2"), 4, 2, 0.5, 150, "chosen", ""),
        Candidate(Mesh.parse("pp=1 dp=4 tp=1"), 4, 1, None, 9 << 30, "infeasible", "parameters need 9 GiB"),
    ),
)


def test_round_trip():
    text = PLAN.to_json()
    again = Plan.from_json(text)
    assert again == PLAN
    assert again.to_json() == text
    assert hash(again) == hash(PLAN)


def test_order_of_mesh_axes_is_kept():
    swapped = dataclasses.replace(PLAN, mesh=Mesh.parse("tp=2 dp=1 pp=2"))
    assert Plan.from_json(swapped.to_json()).mesh.names == ("tp", "dp", "pp")
    assert swapped.fingerprint != PLAN.fingerprint


def test_text_is_for_people():
    lines = PLAN.to_json().splitlines()
    assert lines[1] == f'  "format_version": {PLAN.format_version},'
    at = lines.index('  "choices": {')
    assert lines[at + 1 : at + 5] == [
        '    "embed/embedding/forward#0": "dp=b",',
        '    "layers.2.up/linear/forward#0": "dp=b tp=o",',
        '    "layers.10.up/linear/forward#0": "dp=b tp=o"',
        "  },",
    ]
    assert '    {"first": "embed", "last": "layers.1", "modules": "embed, layers.0-1", "kind": 0, "rank": 0},' in lines
    assert any(line.startswith('      {"stage": 0, "ranks": "all", "parameters": 10,') for line in lines)
    candidate = next(line for line in lines if "infeasible" in line)
    assert candidate.startswith(
        '    {"mesh": {"pp": 1, "dp": 4, "tp": 1}, "microbatches": 4, "stages": 1, "step_s": null'
    )


def test_one_choice_is_one_line_of_a_diff():
    choices = {**PLAN.choices, "embed/embedding/forward#0": "dp=none"}
    other = dataclasses.replace(PLAN, choices=choices).to_json()
    changed = [pair for pair in zip(PLAN.to_json().splitlines(), other.splitlines(), strict=True) if pair[0] != pair[1]]
    assert changed == [('    "embed/embedding/forward#0": "dp=b",', '    "embed/embedding/forward#0": "dp=none",')]


def test_order_of_construction_does_not_matter():
    shuffled = dataclasses.replace(PLAN, choices=dict(reversed(PLAN.choices.items())))
    assert shuffled.to_json() == PLAN.to_json()
    assert shuffled.fingerprint == PLAN.fingerprint


def test_rules_come_back_and_are_read():
    rules = {"my::up(f32[8 8], 1e-05)": "a ([2] b) -> a b; linear 0"}
    with_rules = dataclasses.replace(PLAN, found_rules=rules, registered_rules={"my::down(f32[8])": "a -> a"})
    assert Plan.from_json(with_rules.to_json()) == with_rules
    assert with_rules.rules == {**rules, "my::down(f32[8])": "a -> a"}
    assert with_rules.fingerprint != PLAN.fingerprint
    with pytest.raises(PlanError, match=r"rule of my::up.*print\(\)"):
        dataclasses.replace(PLAN, found_rules={"my::up(f32[8 8])": "print() -> a"})


def test_fingerprint_is_of_the_decisions():
    slower = dataclasses.replace(ESTIMATE, solve_s=99.0)
    assert dataclasses.replace(PLAN, estimate=slower, candidates=()).fingerprint == PLAN.fingerprint
    assert dataclasses.replace(PLAN, schedule="gpipe").fingerprint != PLAN.fingerprint
    assert dataclasses.replace(PLAN, choices={}).fingerprint != PLAN.fingerprint


def test_json_report():
    report = json.loads(json.dumps(PLAN.json_report()))
    assert list(report["mesh"].items()) == [("pp", 2), ("dp", 1), ("tp", 2)]
    assert (report["schedule"], report["status"], report["objective_s"], report["bound_s"], report["gap"]) == (
        "1f1b", "feasible", 0.5, 0.4, 0.2)  # fmt: skip
    assert (report["capture_s"], report["solve_s"], len(report["stages"])) == (1.5, 2.5, 2)
    for row in report["memory"]:
        assert row["peak"] == sum(
            row[name] for name in ("parameters", "gradients", "optimizer", "activations", "buffers")
        )
    assert report["collectives"][0]["bytes_per_step"] == 16384
    assert "estimate" not in report


def test_stage_of():
    rule = {"": 0, "layers.1": 1, "layers.10": 2, "layers.1.mlp": 3}
    paths = ["", "embed", "layers.1", "layers.1.attn.q", "layers.1.mlp.up", "layers.10.mlp", "layers.11"]
    assert [stage_of(rule, path) for path in paths] == [0, 0, 1, 1, 3, 2, 0]
    assert stage_of({}, "anything") == 0


def test_relative_gap():
    assert relative_gap(2.0, 1.5) == 0.25
    assert relative_gap(0.0, 0.0) == 0.0


# -- validity ------------------------------------------------------------------------------------------------------
def test_valid_for_the_same():
    require_valid_for(PLAN, VALID_FOR)
    require_valid_for(PLAN, dataclasses.replace(VALID_FOR, cluster="", num_devices=0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"graph_hash": "f" * 64}, "the model's graph (hash) was 0123456789ab…, is ffffffffffff…"),
        ({"precision": "mixed"}, "precision was fp32, is mixed"),
        ({"optimizer": "SGD"}, "optimizer was AdamW, is SGD"),
        ({"microbatches": 2}, "microbatches was 4, is 2"),
        ({"cluster": "4xh100"}, "cluster was 4xcpu, is 4xh100"),
        ({"num_devices": 2}, "number of devices was 4, is 2"),
        (
            {"batch_shapes": {"tokens": "i64[4 128]", "mask": "b8[4]"}},
            "batch tensor 'mask' was absent, is b8[4]; batch tensor 'targets' was i64[8 128], is absent; "
            "batch tensor 'tokens' was i64[8 128], is i64[4 128]",
        ),
        ({"precision": "mixed", "microbatches": 2}, "precision was fp32, is mixed; microbatches was 4, is 2"),
    ],
)
def test_another_step_is_refused(change, message):
    expected = f"the plan is for another step: {message}; make a new plan for this one"
    with pytest.raises(PlanError, match=re.escape(expected)):
        require_valid_for(PLAN, dataclasses.replace(VALID_FOR, **change))


# -- mistakes in a file --------------------------------------------------------------------------------------------
def without(*path):
    data = json.loads(PLAN.to_json())
    inner = data
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return json.dumps(data)


def changed(value, *path):
    data = json.loads(PLAN.to_json())
    inner = data
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plan: not JSON: "),
        ("mesh: dp=2", "plan: not JSON: Expecting value: line 1 column 1"),
        (PLAN.to_json()[:-20], "plan: not JSON: "),
        ("[]", "plan: expected a JSON object with a plan's fields, got list"),
        ("{}", "plan: field 'format_version' is missing; is this a plan?"),
        (changed(1, "format_version"), "plan: format_version is 1, expected 3; make the plan anew"),
        (without("mesh"), "plan: field 'mesh' is missing"),
        (without("choices"), "plan: field 'choices' is missing"),
        (without("estimate", "bound_s"), "plan: field 'estimate.bound_s' is missing"),
        (without("cluster", "levels", 0, "size"), "plan: field 'cluster.levels.0.size' is missing"),
        (changed(1, "colour"), "plan: unknown field 'colour'"),
        (changed("4", "microbatches"), "plan: field 'microbatches': input should be a valid integer, got '4'"),
        (changed(0, "microbatches"), "plan: microbatches is 0; expected at least 1"),
        (
            changed({"pp": 2, "tp": "x"}, "mesh"),
            "plan: field 'mesh.axes.1.1': input should be a valid integer, got 'x'",
        ),
        (changed("dp=2", "mesh"), "plan: field 'mesh' must be an object, got 'dp=2'"),
        (changed({"pp": 2, "tp": 4}, "mesh"), "plan: mesh pp=2 tp=4 has 8 ranks, but 4xcpu has 4 devices"),
        (changed({"tp": 4}, "mesh"), "plan: 2 stages, but the mesh has pp=1"),
        (changed({"": 0, "head": 2}, "node_stage"), "plan: node_stage['head'] is 2, but there are 2 stages"),
        (changed("best", "estimate", "status"), "estimate: status is 'best'; expected one of optimal, feasible"),
        (changed(0.5, "estimate", "gap"), "estimate: gap is 0.5, but objective_s and bound_s give 0.2"),
        (
            changed(151, "estimate", "memory", 0, "peak"),
            "memory of stage 0 (all): the classes sum to 150 bytes, but peak is 151",
        ),
        (changed(5, "candidates"), "plan: field 'candidates': input should be a valid array, got 5"),
        (changed([5], "candidates"), "plan: field 'candidates.0' must be an object, got 5"),
    ],
)
def test_bad_text(text, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        Plan.from_json(text)


# -- files ---------------------------------------------------------------------------------------------------------
def test_save_and_load(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert Plan.load(str(path)) == PLAN
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("old")

    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(
        PlanError, match=re.escape(f"plan file {str(path)!r}: can't be written: No space left on device")
    ):
        PLAN.save(path)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_save_into_no_folder(tmp_path):
    with pytest.raises(PlanError, match=r"plan.json': can't be written: No such file or directory"):
        PLAN.save(tmp_path / "nowhere" / "plan.json")


def test_load_says_what_is_wrong(tmp_path):
    with pytest.raises(PlanError, match=r"nothing.json': No such file or directory"):
        Plan.load(tmp_path / "nothing.json")
    with pytest.raises(PlanError, match="Is a directory"):
        Plan.load(tmp_path)
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=r"plan.json': not JSON: not text in UTF-8"):
        Plan.load(path)
    path.write_text("{")
    with pytest.raises(PlanError, match=re.escape(f"plan file {str(path)!r}: not JSON: ")):
        Plan.load(path)
