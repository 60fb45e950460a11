"""Latents of the store back to pictures, by the process that has just encoded. Imports torch."""

from __future__ import annotations

import time

import numpy as np
import torch

from pipeline.cache.entry_format import LATENT, MEAN
from pipeline.cache.store import Store
from pipeline.cache.worker.tensors import read_torch
from pipeline.encoding.jobs import Beside, Job
from pipeline.encoding.progress import Progress
from pipeline.errors import counted
from pipeline.vae_latents import report as decoded
from pipeline.vae_latents.worker.encoder import LatentEncoder

CPU_WINDOW_PX = 512
"""Of a larger image, the middle so many pixels are decoded on a CPU: a decoder takes about twice an encoder's
memory, and the system's answer to too much of it would be to kill a process whose work is done."""


def decode_beside(beside: Beside, encoder: LatentEncoder, store: Store, progress: Progress) -> None:
    """Draw the latents that are in the store, each beside its image, with the VAE that has encoded.

    They are for people to look at: what cannot be drawn is said, and is no reason to fail. Those that were
    drawn before are left alone.
    """
    drawn = {seen.key for seen in decoded.read(beside.folder, list(beside.keys))}
    ratios: list[float] = []
    for job in beside.jobs:
        key = job.spec.key
        if key in drawn or not store.check(job.spec).valid:
            continue
        progress.working_on(f"the picture of {job.name}")
        start_s = time.perf_counter()
        try:
            pair = _pair(encoder, job, store)
            if pair is None:
                progress.say(f"no picture of the latent of {job.name}: memory ran out as it was decoded")
                continue
            seconds = time.perf_counter() - start_s
            ratios.append(decoded.keep(beside.folder, key, *pair, seconds=seconds).psnr_db)
        except Exception as err:  # the entry is made and sound, whatever becomes of its picture
            progress.say(f"no picture of the latent of {job.name}: {type(err).__name__}: {err}")
    if ratios:
        mean = sum(ratios) / len(ratios)
        progress.say(f"{counted(len(ratios), 'latent')} decoded again, PSNR {mean:.1f} dB on average")


def _pair(encoder: LatentEncoder, job: Job, store: Store) -> tuple[decoded.Pixels, decoded.Pixels] | None:
    """The image as the VAE saw it and its decoded latent, of one size; None when memory runs out."""
    tensors = read_torch(store, job.spec)
    latent = (tensors[LATENT] if LATENT in tensors else tensors[MEAN]).float()
    image = encoder.image(job)
    factor = image.shape[0] // latent.shape[1]
    if encoder.device == "cpu":
        longest = max(1, CPU_WINDOW_PX // factor)
        tops = [max(0, (edge - longest) // 2) for edge in latent.shape[1:]]
        rows, columns = (slice(top, top + longest) for top in tops)
        latent = latent[:, rows, columns]
        top, left = (edge * factor for edge in tops)
        image = image[top : top + latent.shape[1] * factor, left : left + latent.shape[2] * factor]
    picture = encoder.picture(latent.unsqueeze(0))
    if picture is None:
        return None
    if not torch.isfinite(picture).all():
        raise ValueError("the decoder's answer holds NaN or infinite values, also in float32")
    levels = (picture / 2 + 0.5).clamp(0, 1).permute(1, 2, 0) * 255
    return np.ascontiguousarray(image), levels.round().to(torch.uint8).numpy()
