"""An image encoded in overlapping tiles, for where a whole one does not fit into memory. Imports torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.models.worker.vae import Posterior

MIN_OVERLAP = 0.25
"""Share of a tile's edge that it has at least in common with its neighbour."""


def tiled_posterior(
    encode: Callable[[Tensor], Posterior], pixels: Tensor, *, tile_px: int, multiple: int
) -> Posterior:
    """What `encode` makes of the tiles of `pixels`, blended linearly where they overlap.

    Of the same shape as `encode(pixels)`, and the same for the same arguments; the values differ from it,
    because a VAE's attention and group norms then see a tile and not the image.

    Args:
        encode: Pixels to raw latents, `multiple` pixels being a whole number of latent values.
        pixels: Float tensor (1, 3, H, W), both edges multiples of `multiple`.
        tile_px: Edge of a tile, a multiple of `multiple`; a shorter edge of the image is taken whole.
        multiple: Every tile begins at a multiple of it.
    """
    height, width = pixels.shape[-2:]
    high, wide = min(tile_px, height), min(tile_px, width)
    sums: tuple[Tensor, Tensor, Tensor] | None = None
    for top in tile_starts(height, tile_px, multiple):
        for left in tile_starts(width, tile_px, multiple):
            posterior = encode(pixels[..., top : top + high, left : left + wide])
            mean, std = posterior.mean.cpu(), posterior.std.cpu()
            edges_hw = mean.shape[-2:]
            factor = high // edges_hw[0]
            if sums is None:
                whole = (*mean.shape[:2], height // factor, width // factor)
                sums = torch.zeros(whole), torch.zeros(whole), torch.zeros(whole[-2:])
            weight = _ramp(edges_hw[0])[:, None] * _ramp(edges_hw[1])
            rows = slice(top // factor, top // factor + edges_hw[0])
            columns = slice(left // factor, left // factor + edges_hw[1])
            sums[0][..., rows, columns] += mean * weight
            sums[1][..., rows, columns] += std * weight
            sums[2][rows, columns] += weight
    assert sums is not None
    return Posterior(sums[0] / sums[2], sums[1] / sums[2])


def tile_starts(edge_px: int, tile_px: int, multiple: int) -> list[int]:
    """Where the tiles along one edge begin: about evenly, the first at 0, the last one ending at the edge.

    Neighbours share at least `MIN_OVERLAP` of a tile, less the rounding to `multiple`.
    """
    if edge_px <= tile_px:
        return [0]
    stride_px = tile_px - int(tile_px * MIN_OVERLAP)
    num_strides = -(-(edge_px - tile_px) // stride_px)
    last = edge_px - tile_px
    return [last * index // num_strides // multiple * multiple for index in range(num_strides)] + [last]


def _ramp(length: int) -> Tensor:
    """Weights (length,) above 0, highest in the middle and falling evenly to both ends."""
    places = torch.arange(length, dtype=torch.float32)
    return torch.minimum(places + 1, length - places)
