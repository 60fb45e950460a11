"""A training loop that one or several processes run together, and that resumes where it was stopped.

Each process computes its part of every batch, and all of them average their gradients. Batches depend only on
the seed and the step, so a resumed run continues as if it had not been stopped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_WARMUP_STEPS = 100

COOLDOWN = 0.3
"""Fraction of the steps, at the end, in which the learning rate falls to zero."""


@dataclass(frozen=True)
class Stage:
    """A part of the training.

    Attributes:
        name: Name of the stage's checkpoint and log.
        folder: Folder of checkpoints and logs.
        steps: Number of optimizer steps. It may be raised until the learning rate begins to fall.
        learning_rate: Learning rate between warm-up and cooldown.
        checkpoint_every_s: Seconds between two checkpoints.
        log_every: Number of steps of each line of the log, and of the steps at which checkpoints may be.
    """

    name: str
    folder: Path
    steps: int
    learning_rate: float
    checkpoint_every_s: float = 150.0
    log_every: int = 50

    @property
    def checkpoint(self) -> Path:
        """File of the weights, the optimizer's state and the log."""
        return self.folder / f"{self.name}.pt"

    @property
    def log(self) -> Path:
        """File with one line of JSON per `log_every` steps."""
        return self.folder / f"{self.name}.jsonl"

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step: linear warm-up, constant, linear cooldown."""
        left = (self.steps - step) / (COOLDOWN * self.steps)
        return self.learning_rate * min(1.0, (step + 1) / _WARMUP_STEPS, left)


@dataclass(frozen=True)
class Part:
    """This process's part of every batch.

    Attributes:
        seed: Seed of the training.
        rank: Number of this process.
        processes: Number of processes.
    """

    seed: int
    rank: int = 0
    processes: int = 1

    @property
    def rows(self) -> slice:
        """Rows of a batch that this process computes."""
        return slice(self.rank, None, self.processes)

    def generator(self, step: int) -> torch.Generator:
        """Return the random generator of a step, the same one in all processes."""
        return torch.Generator().manual_seed((self.seed << 32) + step)

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if dist.is_initialized():
            dist.barrier()


def start_processes(seed: int) -> Part:
    """Join the processes that torchrun started, if it did, and return this one's part."""
    torch.set_num_threads(1)
    if "WORLD_SIZE" not in os.environ:
        return Part(seed)
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    return Part(seed, dist.get_rank(), dist.get_world_size())


def load_networks(stage: Stage, networks: Mapping[str, nn.Module]) -> int:
    """Load the weights of the stage's checkpoint, and return its number of finished steps."""
    state = torch.load(stage.checkpoint, weights_only=True)
    for name, network in networks.items():
        network.load_state_dict(state["networks"][name])
    return int(state["step"])


def train(stage: Stage, networks: Mapping[str, nn.Module], loss_at: Callable[[int], Tensor]) -> None:
    """Train the networks from the stage's checkpoint, or from their present weights without one.

    Args:
        stage: The stage.
        networks: Networks to train, by name.
        loss_at: Returns the loss of this process's part of a step's batch.
    """
    parameters = [each for network in networks.values() for each in network.parameters()]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=0.01)
    step, lines = 0, list[dict[str, float]]()
    if stage.checkpoint.exists():
        step = load_networks(stage, networks)
        state = torch.load(stage.checkpoint, weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        lines = state["log"]

    losses: list[float] = []
    saved_s = time.monotonic()
    for number in range(step, stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = stage.rate_at(number)
        optimizer.zero_grad()
        loss = loss_at(number)
        loss.backward()
        _average_gradients(parameters)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

        losses.append(loss.item())
        done = number + 1
        if done % stage.log_every == 0 or done == stage.steps:
            lines.append({"step": done, "loss": sum(losses) / len(losses)})
            losses.clear()
            if _is_first() and (done == stage.steps or time.monotonic() - saved_s > stage.checkpoint_every_s):
                _save(stage, networks, {"optimizer": optimizer.state_dict(), "step": done, "log": lines})
                saved_s = time.monotonic()


def _average_gradients(parameters: list[nn.Parameter]) -> None:
    if not dist.is_initialized():
        return
    gradients = [each.grad for each in parameters if each.grad is not None]
    joined = torch.cat([each.reshape(-1) for each in gradients])
    dist.all_reduce(joined)
    joined /= dist.get_world_size()
    for gradient, part in zip(gradients, joined.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _save(stage: Stage, networks: Mapping[str, nn.Module], state: dict[str, Any]) -> None:
    """Replace the checkpoint and the log atomically."""
    weights = {name: network.state_dict() for name, network in networks.items()}
    partial = stage.checkpoint.with_suffix(".partial")
    torch.save({**state, "networks": weights}, partial)
    partial.replace(stage.checkpoint)
    stage.log.write_text("".join(f"{json.dumps(line)}\n" for line in state["log"]), encoding="utf-8")
