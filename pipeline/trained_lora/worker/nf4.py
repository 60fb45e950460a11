"""The layers of a denoiser that nf4 and 8-bit products leave as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from pipeline.models.worker.loading import component_class

if TYPE_CHECKING:
    from pipeline.models.families import Family


def unpacked_layers(family: Family) -> list[str]:
    """Return `layers_outside_blocks` of a family's denoiser, from its configuration alone."""
    # The names are needed before the weights are loaded, and the meta device allocates none.
    with torch.device("meta"):
        denoiser = component_class(family, family.spec.denoiser_name).from_config(family.denoiser_config)
    return layers_outside_blocks(denoiser)


def layers_outside_blocks(denoiser: nn.Module) -> list[str]:
    """Return the names of the linear layers outside of repeated blocks.

    Neither nf4 nor 8-bit products pack them. These are embedders, modulations that all blocks share, and the
    output layer: few weights that every sample depends on.
    """
    lists = [module for module in denoiser.modules() if isinstance(module, nn.ModuleList)]
    repeated = {id(module) for blocks in lists for module in blocks.modules()}
    linear = {name: each for name, each in denoiser.named_modules() if isinstance(each, nn.Linear)}
    names_in_blocks = {name.rpartition(".")[2] for name, each in linear.items() if id(each) in repeated}

    # A layer at the top with the name of a layer of the blocks, such as FLUX.1's `proj_out`, gets packed:
    # diffusers would exclude both.
    return [name for name, each in linear.items() if id(each) not in repeated and name not in names_in_blocks]
