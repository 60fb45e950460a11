"""Drawing the pictures of a job in a launched process, and their sheet."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.processes.launch import Launch
from pipeline.storage.atomic import is_temp_name, write_bytes
from pipeline.trained_lora.pictures.job import SHEET_FILE, DrawingJob
from pipeline.trained_lora.pictures.sheet import drawing_sheet

MODULE = "pipeline.trained_lora.pictures.worker"


def draw(job: DrawingJob, launch: Launch) -> Path:
    """Draw the job's pictures and their sheet into its folder, and return the sheet's path.

    Each file appears atomically. Pictures that are complete stay after an error or Ctrl-C.

    Raises:
        LatentlineError: See `Launch`.
        OSError: The folder cannot be written.
    """
    with _picture_folder(job.folder), tempfile.TemporaryDirectory(prefix="latentline-") as scratch:
        launch(MODULE, job.write(Path(scratch) / "order.json"))
        write_bytes(job.folder / SHEET_FILE, drawing_sheet(job))
    return job.folder / SHEET_FILE


def num_drawn(job: DrawingJob) -> int:
    """Return the number of the job's pictures that exist."""
    return sum(cell.path.is_file() for cell in job.cells())


@contextmanager
def _picture_folder(folder: Path) -> Generator[None]:
    """Create the folder for the body; remove it afterwards if it is empty, and files of a killed process."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):
            for path in folder.iterdir():
                if is_temp_name(path.name):
                    path.unlink()
            folder.rmdir()  # fails if the folder has files
