"""Models of the matrix that are written in plain `torch.nn`, as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Built = tuple[nn.Module, dict[str, Any]]


class Translator(nn.Module):
    """`nn.Transformer` between two embeddings."""

    def __init__(self, vocab: int = 32, width: int = 16) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        sizes = {"nhead": 4, "num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 32, "dropout": 0.0}
        self.transformer = nn.Transformer(width, batch_first=True, **sizes)
        self.head = nn.Linear(width, vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


class Recurrent(nn.Module):
    """A recurrent language model."""

    def __init__(self, kind: type[nn.RNNBase], vocab: int = 32, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.layers = kind(width, width, num_layers=2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.layers(self.tokens(tokens))
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class UNet(nn.Module):
    """Down, up, and a bridge between: group norms, strided and transposed convolutions, interpolation."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(2 * width, 4, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)

    def forward(self, noisy: Tensor, noise: Tensor) -> Tensor:
        x = F.silu(self.enter(noisy))
        y = self.up(self.middle(F.silu(self.norm(self.down(x)))))
        return F.mse_loss(self.leave(torch.cat([x, F.interpolate(y, size=x.shape[-2:])], 1)), noise)


class Mixer(nn.Module):
    """An MLP-Mixer: matmuls over channels, then over patches."""

    def __init__(self, patches: int = 16, width: int = 16, classes: int = 8) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, width, 2, stride=2)
        self.over_patches = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.over_channels = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = x + self.over_patches(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        x = x + self.over_channels(self.norms[1](x))
        return F.cross_entropy(self.head(x.mean(1)), labels)


class AutoEncoder(nn.Module):
    """Batch norms and pooling, then back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.squeeze, self.widen = nn.Linear(8 * 16, 16), nn.Linear(16, 8 * 16)
        self.decoder = nn.ConvTranspose2d(8, 4, 2, stride=2)

    def forward(self, images: Tensor) -> Tensor:
        x = self.encoder(images)
        y = self.widen(torch.tanh(self.squeeze(x.flatten(1)))).view_as(x)
        return F.mse_loss(torch.sigmoid(self.decoder(y)), torch.sigmoid(images))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _integers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


MODELS: dict[str, Callable[[], Built]] = {
    "nn.Transformer": lambda: (Translator(), {"source": _integers(32, 8, 8), "target": _integers(32, 8, 8)}),
    "nn.LSTM": lambda: (Recurrent(nn.LSTM), {"tokens": _integers(32, 8, 8)}),
    "nn.GRU": lambda: (Recurrent(nn.GRU), {"tokens": _integers(32, 8, 8)}),
    "unet": lambda: (UNet(), {"noisy": _random(8, 4, 8, 8), "noise": _random(8, 4, 8, 8)}),
    "mixer": lambda: (Mixer(), {"images": _random(8, 4, 8, 8), "labels": _integers(8, 8)}),
    "autoencoder": lambda: (AutoEncoder(), {"images": _random(8, 4, 8, 8)}),
}
