"""A Hugging Face Llama from its config, trained on random tokens by several ranks.

torchrun --nproc-per-node 2 examples/hf_llama.py
autopar plan examples/hf_llama.py:step --cluster 8xh100
autopar verify examples/hf_llama.py:step --cluster 4xcpu --pin "pp=2 tp=2"
"""

import os
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

BATCH, SEQUENCE = 8, 32
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=SEQUENCE,
    use_cache=False,
)


def build() -> LlamaForCausalLM:
    """The model with random weights, the same in each process."""
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


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
