"""Helpers that draw pictures in this process and read them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from pipeline.trained_lora.pictures.draw import MODULE, draw
from pipeline.trained_lora.pictures.job import DrawingJob, read_drawing_job
from pipeline.trained_lora.pictures.prepare import Request, prepare_drawing
from pipeline.trained_lora.pictures.worker.artist import draw_pictures

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


class InProcessDrawing:
    """A launcher that draws in this process and records its progress."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.progress_lines: list[str] = []

    def __call__(self, module: str, order: Path, meanwhile: object = None) -> None:
        assert module == MODULE
        draw_pictures(read_drawing_job(order), self, scratch=order.parent)

    def info(self, text: str) -> None: ...

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def progress(self, done: int, total: int, text: str, **details: str) -> None:
        self.progress_lines.append(f"{done}/{total} {text}")


def drawn(project: Project, **request: Any) -> DrawingJob:
    """Draw a request with the project's recipe, and return its job."""
    job = prepare_drawing(project.recipe, Request(**request))
    draw(job, InProcessDrawing())
    return job


def pixels(path: Path) -> npt.NDArray[np.uint8]:
    with Image.open(path) as picture:
        return np.asarray(picture)


def all_pixels(job: DrawingJob) -> list[npt.NDArray[np.uint8]]:
    return [pixels(cell.path) for cell in job.cells()]
