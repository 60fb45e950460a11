"""vae_latents: one new image in a full cache, against a warm run and a bare process that encodes that image.

Nearly all of it is a process that starts: Python, torch, diffusers, the VAE. The aim is a second above the
warm run, and torch alone takes about that long to be imported: so the limit has such a process in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
from PIL import Image

from bench.growth.stages import prepare, project_in
from bench.measure import Figure, Sides, Workplace, timed
from bench.workload import Project
from pipeline.processes.launch import CPU_THREADS_PER_PROCESS

BARE = """
import os, sys

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image

torch.set_num_threads(int(sys.argv[3]))
vae = AutoencoderKL.from_pretrained(sys.argv[1], local_files_only=True).eval()
with Image.open(sys.argv[2]) as image:
    pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None].float() / 127.5 - 1
with torch.inference_mode():
    vae.encode(pixels).latent_dist.mean.half().numpy()
os._exit(0)
"""
"""Ends as fast as a process can: torch takes half a second to tidy up."""

EDGE_PX = 64


@contextmanager
def _one_new(place: Workplace) -> Generator[Sides]:
    folder, numbers = place.folder / "project", count()
    prepare({folder: 100_000 if place.full else 10_000})
    project, image = project_in(folder), folder / "photos" / "new.png"
    random = np.random.default_rng(0)

    def ours() -> float:
        _draw(image, random)
        _planned(project)
        return _latents(project, encoded=1)

    def limit() -> float:
        bare_image = place.folder / f"{next(numbers)}.png"
        _draw(bare_image, random)
        command = [sys.executable, "-c", BARE, str(folder / "tiny" / "vae"), str(bare_image)]
        command.append(str(CPU_THREADS_PER_PROCESS))
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        process_s = timed(lambda: subprocess.run(command, env=environment, capture_output=True, check=True))()
        return _latents(project, encoded=0) + process_s

    yield Sides(1, ours, limit)


def _draw(path: Path, random: np.random.Generator) -> None:
    """An image that no cache knows, with its caption."""
    pixels = random.integers(0, 256, (EDGE_PX, EDGE_PX, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    path.with_suffix(".txt").write_text("new\n", encoding="utf-8")


def _planned(project: Project) -> None:
    """The stages before, not measured here."""
    project.scan()
    project.validate()
    project.buckets()


def _latents(project: Project, *, encoded: int) -> float:
    """Seconds of the whole stage, the start of its processes among them."""
    start_s = time.perf_counter()
    report = project.latents().report
    taken_s = time.perf_counter() - start_s
    if report["encoded"] != encoded or report["failed"]:
        raise RuntimeError(f"{encoded} new latents were to be measured, and not those of {report}")
    return taken_s


FIGURES = [
    Figure(
        "latents one new",
        "images",
        "the stage with one new image in a full cache, process start and all",
        "the stage with nothing new, and a bare process: torch, AutoencoderKL, one image",
        1.0,
        _one_new,
    )
]
