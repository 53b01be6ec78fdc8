"""The long form: a plan and a program as values, made and proven on any machine, then run by the ranks.

    python examples/compile_then_run.py                         # plans, verifies, saves, shows the program
    torchrun --nproc-per-node 2 examples/compile_then_run.py    # plans, compiles and trains

The same from the command line: `autopar build examples/compile_then_run.py:step -c 2xcpu -o out/; autopar run out/`.
Shape suffixes: B batch, D width.
"""

import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

BATCH, WIDTH = 32, 64


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x_BD)))


def batches(seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Vectors and their reversal, to be learnt; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x_BD = torch.randn(BATCH, WIDTH, generator=generator)
        yield x_BD, x_BD.flip(-1)


def step() -> autopar.TrainStep:
    """One optimizer step on one device: all that autopar needs to know."""
    torch.manual_seed(0)
    return autopar.TrainStep(
        Perceptron(),
        next(batches()),
        loss=lambda output_BD, batch: F.mse_loss(output_BD, batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        microbatches=2,
    )


def main() -> None:
    world_size = int(os.environ.get("WORLD_SIZE", "2"))
    plan = autopar.plan(step(), f"{world_size}xcpu")
    program = autopar.compile(step(), plan)
    if "RANK" not in os.environ:
        print(plan)
        print(program.verify())
        program.save("out/")
        print(program.source(stage=0))
        return
    trainer = program.start(seed=0)
    for index, batch in zip(range(50), batches(), strict=False):
        metrics = trainer.step(batch)
        if os.environ["RANK"] == "0" and index % 10 == 0:
            print(f"step {index:3}  loss {metrics['loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
