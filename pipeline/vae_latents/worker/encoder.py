"""Encode images to latents on one device: prefetched, batched by shape, and checked for finite values."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain, groupby, islice
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from pipeline.cache.entry_format import LATENT, MEAN, STD
from pipeline.cache.store import Store, TensorSpec
from pipeline.cache.worker.tensors import as_stored
from pipeline.encoding.jobs import NUM_PROBES, Encoded, Encoding, Failure, Job, Outcome
from pipeline.encoding.prefetch import StalledError, ahead
from pipeline.encoding.progress import Progress
from pipeline.errors import LatentlineError, ModelError, counted
from pipeline.images.decode import File, load_pixels
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Geometry
from pipeline.models.worker.family import load_family
from pipeline.models.worker.vae import Posterior
from pipeline.processes.launch import cpu_threads, num_cores
from pipeline.processes.worker.devices import bf16_text, emulates_bf16
from pipeline.storage.addresses import address
from pipeline.storage.regular_files import MAX_FILE_BYTES
from pipeline.storage.remote_source import source_at
from pipeline.storage.source import Source
from pipeline.vae_latents.worker.vae_batches import EncodedImage, PendingBatch, Pixels, VaeBatches

# Far beyond the worst case of a slow disk.
TIMEOUT_S = 300.0
"""Time after which reading and decoding one image is given up."""

IMAGES_PER_TURN = 16
"""Number of images that are decoded before the VAE encodes them, if both need all cores."""

VALUE_REASONS = ("latent_not_finite", "latent_overflow")
"""Reasons of failures that the VAE or the stored dtype may cause, and not the image."""

MIN_COMPARED_JOBS = 1000
"""Number of images from which on a GPU, float32 is compared with bfloat16."""

_Decoded: TypeAlias = Iterable[tuple[Job, Future[Pixels | None]]]
_Batch: TypeAlias = Sequence[tuple[Job, Pixels]]
_Pending: TypeAlias = deque[tuple[_Batch, PendingBatch | None]]
"""Batches on the device, oldest first."""


class LatentEncoder:
    """A VAE on one device, and threads that read and decode images ahead of it.

    Attributes:
        compares: Whether the next batch is also encoded in bfloat16, for a message about time and rounding.
    """

    def __init__(
        self, encoding: Encoding, device: str, progress: Progress, *, threads: int | None = None
    ) -> None:
        self.family = load_family(encoding.model_folder, encoding.component_folders)
        self._settings = encoding.settings
        self._progress = progress
        self._sources: dict[str, Source] = {}
        self._sources_lock = threading.Lock()
        self._dtype: str = encoding.settings["compute_dtype"]
        if self._dtype == "bfloat16" and emulates_bf16(device):
            progress.say(f"warning: {bf16_text(device)}. latents.compute_dtype: auto avoids it")
        self.batches = VaeBatches(self.family, dtype=self._dtype, device=device, say=progress.say)
        self._threads = threads or decode_threads()
        self.device = device
        self.compares = self._dtype == "float32" and is_worth_comparing(device, len(encoding.jobs))

    def encoded(self, jobs: Iterable[Job], store: Store) -> Iterator[tuple[Job, Outcome]]:
        """Yield each job with its latent, or with the reason for its failure.

        The first few jobs are probes and are encoded alone. Later jobs of equal shape should follow each
        other, because they share batches.

        Raises:
            ModelError: The VAE's latents have another shape than its configuration gives, or no probe gives
                a finite latent that fits the stored dtype.
            LaunchError: One image does not fit into memory, not even in tiles.
        """
        source = iter(jobs)
        first = next(source, None)
        if first is None:
            return

        # Deep enough to fill the next batch while one is on the device.
        depth = self._threads + 2 * self.batches.batch_size(first.cost)
        # On a CPU without spare cores, a thread that decodes delays one of the VAE's, and the others wait for
        # it: at the same time, both took 1.16 times as long as one after the other.
        in_turns = self.device == "cpu" and cpu_threads() >= self._threads
        decoded = ahead(
            chain([first], source),
            lambda job: self._missing_pixels(job, store),
            threads=self._threads,
            depth=IMAGES_PER_TURN if in_turns else depth,
            in_turns=in_turns,
            timeout_s=TIMEOUT_S,
        )

        # Single images would take another time than batches.
        compares, self.compares = self.compares, False
        yield from self._encode_probes(islice(decoded, NUM_PROBES))
        self.compares = compares
        pending: _Pending = deque()
        # Only images of one shape fit into a batch. The jobs are sorted so that equal shapes follow each
        # other.
        for _, group in groupby(decoded, key=lambda pair: _tensor(pair[0]).shape):
            yield from self._encode_one_shape(group, pending)
        yield from self._finish(pending, keep=0)

    def _encode_probes(self, decoded: _Decoded) -> list[tuple[Job, Outcome]]:
        pending: _Pending = deque()
        outcomes = [each for pair in decoded for each in self._encode_one_shape([pair], pending)]
        outcomes += self._finish(pending, keep=0)

        # A grey image separates a broken model from broken images, before a large dataset is encoded in vain.
        if _model_may_be_broken([outcome for _, outcome in outcomes]):
            self._require_working_model([job for job, _ in outcomes])
        return outcomes

    def _require_working_model(self, probes: Sequence[Job]) -> None:
        smallest = min(probes, key=lambda job: job.cost)

        # The smallest size suffices to test the weights, and takes the least time and memory.
        size = Geometry.from_row(smallest.work).target_size
        grey = np.full((size.height, size.width, 3), 127, dtype=np.uint8)
        (image,) = self.batches.encode([("a grey image", grey)])
        outcome = self.outcome(smallest, grey, image)
        if not isinstance(outcome, Failure):
            return

        fix = "the VAE's weights are damaged or do not match its config.json: download the model again"
        if outcome.reason == "latent_overflow":
            fix = outcome.fix
        names = ", ".join(job.name for job in probes)
        raise ModelError(
            f"the VAE gives no valid latent, not even for a grey image: {outcome.detail} (first: {names})",
            where=str(self.family.model.component("vae")),
            fix=fix,
        )

    def _encode_one_shape(self, decoded: _Decoded, pending: _Pending) -> Iterator[tuple[Job, Outcome]]:
        """Yield the outcomes of finished batches; the latest ones stay in `pending`."""
        batch: list[tuple[Job, Pixels]] = []
        for job, future in decoded:
            self._progress.working_on(job.name)
            pixels = _pixels_or_outcome(future)
            if not isinstance(pixels, np.ndarray):
                yield job, pixels
                continue

            batch.append((job, pixels))
            if len(batch) >= self.batches.batch_size(job.cost):
                self._start(batch, pending)
                batch = []
                yield from self._finish(pending, keep=self.batches.overlap)

        if batch:
            self._start(batch, pending)
            yield from self._finish(pending, keep=self.batches.overlap)

    def _missing_pixels(self, job: Job, store: Store) -> Pixels | None:
        # Another process may have written the entry meanwhile.
        if store.check(job.spec).valid:
            return None
        return self.image(job)

    def image(self, job: Job) -> Pixels:
        """Return an image as the VAE sees it.

        Raises:
            ImageError: The file is missing, has changed, or cannot be decoded.
        """
        red, green, blue = self._settings["background"]

        # The bytes are hashed while they are read: a file that changed since the scan must not get this key.
        pixels = load_pixels(
            self._file(job.work["root"], job.work["path"]),
            Geometry.from_row(job.work),
            (red, green, blue),
            content_hash=job.work["content_hash"],
        )
        return np.ascontiguousarray(pixels[:, ::-1]) if job.work["flipped"] else pixels

    def _file(self, root: str, path: str) -> File:
        # Decoding threads share the sources, and opening an address takes a connection.
        with self._sources_lock:
            if root not in self._sources:
                limit = self._settings.get("max_file_bytes", MAX_FILE_BYTES)
                self._sources[root] = source_at(address(root), max_file_bytes=limit)
        return self._sources[root].file(path)

    def _start(self, batch: _Batch, pending: _Pending) -> None:
        pending.append((batch, self.batches.start([(job.name, pixels) for job, pixels in batch])))

    def _finish(self, pending: _Pending, *, keep: int) -> Iterator[tuple[Job, Outcome]]:
        """Yield the outcomes of all pending batches but the last `keep`."""
        while len(pending) > keep:
            batch, started = pending.popleft()
            images = self.batches.finish([(job.name, pixels) for job, pixels in batch], started)
            for (job, pixels), image in zip(batch, images, strict=True):
                yield job, self.outcome(job, pixels, image)
            if self.compares:
                self.compares = False
                self._compare_with_bfloat16([pixels for _, pixels in batch])

    def _compare_with_bfloat16(self, images: Sequence[Pixels]) -> None:
        compared = self.batches.compare_bfloat16(images)
        if compared is not None:
            self._progress.say(
                f"the VAE computes in float32; in bfloat16 it would be {compared.speedup:.1f} times as fast "
                f"and change latents by {compared.difference:.2%} of their standard deviation (measured on "
                f"{counted(len(images), 'image')}). latents.compute_dtype: bfloat16 encodes all images again"
            )

    def outcome(self, job: Job, pixels: Pixels, image: EncodedImage) -> Outcome:
        """Return the entry of one image; if half precision overflowed, encode it again in float32."""
        values = self.tensors(job, image.posterior)
        if not _all_finite(values) and self._dtype != "float32":
            self._progress.say(f"{job.name}: not finite in {self._dtype}, encoding again in float32")
            image = self.batches.encode_exact(job.name, pixels)
            values = self.tensors(job, image.posterior)
        self._require_shape(job, values)
        if not _all_finite(values):
            return Failure(
                "latent_not_finite",
                "the latent contains NaN or infinite values, also in float32",
                "inspect or remove the image; if many images are affected, the base model's VAE is damaged",
            )

        # float16 ends at 65,504, so a value may be finite in the VAE and infinite in the entry.
        dtype = _tensor(job).dtype
        stored = {name: value.to(getattr(torch, dtype)) for name, value in values.items()}
        if not _all_finite(stored):
            largest = max(float(value.abs().max()) for value in values.values())
            detail = f"a value of {largest:.4g} does not fit into {dtype}"
            return Failure("latent_overflow", detail, "set latents.dtype to bfloat16 or float32")

        facts = {"tile_px": image.tile_px} if image.tile_px else {}
        return Encoded({name: as_stored(value) for name, value in stored.items()}, facts)

    def _require_shape(self, job: Job, values: Mapping[str, Tensor]) -> None:
        expected = _tensor(job).shape
        wrong = {tuple(value.shape) for value in values.values()} - {expected}
        if wrong:
            raise ModelError(
                f"the VAE's latent of {job.name} must have the shape {expected}, got {wrong.pop()}",
                where=str(self.family.model.component("vae")),
                fix="download the base model again: its weights do not match its config.json",
            )

    def tensors(self, job: Job, posterior: Posterior) -> dict[str, Tensor]:
        """Return float32 tensors (C, h, w): the mean, a draw seeded by the entry's key, or both moments."""
        raw_latent, normalise = posterior.mean, self.family.vae.normalise
        # References have their own, because the pipelines do not sample them.
        stored = job.work.get("posterior") or self._settings["posterior"]
        if stored == "moments":
            # Normalisation is affine. The difference removes its shift, which belongs to the mean alone.
            std = normalise(posterior.std) - normalise(torch.zeros_like(posterior.std))
            return {MEAN: normalise(raw_latent)[0], STD: std[0]}
        if stored == "sample":
            # Seeded by the key, so that the entry depends on nothing else, and a repaired entry has the same
            # bytes.
            noise = posterior_noise(job.spec.key, tuple(raw_latent.shape))
            raw_latent = raw_latent + posterior.std * noise
        return {LATENT: normalise(raw_latent)[0]}


def is_worth_comparing(device: str, num_jobs: int) -> bool:
    """Return whether to find out what bfloat16 would change, which takes four passes and a second VAE."""
    return device != "cpu" and num_jobs >= MIN_COMPARED_JOBS and not emulates_bf16(device)


def decode_threads() -> int:
    """Return this process's share of the available cores, among the processes launched with it."""
    return max(1, num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def posterior_noise(key: str, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal float32 noise; equal keys give equal noise with the same version of torch."""
    # On the CPU, because other devices draw other numbers from the same seed.
    generator = torch.Generator("cpu").manual_seed(int(key[:15], 16))
    return torch.randn(shape, generator=generator)


def _tensor(job: Job) -> TensorSpec:
    # All tensors of an entry have one shape and dtype.
    return next(iter(job.spec.tensors.values()))


def _all_finite(values: Mapping[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in values.values())


def _model_may_be_broken(outcomes: Sequence[Outcome]) -> bool:
    values = [
        outcome
        for outcome in outcomes
        # Images that could not be decoded say nothing about the VAE.
        if isinstance(outcome, Encoded) or (isinstance(outcome, Failure) and outcome.reason in VALUE_REASONS)
    ]
    return bool(values) and all(isinstance(outcome, Failure) for outcome in values)


def _pixels_or_outcome(future: Future[Pixels | None]) -> Pixels | Outcome:
    error = future.exception()
    if isinstance(error, ImageError):
        return Failure(error.reason, error.detail, error.fix)
    if isinstance(error, StalledError):
        fix = "make sure that its disk responds and that it is a regular file, then start the job again"
        return Failure("stalled", f"reading and decoding it was given up: {error}", fix)

    # A decoder may raise anything on a damaged image, and one image must not stop the rest.
    if isinstance(error, Exception) and not isinstance(error, LatentlineError):
        fix = "export the image again, or remove it"
        return Failure("undecodable", f"{type(error).__name__}: {error}", fix)
    pixels = future.result()
    return "present" if pixels is None else pixels
