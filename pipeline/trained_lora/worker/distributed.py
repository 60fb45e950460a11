"""The processes of one training run: accelerate's settings, and the weights that they exchange."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.errors import TrainingError, counted
from pipeline.processes.worker.devices import bf16_text, emulates_bf16, own_device
from pipeline.trained_lora.worker.adapter.lora import FROZEN_ADAPTER

if TYPE_CHECKING:
    from pipeline.recipe import AccelerateSettings

COLLECTIVE_TIMEOUT = timedelta(hours=12)
"""Maximum wait while the main process exports or draws previews alone; NCCL's default is 10 minutes."""

STEP_TIMEOUT = timedelta(minutes=30)
"""Maximum wait of one process for another one within a step, in which all of them do the same work."""


def make_accelerator(
    settings: AccelerateSettings,
    *,
    mixed_precision: str,
    find_unused_parameters: bool,
) -> Accelerator:
    """Return the `Accelerator` of this process.

    `mixed_precision` is the result of `Family.mixed_precision`. With `find_unused_parameters`, DDP searches
    in every step for trained weights without a gradient, instead of waiting for their gradients.

    Raises:
        TrainingError: The device does not compute in this precision, or the number of processes is wrong.
        LaunchError: See `own_device`.
    """
    device = own_device()
    if mixed_precision == "bf16" and emulates_bf16(device):
        raise TrainingError(
            bf16_text(device),
            where="accelerate.mixed_precision, which is bf16 or auto",
            fix="set it to fp16, or to no, which computes in float32; both start a new run",
        )
    try:
        accelerator = Accelerator(
            mixed_precision=mixed_precision,
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT),
                # Gradients are views of the buffers that processes exchange, which saves a copy of all.
                # `static_graph` is not set: if the first step has several micro-batches, of which all but the
                # last run in `no_sync`, DDP of torch 2.13 fails with an internal assertion.
                DistributedDataParallelKwargs(
                    find_unused_parameters=find_unused_parameters, gradient_as_bucket_view=True
                ),
            ],
        )
    except ValueError as err:
        raise TrainingError(
            f"this machine does not support mixed precision {mixed_precision}: {err}",
            where=f"accelerate.mixed_precision: {mixed_precision}",
            fix="set it to no (float32) or bf16, or train on a GPU that supports it",
        ) from err

    if accelerator.num_processes != settings.num_processes:
        raise TrainingError(
            f"accelerate.num_processes is {settings.num_processes}, but "
            f"{counted(accelerator.num_processes, 'process was', 'processes were')} launched",
            where="accelerate.num_processes",
            fix="start training through Latentline, which passes the number to accelerate launch",
        )
    return accelerator


def wait_at_most(timeout: timedelta) -> None:
    """Limit how long this process waits for others in its next exchanges, before it ends.

    A process alone waits for nobody, so nothing happens.
    """
    # The limit applies to exchanges that begin later.
    if torch.distributed.is_initialized():
        set_timeout = torch.distributed.distributed_c10d._set_pg_timeout  # pyright: ignore[reportPrivateUsage] - torch has no public call for it
        set_timeout(timeout)


def exclude_frozen_weights(model: nn.Module) -> None:
    """Exclude frozen weights from DDP's initial broadcast; call it before `model` is prepared."""
    # Every process has read the same base weights, and quantised ones cannot be sent. The frozen adapter is
    # broadcast all the same, because each process has computed its own.
    excluded = {
        name
        for name, weight in model.named_parameters()
        if not weight.requires_grad and f".{FROZEN_ADAPTER}." not in name
    }
    excluded |= {name for name, _ in model.named_buffers()}
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model  # pyright: ignore[reportPrivateUsage] - torch has no public call for it
    ignore(model, excluded)
