"""The sheet of a `latentline sample`: all pictures, with steps, strengths and prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.reporting.grids import CELL_PX, fitted, picture_grid
from pipeline.reporting.pictures import jpeg
from pipeline.trained_lora.pictures.job import Cell, DrawingJob
from pipeline.trained_lora.previews import MAX_SHEET_BYTES, number_text

if TYPE_CHECKING:
    from PIL import Image


def drawing_sheet(job: DrawingJob) -> bytes:
    """Return a JPEG of the job's pictures, which exist.

    The columns are prompts, and each row is a step and a strength. With a single prompt, which is then the
    title, the columns are strengths.
    """
    title = _title(job)
    cells = list(job.cells())
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
        (label, [_picture(cell) for cell in cells[row * width : (row + 1) * width]])
        for row, label in enumerate(labels)
    ]
    return jpeg(picture_grid(rows, headings, title=title), MAX_SHEET_BYTES)


def _picture(cell: Cell) -> Image.Image:
    """Read a picture at the size of the sheet's cells, since all full pictures may not fit into memory."""
    from PIL import Image

    with Image.open(cell.path) as picture:
        return fitted(picture, CELL_PX)


def _title(job: DrawingJob) -> str:
    source = Path(job.loras[0].file).name if job.run is None else f"run {job.run}"
    return f"{job.recipe.name}, {source}, seed {job.seed}"
