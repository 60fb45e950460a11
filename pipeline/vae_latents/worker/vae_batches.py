"""Batches of VAE passes that shrink when memory runs out, down to tiles of one image."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipeline.errors import LaunchError
from pipeline.models.worker.family import WorkerFamily
from pipeline.models.worker.vae import Posterior
from pipeline.processes.worker.devices import is_out_of_memory

Pixels = npt.NDArray[np.uint8]
"""Pixels of one image, (H, W, 3)."""

GPU_BATCH_PX = 4 * 1024 * 1024
"""Number of pixels per batch on a GPU; it falls when memory runs out."""

TILES_PX = (512, 256)
"""Tile edges to try, in this order, if one image does not fit into memory."""

MIN_OVERLAP = 0.25
"""Minimum overlap of neighbouring tiles, as a fraction of a tile's edge."""

# An assumption: timing the algorithms takes about as long as encoding a few batches.
MIN_BATCHES = 8
"""Number of batches of one shape before its algorithms are timed."""

MAX_SHAPES = 32
"""Maximum number of shapes with timed algorithms, more than the buckets of a usual recipe."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class EncodedImage:
    """Posterior (1, C, h, w) of one image on the CPU, and the edge of its tiles, 0 if it was not tiled."""

    posterior: Posterior
    tile_px: int


@dataclass(frozen=True)
class PendingBatch:
    """A batch that a GPU is encoding.

    Attributes:
        posterior: Posterior (B, C, h, w) on the CPU; not valid before `wait`.
        copied: Event after the copy to the CPU; None if the posterior is valid already.
    """

    posterior: Posterior
    copied: torch.cuda.Event | None

    def wait(self) -> Posterior:
        """Wait for the posterior and return it."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.posterior


@dataclass(frozen=True)
class Bfloat16Comparison:
    """What bfloat16 would change for a batch that is encoded in float32.

    Attributes:
        difference: Root mean square of the latents' difference, relative to their standard deviation.
        speedup: Time of a pass in float32 divided by the time in bfloat16.
    """

    difference: float
    speedup: float


class CudnnTuning:
    """Switches cuDNN's timing of algorithms on for shapes that occur often; used on GPUs only."""

    # With `torch.backends.cudnn.benchmark`, cuDNN times its algorithms when a shape occurs for the first
    # time, and uses the fastest one from then on. That pays off only for shapes of many batches.

    def __init__(self) -> None:
        self._num_batches = Counter[tuple[int, ...]]()
        self._tuned_shapes = set[tuple[int, ...]]()

    def before_batch(self, shape: tuple[int, ...]) -> None:
        """Set cuDNN's mode for a batch of this shape (B, H, W)."""
        self._num_batches[shape] += 1
        if self._num_batches[shape] > MIN_BATCHES and len(self._tuned_shapes) < MAX_SHAPES:
            self._tuned_shapes.add(shape)
        torch.backends.cudnn.benchmark = shape in self._tuned_shapes


class VaeBatches:
    """A VAE on one device, in its compute dtype and, if needed, in float32.

    A GPU works asynchronously: `start` queues a batch, and `finish` waits for it. A caller that starts the
    next batch in between has it computed while the results of the last one are processed.

    Attributes:
        overlap: Number of batches worth queueing besides the one that is awaited.
        max_px: Number of pixels in one pass; halved when memory runs out.
    """

    def __init__(self, family: WorkerFamily, *, dtype: str, device: str, say: Callable[[str], None]) -> None:
        """Load the VAE in `dtype`; `say` receives a message when memory runs out."""
        self.family = family
        self._device = device
        self._say = say
        self.vae = family.vae.load(dtype, device)
        self._exact_vae: nn.Module | None = self.vae if dtype == "float32" else None
        self.overlap = 1 if device != "cpu" else 0

        # On the CPU each pass takes one image, so that a latent's bytes depend on its key alone. On a GPU,
        # values differ by the arithmetic of a larger batch.
        self.max_px = GPU_BATCH_PX if device != "cpu" else 1
        self._too_large_px: float = float("inf")
        self.tuning = CudnnTuning() if device != "cpu" else None

    def batch_size(self, image_px: int) -> int:
        """Return how many images of this area fit into one batch now; at least 1."""
        return max(1, self.max_px // image_px)

    def encode(self, batch: Sequence[tuple[str, Pixels]]) -> Iterator[EncodedImage]:
        """Encode named images of one shape, in their order.

        If memory runs out, the batch is halved until one image is left, and that one is cut into tiles.

        Raises:
            LaunchError: Not even the smallest tiles fit into memory.
        """
        yield from self.finish(batch, self.start(batch))

    def start(self, batch: Sequence[tuple[str, Pixels]]) -> PendingBatch | None:
        """Start a pass over images of one shape; None if memory ran out, now or at this size before."""
        images = [pixels for _, pixels in batch]

        # A size that ran out of memory before would do so again; the caller tiles the image at once.
        if len(batch) == 1 and _area(images[0]) >= self._too_large_px:
            return None
        if self.tuning is not None:
            self.tuning.before_batch((len(images), *images[0].shape[:2]))
        return self._try(partial(self._pass, self.vae, images))

    def finish(
        self, batch: Sequence[tuple[str, Pixels]], pending: PendingBatch | None
    ) -> Iterator[EncodedImage]:
        """Yield the images of a batch after its `start`; see `encode` for errors."""
        if pending is not None:
            posterior = pending.wait()
            for index in range(len(batch)):
                one = slice(index, index + 1)
                yield EncodedImage(Posterior(posterior.mean[one], posterior.std[one]), 0)
            return

        if len(batch) == 1:
            yield self._encode_tiled(self.vae, *batch[0])
            return

        # The limit falls for all later batches too, because they would fail in the same way.
        half = len(batch) // 2
        self.max_px = half * _area(batch[0][1])
        self._say(f"memory ran out with a batch of {len(batch)} images, continuing with {half}")
        yield from self.encode(batch[:half])
        yield from self.encode(batch[half:])

    def encode_exact(self, name: str, pixels: Pixels) -> EncodedImage:
        """Encode one image in float32; see `encode` for errors."""
        vae = self._float32_vae()
        if _area(pixels) < self._too_large_px:
            pending = self._try(partial(self._pass, vae, [pixels]))
            if pending is not None:
                return EncodedImage(pending.wait(), 0)
        return self._encode_tiled(vae, name, pixels)

    def compare_bfloat16(self, images: Sequence[Pixels]) -> Bfloat16Comparison | None:
        """Encode images of one shape in float32 and in bfloat16; None if memory runs out."""

        def timed_pass(vae: nn.Module) -> tuple[Tensor, float]:
            self._pass(vae, images).wait()  # the first pass of a shape also chooses algorithms
            started_s = time.perf_counter()
            posterior = self._pass(vae, images).wait()
            return self.family.vae.normalise(posterior.mean), time.perf_counter() - started_s

        def compare() -> Bfloat16Comparison:
            exact, exact_s = timed_pass(self._float32_vae())
            rounded, rounded_s = timed_pass(self.family.vae.load("bfloat16", self._device))
            difference = (rounded - exact).square().mean().sqrt() / exact.std()
            return Bfloat16Comparison(float(difference), exact_s / rounded_s)

        return self._try(compare)

    def decode(self, latent: Tensor) -> Tensor | None:
        """Decode a latent (1, C, h, w) to (3, H, W) in [-1, 1] on the CPU; None if memory runs out."""
        image = self._try(partial(self.family.vae.decode, self.vae, latent))

        # Half precision may overflow in the decoder as it may in the encoder.
        if image is not None and not torch.isfinite(image).all() and self.vae is not self._exact_vae:
            image = self._try(lambda: self.family.vae.decode(self._float32_vae(), latent))
        return None if image is None else image[0].cpu()

    def _float32_vae(self) -> nn.Module:
        if self._exact_vae is None:
            self._exact_vae = self.family.vae.load("float32", self._device)
        return self._exact_vae

    def _encode_tiled(self, vae: nn.Module, name: str, pixels: Pixels) -> EncodedImage:
        area, longest = _area(pixels), max(pixels.shape[:2])
        self._too_large_px = min(self._too_large_px, area)
        tiles_px = [tile_px for tile_px in TILES_PX if tile_px < longest]
        for tile_px in tiles_px:
            self._say(f"{name} does not fit into memory, encoding it in tiles of {tile_px} px")
            posterior = self._try(partial(self._pass_tiled, vae, pixels, tile_px))
            if posterior is not None:
                return EncodedImage(posterior, tile_px)

        also_tiled = ", in tiles too" if tiles_px else ""
        raise LaunchError(
            f"memory ran out while encoding {name} alone ({area:,} pixels){also_tiled}",
            where=f"vae_latents on {self._device}",
            fix="free the device, lower buckets.resolution, or set latents.compute_dtype to bfloat16",
        )

    def _try(self, work: Callable[[], _T]) -> _T | None:
        try:
            return work()
        except (RuntimeError, MemoryError) as err:
            if not is_out_of_memory(err):
                raise

        # The traceback keeps the failed pass's tensors alive until the except block ends.
        gc.collect()
        if self._device != "cpu":
            torch.cuda.empty_cache()
        return None

    def _pass(self, vae: nn.Module, images: Sequence[Pixels]) -> PendingBatch:
        posterior = self.family.vae.posterior(vae, self._to_device(images))

        # A copy from a GPU goes to pinned memory and does not block.
        moments = (posterior.mean, posterior.std)
        on_cpu = Posterior(*(moment.to("cpu", non_blocking=True) for moment in moments))
        if self._device == "cpu":
            return PendingBatch(on_cpu, None)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self._device))
        return PendingBatch(on_cpu, copied)

    def _pass_tiled(self, vae: nn.Module, pixels: Pixels, tile_px: int) -> Posterior:
        encode, multiple = partial(self.family.vae.posterior, vae), self.family.size_multiple()
        return tiled_posterior(encode, self._to_device([pixels]), tile_px=tile_px, multiple=multiple)

    def _to_device(self, images: Sequence[Pixels]) -> Tensor:
        """Return floats (B, 3, H, W) in [-1, 1], channels last, on the device; the copy does not block."""
        shape, pinned = (len(images), *images[0].shape), self._device != "cpu"

        # Bytes are copied to the device and converted there: a quarter of the traffic of floats.
        stacked = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        np.stack(images, out=stacked.numpy())
        on_device = stacked.to(self._device, non_blocking=True)
        return on_device.permute(0, 3, 1, 2).float() / 127.5 - 1.0


def _area(pixels: Pixels) -> int:
    return pixels.shape[0] * pixels.shape[1]


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
