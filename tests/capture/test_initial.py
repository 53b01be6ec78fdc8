"""Deferred initialisation: bit-equal to running the factory, without holding the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import capture_models as models
import pytest
import torch
from torch import Tensor, nn

from autopar.capture import initial
from autopar.errors import CaptureError


class Peculiar(nn.Module):
    """Seeds of its own, a forked generator, rejection sampling, values read back, writes through views."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a = nn.Linear(4, 5)
        nn.init.orthogonal_(self.a.weight)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(9)
            self.b = nn.Parameter(torch.randn(3))
        self.c = nn.Parameter(torch.rand(7))
        nn.init.trunc_normal_(self.c)
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.d = nn.Parameter(torch.full((2,), rates[2]))
        self.register_buffer("e", torch.tensor([1.0, 2.0]) * 2)
        self.f = nn.Embedding(5, 6, padding_idx=1)
        self.f.weight.data[:, 1] = 7.0
        self.register_buffer("g", torch.triu(torch.ones(4, 4)))
        self.h = nn.Parameter(torch.randperm(5).float())
        self.a.weight.data.mul_(0.5)
        self.i = nn.Linear(4, 4, dtype=torch.bfloat16)


FACTORIES: list[Callable[[], nn.Module]] = [
    models.GPT,
    models.tiny_llama,
    models.tiny_gpt2,
    lambda: models.tiny_llama(tie_word_embeddings=True),
    models.ConvNet,
    Peculiar,
]
IDS = ["gpt", "llama", "gpt2", "tied llama", "conv", "peculiar"]


@pytest.mark.parametrize("factory", FACTORIES, ids=IDS)
def test_bit_equal_to_the_factory(factory: Callable[[], nn.Module]) -> None:
    recording = initial.record(factory)
    for seed in (0, 7):
        found: dict[str, Tensor] = {}
        initial.replay(recording, seed, lambda name, tensor, into=found: into.update({name: tensor.clone()}))
        torch.manual_seed(seed)
        model = factory()
        expected = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert value.dtype == found[name].dtype
            assert torch.equal(value, found[name]), name


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    initial.replay(initial.record(models.GPT), 5, lambda name, tensor: None)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("factory", FACTORIES[:3], ids=IDS[:3])
def test_no_more_than_one_tensor_is_held(factory: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    recording = initial.record(factory)
    live: dict[int, int] = {}
    peak = 0
    adopt = initial._Replay._adopt
    tensor_of = initial._Replay._tensor

    def watch(replay: initial._Replay) -> None:
        nonlocal peak
        for storage in replay.storages.values():
            if id(storage) not in live:
                live[id(storage)] = storage.nbytes()
                weakref.finalize(storage, live.pop, id(storage), None)
        peak = max(peak, sum(live.values()))

    def watched_tensor(self: initial._Replay, view: initial.View) -> Tensor:
        tensor = tensor_of(self, view)
        watch(self)
        return tensor

    def watched_adopt(self: initial._Replay, view: initial.View, tensor: Tensor, inputs: frozenset[int]) -> None:
        adopt(self, view, tensor, inputs)
        watch(self)

    monkeypatch.setattr(initial._Replay, "_tensor", watched_tensor)
    monkeypatch.setattr(initial._Replay, "_adopt", watched_adopt)
    initial.replay(recording, 0, lambda name, tensor: None)
    largest = max(recording.num_bytes)
    total = sum(recording.num_bytes[view.storage] for view in recording.names.values())
    small = 1024  # rotary tables
    assert largest <= peak <= largest + small < total


def test_a_constructor_that_branches_on_random_values_is_refused() -> None:
    def factory() -> nn.Module:
        return nn.Linear(3, 3) if torch.rand(()).item() < 0.5 else nn.Linear(3, 4)

    with pytest.raises(CaptureError, match="random value"):
        initial.record(factory)
