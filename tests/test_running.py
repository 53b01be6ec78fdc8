"""Where a saved program's batches come from."""

import pytest
import torch

from autopar.errors import PlanError
from autopar.models import StepOptions
from autopar.running import ORIGIN, Origin, batches, origin_of, read_origin, start_ranks

MODEL = """
import torch, autopar

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 4)

    def forward(self, tokens, weights):
        return (self.embed(tokens).sum(-1) * weights).mean()

def step():
    return autopar.TrainStep(Model(), {"tokens": torch.arange(8).reshape(4, 2), "weights": torch.ones(4, 2)})
"""


@pytest.fixture
def built(tmp_path):
    """A folder with `model.py` and, beside it, an empty `out`."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def leave(built, origin: Origin) -> None:
    (built / ORIGIN).write_text(origin.to_json())


def test_origin_is_found_from_the_directory(built):
    origin = origin_of(f"{built.parent}/model.py:step", StepOptions(batch=4, precision="fp32"), built)
    assert origin.model == "../model.py:step"
    leave(built, origin)
    assert read_origin(built) == origin


def test_directory_without_a_program(tmp_path):
    with pytest.raises(PlanError, match=r"no built program here.*autopar build"):
        start_ranks(str(tmp_path), [])


def test_random_batches_are_like_the_first_and_the_same_for_a_seed(built):
    leave(built, Origin("../model.py:step", StepOptions()))
    source, feed = batches(built, seed=3)
    first, second = next(feed), next(feed)
    assert source == "random, seed 3"
    assert first["tokens"].shape == (4, 2) and first["tokens"].max() < 8
    assert first["weights"].dtype == torch.float32 and not torch.equal(first["weights"], second["weights"])
    assert torch.equal(next(batches(built, seed=3)[1])["weights"], first["weights"])


def test_the_files_own_batches_come_first(built):
    file = built.parent / "model.py"
    file.write_text(file.read_text() + "\ndef batches():\n    yield 7\n")
    leave(built, Origin("../model.py:step", StepOptions()))
    source, feed = batches(built, seed=0)
    assert source == "batches() of model.py" and list(feed) == [7]


def test_without_an_origin_nothing_feeds_the_run(built):
    with pytest.raises(PlanError, match=r"no origin\.json.*autopar build"):
        batches(built, seed=0)
