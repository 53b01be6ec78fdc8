"""A GPT in plain PyTorch, trained by several ranks together on the text of Python's own documentation.

    torchrun --nproc-per-node 2 examples/train_gpt.py
    python examples/train_gpt.py                        # the same on one device
    autopar plan examples/train_gpt.py:step --cluster 8xh100

Nothing in the model or in the training loop knows about ranks: the decorator captures the step at the first batch,
plans it for the devices at hand and runs it. Shape suffixes: B batch, S sequence, D width, H heads, K width of a head,
V vocabulary.
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar


@dataclass(frozen=True)
class Config:
    vocabulary: int = 128  # ASCII
    sequence: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128
    batch: int = 16


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(config.width, config.width, bias=False) for _ in range(4)
        )

    def forward(self, x_BSD: Tensor) -> Tensor:
        q_BHSK, k_BHSK, v_BHSK = (
            project(x_BSD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed_BHSK = F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, is_causal=True)
        return self.out(mixed_BHSK.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        return x_BSD + self.down(F.gelu(self.up(self.mlp_norm(x_BSD))))


@autopar.parallelize(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), cluster="auto")
class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.sequence, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSD = self.token(tokens_BS) + self.position(positions_S)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        logits_BSV = self.head(self.norm(x_BSD))
        return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


def batches(config: Config | None = None, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of the text, the same on every rank: (tokens_BS, targets_BS), one character later."""
    config = config or Config()
    text = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
    generator = torch.Generator().manual_seed(seed)
    while True:
        start_B1 = torch.randint(len(text) - config.sequence - 1, (config.batch, 1), generator=generator)
        window_BS = text[start_B1 + torch.arange(config.sequence + 1)]
        yield window_BS[:, :-1], window_BS[:, 1:]


def step() -> autopar.TrainStep:
    """The training step as a value, for the command line."""
    return GPT(Config()).as_step(*next(batches()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps

    is_first_rank = int(os.environ.get("RANK", "0")) == 0
    model = GPT(Config())
    started = time.perf_counter()
    for index, batch in zip(range(steps + 1), batches(), strict=False):
        metrics = model.train_step(*batch)
        if is_first_rank and index == 0:
            print(model.plan)
        if is_first_rank and index % 20 == 0:
            print(f"step {index:4}  loss {metrics['loss']:.3f}  {time.perf_counter() - started:6.1f} s", flush=True)


if __name__ == "__main__":
    main()
