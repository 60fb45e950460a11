"""vae_latents: one new image in a full cache, compared with a warm run.

Most of the time is the start of a process: Python, torch, diffusers and the VAE.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from bench.growth.stages import prepare, project_in
from bench.measure import Figure, Sides, Workplace
from bench.workload import Project

MAX_EXTRA_S = 5.0
"""Maximum time of one new image on top of a warm run, in seconds."""

EDGE_PX = 64


@contextmanager
def _one_new(place: Workplace) -> Generator[Sides]:
    folder = place.folder / "project"
    prepare({folder: 100_000 if place.full else 10_000})
    project, image = project_in(folder), folder / "photos" / "new.png"
    random = np.random.default_rng(0)

    def ours() -> float:
        _draw(image, random)
        _planned(project)
        return _latents(project, encoded=1)

    def limit() -> float:
        return _latents(project, encoded=0) + MAX_EXTRA_S

    yield Sides(1, ours, limit)


def _draw(path: Path, random: np.random.Generator) -> None:
    """Write a new random image with a caption."""
    pixels = random.integers(0, 256, (EDGE_PX, EDGE_PX, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    path.with_suffix(".txt").write_text("new\n", encoding="utf-8")


def _planned(project: Project) -> None:
    """Run the earlier stages, which are not measured."""
    project.scan()
    project.validate()
    project.buckets()


def _latents(project: Project, *, encoded: int) -> float:
    """Return the seconds of the stage, including the start of its processes."""
    start_s = time.perf_counter()
    report = project.latents().report
    taken_s = time.perf_counter() - start_s
    if report["encoded"] != encoded or report["failed"]:
        raise RuntimeError(f"the stage must encode {encoded} latents, got {report}")
    return taken_s


FIGURES = [
    Figure(
        "latents one new",
        "images",
        "the stage with one new image in a full cache, including process start",
        f"the stage without new images, plus {MAX_EXTRA_S:g} s",
        1.0,
        _one_new,
    )
]
