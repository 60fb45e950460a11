"""Compute the features of pictures, dataset images and texts in batches, one scorer at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from pipeline.cache.entry_format import FEATURES, PICTURE
from pipeline.cache.store import EntrySpec, Store
from pipeline.encoding.jobs import Encoded, Encoding, Failure, Job, Outcome
from pipeline.encoding.progress import Progress
from pipeline.errors import EvaluationError
from pipeline.evaluation.feature_entries import IMAGE, MAX_FEATURES, SCORERS, TEXT
from pipeline.evaluation.pictures import picture_spec
from pipeline.evaluation.scorers import Features, Scorer, load_import
from pipeline.images.decode import load_pixels
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Geometry
from pipeline.recipe.evaluation import SCORERS as OWN_SCORERS
from pipeline.storage.addresses import address
from pipeline.storage.remote_source import source_at

if TYPE_CHECKING:
    from pipeline.storage.source import Source

# On a CPU, a batch of one makes a feature independent of its batch mates, bit for bit.
GPU_BATCH = 32
"""Number of pictures or texts per forward pass on a GPU."""


class FeatureEncoder:
    """The scorers of an evaluation, of which one is loaded at a time."""

    def __init__(self, encoding: Encoding, device: str, progress: Progress) -> None:
        self._settings = encoding.settings
        self._device = device
        self._progress = progress
        self._batch = 1 if device == "cpu" else GPU_BATCH
        self._sources: dict[str, Source] = {}
        self._loaded = -1
        self._scorer: Scorer | None = None

    def encoded(self, jobs: Iterable[Job], store: Store) -> Iterator[tuple[Job, Outcome]]:
        """Yield each job with its features, by scorer.

        Raises:
            EvaluationError: A scorer returns something else than finite features.
            StoreError: A picture cannot be read.
        """
        ordered = sorted(jobs, key=lambda job: (job.work["scorer"], job.work["kind"]))
        for (index, kind), group in groupby(ordered, key=lambda job: (job.work["scorer"], job.work["kind"])):
            missing: list[Job] = []
            for job in group:
                # Another evaluation may have computed the features since the stage checked.
                if store.check(job.spec).valid:
                    yield job, "present"
                else:
                    missing.append(job)

            # One scorer is in memory at a time.
            if missing and index != self._loaded:
                self._scorer = self._load(index)
            for start in range(0, len(missing), self._batch):
                yield from self._features(index, kind, missing[start : start + self._batch], store)

    def _load(self, index: int) -> Scorer:
        self._scorer, self._loaded = None, index
        settings: Mapping[str, Any] = self._settings[SCORERS][index]
        name = settings["name"]
        self._progress.phase(f"loading the scorer {name}")
        if name not in OWN_SCORERS:
            return load_import(name, settings["weights"])
        from pipeline.evaluation.worker.transformers_scorer import TransformersScorer

        return TransformersScorer(name, settings["weights"], self._device)

    def _features(
        self, index: int, kind: str, jobs: Sequence[Job], store: Store
    ) -> Iterator[tuple[Job, Outcome]]:
        scorer, name = self._scorer, self._settings[SCORERS][index]["name"]
        assert scorer is not None, f"{name} is not loaded"
        self._progress.working_on(jobs[0].name)
        if kind == TEXT:
            values = scorer.text_features([job.work["text"] for job in jobs])
            yield from zip(jobs, _as_entries(name, values, len(jobs)), strict=True)
            return

        images: list[Image.Image] = []
        usable: list[Job] = []
        for job in jobs:
            image = self._image(job) if kind == IMAGE else _picture(job, store)
            if isinstance(image, Failure):
                yield job, image
            else:
                images.append(image)
                usable.append(job)
        if usable:
            values = scorer.picture_features(images)
            yield from zip(usable, _as_entries(name, values, len(usable)), strict=True)

    def _image(self, job: Job) -> Image.Image | Failure:
        """Return an image of a dataset as training saw it."""
        work = job.work
        red, green, blue = self._settings["background"]
        if work["root"] not in self._sources:
            limit = self._settings["max_file_bytes"]
            self._sources[work["root"]] = source_at(address(work["root"]), max_file_bytes=limit)
        try:
            pixels = load_pixels(
                self._sources[work["root"]].file(work["path"]),
                Geometry.from_row(work),
                (red, green, blue),
                content_hash=work["content_hash"],
            )
        except ImageError as err:
            return Failure(err.reason, err.detail, err.fix)
        return Image.fromarray(pixels)


def _picture(job: Job, store: Store) -> Image.Image:
    spec: EntrySpec = picture_spec(job.work)
    # Features of a damaged picture would stay in the cache after its repair.
    return Image.fromarray(store.read(spec, verify=True)[PICTURE])


def _as_entries(name: str, values: Features | None, number: int) -> list[Encoded]:
    """Return the features as entries; raises EvaluationError if they are something else."""
    array = np.asarray(values)
    is_valid = array.ndim == 2 and len(array) == number and 0 < array.shape[1] <= MAX_FEATURES
    if not is_valid or array.dtype != np.float32 or not np.isfinite(array).all():
        raise EvaluationError(
            f"the scorer {name} must return {number} rows of finite float32 values, got {array.dtype} "
            f"{array.shape}",
            where="evaluation.scorers",
            fix="correct the class of the scorer; if it is one of Latentline, its weights are damaged",
        )
    return [Encoded({FEATURES: row}, {}) for row in np.ascontiguousarray(array)]
