"""Images to latents on one device: decoding ahead, one shape a batch, all values finite. Imports torch."""

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
from pipeline.encoding.jobs import NUM_PROBES, Job, Order
from pipeline.encoding.outcome import Encoded, Failure, Outcome
from pipeline.encoding.prefetch import StalledError, ahead
from pipeline.encoding.progress import Progress
from pipeline.encoding.sanity import suspicious, wrong_model
from pipeline.errors import LatentlineError, ModelError
from pipeline.images.decode import File, load_pixels
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Geometry
from pipeline.models.worker.family import load_family
from pipeline.models.worker.vae import Posterior
from pipeline.raw_images.parallel import num_threads
from pipeline.storage.addresses import address
from pipeline.storage.source import Source, source_at
from pipeline.vae_latents.worker.vae_batches import Answer, Begun, Passes, Pixels

PATIENCE_S = 300.0
"""How long one image may be read and decoded before it is given up; far beyond a slow disk's worst."""

_Decoded: TypeAlias = Iterable[tuple[Job, Future[Pixels | None]]]
_Batch: TypeAlias = Sequence[tuple[Job, Pixels]]
_UnderWay: TypeAlias = deque[tuple[_Batch, Begun | None]]
"""Passes that were begun, oldest first."""


class LatentEncoder:
    """A VAE on one device, fed by threads that decode; see `Passes` for what comes together in one pass."""

    def __init__(self, order: Order, device: str, progress: Progress, *, threads: int | None = None) -> None:
        """Load the VAE of the order's model; `threads` decode, by default `decode_threads()`."""
        self._family = load_family(order.model_folder, order.elsewhere)
        self._settings = order.settings
        self._progress = progress
        self._sources: dict[str, Source] = {}
        self._opening = threading.Lock()
        self._dtype: str = order.settings["compute_dtype"]
        self._passes = Passes(self._family, dtype=self._dtype, device=device, say=progress.say)
        self._threads = threads or decode_threads()
        self.device = device

    def encoded(self, jobs: Iterable[Job], store: Store) -> Iterator[tuple[Job, Outcome]]:
        """Each job with its latent or the reason why there is none; jobs of one shape should be neighbours.

        The first few are probes, each encoded alone.

        Raises:
            ModelError: The VAE gives latents of another shape than its configuration says, or none that is
                finite and fits the stored dtype.
            LaunchError: Memory does not suffice for one image, in tiles either.
        """
        source = iter(jobs)
        first = next(source, None)
        if first is None:
            return
        threads = self._threads
        depth = threads + 2 * self._passes.batch_size(first.cost)
        decoded = ahead(
            chain([first], source),
            lambda job: self._pixels(job, store),
            threads=threads,
            depth=depth,
            patience_s=PATIENCE_S,
        )
        yield from self._probed(islice(decoded, NUM_PROBES))
        under_way: _UnderWay = deque()
        for _, group in groupby(decoded, key=lambda pair: _tensor(pair[0]).shape):
            yield from self._of_one_shape(group, under_way)
        yield from self._ended(under_way, keep=0)

    def _probed(self, decoded: _Decoded) -> list[tuple[Job, Outcome]]:
        """The probes' outcomes, if any is of use; otherwise a plain picture shows who is to blame."""
        under_way: _UnderWay = deque()
        found = [end for pair in decoded for end in self._of_one_shape([pair], under_way)]
        found += self._ended(under_way, keep=0)
        probes = [job for job, _ in found]
        if suspicious([outcome for _, outcome in found]):
            smallest = min(probes, key=lambda job: job.cost)
            size = Geometry.from_row(smallest.work).target_size
            plain = np.full((size.height, size.width, 3), 127, dtype=np.uint8)
            (answer,) = self._passes.answers([("a plain picture", plain)])
            outcome = self._finished(smallest, plain, answer)
            if isinstance(outcome, Failure):
                raise wrong_model(probes, outcome, str(self._family.component_folder("vae")))
        return found

    def _of_one_shape(self, decoded: _Decoded, under_way: _UnderWay) -> Iterator[tuple[Job, Outcome]]:
        """The outcomes of these but for the passes that are left `under_way`, and of those left there."""
        batch: list[tuple[Job, Pixels]] = []
        for job, future in decoded:
            self._progress.working_on(job.name)
            pixels = _outcome(future)
            if not isinstance(pixels, np.ndarray):
                yield job, pixels
                continue
            batch.append((job, pixels))
            if len(batch) >= self._passes.batch_size(job.cost):
                self._begin(batch, under_way)
                batch = []
                yield from self._ended(under_way, keep=self._passes.overlap)
        if batch:
            self._begin(batch, under_way)
            yield from self._ended(under_way, keep=self._passes.overlap)

    def _pixels(self, job: Job, store: Store) -> Pixels | None:
        """As `image`; None when another process has made its entry meanwhile."""
        if store.check(job.spec).valid:
            return None
        return self.image(job)

    def image(self, job: Job) -> Pixels:
        """What the VAE sees of one image.

        Raises:
            ImageError: The file is gone, has changed, or cannot be decoded.
        """
        red, green, blue = self._settings["background"]
        pixels = load_pixels(
            self._file(job.work["root"], job.work["path"]),
            Geometry.from_row(job.work),
            (red, green, blue),
            content_hash=job.work["content_hash"],
        )
        return np.ascontiguousarray(pixels[:, ::-1]) if job.work["flipped"] else pixels

    def _file(self, root: str, path: str) -> File:
        """Of a dataset that is opened once for all its images."""
        with self._opening:
            if root not in self._sources:
                self._sources[root] = source_at(address(root))
        return self._sources[root].file(path)

    def picture(self, latent: Tensor) -> Tensor | None:
        """What a latent decodes to, as `Passes.picture`."""
        return self._passes.picture(latent)

    def _begin(self, batch: _Batch, under_way: _UnderWay) -> None:
        under_way.append((batch, self._passes.begun([(job.name, pixels) for job, pixels in batch])))

    def _ended(self, under_way: _UnderWay, *, keep: int) -> Iterator[tuple[Job, Outcome]]:
        """The outcomes of all passes but the last `keep`, which are left."""
        while len(under_way) > keep:
            batch, begun = under_way.popleft()
            answers = self._passes.ended([(job.name, pixels) for job, pixels in batch], begun)
            for (job, pixels), answer in zip(batch, answers, strict=True):
                yield job, self._finished(job, pixels, answer)

    def _finished(self, job: Job, pixels: Pixels, answer: Answer) -> Outcome:
        """The entry of one image; half precision that overflowed is repeated in float32."""
        values = self._values(job, answer.posterior)
        if not _finite(values) and self._dtype != "float32":
            self._progress.say(f"{job.name}: not finite in {self._dtype}, encoded again in float32")
            answer = self._passes.exact(job.name, pixels)
            values = self._values(job, answer.posterior)
        self._require_shape(job, values)
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
        facts = {"tile_px": answer.tile_px} if answer.tile_px else {}
        return Encoded({name: as_stored(value) for name, value in stored.items()}, facts)

    def _require_shape(self, job: Job, values: Mapping[str, Tensor]) -> None:
        expected = _tensor(job).shape
        wrong = {tuple(value.shape) for value in values.values()} - {expected}
        if wrong:
            raise ModelError(
                f"the VAE makes a latent of shape {wrong.pop()} of {job.name}, not of {expected} as its "
                "configuration promises",
                where=str(self._family.component_folder("vae")),
                fix="fetch the base model again: its weights and its config.json do not belong together",
            )

    def _values(self, job: Job, posterior: Posterior) -> dict[str, Tensor]:
        """Float32 (C, h, w) each: the mean; one draw whose noise the entry's key decides; or both moments.

        A family's normalisation is affine, so a standard deviation is normalised without its shift.
        """
        raw, normalise = posterior.mean, self._family.vae.normalise
        if self._settings["posterior"] == "moments":
            std = normalise(posterior.std) - normalise(torch.zeros_like(posterior.std))
            return {MEAN: normalise(raw)[0], STD: std[0]}
        if self._settings["posterior"] == "sample":
            raw = raw + posterior.std * posterior_noise(job.spec.key, tuple(raw.shape))
        return {LATENT: normalise(raw)[0]}


def decode_threads() -> int:
    """This process's share of the cores that it may use, among the processes launched with it."""
    return max(1, num_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _tensor(job: Job) -> TensorSpec:
    """Of the job's entry; where there are several, all are alike."""
    return next(iter(job.spec.tensors.values()))


def _finite(values: Mapping[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in values.values())


def posterior_noise(key: str, shape: tuple[int, ...]) -> Tensor:
    """Standard normal float32 of `shape`; the same for the same key on every machine of one torch version."""
    generator = torch.Generator("cpu").manual_seed(int(key[:15], 16))
    return torch.randn(shape, generator=generator)


def _outcome(future: Future[Pixels | None]) -> Pixels | Outcome:
    """Pixels, "present", or why this one image fails while the others go on."""
    error = future.exception()
    if isinstance(error, ImageError):
        return Failure(error.reason, error.detail, error.fix)
    if isinstance(error, StalledError):
        fix = "see whether its disk answers and the file is an ordinary one; then start the job again"
        return Failure("stalled", f"reading and decoding it was {error}, and was given up", fix)
    if isinstance(error, Exception) and not isinstance(error, LatentlineError):
        fix = "export the image again, or remove it"
        return Failure("undecodable", f"{type(error).__name__}: {error}", fix)
    pixels = future.result()
    return "present" if pixels is None else pixels
