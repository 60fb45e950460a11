"""Draw the pictures of an evaluation, by the arithmetic of `latentline sample`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np

from pipeline.cache.entry_format import PICTURE
from pipeline.cache.store import Store
from pipeline.encoding.jobs import Encoded, Encoding, Job, Outcome
from pipeline.encoding.progress import Progress
from pipeline.evaluation.pictures import DRAWING
from pipeline.processes.worker.devices import out_of_memory_as
from pipeline.trained_lora.pictures.job import Cell, drawing_job_from_json
from pipeline.trained_lora.pictures.worker.artist import Artist, drawing_memory_error


class _AsReport:
    """Passes the phases of loading on to the progress of the encoding."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def info(self, text: str) -> None:
        self._progress.say(text)

    def phase(self, text: str) -> None:
        self._progress.phase(text)

    def progress(self, done: int, total: int, text: str, *, note: str = "") -> None:
        """Ignore the count of encoded prompts, which would look like a count of pictures."""


class PictureEncoder:
    """The base model with the LoRA of one step at a time."""

    def __init__(self, encoding: Encoding, progress: Progress) -> None:
        self._job = drawing_job_from_json(encoding.settings[DRAWING])
        self._progress = progress
        with tempfile.TemporaryDirectory() as scratch, self._memory():
            self._artist = Artist(self._job, _AsReport(progress), Path(scratch))

    def encoded(self, jobs: Iterable[Job], store: Store) -> Iterator[tuple[Job, Outcome]]:
        """Yield each job with its picture, by LoRA and strength.

        Raises:
            DrawingError: A LoRA does not fit the base model, or memory ran out.
        """
        # In the order of `fill`, each picture could have another LoRA, and its file would be read again.
        for job in sorted(jobs, key=lambda job: (job.work["lora"], job.work["strength"], job.work["number"])):
            self._progress.working_on(job.name)
            # Another evaluation may have drawn the picture since the stage checked.
            if store.check(job.spec).valid:
                yield job, "present"
                continue

            lora, number = self._job.loras[job.work["lora"]], job.work["number"]
            with self._memory():
                picture = self._artist.draw(Cell(lora, job.work["strength"], number, Path()))
            yield job, Encoded({PICTURE: np.asarray(picture.convert("RGB"))}, {})

    def _memory(self) -> AbstractContextManager[None]:
        return out_of_memory_as(partial(drawing_memory_error, self._job))
