"""Layers of a LoRA file that combine several modules, such as query, key and value of FLUX.1.

Latentline trains one LoRA per module. In the file it stacks the `down` matrices of a layer's parts, and puts
their `up` matrices on the diagonal of a block matrix. sd-scripts trains one LoRA for the complete layer, so
that its `up` matrix is dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipeline.trained_lora.export.lora_files import Layout, LoraFile, LoraModule


def with_separate_parts(file: LoraFile, modules: Sequence[LoraModule], layout: Layout) -> LoraFile:
    """Return the file with block matrices in place of dense ones, which have the same effect.

    The weights of part i change by `up_i @ down`, where `up_i` are its rows of the dense matrix of shape
    (out, rank). So each part gets `down` and `up_i`, and the layer has rank `parts * rank`. A layer is dense
    if the file and the adapted `modules` have the same rank for it.
    """
    tensors: dict[str, Any] = dict(file.tensors)
    for (down_key, up_key, alpha_key), module in _fused_layers(modules, layout).items():
        outs = module.outs(layout)
        down, up = tensors.get(down_key), tensors.get(up_key)
        if down is None or up is None or up.shape != (sum(outs), len(down)):
            continue  # the reader of the file names tensors that are missing or have another shape
        if len(down) != module.rank and _is_block_diagonal(up, outs, module.ranks(layout)):
            continue

        tensors[down_key] = torch.cat([down] * len(outs))
        tensors[up_key] = torch.block_diag(*up.split(outs))

        # The rank grows by the number of parts, and alpha with it: the scale alpha / rank stays.
        if alpha_key in tensors:
            tensors[alpha_key] = tensors[alpha_key] * len(outs)
    return replace(file, tensors=tensors)


def partly_adapted(file: LoraFile, modules: Sequence[LoraModule], layout: Layout) -> list[str]:
    """Return the keys of up matrices that also change parts of a layer which are not among `modules`."""
    partly: list[str] = []
    for (_, up_key, _), first in _fused_layers(modules, layout).items():
        up = file.tensors.get(up_key)
        outs = first.outs(layout)
        if up is None or len(up) != sum(outs):
            continue
        is_other = torch.ones(len(up), dtype=torch.bool)
        for module in modules:
            if module.keys(layout)[1] == up_key:
                is_other[module.slices(layout)[1]] = False
        if bool(torch.as_tensor(up)[is_other].any()):
            partly.append(up_key)
    return partly


def _fused_layers(
    modules: Sequence[LoraModule], layout: Layout
) -> dict[tuple[str, str, str | None], LoraModule]:
    """Return one module of each layer that combines several, by the layer's keys."""
    return {module.keys(layout): module for module in modules if len(module.outs(layout)) > 1}


def _is_block_diagonal(up: Tensor, outs: Sequence[int], ranks: Sequence[int]) -> bool:
    if up.shape[1] != sum(ranks):
        # The file has another rank, so its blocks are known only if they have the same width.
        rank, remainder = divmod(up.shape[1], len(outs))
        if remainder:
            return False
        ranks = [rank] * len(outs)
    blocks = torch.block_diag(*(torch.ones(rows, rank) for rows, rank in zip(outs, ranks, strict=True)))
    return not bool(up[blocks == 0].any())
