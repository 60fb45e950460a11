"""`python -m tests.demo.pretraining.linear_stage <folder>`: train one layer as the demo trains its model."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from demo.pretraining.loop import Part, Stage, start_processes, train


class StoppedError(Exception):
    """Training was stopped at the requested step."""


def train_linear(folder: Path, part: Part, *, stop_at: int | None = None) -> Tensor:
    """Train a layer that adds its four inputs, and return its weights (1, 4)."""
    torch.manual_seed(0)
    network = nn.Linear(4, 1)

    def loss_at(step: int) -> Tensor:
        if step == stop_at:
            raise StoppedError
        samples = torch.randn(8, 4, generator=part.generator(step))[part.rows]
        return (network(samples) - samples.sum(dim=1, keepdim=True)).square().mean()

    folder.mkdir(exist_ok=True)
    train(Stage("linear", folder, 300, 0.05, checkpoint_every_s=0.0), {"linear": network}, loss_at)
    return network.weight.detach()


if __name__ == "__main__":
    train_linear(Path(sys.argv[1]), start_processes(seed=7))
