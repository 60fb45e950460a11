"""validated_dataset: a first validation, and one without changes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from bench.figures.scan import SETTLE_S, bare_stat
from bench.measure import Figure, Sides, Workplace, timed
from bench.workload import Project, photographs, tiny_files


def bare_decode(path: Path) -> None:
    """Decode all pixels of one file with Pillow."""
    with Image.open(path) as image:
        image.load()


@contextmanager
def _cold(place: Workplace) -> Generator[Sides]:
    dataset = place.folder / "photos"
    paths = photographs(dataset, 400 if place.full else 200)
    project = Project.at(place.folder / "project", dataset)
    project.scan()

    def ours() -> float:
        project.tables.path("validated_dataset").unlink(missing_ok=True)
        shutil.rmtree(project.tables.folder / "known", ignore_errors=True)
        return timed(project.validate)()

    def limit() -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(bare_decode, paths):
                pass

    yield Sides(len(paths), ours, timed(limit))


@contextmanager
def _unchanged(place: Workplace) -> Generator[Sides]:
    dataset = place.folder / "photos"
    paths = tiny_files(dataset, 100_000 if place.full else 10_000)
    time.sleep(SETTLE_S)
    project = Project.at(place.folder / "project", dataset)
    project.scan()
    project.validate()
    yield Sides(len(paths), timed(project.validate), timed(lambda: bare_stat(dataset)))


FIGURES = [
    Figure("validation cold", "images", "first validation", "decode with Pillow on all cores", None, _cold),
    Figure(
        "validation unchanged", "images", "validation without changes", "scandir and stat", None, _unchanged
    ),
]
