"""The command line: what it prints where, its exit statuses, and one clear message for each mistake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cli import main

STEP = """
import torch
import autopar

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()

def step(batch=8):
    torch.manual_seed(0)
    return autopar.TrainStep(Model(), torch.randn(batch, 8))

def not_a_step():
    return 7

def broken():
    return undefined_name
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder with `model.py`, as the current one."""
    (tmp_path / "model.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments):
    """(exit status, stdout, stderr) of one command."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    out, err = capsys.readouterr()
    return stopped.value.code or 0, out, err


def refused(capsys, *arguments):
    """The one message of a command that must exit with 2 and print nothing else."""
    status, out, err = run(capsys, *arguments)
    assert status == 2, err
    assert out == ""
    assert "Traceback" not in err
    return err


# -- what is given ---------------------------------------------------------------------------------------------------
def test_unknown_cluster(capsys, model):
    message = refused(capsys, "plan", "model.py:step", "--cluster", "8xabacus")
    assert "abacus" in message and "h100" in message


def test_unknown_command_and_option(capsys):
    assert "No such command" in refused(capsys, "plam")
    assert "No such option" in refused(capsys, "plan", "m.py:step", "--clutser", "2xcpu")
    assert "Missing option '--cluster'" in refused(capsys, "plan", "m.py:step")


@pytest.mark.parametrize("pin", ["tp", "zero=9", "layers: tp=sideways"])
def test_malformed_pin(capsys, model, pin):
    message = refused(capsys, "plan", "model.py:step", "--cluster", "2xcpu", "--pin", pin)
    assert message.startswith(f"autopar: pin {pin!r}: ")


@pytest.mark.parametrize("memory", ["plenty", "-3GiB", "0"])
def test_malformed_memory(capsys, model, memory):
    message = refused(capsys, "plan", "model.py:step", "--cluster", "2xcpu", f"--memory={memory}")
    assert memory in message and "60GiB" in message


# -- MODEL -----------------------------------------------------------------------------------------------------------
def test_unknown_file(capsys, model):
    message = refused(capsys, "plan", "absent.py:step", "--cluster", "2xcpu")
    assert "'absent.py': no such file" in message


def test_no_factory(capsys, model):
    assert "names no factory" in refused(capsys, "plan", "model.py", "--cluster", "2xcpu")


def test_unknown_factory(capsys, model):
    message = refused(capsys, "plan", "model.py:stop", "--cluster", "2xcpu")
    assert "has no function 'stop'; it has step, not_a_step, broken" in message


def test_factory_that_returns_something_else(capsys, model):
    message = refused(capsys, "plan", "model.py:not_a_step", "--cluster", "2xcpu")
    assert "model.py:not_a_step: returned int; expected an autopar.TrainStep" in message


def test_factory_that_raises_names_the_users_line(capsys, model):
    line = STEP.splitlines().index("    return undefined_name") + 1
    message = refused(capsys, "plan", "model.py:broken", "--cluster", "2xcpu")
    assert f"model.py:{line}: broken() raised NameError" in message


def test_file_that_is_not_python(capsys, model):
    (model / "bad.py").write_text("def step(:\n")
    assert "bad.py:1: " in refused(capsys, "plan", "bad.py:step", "--cluster", "2xcpu")


def test_batch_for_a_factory_without_one(capsys, model):
    message = refused(capsys, "plan", "model.py:step", "--cluster", "2xcpu", "--seq", "8")
    assert "--seq: model.py:step takes no argument 'seq'" in message


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": 8}'])
def test_config_that_is_none(capsys, model, text):
    (model / "config.json").write_text(text)
    assert "'config.json'" in refused(capsys, "plan", "config.json", "--cluster", "2xcpu")


# -- plan files ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", [["explain", "plan.json"], ["diff", "plan.json", "plan.json"]])
def test_plan_file_that_is_absent(capsys, model, command):
    assert "plan file 'plan.json': No such file" in refused(capsys, *command)


@pytest.mark.parametrize("text", ["", "not JSON", "[1, 2]", '{"mesh": 3}'])
def test_plan_file_that_is_not_a_plan(capsys, model, text):
    (model / "plan.json").write_text(text)
    assert "plan.json" in refused(capsys, "explain", "plan.json")
    assert "plan.json" in refused(capsys, "verify", "model.py:step", "-c", "2xcpu", "--plan", "plan.json")


def test_nothing_is_written_on_a_mistake(capsys, model):
    refused(capsys, "plan", "model.py:step", "--cluster", "2xabacus", "-o", "plan.json")
    refused(capsys, "build", "model.py:step", "--cluster", "2xabacus", "-o", "out")
    assert {file.name for file in model.iterdir()} <= {"model.py", "__pycache__"}


def test_run_of_a_directory_that_is_absent(capsys, model):
    assert "absent" in refused(capsys, "run", "absent")


# -- the way through -------------------------------------------------------------------------------------------------
def test_plan_prints_json_alone_and_the_file_holds_the_plan(capsys, model):
    status, out, _ = run(capsys, "plan", "model.py:step", "-c", "2xcpu", "--json", "-o", "plan.json")
    data = json.loads(out)
    assert status == 0
    assert data["status"] in ("optimal", "feasible")
    assert json.loads((model / "plan.json").read_text())["mesh"] == data["mesh"]


def test_the_best_plans_have_a_table_and_a_file_each(capsys, model):
    status, out, err = run(capsys, "plan", "model.py:step", "-c", "2xcpu", "--best", "3", "-o", "plan.json")
    assert status == 0, err
    assert "the best plans" in out and {"plan.json", "plan.2.json"} <= {file.name for file in model.iterdir()}
    data = json.loads(run(capsys, "plan", "model.py:step", "-c", "2xcpu", "--best", "2", "--json")[1])
    assert [each["mesh"] for each in data["plans"]] == [
        json.loads((model / name).read_text())["mesh"] for name in ("plan.json", "plan.2.json")
    ]


def test_a_given_plan_is_for_its_cluster_and_stands_as_it_is(capsys, model):
    run(capsys, "plan", "model.py:step", "-c", "2xcpu", "-o", "plan.json")
    verify = ["verify", "model.py:step", "--plan", "plan.json"]
    assert "the plan is for 2xcpu" in refused(capsys, *verify, "-c", "4xcpu")
    assert "leave them or --plan out" in refused(capsys, *verify, "-c", "2xcpu", "--pin", "dp=2")


def test_explain_with_the_model_prices_alternatives(capsys, model):
    run(capsys, "plan", "model.py:step", "-c", "2xcpu", "--pin", "tp=2", "-o", "plan.json")
    status, out, err = run(capsys, "explain", "plan.json", "up", "--model", "model.py:step", "--json")
    assert status == 0, err
    rows = json.loads(out)["alternatives"]
    assert {row["why"] == "chosen" for row in rows} == {True, False}
    status, out, _ = run(capsys, "explain", "plan.json", "up")
    assert status == 0 and "add --model MODEL" in out
    assert "nearest limit: stage 0 at " in run(capsys, "explain", "plan.json")[1]
    assert "of which part?" in refused(capsys, "explain", "plan.json", "--model", "model.py:step")
    other = ["explain", "plan.json", "up", "--model", "model.py:step", "--batch", "16"]
    assert "the plan is for another step" in refused(capsys, *other)


def test_build_leaves_other_folders_alone(capsys, model):
    assert "is no saved program" in refused(capsys, "build", "model.py:step", "-c", "2xcpu", "-o", ".")


@pytest.mark.dist
def test_build_then_run(capfd, model, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    status, _, err = run(capfd, "build", "model.py:step", "-c", "2xcpu", "-o", "out")
    assert status == 0, err
    status, out, err = run(capfd, "run", "out", "--steps", "3", "--json")
    assert status == 0, err
    report = json.loads(out)
    assert report["batches"] == "random, seed 0" and len(report["steps"]) == 3


def test_debug_shows_the_traceback(capsys, model, monkeypatch):
    monkeypatch.setenv("AUTOPAR_DEBUG", "1")
    status, _, err = run(capsys, "plan", "model.py:broken", "-c", "2xcpu")
    assert status == 2 and "Traceback" in err


def test_module_and_script_are_the_same_command():
    command = [sys.executable, "-m", "autopar", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("autopar ")


# -- clusters ----------------------------------------------------------------------------------------------------
def test_a_cluster_is_shown_with_its_sources(capsys):
    status, out, _ = run(capsys, "cluster", "2x8xh100")
    assert status == 0
    assert out.startswith("2x8xh100: 16 devices, network=2 nvlink=8\n")
    assert "989.4 TFLOP/s" in out and "450 GB/s" in out and "stas00/ml-engineering" in out


def test_a_cluster_file_and_its_schema(capsys, tmp_path):
    _, text, _ = run(capsys, "cluster", "2x8xh100", "--json")
    (tmp_path / "mine.json").write_text(text.replace('"size": 8', '"size": 4'))
    _, out, _ = run(capsys, "cluster", str(tmp_path / "mine.json"))
    assert "8 devices, network=2 nvlink=4" in out
    _, schema, _ = run(capsys, "cluster", "--schema")
    assert json.loads(schema)["title"] == "Cluster"


@pytest.mark.parametrize("arguments", [[], ["8xh100", "--schema"]])
def test_cluster_without_one(capsys, arguments):
    assert "give C (8xh100, auto, a cluster file) or --schema" in refused(capsys, "cluster", *arguments)


# -- rules -------------------------------------------------------------------------------------------------------
def test_rules_are_listed(capsys):
    status, out, _ = run(capsys, "rules", "aten.*mm")
    assert status == 0
    assert out.splitlines()[0] == "6 rules"
    assert "m k, k n -> m n" in out


def test_rules_are_proven(capsys):
    status, out, _ = run(capsys, "rules", "aten.mm", "--prove", "--json")
    assert status == 0
    (row,) = json.loads(out)["rules"]
    assert row["op"] == "aten.mm" and row["linear"] == "0|1" and row["from"] == "table"
    assert row["executed"] > 40 and row["counterexamples"] == 0 and row["proof_s"] > 0


def test_a_wrong_rule_exits_with_1(capsys, monkeypatch):
    from autopar.rules import table
    from autopar.rules.entries import texts

    monkeypatch.setitem(table._ROWS, "aten.mm", texts("", "m k, j n -> m n"))
    status, _, err = run(capsys, "rules", "aten.mm", "--prove")
    assert status == 1
    assert "aten.mm.default([6, 4], [4, 12]) on x=2: aten.mm under 'x=k'" in err


def test_rules_of_no_op(capsys):
    assert "no op with a rule matches 'aten.nosuch'" in refused(capsys, "rules", "aten.nosuch")
