"""Drawing the pictures of a job in a launched process, and their sheet."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.processes.launch import Launch
from pipeline.reporting.grids import CELL_PX, fitted, picture_grid
from pipeline.reporting.pictures import jpeg
from pipeline.storage.atomic import is_temp_name, write_bytes
from pipeline.trained_lora.pictures.job import SHEET_FILE, Cell, DrawingJob
from pipeline.trained_lora.previews import MAX_SHEET_BYTES, number_text

if TYPE_CHECKING:
    from PIL import Image

MODULE = "pipeline.trained_lora.pictures.worker"


def draw(job: DrawingJob, launch: Launch) -> Path:
    """Draw the job's pictures and their sheet into its folder, and return the sheet's path.

    Each file appears atomically. Pictures that are complete stay after an error or Ctrl-C.
    """
    with _picture_folder(job.folder), tempfile.TemporaryDirectory(prefix="latentline-") as scratch:
        launch(MODULE, job.write(Path(scratch) / "order.json"))
        write_bytes(job.folder / SHEET_FILE, _sheet(job))
    return job.folder / SHEET_FILE


def num_drawn(job: DrawingJob) -> int:
    """Return the number of the job's pictures that exist."""
    return sum(cell.path.is_file() for cell in job.cells())


@contextmanager
def _picture_folder(folder: Path) -> Generator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):
            for path in folder.iterdir():
                # A killed process leaves its temporary file.
                if is_temp_name(path.name):
                    path.unlink()
            folder.rmdir()  # fails if the folder has files


def _sheet(job: DrawingJob) -> bytes:
    title = _title(job)
    cells = list(job.cells())

    # With a single prompt, which is then the title, strengths are the columns, and each row is a step.
    if len(job.prompts) == 1:
        title = f"{job.prompts[0].heading} ({title})"
        headings = [f"strength {number_text(strength)}" for strength in job.strengths]
        labels = [lora.label for lora in job.loras]
    else:
        headings = [prompt.heading for prompt in job.prompts]
        labels = [
            f"{lora.label}, strength {number_text(strength)}"
            for lora in job.loras
            for strength in job.strengths
        ]

    # `cells` is ordered by LoRA, strength and prompt, and so are the rows.
    width = len(headings)
    rows = [
        (label, [_fitted_picture(cell) for cell in cells[row * width : (row + 1) * width]])
        for row, label in enumerate(labels)
    ]
    return jpeg(picture_grid(rows, headings, title=title), MAX_SHEET_BYTES)


def _fitted_picture(cell: Cell) -> Image.Image:
    from PIL import Image

    # Reduced as soon as it is read, because all full pictures may not fit into memory.
    with Image.open(cell.path) as picture:
        return fitted(picture, CELL_PX)


def _title(job: DrawingJob) -> str:
    source = Path(job.loras[0].file).name if job.run is None else f"run {job.run}"
    return f"{job.recipe.name}, {source}, seed {job.seed}"
