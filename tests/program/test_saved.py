"""Saving and loading: what comes back, what is refused, and that nothing is half-written."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

from autopar.errors import PlanError
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.program import saved
from autopar.program.parts import Pipeline, Slot, StageProgram, Transfer, Value
from autopar.program.saved import load_program, parse_value, program_hash, save_program, stage_codes, value_text

sys.path.insert(0, str(Path(__file__).parent))
from tracing import part_of, traced_part, values_of

aten = torch.ops.aten


@dataclasses.dataclass
class Program:
    pipeline: Pipeline
    plan_json: str = '{"plan": 1}'
    recipe: dict = dataclasses.field(default_factory=lambda: {"seed": 7, "weights": {"w": ["normal", 0.02]}})
    scalars: dict = dataclasses.field(default_factory=lambda: {"group0.lr": 0.1})
    options: dict = dataclasses.field(default_factory=lambda: {"group0": {"lr": 0.1, "betas": [0.9, 0.99]}})
    aliases: dict = dataclasses.field(default_factory=lambda: {"head.weight": "w"})
    batch_layout: tuple = ("x",)


def with_constant():
    graph = fx.Graph()
    x, constant = graph.placeholder("x"), graph.get_attr("table")
    y = graph.call_function(aten.add.Tensor, (x, constant))
    graph.output((y,))
    for node in (x, constant, y):
        node.meta["val"] = torch.zeros(4)
    root = torch.nn.Module()
    root.register_buffer("table", torch.arange(4.0))
    return part_of(fx.GraphModule(root, graph), "received:h", "output:loss")


def two_stages():
    first = traced_part(lambda x, w: (x * w,), "batch:x param:w", "saved:h", *torch.randn(2, 4))
    second = with_constant()
    stages = tuple(StageProgram(i, {"forward": p}, values_of(p)) for i, p in enumerate((first, second)))
    transfers = (Transfer(Slot("saved", "h"), 0, 1, "forward"),)
    return Pipeline(Mesh.parse("pp=2"), 2, stages, transfers, (("0F0", "0F1"), ("1F0", "1F1")))


def test_round_trip(tmp_path):
    program = Program(two_stages())
    save_program(program, tmp_path / "out", {"origin.json": "{}"})
    loaded = load_program(tmp_path / "out")
    codes = stage_codes(program.pipeline)
    assert loaded.hash == program_hash(program.plan_json, codes)
    for field in ("plan_json", "recipe", "scalars", "options", "aliases", "batch_layout"):
        assert getattr(loaded, field) == getattr(program, field)
    for field in ("mesh", "microbatches", "transfers", "schedule"):
        assert getattr(loaded.pipeline, field) == getattr(program.pipeline, field)
    for mine, theirs, code in zip(program.pipeline.stages, loaded.pipeline.stages, loaded.codes, strict=True):
        assert mine.values == theirs.values
        for name, part in mine.parts.items():
            assert (part.inputs, part.outputs) == (theirs.parts[name].inputs, theirs.parts[name].outputs)
        assert code.functions == codes[code.index].functions
    second = loaded.codes[1].bind(None, torch.device("cpu"))["forward"]
    assert torch.equal(second([torch.ones(4)])[0], torch.arange(4.0) + 1)
    names = {"origin.json", "plan.json", "program.json", "schedule.txt", "recipe.json", "constants.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {"stage_0.py", "stage_1.py"}


def test_a_loaded_program_saves_to_the_same_text(tmp_path):
    save_program(Program(two_stages()), tmp_path / "a")
    save_program(load_program(tmp_path / "a"), tmp_path / "b")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_text_is_the_same_in_another_process(tmp_path):
    """No text depends on addresses or on the order of sets."""
    script = "import sys; import test_saved as t; t.save_program(t.Program(t.two_stages()), sys.argv[1])"
    for seed in "12":
        arguments = [sys.executable, "-c", script, str(tmp_path / seed)]
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        }
        subprocess.run(arguments, check=True, env=environment)
    for path in (tmp_path / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "2" / path.name).read_bytes(), path.name


def test_values_have_a_text_form():
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8):
        for layout in ("[(8@dp 4096@tp.cp) 1 1024] +pp", "[]"):
            value = Value(dtype, Layout.parse(layout))
            assert parse_value(value_text(value), "here") == value
    for wrong in ("f32", "q7[4]", "f32[x]"):
        with pytest.raises(PlanError, match=r"here: .* is not a value"):
            parse_value(wrong, "here")


# -- nothing half-written ------------------------------------------------------------------------------------------
def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    program = Program(two_stages(), recipe={"not JSON": object()})
    with pytest.raises(TypeError):
        save_program(program, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_keeps_the_earlier_program(tmp_path, monkeypatch):
    save_program(Program(two_stages()), tmp_path / "out")
    before = load_program(tmp_path / "out").hash

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(saved, "format_schedule", fail)
        with pytest.raises(OSError, match="disk full"):
            save_program(Program(two_stages(), plan_json="{}"), tmp_path / "out")
    assert load_program(tmp_path / "out").hash == before
    save_program(Program(two_stages(), plan_json="{}"), tmp_path / "out")
    assert load_program(tmp_path / "out").plan_json == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_only_programs_are_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(PlanError, match="is no saved program"):
        save_program(Program(two_stages()), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"


# -- what is refused -----------------------------------------------------------------------------------------------
def edit_document(change):
    def edit(folder):
        document = json.loads((folder / "program.json").read_text())
        change(document)
        (folder / "program.json").write_text(json.dumps(document))

    return edit


BROKEN = [
    (lambda f: (f / "program.json").unlink(), "no saved program here"),
    (lambda f: (f / "program.json").write_text("not json"), "program.json: not JSON"),
    (edit_document(lambda d: d.update(format_version=99)), "format version 99, this autopar reads 1"),
    (edit_document(lambda d: d.pop("mesh")), "field 'mesh' is missing"),
    (edit_document(lambda d: d.update(color="red")), "unknown field 'color'"),
    (edit_document(lambda d: d.update(microbatches="2")), "field 'microbatches'"),
    (edit_document(lambda d: d.update(mesh="pp=3")), "2 stages on mesh pp=3, expected 3"),
    (
        edit_document(lambda d: d["stages"][0]["values"].update({"param:w": "f32"})),
        "stage 0, param:w: 'f32' is not a value",
    ),
    (edit_document(lambda d: d["stages"][0]["values"].pop("param:w")), "slot param:w has no value"),
    (edit_document(lambda d: d["transfers"][0].update(target=5)), "stages that don't exist"),
    (lambda f: (f / "stage_1.py").unlink(), "stage_1.py: missing"),
    (lambda f: (f / "stage_0.py").write_text("def bind(:\n"), "stage_0.py: line 1"),
    (lambda f: (f / "schedule.txt").write_text("0F0,what\n"), "schedule, line 1"),
    (lambda f: (f / "constants.safetensors").write_bytes(b"junk"), "constants.safetensors: can't be read"),
    (lambda f: (f / "constants.safetensors").unlink(), "constants.safetensors: can't be read"),
    (lambda f: (f / "plan.json").write_bytes(b"\xff\xfe"), "plan.json: can't be read"),
    (lambda f: (f / "recipe.json").write_text("[]"), "recipe.json"),
]


@pytest.mark.parametrize(("breakage", "message"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_directory_gives_one_message(tmp_path, breakage, message):
    save_program(Program(two_stages()), tmp_path / "out")
    breakage(tmp_path / "out")
    with pytest.raises(PlanError) as raised:
        load_program(tmp_path / "out")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_edited_file_changes_the_hash(tmp_path):
    save_program(Program(two_stages()), tmp_path / "out")
    before = load_program(tmp_path / "out").hash
    file = tmp_path / "out" / "stage_0.py"
    file.write_text(file.read_text().replace("batch_x * w", "batch_x + w"))
    assert load_program(tmp_path / "out").hash != before
