"""Encode an image that does not fit into memory in overlapping tiles."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.models.worker.vae import Posterior

MIN_OVERLAP = 0.25
"""Minimum overlap of neighbouring tiles, as a fraction of a tile's edge."""


def tiled_posterior(
    encode: Callable[[Tensor], Posterior], pixels: Tensor, *, tile_px: int, multiple: int
) -> Posterior:
    """Encode tiles of an image, and blend them linearly where they overlap.

    The posterior has the shape of `encode(pixels)` and is deterministic. Its values differ from it, because
    the VAE's attention and group norms see a tile instead of the image.

    Args:
        encode: Encoder of pixels; `multiple` pixels must be an integer number of latent values.
        pixels: Float tensor (1, 3, H, W); both edges must be multiples of `multiple`.
        tile_px: Edge of a tile, a multiple of `multiple`; a shorter edge of the image is not divided.
        multiple: Divisor of the position of every tile.
    """
    height, width = pixels.shape[-2:]
    tile_height, tile_width = min(tile_px, height), min(tile_px, width)
    sums: tuple[Tensor, Tensor, Tensor] | None = None
    for top in tile_starts(height, tile_px, multiple):
        for left in tile_starts(width, tile_px, multiple):
            posterior = encode(pixels[..., top : top + tile_height, left : left + tile_width])

            # Sums are on the host, because the device is out of memory already.
            mean, std = posterior.mean.cpu(), posterior.std.cpu()
            latent_hw = mean.shape[-2:]
            factor = tile_height // latent_hw[0]
            if sums is None:
                shape = (*mean.shape[:2], height // factor, width // factor)
                sums = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape[-2:])

            # Weights fall towards the tile's edges, so that seams vanish; the sum of weights normalises.
            weight = _ramp(latent_hw[0])[:, None] * _ramp(latent_hw[1])
            rows = slice(top // factor, top // factor + latent_hw[0])
            columns = slice(left // factor, left // factor + latent_hw[1])
            sums[0][..., rows, columns] += mean * weight
            sums[1][..., rows, columns] += std * weight
            sums[2][rows, columns] += weight

    assert sums is not None
    return Posterior(sums[0] / sums[2], sums[1] / sums[2])


def tile_starts(edge_px: int, tile_px: int, multiple: int) -> list[int]:
    """Return the positions of the tiles along one edge: evenly spaced, from 0 to the last that fits.

    Neighbours overlap by at least `MIN_OVERLAP` of a tile, less the rounding to `multiple`.
    """
    if edge_px <= tile_px:
        return [0]
    stride_px = tile_px - int(tile_px * MIN_OVERLAP)
    num_strides = -(-(edge_px - tile_px) // stride_px)
    last = edge_px - tile_px
    return [last * index // num_strides // multiple * multiple for index in range(num_strides)] + [last]


def _ramp(length: int) -> Tensor:
    """Return positive weights (length,) that fall linearly from the middle to both ends."""
    positions = torch.arange(length, dtype=torch.float32)
    return torch.minimum(positions + 1, length - positions)
