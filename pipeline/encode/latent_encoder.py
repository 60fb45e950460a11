"""Images to latents on one device: decoding ahead, one shape a batch, all values finite. Imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipeline.encode.feed import ahead
from pipeline.encode.order import Job, Order
from pipeline.encode.outcome import Encoded, Failure, Outcome
from pipeline.encode.progress import Progress
from pipeline.entries import LATENT, MEAN, STD
from pipeline.errors import LatentlineError, LaunchError
from pipeline.families import Posterior, detect
from pipeline.geometry import Geometry
from pipeline.image_formats import ImageError
from pipeline.images import load_pixels
from pipeline.store import Store, TensorSpec

Pixels = npt.NDArray[np.uint8]

GPU_BATCH_PX = 4 * 1024 * 1024
"""Pixels in one forward pass on a GPU; halved as long as memory runs out."""


class LatentEncoder:
    """A VAE on one device.

    On the CPU each forward pass takes one image, so that a latent's bytes depend on nothing but its key. On a
    GPU a pass takes images of one shape; their values then differ by the arithmetic of larger batches.
    """

    def __init__(self, order: Order, device: str, progress: Progress) -> None:
        """Load the VAE of the order's model."""
        self._family = detect(order.model_folder)
        self._settings = order.settings
        self._device = device
        self._progress = progress
        self._dtype: str = order.settings["compute_dtype"]
        self._vae = self._family.load_vae(self._dtype, device)
        self._exact_vae: nn.Module | None = self._vae if self._dtype == "float32" else None
        self._max_px = GPU_BATCH_PX if device != "cpu" else 1

    def encoded(self, jobs: Sequence[Job], store: Store) -> Iterator[tuple[Job, Outcome]]:
        """Each job with its latent or the reason why there is none; jobs of one shape must be neighbours."""
        threads = os.cpu_count() or 1
        depth = threads + 2 * self._batch_size(jobs[0]) if jobs else 1
        decoded = ahead(jobs, lambda job: self._pixels(job, store), threads=threads, depth=depth)
        for _, group in groupby(decoded, key=lambda pair: _tensor(pair[0]).shape):
            batch: list[tuple[Job, Pixels]] = []
            for job, future in group:
                self._progress.working_on(job.name)
                pixels = _outcome(future)
                if not isinstance(pixels, np.ndarray):
                    yield job, pixels
                    continue
                batch.append((job, pixels))
                if len(batch) >= self._batch_size(job):
                    yield from self._batch(batch)
                    batch = []
            yield from self._batch(batch)

    def _batch_size(self, job: Job) -> int:
        return max(1, self._max_px // job.cost)

    def _pixels(self, job: Job, store: Store) -> Pixels | None:
        """What the VAE sees of one image; None when another process has made its entry meanwhile."""
        if store.path(job.spec).exists() and store.check(job.spec).valid:
            return None
        red, green, blue = self._settings["background"]
        pixels = load_pixels(
            Path(job.work["path"]),
            Geometry.from_row(job.work),
            (red, green, blue),
            content_hash=job.work["content_hash"],
        )
        return np.ascontiguousarray(pixels[:, ::-1]) if job.work["flipped"] else pixels

    def _batch(self, batch: list[tuple[Job, Pixels]]) -> Iterator[tuple[Job, Outcome]]:
        """The batch's latents; after an out-of-memory error those of its halves."""
        if not batch:
            return
        try:
            posterior = self._posterior(self._vae, [pixels for _, pixels in batch])
        except torch.OutOfMemoryError as err:
            self._shrink(batch, err)
            middle = len(batch) // 2
            yield from self._batch(batch[:middle])
            yield from self._batch(batch[middle:])
            return
        for index, (job, pixels) in enumerate(batch):
            one = Posterior(posterior.mean[index : index + 1], posterior.std[index : index + 1])
            yield job, self._finished(job, pixels, one)

    def _posterior(self, vae: nn.Module, images: Sequence[Pixels]) -> Posterior:
        """Of the images, (B, C, h, w) on the CPU."""
        stacked = torch.from_numpy(np.stack(images)).to(self._device).permute(0, 3, 1, 2).contiguous()
        posterior = self._family.posterior(vae, stacked.float() / 127.5 - 1.0)
        return Posterior(posterior.mean.cpu(), posterior.std.cpu())

    def _finished(self, job: Job, pixels: Pixels, posterior: Posterior) -> Outcome:
        """The entry of one image; half precision that overflowed is repeated in float32."""
        values = self._values(job, posterior)
        if not _finite(values) and self._dtype != "float32":
            self._progress.say(f"{job.name}: not finite in {self._dtype}, encoded again in float32")
            if self._exact_vae is None:
                self._exact_vae = self._family.load_vae("float32", self._device)
            values = self._values(job, self._posterior(self._exact_vae, [pixels]))
        dtype = _tensor(job).dtype
        stored = {name: value.to(getattr(torch, dtype)) for name, value in values.items()}
        if not _finite(values):
            return Failure(
                "latent_not_finite",
                "the VAE's answer holds NaN or infinite values, also in float32",
                "look at the image, or remove it; if many are concerned, the base model's VAE is damaged",
            )
        if not _finite(stored):
            largest = max(float(value.abs().max()) for value in values.values())
            detail = f"a value of {largest:.4g} does not fit into {dtype}"
            return Failure("latent_overflow", detail, "set latents.dtype to bfloat16 or float32")
        return Encoded({name: as_stored(value) for name, value in stored.items()}, {})

    def _values(self, job: Job, posterior: Posterior) -> dict[str, Tensor]:
        """Float32 (C, h, w) each: the mean; one draw whose noise the entry's key decides; or both moments.

        A family's normalisation is affine, so a standard deviation is normalised without its shift.
        """
        raw, normalise = posterior.mean, self._family.normalise
        if self._settings["posterior"] == "moments":
            std = normalise(posterior.std) - normalise(torch.zeros_like(posterior.std))
            return {MEAN: normalise(raw)[0], STD: std[0]}
        if self._settings["posterior"] == "sample":
            raw = raw + posterior.std * posterior_noise(job.spec.key, tuple(raw.shape))
        return {LATENT: normalise(raw)[0]}

    def _shrink(self, batch: Sequence[tuple[Job, Any]], err: torch.OutOfMemoryError) -> None:
        """Halve what a pass takes from here on."""
        job = batch[0][0]
        if len(batch) == 1:
            raise LaunchError(
                f"memory ran out while encoding {job.name} alone ({job.cost:,} pixels)",
                where=f"vae_latents on {self._device}",
                fix="free the device, lower buckets.resolution, or set latents.compute_dtype to bfloat16",
            ) from err
        torch.cuda.empty_cache()
        self._max_px = max(1, len(batch) // 2) * job.cost
        self._progress.say(f"memory ran out with {len(batch)} images a pass, going on with {len(batch) // 2}")


def _tensor(job: Job) -> TensorSpec:
    """Of the job's entry; where there are several, all are alike."""
    return next(iter(job.spec.tensors.values()))


def _finite(values: Mapping[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in values.values())


def posterior_noise(key: str, shape: tuple[int, ...]) -> Tensor:
    """Standard normal float32 of `shape`; the same for the same key on every machine of one torch version."""
    generator = torch.Generator("cpu").manual_seed(int(key[:15], 16))
    return torch.randn(shape, generator=generator)


def as_stored(tensor: Tensor) -> npt.NDArray[Any]:
    """The tensor's values as `Store.write` takes them: bfloat16 as its bits."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _outcome(future: Future[Pixels | None]) -> Pixels | Outcome:
    """Pixels, "present", or why this one image fails while the others go on."""
    error = future.exception()
    if isinstance(error, ImageError):
        return Failure(error.reason, error.detail, error.fix)
    if isinstance(error, Exception) and not isinstance(error, LatentlineError):
        fix = "export the image again, or remove it"
        return Failure("undecodable", f"{type(error).__name__}: {error}", fix)
    pixels = future.result()
    return "present" if pixels is None else pixels
