"""Small models and their training steps, captured once a process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.step import TrainStep

VOCAB, LENGTH, BATCH = 24, 6, 4


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(w, dim=2))
        p = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p).transpose(1, 2).reshape(b, s, w)
        x = x + F.dropout(self.out(attended), p)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), p)


class GPT(nn.Module):
    """A plain GPT with biases and tied embeddings; returns its loss."""

    def __init__(
        self,
        width: int = 8,
        heads: int = 2,
        layers: int = 1,
        tied: bool = True,
        dropout: float = 0.0,
        vocab: int = VOCAB,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten(), ignore_index=3)


class Perceptrons(nn.Module):
    """A language model of residual perceptrons without biases: its backward reads every parameter."""

    def __init__(self, width: int = 16, layers: int = 1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), targets.flatten())


class ConvNet(nn.Module):
    """Batch norm: statistics over the whole batch, buffers that change; convolutions have no rule yet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 6)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(images)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Squares(nn.Module):
    """Values that stand twice in one op, at a layout of their own in each place."""

    def __init__(self) -> None:
        super().__init__()
        self.square, self.scale = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
        self.one, self.other = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))  # these share a gradient

    def forward(self, x: Tensor) -> Tensor:
        y = torch.mm(x, torch.mm(self.square, self.square)) * self.scale + self.one + self.other
        return (y * y).mean() + torch.mm(y, y.t()).mean()


def token_batch(rows: int = BATCH) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def hf_batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def gpt(**changes: Any) -> nn.Module:
    return GPT(**changes)


def frozen_gpt() -> nn.Module:
    model = GPT(tied=False)
    for parameter in (model.positions.weight, model.norm.weight, model.blocks[0].up.weight):  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    return model


def llama(layers: int = 1) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def gpt2(layers: int = 1) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCAB, "n_embd": 8, "n_layer": layers, "n_head": 2, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "images": torch.randn(BATCH, 2, 5, 5, generator=generator),
        "labels": torch.randint(0, 6, (BATCH,), generator=generator),
    }


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]], Any]] = {
    "gpt": (gpt, token_batch, adamw),
    "gpt, 3 layers": (functools.partial(gpt, layers=3), token_batch, adamw),
    "gpt, dropout": (functools.partial(gpt, dropout=0.2), token_batch, momentum),
    "gpt, frozen, momentum": (frozen_gpt, token_batch, momentum),
    "gpt, 8 rows": (gpt, lambda: token_batch(8), adamw),
    **{
        f"gpt, {n} wide layers": (
            functools.partial(gpt, width=16, heads=4, layers=n, tied=False),
            token_batch,
            momentum,
        )
        for n in (1, 2, 3)
    },
    "gpt, odd sizes": (functools.partial(gpt, width=15, heads=3, vocab=25), lambda: token_batch(6), adamw),
    "perceptrons, 8 rows": (Perceptrons, lambda: token_batch(8), adamw),
    "llama": (llama, hf_batch, adamw),
    "llama, 2 layers": (functools.partial(llama, layers=2), hf_batch, momentum),
    "llama, 3 layers": (functools.partial(llama, layers=3), hf_batch, momentum),
    "gpt2": (gpt2, hf_batch, momentum),
    "convnet": (ConvNet, images, momentum),
    "squares": (Squares, lambda: {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(1))}, adamw),
}


def step_of(name: str, microbatches: int = 1) -> TrainStep:
    return _step_of(name, microbatches)


@functools.cache  # which would keep a step for each way to say the same
def _step_of(name: str, microbatches: int) -> TrainStep:
    factory, batch, optimizer = MODELS[name]
    torch.manual_seed(0)
    return TrainStep(factory(), batch(), optimizer=optimizer, microbatches=microbatches)


def weights_of(step: TrainStep) -> dict[str, Tensor]:
    named = {**dict(step.model.named_parameters()), **dict(step.model.named_buffers())}
    return {name: value.detach() for name, value in named.items()}
