"""raw_images: a first scan, and scans with few or no changes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from bench.measure import Figure, Sides, Workplace, timed
from bench.workload import Project, photographs, tiny_files
from pipeline.raw_images.scan_fingerprint import scan_fingerprint

SETTLE_S = 2.5
"""Seconds to wait: a scan reads a file again if it changed less than two seconds before the last read."""


def bare_stat(folder: Path) -> int:
    """Return the number of files below the folder, with a stat of each."""
    num_files = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                num_files += bare_stat(Path(entry.path))
            else:
                entry.stat()
                num_files += 1
    return num_files


def bare_read(paths: list[Path]) -> None:
    """Read each file once, on all cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(Path.read_bytes, paths):
            pass


@contextmanager
def _cold(place: Workplace) -> Generator[Sides]:
    dataset = place.folder / "photos"
    paths = photographs(dataset, 1000 if place.full else 200, max_px=4_000_000)
    project = Project.at(place.folder / "project", dataset)

    def ours() -> float:
        shutil.rmtree(project.recipe.output_dir, ignore_errors=True)
        return timed(project.scan)()

    def limit() -> None:
        bare_stat(dataset)
        bare_read(paths)

    yield Sides(len(paths), ours, timed(limit))


@contextmanager
def _tiny(place: Workplace) -> Generator[tuple[Project, list[Path]]]:
    dataset = place.folder / "photos"
    paths = tiny_files(dataset, 100_000 if place.full else 10_000)
    time.sleep(SETTLE_S)
    project = Project.at(place.folder / "project", dataset)
    project.scan()
    yield project, paths


@contextmanager
def _unchanged(place: Workplace) -> Generator[Sides]:
    with _tiny(place) as (project, paths):
        dataset = project.recipe.datasets[0].path
        yield Sides(len(paths), timed(project.scan), timed(lambda: bare_stat(Path(dataset))))


@contextmanager
def _one_changed(place: Workplace) -> Generator[Sides]:
    with _tiny(place) as (project, paths):
        dataset = project.recipe.datasets[0].path

        def ours() -> float:
            paths[0].write_bytes(paths[0].read_bytes() + b"\0")
            return timed(project.scan)()

        yield Sides(len(paths), ours, timed(lambda: bare_stat(Path(dataset))))


@contextmanager
def _sensor(place: Workplace) -> Generator[Sides]:
    dataset = place.folder / "photos"
    paths = tiny_files(dataset, 100_000 if place.full else 10_000)
    yield Sides(len(paths), timed(lambda: scan_fingerprint([dataset])), timed(lambda: bare_stat(dataset)))


FIGURES = [
    Figure("scan cold", "images", "first scan", "scandir and stat, and reading each file once", None, _cold),
    Figure("scan unchanged", "images", "scan without changes", "scandir and stat", 2.5, _unchanged),
    Figure(
        "scan one changed", "images", "scan after one file was edited", "scandir and stat", 2.5, _one_changed
    ),
    Figure("sensor look", "files", "the sensor's fingerprint of all files", "scandir and stat", 2.5, _sensor),
]
