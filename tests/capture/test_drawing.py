"""Random ops in a model: captured, they draw what the eager model draws under `reference_rng`, run again or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.capture.graphs import RANDOM_KEY, Role, op_name, placeholders
from autopar.capture.step import ForwardStep, TrainStep
from autopar.errors import CaptureError
from autopar.randomness import microbatch_key


class Applied(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


X = torch.rand(6, 8, generator=torch.Generator().manual_seed(0))


def eager(function: Callable[[Tensor], Any], x: Tensor = X, step: int = 0) -> Any:
    with autopar.reference_rng(seed=3, step=step, microbatch=1):
        return function(x.clone())


def captured(function: Callable[[Tensor], Any], x: Tensor = X) -> tuple[Tensor, ...]:
    graph = ForwardStep(Applied(function), {"x": x}).capture().gradient
    given = {Role("batch", "x"): x, RANDOM_KEY: torch.tensor(microbatch_key(3, 0, 1))}
    with torch.no_grad():
        results: tuple[Tensor, ...] = torch.fx.Interpreter(graph).run(*(given[role] for role in placeholders(graph)))
    return results


def _in_place(name: str, *arguments: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: getattr(torch.empty_like(x), name)(*arguments)


OPS: dict[str, Callable[[Tensor], Any]] = {
    "rand": lambda x: torch.rand(3, 4),
    "randn": lambda x: torch.randn(5, dtype=torch.float64),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.bfloat16),
    "randint": lambda x: torch.randint(7, (4, 5)),
    "randint from": lambda x: torch.randint(-3, 7, (4, 5), dtype=torch.int32),
    "randint_like": lambda x: torch.randint_like(x, 2, 9),
    "randperm": lambda x: torch.randperm(12),
    "bernoulli": lambda x: torch.bernoulli(x),
    "bernoulli of p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_": _in_place("bernoulli_", 0.3),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(x),
    "uniform_": _in_place("uniform_", -2.0, 3.0),
    "normal_": _in_place("normal_", 1.0, 2.0),
    "log_normal_": _in_place("log_normal_", 0.0, 0.5),
    "exponential_": _in_place("exponential_", 2.0),
    "cauchy_": _in_place("cauchy_"),
    "geometric_": _in_place("geometric_", 0.3),
    "random_": lambda x: torch.empty(9, dtype=torch.int64).random_(),
    "random_ to": lambda x: torch.empty(9, dtype=torch.int64).random_(5),
    "random_ from": _in_place("random_", 2, 5),
    "normal of tensors": lambda x: torch.normal(x, x),
    "normal of a mean": lambda x: torch.normal(x, 2.0),
    "normal of a deviation": lambda x: torch.normal(1.0, x),
    "normal of a size": lambda x: torch.normal(1.0, 2.0, (3, 4)),
    "multinomial": lambda x: torch.multinomial(x, 3),
    "multinomial, one": lambda x: torch.multinomial(x, 1),
    "multinomial, put back": lambda x: torch.multinomial(x, 12, replacement=True),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "all dropped": lambda x: F.dropout(x, 1.0),
    "dropout of channels": lambda x: F.dropout1d(x.view(3, 2, 8), 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "gumbel softmax": lambda x: F.gumbel_softmax(x),
}


@pytest.mark.parametrize("name", OPS)
def test_captured_and_eager_draw_alike(name: str) -> None:
    expected = eager(OPS[name])
    (got,) = captured(OPS[name])
    assert got.dtype == expected.dtype and torch.allclose(got, expected, rtol=1e-6, atol=0)
    assert torch.equal(eager(OPS[name]), expected)
    assert name == "all dropped" or not torch.equal(eager(OPS[name], step=1), expected)


def test_two_draws_are_not_alike() -> None:
    first, second = captured(lambda x: (torch.rand(50), torch.rand(50)))
    assert not torch.isclose(first, second).any()


def test_reference_rng_leaves_the_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    eager(lambda x: torch.rand(3))
    assert torch.equal(torch.get_rng_state(), before)


# -- distributions -------------------------------------------------------------------------------------------------
MANY = torch.empty(40_000, dtype=torch.float64)
QUANTILES = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
DISTRIBUTIONS: dict[str, tuple[tuple[float, ...], Callable[[Tensor], Tensor]]] = {
    "uniform_": ((-2.0, 3.0), lambda q: q * 5 - 2),
    "normal_": ((1.0, 2.0), lambda q: torch.special.ndtri(q) * 2 + 1),
    "log_normal_": ((0.0, 0.5), lambda q: (torch.special.ndtri(q) * 0.5).exp()),
    "exponential_": ((2.0,), lambda q: -torch.log1p(-q) / 2),
    "cauchy_": ((1.0, 2.0), lambda q: torch.tan((q - 0.5) * torch.pi) * 2 + 1),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_quantiles(name: str) -> None:
    """The share below each quantile, to five standard errors."""
    arguments, quantile = DISTRIBUTIONS[name]
    drawn = eager(_in_place(name, *arguments), MANY)
    shares = (drawn.unsqueeze(1) < quantile(QUANTILES)).double().mean(0)
    assert (shares - QUANTILES).abs().max() < 5 * 0.5 / 200


def test_discrete_distributions() -> None:
    drawn = eager(_in_place("geometric_", 0.3), MANY)
    assert drawn.min() == 1 and abs((drawn == 1).double().mean() - 0.3) < 0.012
    assert abs((drawn == 3).double().mean() - 0.3 * 0.49) < 0.01
    weights = torch.tensor([1.0, 0.0, 3.0, 6.0]).expand(20_000, 4)
    one = eager(lambda x: torch.multinomial(weights, 1)).flatten().bincount(minlength=4) / 20_000
    assert (one - torch.tensor([0.1, 0.0, 0.3, 0.6])).abs().max() < 0.02
    two = eager(lambda x: torch.multinomial(weights, 2))
    assert (two[:, 0] != two[:, 1]).all() and (two != 1).all()
    back = eager(lambda x: torch.multinomial(weights[0], 20_000, replacement=True)).bincount(minlength=4) / 20_000
    assert (back - torch.tensor([0.1, 0.0, 0.3, 0.6])).abs().max() < 0.02
    assert sorted(eager(lambda x: torch.randperm(50)).tolist()) == list(range(50))
    kept = eager(lambda x: F.dropout(x, 0.1), torch.ones(40_000))
    assert abs((kept > 0).double().mean() - 0.9) < 0.008 and torch.allclose(kept[kept > 0], torch.tensor(1 / 0.9))


# -- what is refused -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: torch.poisson(x), r"poisson \(test_drawing\.py:\d+\) draws numbers that can't be told from"),
        (lambda x: torch.binomial(x, x), r"binomial \(test_drawing\.py:\d+\)"),
        (lambda x: torch.rand(3, generator=torch.Generator()), r"rand \(test_drawing\.py:\d+\) draws from a generator"),
        (lambda x: x.clone().normal_(generator=torch.Generator()), r"normal_ \(test_drawing\.py:\d+\) draws from a"),
    ],
)
def test_other_random_ops_are_refused(function: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        captured(function)
    with pytest.raises(CaptureError, match=message):
        eager(function)


def test_a_graph_without_random_ops_has_no_key() -> None:
    graph = ForwardStep(Applied(lambda x: F.dropout(x, 0.5, training=False)), {"x": X}).capture().gradient
    assert RANDOM_KEY not in placeholders(graph)


# -- gradients and what runs again -----------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, kind: str = "mlp") -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.dropout(torch.relu(self.up(x)), 0.3)))


class Checkpointed(nn.Module):
    def __init__(self, keep_rng: bool = True, reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.keep_rng, self.reentrant = keep_rng, reentrant
        self.scale = nn.Parameter(torch.ones(()), requires_grad=reentrant)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x * self.scale, 0.2)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant, preserve_rng_state=self.keep_rng)
        return F.dropout(x, 0.2).square().mean()


class Encoder(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.3, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x.view(2, 3, 8))
        return self.attention(x, x, x, need_weights=self.need_weights)[0].square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(8, 4, num_layers=2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.view(3, 2, 8))[0].square().mean()


class Shared(nn.Module):
    """A module called twice, and once more under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.first = nn.Dropout(0.5)
        self.parts = nn.ModuleDict({"again": self.first, "other": nn.Dropout(0.5)})

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.first, self.parts["other"], self.parts["again"], self.first):
            x = x + part(self.scale.expand_as(x))
        return x.square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "checkpointed": Checkpointed,
    "checkpointed, other numbers when run again": lambda: Checkpointed(keep_rng=False),
    "checkpointed, reentrant": lambda: Checkpointed(reentrant=True),
    "encoder": lambda: Encoder(need_weights=False),
    "encoder, attention's weights": lambda: Encoder(need_weights=True),
    "recurrent": Recurrent,
    "shared": Shared,
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_eager(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    step = TrainStep(model, {"x": X})
    with autopar.reference_rng(seed=3, microbatch=1):
        loss = model(X)
        loss.backward()
    graph, roles = step.capture().gradient, step.capture().gradient_outputs
    given = {Role("param", n): p.detach() for n, p in model.named_parameters()}
    given |= {Role("batch", "x"): X, RANDOM_KEY: torch.tensor(microbatch_key(3, 0, 1))}
    results = torch.fx.Interpreter(graph).run(*(given[role] for role in placeholders(graph)))
    for role, got in zip(roles, results, strict=True):
        expected = loss if role.kind == "loss" else model.get_parameter(role.name).grad
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-7), role


def test_what_a_checkpoint_runs_again_draws_again() -> None:
    graph = TrainStep(Checkpointed(), {"x": X}).capture().gradient
    draws = [(n.meta["phase"], n.args[1], n.meta["path"]) for n in graph.graph.nodes if op_name(n) == "random_mask"]
    forward, backward = ([draw[1:] for draw in draws if draw[0] == phase] for phase in ("forward", "backward"))
    blocks = [f"blocks.{i}{where}#0" for i in range(2) for where in ("", ".dropout")]
    assert [name for name, _ in forward] == ["#0", *blocks, "#1"]
    assert set(backward) <= set(forward) and {name for name, _ in backward} == set(blocks)


def test_every_call_of_a_module_draws_other_numbers() -> None:
    step = TrainStep(Shared(), X, loss=lambda output, batch: F.dropout(output.expand(2), 0.5).sum())
    draws = [node for node in step.capture().gradient.graph.nodes if op_name(node) == "random_mask"]
    names = [node.args[1] for node in draws if node.meta["phase"] == "forward"]
    assert names == ["first#0", "parts.other#0", "first#1", "first#2", "#0"]
    masks = {tuple(torch.ops.autopar.random_mask(torch.tensor(0), name, [50], 0.5).tolist()) for name in names}
    assert len(masks) == len(names)


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def test_a_wrapped_model_draws_its_own_numbers_where_it_is_named() -> None:
    model = Block()
    expected = eager(model)
    with autopar.reference_rng(seed=3, microbatch=1, model=model):
        assert torch.equal(Wrapper(model)(X), expected)
    with autopar.reference_rng(seed=3, microbatch=1):
        assert not torch.equal(Wrapper(model)(X), expected)


def test_draws_of_what_isn_t_the_model_are_refused() -> None:
    with autopar.reference_rng(), pytest.raises(CaptureError, match="Dropout draws numbers, but isn't part of Linear"):
        nn.Dropout(0.5)(nn.Linear(8, 8)(X))


def test_the_backward_keeps_masks_of_a_byte() -> None:
    """Not the noise in floats that torch's dropout multiplies by."""
    graph = TrainStep(Block(), {"x": X}, loss=lambda y, batch: y.sum()).capture().gradient
    saved = {s for n in graph.graph.nodes if n.meta.get("phase") == "backward" for s in n.all_input_nodes}
    names = {op_name(n) for n in saved if n.op == "call_function" and n.meta["phase"] == "forward"}
    assert names <= {"random_mask", "relu", "mul", "sum"}
