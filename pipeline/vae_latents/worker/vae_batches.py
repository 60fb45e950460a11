"""Forward passes of a VAE that take less at once when memory runs out. Imports torch."""

from __future__ import annotations

import gc
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
from pipeline.vae_latents.worker.tiling import tiled_posterior

Pixels = npt.NDArray[np.uint8]
"""Of one image, (H, W, 3)."""

GPU_BATCH_PX = 4 * 1024 * 1024
"""Pixels in one forward pass on a GPU; halved as long as memory runs out."""

TILES_PX = (512, 256)
"""Edges of the tiles that are tried, in this order, when not even one image fits."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Answer:
    """Of one image: its posterior (1, C, h, w) on the CPU, and the edge of its tiles, 0 when it was whole."""

    posterior: Posterior
    tile_px: int


@dataclass(frozen=True)
class Begun:
    """A pass that a GPU is at work on.

    Attributes:
        posterior: Of the images, (B, C, h, w) on the CPU; not to be read before `wait`.
        there: Comes to pass when it can be read; None where it can be already.
    """

    posterior: Posterior
    there: torch.cuda.Event | None

    def wait(self) -> Posterior:
        """The posterior, once it is there."""
        if self.there is not None:
            self.there.synchronize()
        return self.posterior


class Passes:
    """A VAE on one device, in one or two precisions.

    On the CPU each forward pass takes one image, so that a latent's bytes depend on nothing but its key. On a
    GPU a pass takes images of one shape; their values then differ by the arithmetic of larger batches. What
    an image costs is its area, in pixels.

    A GPU works by itself: what `begun` gives is on its way, and `ended` waits for it. Whoever begins the next
    pass in between has it computed while the last one's answers are copied and finished.

    Attributes:
        overlap: Passes that it pays to have under way beside the one that is waited for.
    """

    def __init__(self, family: WorkerFamily, *, dtype: str, device: str, say: Callable[[str], None]) -> None:
        """Load the VAE in `dtype`; `say` is told when memory runs out."""
        self._family = family
        self._device = device
        self._say = say
        self._vae = family.vae.load(dtype, device)
        self._exact_vae: nn.Module | None = self._vae if dtype == "float32" else None
        self.overlap = 1 if device != "cpu" else 0
        self._max_px = GPU_BATCH_PX if device != "cpu" else 1
        self._too_large_px: float = float("inf")

    def batch_size(self, image_px: int) -> int:
        """How many images of so many pixels one pass takes now; at least 1."""
        return max(1, self._max_px // image_px)

    def answers(self, batch: Sequence[tuple[str, Pixels]]) -> Iterator[Answer]:
        """The posteriors of images of one shape, each with its name, in their order.

        When memory runs out, the batch is halved until one image is left; that one is cut into tiles.

        Raises:
            LaunchError: Memory does not even suffice for the smallest tiles.
        """
        yield from self.ended(batch, self.begun(batch))

    def begun(self, batch: Sequence[tuple[str, Pixels]]) -> Begun | None:
        """The pass over images of one shape; None when memory ran out, or is known not to suffice."""
        images = [pixels for _, pixels in batch]
        if len(batch) == 1 and _area(images[0]) >= self._too_large_px:
            return None
        return self._tried(partial(self._begun, self._vae, images))

    def ended(self, batch: Sequence[tuple[str, Pixels]], begun: Begun | None) -> Iterator[Answer]:
        """What `answers` gives for a batch, after its `begun`.

        Raises:
            LaunchError: As `answers`.
        """
        if begun is not None:
            posterior = begun.wait()
            for index in range(len(batch)):
                one = slice(index, index + 1)
                yield Answer(Posterior(posterior.mean[one], posterior.std[one]), 0)
            return
        if len(batch) == 1:
            yield self._in_parts(self._vae, *batch[0])
            return
        middle = len(batch) // 2
        self._max_px = middle * _area(batch[0][1])
        self._say(f"memory ran out with {len(batch)} images a pass, going on with {middle}")
        yield from self.answers(batch[:middle])
        yield from self.answers(batch[middle:])

    def exact(self, name: str, pixels: Pixels) -> Answer:
        """As `answers`, of one image in float32.

        Raises:
            LaunchError: As `answers`.
        """
        vae = self._exactly()
        if _area(pixels) < self._too_large_px:
            begun = self._tried(partial(self._begun, vae, [pixels]))
            if begun is not None:
                return Answer(begun.wait(), 0)
        return self._in_parts(vae, name, pixels)

    def picture(self, latent: Tensor) -> Tensor | None:
        """What a latent (1, C, h, w) decodes to, as `Family.decode`: (3, H, W) on the CPU.

        Half precision that overflows is repeated in float32. None when memory runs out.
        """
        picture = self._tried(partial(self._family.vae.decode, self._vae, latent))
        if picture is not None and not torch.isfinite(picture).all() and self._vae is not self._exact_vae:
            picture = self._tried(lambda: self._family.vae.decode(self._exactly(), latent))
        return None if picture is None else picture[0].cpu()

    def _exactly(self) -> nn.Module:
        """The VAE in float32."""
        if self._exact_vae is None:
            self._exact_vae = self._family.vae.load("float32", self._device)
        return self._exact_vae

    def _in_parts(self, vae: nn.Module, name: str, pixels: Pixels) -> Answer:
        """Of one image that does not fit whole."""
        area, longest = _area(pixels), max(pixels.shape[:2])
        self._too_large_px = min(self._too_large_px, area)
        tiles_px = [tile_px for tile_px in TILES_PX if tile_px < longest]
        for tile_px in tiles_px:
            self._say(f"memory does not suffice for {name} whole, it is encoded in tiles of {tile_px} px")
            posterior = self._tried(partial(self._in_tiles, vae, pixels, tile_px))
            if posterior is not None:
                return Answer(posterior, tile_px)
        tried = ", in tiles too" if tiles_px else ""
        raise LaunchError(
            f"memory ran out while encoding {name} alone ({area:,} pixels){tried}",
            where=f"vae_latents on {self._device}",
            fix="free the device, lower buckets.resolution, or set latents.compute_dtype to bfloat16",
        )

    def _tried(self, work: Callable[[], _T]) -> _T | None:
        """What `work` makes, or None when memory runs out meanwhile."""
        try:
            return work()
        except (RuntimeError, MemoryError) as err:
            if not is_out_of_memory(err):
                raise
        # Only here, behind the except, is the traceback gone that held on to the tensors of the failed pass.
        gc.collect()
        if self._device != "cpu":
            torch.cuda.empty_cache()
        return None

    def _begun(self, vae: nn.Module, images: Sequence[Pixels]) -> Begun:
        posterior = self._family.vae.posterior(vae, self._loaded(images))
        # From a GPU this is into pinned memory, and not waited for.
        copied = Posterior(*(each.to("cpu", non_blocking=True) for each in (posterior.mean, posterior.std)))
        if self._device == "cpu":
            return Begun(copied, None)
        there = torch.cuda.Event()
        there.record(torch.cuda.current_stream(self._device))
        return Begun(copied, there)

    def _in_tiles(self, vae: nn.Module, pixels: Pixels, tile_px: int) -> Posterior:
        encode, multiple = partial(self._family.vae.posterior, vae), self._family.size_multiple()
        return tiled_posterior(encode, self._loaded([pixels]), tile_px=tile_px, multiple=multiple)

    def _loaded(self, images: Sequence[Pixels]) -> Tensor:
        """Float tensor (B, 3, H, W) in [-1, 1] on the device; a GPU copies it by itself."""
        shape, pinned = (len(images), *images[0].shape), self._device != "cpu"
        stacked = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        np.stack(images, out=stacked.numpy())
        moved = stacked.to(self._device, non_blocking=True)
        return moved.permute(0, 3, 1, 2).contiguous().float() / 127.5 - 1.0


def _area(pixels: Pixels) -> int:
    return pixels.shape[0] * pixels.shape[1]
