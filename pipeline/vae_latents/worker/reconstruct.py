"""Decode stored latents for the report, in the process that has just encoded."""

from __future__ import annotations

import time

import numpy as np
import torch

from pipeline.cache.entry_format import LATENT, MEAN
from pipeline.cache.store import Store
from pipeline.cache.worker.tensors import read_torch
from pipeline.encoding.jobs import Job, PictureJobs
from pipeline.encoding.progress import Progress
from pipeline.errors import counted
from pipeline.vae_latents import report
from pipeline.vae_latents.worker.encoder import LatentEncoder

# A decoder takes about twice an encoder's memory, and the system might kill a process that has done its work.
CPU_WINDOW_PX = 256
"""Edge of the central window that is decoded on a CPU."""


def draw_pictures(pictures: PictureJobs, encoder: LatentEncoder, store: Store, progress: Progress) -> None:
    """Draw latents of the store next to their images; a picture that cannot be drawn is reported."""
    # A picture belongs to a key, so one from an earlier run is still right.
    drawn = {each.key for each in report.read(pictures.folder, list(pictures.keys))}
    ratios: list[float] = []
    progress.phase("decoding latents for the report")
    for job in pictures.jobs:
        key = job.spec.key
        if key in drawn or not store.check(job.spec).valid:
            continue

        start_s = time.perf_counter()
        try:
            pair = _image_and_decoded(encoder, job, store)
            if pair is None:
                progress.say(f"no picture of the latent of {job.name}: memory ran out while decoding")
                continue
            seconds = time.perf_counter() - start_s
            ratios.append(report.save(pictures.folder, key, *pair, seconds=seconds).psnr_db)
        except Exception as err:  # the entry is valid, whatever happens to its picture
            progress.say(f"no picture of the latent of {job.name}: {type(err).__name__}: {err}")

    if ratios:
        mean = sum(ratios) / len(ratios)
        progress.say(f"{counted(len(ratios), 'latent')} decoded for the report, mean PSNR {mean:.1f} dB")


def _image_and_decoded(
    encoder: LatentEncoder, job: Job, store: Store
) -> tuple[report.Pixels, report.Pixels] | None:
    """Return the image as the VAE saw it and its decoded latent, of equal size; None if memory runs out."""
    tensors = read_torch(store, job.spec)
    latent = (tensors[LATENT] if LATENT in tensors else tensors[MEAN]).float()
    image = encoder.image(job)

    factor = image.shape[0] // latent.shape[1]

    # The same window of both, since a decoded part is compared with the part of the image that it shows.
    if encoder.device == "cpu":
        longest = max(1, CPU_WINDOW_PX // factor)
        starts = [max(0, (edge - longest) // 2) for edge in latent.shape[1:]]
        rows, columns = (slice(start, start + longest) for start in starts)
        latent = latent[:, rows, columns]
        top, left = (start * factor for start in starts)
        image = image[top : top + latent.shape[1] * factor, left : left + latent.shape[2] * factor]

    decoded = encoder.batches.decode(latent.unsqueeze(0))
    if decoded is None:
        return None
    if not torch.isfinite(decoded).all():
        raise ValueError("the decoded image contains NaN or infinite values, also in float32")
    levels = (decoded / 2 + 0.5).clamp(0, 1).permute(1, 2, 0) * 255
    return np.ascontiguousarray(image), levels.round().to(torch.uint8).numpy()
