"""A frozen base model that is sharded over the GPUs of a machine with torch's `fully_shard`.

Each process holds its share of every weight. The weights of a block are gathered before its forward and its
backward pass, and freed afterwards:

    share 0 on GPU 0 ---+--- gathered on GPU 0: micro-batch 0
    share 1 on GPU 1 ---+--- gathered on GPU 1: micro-batch 1

Gathering is collective, so all processes must run the denoiser equally often. The adapter is added after
sharding: its weights and the optimizer are replicated, and DDP averages the gradients as without sharding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from pipeline.models.worker.offload.streamed_blocks import repeated_blocks

if TYPE_CHECKING:
    from pipeline.recipe import Recipe


def shard_base(denoiser: nn.Module, device: torch.device) -> None:
    """Keep this process's share of the frozen denoiser's weights on its device; it has no adapter yet.

    Every process of the run calls it, with the same weights in host memory.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for block in repeated_blocks(denoiser).values():
        fully_shard(block, mesh=mesh)

    # By default, weights outside of blocks stay gathered after a pass without gradients. Reading the state
    # dict frees them, which the main process does alone, so that it would gather them more often than others.
    fully_shard(denoiser, mesh=mesh, reshard_after_forward=True)


def is_sharded(network: nn.Module) -> bool:
    """Return whether the weights of a network are sharded."""
    return isinstance(network, FSDPModule)


def may_need_base_prediction(recipe: Recipe) -> bool:
    """Return whether any micro-batch of the recipe may need `MicroInput.needs_base_prediction`."""
    keeps_prediction = recipe.training.loss.prior == "prediction"
    return any(
        (dataset.role == "prior" and keeps_prediction)
        or (dataset.mask is not None and dataset.mask.prior_weight > 0)
        for dataset in recipe.datasets
    )


def share_bytes(denoiser: nn.Module) -> int:
    """Return the bytes of this process's share of a sharded denoiser."""
    return sum(weight.to_local().nbytes for weight in denoiser.parameters() if isinstance(weight, DTensor))
