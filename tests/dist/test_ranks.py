"""Real ranks on gloo: each test starts processes that run one of `checks.py`."""

import os
import sys
from pathlib import Path

import pytest

from autopar.errors import PlanError
from autopar.program.launch import TIMED_OUT, run_ranks
from autopar.program.trainer import Trainer
from tests.dist import against_eager, agreement

sys.path.insert(0, str(Path(__file__).parent))
import hand_built as hb

pytestmark = pytest.mark.dist
CHECKS = str(Path(__file__).with_name("checks.py"))
ENV = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}


def test_four_ranks_agree_with_the_virtual_mesh(tmp_path):
    """Plans of models bit for bit with deterministic reductions; more models: `python -m tests.dist.agreement`."""
    agreement.save_programs(tmp_path, ["gpt, odd sizes", "convnet"], steps=2)
    assert run_ranks(4, [CHECKS, "four_ranks", str(tmp_path)], env=ENV, timeout_s=240) == 0
    found = agreement.found_differences(tmp_path)
    assert len(found) == 2 * len(agreement.PINS)
    for title, (exact, close) in found.items():
        assert exact == 0, title
        assert close <= 1e-6, title


def test_two_ranks_agree_with_the_virtual_mesh_and_with_eager(tmp_path):
    against_eager.save_programs(tmp_path)
    assert run_ranks(2, [CHECKS, "two_ranks", str(tmp_path)], env=ENV, timeout_s=240) == 0


def test_ranks_with_different_programs_are_refused(tmp_path, capfd):
    assert run_ranks(2, [CHECKS, "hashes", str(tmp_path)], env=ENV, timeout_s=60) == 2
    assert "ranks 1 have another program than rank 0" in capfd.readouterr().err


def test_a_rank_that_dies_takes_the_others_along(tmp_path, capfd):
    assert run_ranks(2, [CHECKS, "rank_1_dies", str(tmp_path)], env=ENV, timeout_s=60) == 7
    assert "[rank 1] rank 1 gives up" in capfd.readouterr().err
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "rank0.pid").read_text()), 0)


def test_timeout_ends_the_ranks():
    assert run_ranks(2, ["-c", "import time; time.sleep(60)"], timeout_s=0.2) == TIMED_OUT


def test_another_number_of_ranks_is_refused():
    with pytest.raises(PlanError, match=r"the plan is for 2 ranks \(mesh dp=2\), 1 were started"):
        Trainer(hb.HandBuilt(hb.zero3()))
