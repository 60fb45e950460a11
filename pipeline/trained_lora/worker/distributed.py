"""The processes of one training: how they find, await and tell one another."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.errors import TrainingError, counted
from pipeline.trained_lora.worker.adapter.lora import FROZEN_ADAPTER

if TYPE_CHECKING:
    from pipeline.recipe import AccelerateSettings

PATIENCE = timedelta(hours=12)
"""How long processes wait for the one that exports or draws pictures alone; NCCL itself waits 10 minutes."""


def make_accelerator(settings: AccelerateSettings, *, all_learn: bool) -> Accelerator:
    """Accelerate's object for this process, by what it was launched with.

    Args:
        settings: Of the recipe.
        all_learn: Whether every trained weight gets a gradient in every step. Otherwise torch looks in each
            for those that get none, and does not wait for them.

    Raises:
        TrainingError: This machine cannot compute so, or other processes were launched.
    """
    try:
        accelerator = Accelerator(
            mixed_precision=settings.mixed_precision,
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=PATIENCE),
                DistributedDataParallelKwargs(find_unused_parameters=not all_learn),
            ],
        )
    except ValueError as err:
        fix = "use no (float32) or bf16, or train on a GPU that can"
        where = f"accelerate.mixed_precision: {settings.mixed_precision}"
        raise TrainingError(f"this machine cannot train so: {err}", where=where, fix=fix) from err
    if accelerator.num_processes != settings.num_processes:
        run = counted(accelerator.num_processes, "process runs", "processes run")
        what = f"{run}, the recipe asks for {settings.num_processes}"
        fix = "start training through Latentline, which passes the number on to accelerate launch"
        raise TrainingError(what, where="accelerate.num_processes", fix=fix)
    return accelerator


def exclude_frozen_weights(model: nn.Module) -> None:
    """Let no process send frozen weights to the others, before `model` is prepared.

    All have read the same, and packed ones cannot be sent. The adapter that stays as it began is exchanged:
    each process has computed it.
    """
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    given = {name for name in frozen if f".{FROZEN_ADAPTER}." not in name}
    given |= {name for name, _ in model.named_buffers()}
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model  # pyright: ignore[reportPrivateUsage] - there is no public one
    ignore(model, given)
