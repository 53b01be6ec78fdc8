"""The accountant beside published formulas: ZeRO's model states, and what a transformer layer keeps for its backward.

ZeRO (Rajbhandari et al. 2020, figure 1): Ψ parameters on N ranks take 16Ψ bytes, and split by stages 1, 2, 3
4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N, 16Ψ/N. The accountant says so to the byte, but for the optimizer's step counts and scalars.

Korthikanti et al. 2022, section 4, of a layer with sequence s, batch b, hidden size h and a heads on t ranks:

| layer                 | published bytes            | ours beside it, in units of sbh                               |
|-----------------------|----------------------------|---------------------------------------------------------------|
| on one device         | sbh (34 + 5as/h)           | + 2as/h: the softmax is fp32; + 8/h: the norms' statistics    |
| tensor parallel       | sbh (10 + 24/t + 5as/(ht)) | + 2as/(ht) + 8/h                                              |
| and sequence parallel | sbh/t (34 + 5as/h)         | - 4/t: norms run again, so that their results needn't be kept |
| full recompute        | 2 sbh                      | the same                                                      |

Without dropout in it, attention is one fused op: no 5as/h, but 4a/h for the logarithm of each row's sum, in fp32.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.step import TrainStep
from autopar.cluster.cluster import Cluster, Device, Level
from autopar.compiling import compile
from autopar.layers import block_of
from autopar.planning import plan
from autopar.program.memory import MemoryProfile, stage_peaks
from autopar.program.program import Program
from autopar.program.storages import Origin, lifetimes, local_value, nbytes
from autopar.rules.nodes import op_name

# -- ZeRO ----------------------------------------------------------------------------------------------------------
RANKS, PARAMETERS = 64, 7.5e9
PUBLISHED_GB = (120, 31.4, 16.6, 1.9)


class Perceptrons(nn.Module):
    def __init__(self, width: int = RANKS, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x.square().mean()


@functools.cache
def zero_step(precision: str) -> TrainStep:
    rows = torch.zeros(2 * RANKS, RANKS)  # one for each rank and microbatch
    return TrainStep(Perceptrons(), {"x": rows}, microbatches=2, precision=precision)


def before_the_update(zero: int, precision: str = "mixed-bf16-sums") -> MemoryProfile:
    """What a rank holds when all gradients are summed and no update has begun."""
    step = zero_step(precision)
    found = stage_peaks(compile(step, plan(step, "8x8xh100", pin=f"dp={RANKS}, zero={zero}")).pipeline, 0)
    profile = found["update", ""]
    assert profile.where == "update"  # its beginning
    return profile


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_splits_model_states(zero: int) -> None:
    parameters = list(zero_step("mixed-bf16-sums").model.parameters())
    psi = sum(p.numel() for p in parameters)
    ways = [RANKS if zero >= first else 1 for first in (3, 2, 1)]
    found = before_the_update(zero)
    counts = 4 * len(parameters) + 8 * len(zero_step("mixed-bf16-sums").capture().scalars)
    assert found.parameters == 2 * psi // ways[0]
    assert found.gradients == 2 * psi // ways[1]
    assert found.optimizer - counts == 12 * psi // ways[2]
    states = found.parameters + found.gradients + found.optimizer - counts
    assert round(states / psi * PARAMETERS / 1e9, 1) == PUBLISHED_GB[zero]


def test_gradients_are_summed_in_fp32_unless_asked_otherwise() -> None:
    wide, narrow = (before_the_update(1, precision) for precision in ("mixed", "mixed-bf16-sums"))
    assert wide.gradients == 2 * narrow.gradients
    assert (wide.parameters, wide.optimizer) == (narrow.parameters, narrow.optimizer)


# -- activations -----------------------------------------------------------------------------------------------------
S, B, H, A, T = 16, 4, 32, 4, 2
SBH = S * B * H


class Layer(nn.Module):
    """As in their figure 2."""

    def __init__(self, attention_dropout: float) -> None:
        super().__init__()
        self.attention_dropout = attention_dropout
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.view(B, S, A, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(H, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.attention_dropout)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(B, S, H)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


class Layers(nn.Module):
    def __init__(self, attention_dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(attention_dropout) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def published(tp: int = 1, sequence: int = 1, s: int = S, h: int = H, a: int = A) -> dict[str, float]:
    """Their terms in units of sbh, on `tp` ranks of which `sequence` split what tensor parallelism alone doesn't."""
    scores = a * s / h / tp
    return {
        "norms' inputs": 4 / sequence,
        "norms' results": 4 / sequence,
        "dropout masks": 2 / sequence,
        "attention": 8 / tp,
        "up": 8 / tp,
        "gelu": 8 / tp,
        "softmax": 2 * scores,
        "softmax after dropout": 2 * scores,
        "softmax's mask": scores,
    }


MADE_BY = {
    ("out", "linear", 0): "norms' inputs",  # the residual sum is made in its place, or where the result arrives
    ("down", "linear", 0): "norms' inputs",
    ("", "wait", 0): "norms' inputs",
    **{(norm, "native_layer_norm", 0): "norms' results" for norm in ("norm1", "norm2")},
    **{(norm, "native_layer_norm", i): "norms' statistics" for norm in ("norm1", "norm2") for i in (1, 2)},
    **{("", "split", i): "attention" for i in range(3)},  # q, k, v, and below what is made of them
    ("", "clone", 0): "attention",
    ("", "attention", 0): "attention",
    ("", "attention", 1): "attention's row sums",
    ("up", "linear", 0): "up",
    ("", "gelu", 0): "gelu",
    ("", "_softmax", 0): "softmax",
    ("", "_to_copy", 0): "softmax after dropout",
}
"""(module of the layer, op, which of its results) → what it is to the formulas."""


@functools.cache
def layers_step(attention_dropout: float) -> TrainStep:
    model, batch = Layers(attention_dropout), {"x": torch.zeros(B, S, H)}
    return TrainStep(model, batch, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), precision="mixed")


def program_of(attention_dropout: float, pins: str, bytes_per_s: float = 1e13) -> Program:
    """On ideal devices: no latency, memory without end and so fast that what is whole isn't split to spare its reading,
    unless told otherwise."""
    device = Device("ideal", 10**12, {"float32": 1e12}, bytes_per_s, 0.0)
    cluster = Cluster("ideal", device, (Level("link", T if "tp" in pins else 1, 1e9, 1e-12),))
    step = layers_step(attention_dropout)
    return compile(step, plan(step, cluster, pin=pins or None))


def kept(program: Program) -> dict[str, float]:
    """What the forward leaves of the second layer to the backward, in units of sbh, each storage once."""
    part = program.pipeline.stages[0].parts["forward"]
    lives, (returned,) = lifetimes(part.graph.graph), next(iter(reversed(part.graph.graph.nodes))).args
    saved = [node for node, slot in zip(returned, part.outputs, strict=True) if slot.kind == "saved"]
    found: Counter[str] = Counter()
    for origin in {origin for node in saved for origin in lives.of(node)}:
        if block_of(origin[0].meta.get("path", "")) == "layers.1":
            found[_name(origin)] += _bytes(origin) / SBH
    return dict(found)


def _bytes(origin: Origin) -> int:
    value = local_value(origin[0])
    return nbytes(value[origin[1]] if isinstance(value, (tuple, list)) else value)


def _name(origin: Origin) -> str:
    maker, index = origin
    op, module = op_name(maker).rpartition(".")[2], maker.meta["path"].removeprefix("layers.1").removeprefix(".")
    if op == "random_mask":
        return "softmax's mask" if local_value(maker).dim() == 4 else "dropout masks"
    return MADE_BY[module, op, index]


def counted(program: Program) -> float:
    """The same by the accountant: what it has more at the peak in the second layer's forward than in the first's."""
    peaks = stage_peaks(program.pipeline, 0)
    return (peaks["forward 0", "layers.1"].activations - peaks["forward 0", "layers.0"].activations) / SBH


STATISTICS, SOFTMAX, ROW_SUMS = 8 / H, 2 * A * S / H, 4 * A / H
"""Mean and deviation of two norms in 16 bit; two bytes more for each score; four bytes for each row of the scores."""
UNFUSED = ("softmax", "softmax after dropout", "softmax's mask")


def fused(tp: int = 1, sequence: int = 1) -> dict[str, float]:
    terms = published(tp, sequence)
    return {name: terms[name] for name in terms if name not in UNFUSED} | {"attention's row sums": ROW_SUMS / tp}


def test_a_layer_on_one_device() -> None:
    program, terms = program_of(0.1, ""), published()
    assert sum(terms.values()) == 34 + 5 * A * S / H
    assert kept(program) == terms | {"norms' statistics": STATISTICS, "softmax": terms["softmax"] + SOFTMAX}
    assert counted(program) == sum(terms.values()) + STATISTICS + SOFTMAX


def test_tensor_parallelism() -> None:
    program, terms = program_of(0.1, f"tp={T}"), published(T)
    assert sum(terms.values()) == 10 + 24 / T + 5 * A * S / (H * T)
    assert kept(program) == terms | {"norms' statistics": STATISTICS, "softmax": terms["softmax"] + SOFTMAX / T}
    assert counted(program) == sum(terms.values()) + STATISTICS + SOFTMAX / T


def test_fused_attention() -> None:
    program, terms = program_of(0.0, ""), fused()
    assert sum(terms.values()) == 34 + ROW_SUMS
    assert kept(program) == terms | {"norms' statistics": STATISTICS}
    assert counted(program) == sum(terms.values()) + STATISTICS


def test_sequence_parallelism() -> None:
    program, terms = program_of(0.0, f"tp={T}, *.norm*: tp=seq, recompute=*.norm*", bytes_per_s=1e11), fused(T, T)
    assert sum(terms.values()) == (34 + ROW_SUMS) / T
    assert terms.pop("norms' results") == 4 / T
    assert kept(program) == terms
    assert counted(program) == sum(terms.values())


def test_full_recompute() -> None:
    program = program_of(0.0, "recompute=full")
    assert kept(program) == {"norms' inputs": 2}
    assert counted(program) == 2


def test_the_terms_at_their_size() -> None:
    """22 billion parameters, figure 1 and table 3: GiB of 48 layers, with the scores and without."""
    sbh, sizes = 2048 * 4 * 6144, {"s": 2048, "h": 6144, "a": 64}
    assert 48 * sbh * sum(published(8, **sizes).values()) / 2**30 == 59.25
    without = {k: v for k, v in published(8, 8, **sizes).items() if k not in UNFUSED}
    assert 48 * sbh * sum(without.values()) / 2**30 == 9.5625
