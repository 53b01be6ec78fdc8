"""A Hugging Face GPT-2 from its config, trained on random tokens by several ranks.

torchrun --nproc-per-node 2 examples/hf_gpt2.py
autopar plan examples/hf_gpt2.py:step --cluster 8xh100
autopar verify examples/hf_gpt2.py:step --cluster 2xcpu --pin "zero=3"
"""

import os
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import autopar

BATCH, SEQUENCE = 8, 32
CONFIG = GPT2Config(
    vocab_size=256,
    n_embd=64,
    n_layer=4,
    n_head=4,
    n_positions=SEQUENCE,
    bos_token_id=0,
    eos_token_id=0,
    use_cache=False,
)


def build() -> GPT2LMHeadModel:
    """The model with random weights, the same in each process."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(CONFIG)
    model.loss_type = "ForCausalLM"  # what transformers falls back to for this class, without its warning
    return model


def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def batches(seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """The same random tokens at every step, to be learnt by heart: the loss falls."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(CONFIG.vocab_size, (BATCH, SEQUENCE), generator=generator)
    while True:
        yield {"input_ids": tokens_BS, "labels": tokens_BS}


def step() -> autopar.TrainStep:
    """The training step as a value, for the command line."""
    return autopar.TrainStep(build, next(batches()), optimizer=optimizer)


def main() -> None:
    model = autopar.parallelize(build(), optimizer=optimizer, cluster="auto")
    for index, batch in zip(range(50), batches(), strict=False):
        metrics = model.train_step(**batch)
        if os.environ.get("RANK", "0") == "0" and index % 10 == 0:
            print(f"step {index:3}  loss {metrics['loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
