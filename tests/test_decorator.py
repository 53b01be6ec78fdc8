"""What `parallelize` makes of a class and of an instance, before the first step."""

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import TrainStep
from autopar.errors import CaptureError, PlanError
from autopar.program.launch import run_ranks
from tests.small_plan import small_plan


class Plain(nn.Module):
    """Has state and an attribute of its own."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x).square().mean()


def test_a_class_stays_the_class_that_it_was():
    Model = autopar.parallelize(Plain)
    model = Model(width=4)
    assert Model.__name__ == "Plain" and Model.__doc__ == Plain.__doc__
    assert isinstance(model, Plain) and model.width == 4
    assert list(dict(model.named_parameters())) == ["linear.weight", "linear.bias"]


def test_a_class_builds_on_meta_and_its_step_too():
    model = autopar.parallelize(optimizer=torch.optim.SGD)(Plain)()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    step = model.as_step(torch.zeros(4, 8))
    assert isinstance(step, TrainStep)
    assert {p.device.type for p in step.model.parameters()} == {"meta"}


def test_an_instance_keeps_its_weights():
    plain = Plain()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    model = autopar.parallelize(plain, microbatches=2)
    assert model is plain and type(model).__name__ == "Plain"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.as_step(torch.zeros(4, 8)).microbatches == 2


def test_two_instances_share_nothing():
    Model = autopar.parallelize(Plain)
    assert Model()._autopar is not Model()._autopar


def test_no_plan_before_the_first_step():
    with pytest.raises(PlanError, match="first train_step"):
        _ = autopar.parallelize(Plain()).plan


def test_precision_follows_the_cluster():
    batch = torch.zeros(4, 8)
    assert autopar.parallelize(Plain(), cluster="2xcpu").as_step(batch).precision == "fp32"
    assert autopar.parallelize(Plain(), cluster="8xh100").as_step(batch).precision == "mixed"
    assert autopar.parallelize(Plain(), cluster="8xh100", precision="fp32").as_step(batch).precision == "fp32"


@pytest.mark.parametrize("thing", [7, "GPT", dict, lambda: None])
def test_other_things_are_refused(thing):
    with pytest.raises(CaptureError, match=r"parallelize: got .*; expected a torch\.nn\.Module"):
        autopar.parallelize(thing)


def test_batches_are_positionals_or_keywords():
    with pytest.raises(CaptureError, match="one or the other"):
        autopar.parallelize(Plain()).as_step(torch.zeros(4, 8), y=1)


AGREE = """
import os, sys
from autopar.decorator import agree
from autopar.errors import InfeasibleError
from autopar.plans import Plan

def make():
    assert os.environ["RANK"] == "0"
    if sys.argv[1] == "fail":
        raise InfeasibleError("needs 9 GiB")
    return Plan.load(sys.argv[1])

try:
    print(agree(make).mesh)
except InfeasibleError as error:
    sys.exit(0 if "needs 9 GiB" in str(error) and sys.argv[1] == "fail" else 1)
"""


@pytest.mark.dist
@pytest.mark.parametrize("case", ["plan", "fail"])
def test_ranks_agree_on_the_plan_or_the_mistake_of_rank_0(tmp_path, capfd, case):
    small_plan("dp=2", "2xcpu").save(tmp_path / "plan.json")
    argument = str(tmp_path / "plan.json") if case == "plan" else "fail"
    assert run_ranks(2, ["-c", AGREE, argument], timeout_s=150) == 0
    assert case == "fail" or "dp=2" in capfd.readouterr().out
