"""Mistakes of the user's: each is one `autopar.Error` of the right kind with a message that names what was got, what
was expected and what to do; nothing half-written is left."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.step import TrainStep
from autopar.cli import main
from autopar.compiling import compile
from autopar.errors import CaptureError, Error, InfeasibleError, PlanError
from autopar.planning import plan
from autopar.plans import Plan
from autopar.program.virtual import VirtualMesh
from tests.virtual.step_models import GPT, Perceptrons, step_of, token_batch

NAME = "perceptrons, 8 rows"


def refused(kind: type[Error], status: int, run: Callable[[], Any]) -> str:
    """The message, one line without a traceback of ours."""
    with pytest.raises(Error) as error:
        run()
    assert type(error.value) is kind, error.value
    assert error.value.exit_status == status
    message = str(error.value)
    assert "Traceback" not in message and 20 < len(message) < 600
    return message


# -- clusters and meshes -------------------------------------------------------------------------------------------
def test_unknown_cluster() -> None:
    message = refused(PlanError, 2, lambda: plan(step_of(NAME), "8xabacus"))
    assert "abacus" in message and "cpu" in message


@pytest.mark.parametrize(
    ("pins", "names"), [("tp=3", "tp=3"), ("dp=4, tp=4", "4xcpu"), ("pp=8", "pp=8"), ("dp=3, tp=2", "4xcpu")]
)
def test_a_mesh_that_does_not_divide(pins: str, names: str) -> None:
    message = refused(PlanError, 2, lambda: plan(step_of(NAME), "4xcpu", pin=pins))
    assert names in message and "4" in message


def test_more_stages_than_the_model_has_units() -> None:
    message = refused(PlanError, 2, lambda: plan(step_of("squares"), "2xcpu", pin="pp=2"))
    assert "stages" in message and "unit" in message


# -- pins ----------------------------------------------------------------------------------------------------------
def test_a_pin_that_matches_no_module() -> None:
    message = refused(PlanError, 2, lambda: plan(step_of(NAME), "2xcpu", pin="tp=2, layers.*: tp=out"))
    assert "layers.*" in message


@pytest.mark.parametrize(("pin", "what"), [("norms.*: tp=heads", "heads"), ("ups.0: tp=vocab", "vocab")])
def test_a_pin_whose_modules_have_no_such_dim(pin: str, what: str) -> None:
    message = refused(PlanError, 2, lambda: plan(step_of(NAME), "2xcpu", pin=["tp=2", pin]))
    assert pin in message and what in message


def test_a_data_parallel_pin_that_the_microbatch_does_not_divide() -> None:
    """8 rows in 4 microbatches over dp=4: two rows each. A plan that quietly used fewer ranks would be worse."""
    message = refused(PlanError, 2, lambda: plan(step_of(NAME), "4xcpu", pin="dp=4, microbatches=4"))
    assert "dp=4" in message and "2" in message and "microbatches" in message


def test_contradictory_pins() -> None:
    assert "tp=4" in refused(PlanError, 2, lambda: plan(step_of(NAME), "4xcpu", pin="tp=2, tp=4"))


@pytest.mark.parametrize("count", ["0", "3", "16"])
def test_microbatches_that_do_not_divide_the_batch(count: str) -> None:
    with pytest.raises(Error) as error:
        plan(step_of(NAME), "2xcpu", pin=f"microbatches={count}")
    assert error.value.exit_status == 2 and count in str(error.value)


# -- plans ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(step_of(NAME), "2xcpu", pin="dp=2")


def test_a_plan_of_another_model(made: Plan) -> None:
    assert "step" in refused(PlanError, 2, lambda: compile(step_of("gpt, 8 rows"), made))


def test_a_plan_for_another_batch(made: Plan) -> None:
    torch.manual_seed(0)
    other = TrainStep(Perceptrons(), token_batch(16), optimizer=torch.optim.AdamW)
    message = refused(PlanError, 2, lambda: compile(other, made))
    assert "tokens" in message and "[8 6]" in message and "[16 6]" in message


def test_a_plan_for_another_optimizer(made: Plan) -> None:
    torch.manual_seed(0)
    other = TrainStep(Perceptrons(), token_batch(8), optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    assert "SGD" in refused(PlanError, 2, lambda: compile(other, made))


def test_a_plan_whose_choices_name_no_node(made: Plan) -> None:
    data = json.loads(made.to_json())
    key = next(key for key in data["choices"] if "linear" in key)
    data["choices"][key] = "dp=zz"
    message = refused(PlanError, 2, lambda: compile(step_of(NAME), Plan.from_json(json.dumps(data))))
    assert key in message and "zz" in message


@pytest.mark.parametrize("text", ["", "{", "not JSON", "[]", "3", '{"mesh": "dp=2"}'])
def test_a_plan_file_that_is_no_plan(text: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    assert "plan.json" in refused(PlanError, 2, lambda: Plan.load(file))


def test_a_plan_of_another_format(made: Plan) -> None:
    data = {**json.loads(made.to_json()), "format_version": 99}
    assert "99" in refused(PlanError, 2, lambda: Plan.from_json(json.dumps(data)))


def test_a_plan_that_contradicts_itself(made: Plan) -> None:
    data = {**json.loads(made.to_json()), "mesh": {"pp": 1, "dp": 4, "tp": 1}}
    refused(PlanError, 2, lambda: Plan.from_json(json.dumps(data)))


# -- models and batches --------------------------------------------------------------------------------------------
class NoLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


def test_a_model_that_returns_no_loss() -> None:
    message = refused(CaptureError, 2, lambda: plan(TrainStep(NoLoss(), torch.randn(4, 4)), "2xcpu"))
    assert "loss" in message


def test_a_batch_of_another_shape(made: Plan) -> None:
    mesh = VirtualMesh(compile(step_of(NAME), made).pipeline)
    parameters = {name: p.detach() for name, p in step_of(NAME).model.named_parameters()}
    for stage in mesh.pipeline.stages:
        mesh.load({slot: _value(parameters, slot) for slot in stage.values if slot.kind in ("param", "state")})
    batch = {name: value[:, :-1] for name, value in token_batch(8).items()}
    message = refused(PlanError, 2, lambda: mesh.step(batch, step_of(NAME).capture().scalars))
    assert "tokens" in message and "5" in message and "6" in message


def _value(parameters: dict[str, Tensor], slot: Any) -> Tensor:
    if slot.kind == "param":
        return parameters[slot.name]
    name, _, key = slot.name.rpartition(".")
    return step_of(NAME).capture().initial_state[name][key].build(parameters[name])


def test_a_step_that_trains_nothing() -> None:
    model = GPT()
    model.requires_grad_(False)
    step = TrainStep(model, token_batch(), optimizer=lambda ps: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    assert "train" in refused(CaptureError, 2, lambda: plan(step, "2xcpu"))


# -- memory --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pins", ["", "dp=2, zero=0"])
def test_a_budget_that_nothing_fits_says_what_would(pins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.certificate.TIME_S", 0.0)  # of the relaxations, only the budget is asked for
    message = refused(InfeasibleError, 3, lambda: plan(step_of(NAME), "2xcpu", pin=pins or None, memory="2KiB"))
    assert "2.00 KiB" in message
    (needed,) = re.findall(r"--memory ([\d.]+\w*iB): fits", message)
    assert plan(step_of(NAME), "2xcpu", pin=pins or None, memory=needed).estimate.status in ("optimal", "feasible")


# -- the command line ----------------------------------------------------------------------------------------------
MODEL = """
import torch
import autopar

class Model(torch.nn.Module):
    def __init__(self, loss=True):
        super().__init__()
        self.up, self.loss = torch.nn.Linear(8, 16), loss

    def forward(self, x):
        y = self.up(x)
        return y.square().mean() if self.loss else y

def step():
    return autopar.TrainStep(Model(), torch.randn(8, 8))

def other():
    return autopar.TrainStep(Model(), torch.randn(16, 8))

def lossless():
    return autopar.TrainStep(Model(False), torch.randn(8, 8))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status and message; stdout is empty."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    out, err = capsys.readouterr()
    assert out == ""
    return int(stopped.value.code or 0), err


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["plan", "net.py:step", "-c", "4xcpu", "--pin", "tp=3"], 2, "tp=3"),
        (["plan", "net.py:step", "-c", "2xcpu", "--pin", "layers.*: tp=out"], 2, "layers.*"),
        (["plan", "net.py:step", "-c", "2xcpu", "--memory", "64"], 3, "--memory"),
        (["plan", "net.py:lossless", "-c", "2xcpu"], 2, "loss"),
        (["build", "net.py:step", "-c", "2xcpu", "--memory", "64"], 3, "--memory"),
        (["build", "net.py:lossless", "-c", "2xcpu"], 2, "loss"),
        (["build", "net.py:step", "-c", "3xcpu", "--pin", "dp=2"], 2, "dp=2"),
    ],
)
def test_command_says_one_thing_and_writes_nothing(
    arguments: list[str], status: int, says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ["-o", "out.json" if arguments[0] == "plan" else "out"]
    got, message = command(capsys, *arguments, *target)
    assert got == status and says in message and "Traceback" not in message
    first, *more = message.strip().splitlines()
    assert first.startswith("autopar: ") and all(line.startswith("  ") for line in more) and bool(more) == (status == 3)
    assert {file.name for file in folder.iterdir()} <= {"net.py", "__pycache__"}


def test_verify_with_a_plan_of_another_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "net.py:step", "-c", "2xcpu", "-o", "plan.json"])
    capsys.readouterr()
    status, message = command(capsys, "verify", "net.py:other", "-c", "2xcpu", "--plan", "plan.json")
    assert status == 2 and "another step" in message
    (folder / "plan.json").write_text("{")
    status, message = command(capsys, "verify", "net.py:step", "-c", "2xcpu", "--plan", "plan.json")
    assert status == 2 and "not JSON" in message
