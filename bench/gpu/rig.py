"""Shared setup of experiments: base models on disk, photographs, and a cache filled by the stages."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bench.gpu.models import BaseModel
from bench.workload import Project, photographs
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.recipe import TrainingSettings, recipe_from_mapping
from pipeline.text_embeddings.stage import cache_text
from pipeline.vae_latents.stage import cache_latents

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import polars as pl

    from pipeline.encoding.jobs import Encoding, Job
    from pipeline.log import Log
    from pipeline.processes.launch import Launch, Meanwhile
    from pipeline.recipe import Recipe
    from pipeline.reporting.reports import StageResult
    from pipeline.storage.tables import Tables
    from pipeline.trained_lora.job import TrainingJob

RANK = 16
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Scale:
    """Sizes of an experiment.

    Attributes:
        full: True for networks of published size, False for tiny networks of the same classes.
        resolution: Edge of the square images, in pixels.
        images: Number of images in the dataset, each with a different caption.
        steps: Training steps per round.
        job_steps: Training steps of a complete job.
        batches: Batch sizes that the sweep tries.
        workers: Numbers of decoding threads that the sweep tries.
    """

    full: bool
    resolution: int
    images: int
    steps: int
    job_steps: int
    batches: tuple[int, ...]
    workers: tuple[int, ...]


FULL = Scale(True, 1024, 96, 10, 20, (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32))
TINY = Scale(False, 64, 6, 2, 2, (1, 2), (1, 2))


@dataclass(frozen=True)
class Bench:
    """Working folder and device of experiments. Models and photographs are created on first use.

    Attributes:
        folder: Folder for all files, about 50 GB at full size. Models and caches in it are used again.
        device: "cuda" or "cpu".
        scale: Sizes of the experiments.
    """

    folder: Path
    device: str
    scale: Scale

    @property
    def photos(self) -> Path:
        """Folder of the dataset."""
        return self._written(
            "photos", lambda folder: photographs(folder, self.scale.images, max_px=4_000_000)
        )

    def base(self, model: BaseModel) -> Path:
        """Return the folder of the model, which is written on first use."""
        if self.scale.full:
            return self._written(model.name, lambda folder: model.write(folder, self.device))
        return self._written(model.name, model.tiny)

    def _written(self, name: str, write: Callable[[Path], object]) -> Path:
        """Return a folder of this name, complete even if an earlier call was interrupted."""
        folder = self.folder / name
        if not folder.exists():
            partial = self.fresh_folder("partial") / name
            write(partial)
            partial.rename(folder)
        return folder

    def rig(self, model: BaseModel, place: str, **training: Any) -> Rig:
        """Return the model with a recipe of these training settings. Rigs of one place share a cache."""
        return Rig(self, model, training, self.folder / place / model.name)

    def fresh_folder(self, name: str) -> Path:
        """Return an empty folder, after removing its previous content."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder


@dataclass(frozen=True)
class Rig:
    """One base model, a recipe for it, and its cache."""

    bench: Bench
    model: BaseModel
    training: Mapping[str, Any]
    place: Path

    @cached_property
    def family(self) -> WorkerFamily:
        """Family of the model."""
        return load_family(self.bench.base(self.model))

    @cached_property
    def project(self) -> Project:
        """Project with square images, full batches, bf16, no previews and one checkpoint."""
        scale, folder = self.bench.scale, self.place
        steps = self.training.get("steps", scale.steps)
        settings = {
            "batch_size": self.model.batch_size if scale.full else 2,
            "learning_rate": LEARNING_RATE,
            "checkpoint_every": 1_000,
            "sample_every": 0,
            "lora": {"rank": RANK, "alpha": float(RANK)},
            "trackers": [],
        }
        values = {
            "datasets": [{"name": "photos", "path": str(self.bench.photos)}],
            "cache_dir": str(folder / "cache"),
            "output_dir": str(folder / "out"),
            "model": {"base": str(self.bench.base(self.model))},
            "buckets": {"resolution": scale.resolution, "step": 64, "max_aspect_ratio": 1.0},
            "latents": {"dtype": self.model.dtype, "compute_dtype": "bfloat16"},
            "text": {"dtype": self.model.dtype, "compute_dtype": "bfloat16", "caption_dropout": 0.0},
            "training": {**settings, **self.model.training, **self.training, "steps": steps},
            "accelerate": {"mixed_precision": "bf16"},
        }
        return Project(recipe_from_mapping("gpu", values))

    @property
    def recipe(self) -> Recipe:
        """Recipe of the project."""
        return self.project.recipe

    def prepare(self) -> None:
        """Write the tables that caching needs, if they are missing."""
        if not self.project.tables.path("aspect_buckets").exists():
            for stage in (self.project.scan, self.project.validate, self.project.buckets):
                stage()

    def encoding(self) -> RecordedEncoding:
        """Encode all latents into the rig's cache in this process, and return the stage's encoding."""
        self.prepare()
        launch = _RecordingLaunch()
        shutil.rmtree(self.recipe.cache_dir, ignore_errors=True)
        self._keep("vae_latents", cache_latents, "aspect_buckets", launch)
        assert launch.encoding is not None
        return RecordedEncoding(launch.encoding, launch.jobs)

    def training_job(self, **training: Any) -> TrainingJob:
        """Return a training job, with prompts if it draws previews.

        An incomplete cache is filled in this process first.
        """
        from pipeline.trained_lora.inputs import training_inputs
        from pipeline.trained_lora.job import TrainingJob
        from pipeline.trained_lora.prompts import preview_prompts

        if not self.project.tables.path("text_embeddings").exists():
            self.prepare()
            self._keep("vae_latents", cache_latents, "aspect_buckets", _RecordingLaunch())
            self._keep("text_embeddings", cache_text, "validated_dataset", _RecordingLaunch())
        tables, entries = self.project.tables, RecipeEntries(self.recipe)
        latents = tables.read("vae_latents")
        inputs = training_inputs(self.recipe, entries, latents, tables.read("text_embeddings"))
        settings = TrainingSettings.model_validate({**self.recipe.training.model_dump(), **training})
        recipe = self.recipe.model_copy(update={"training": settings})
        prompts = preview_prompts(recipe, entries, inputs, latents)
        return TrainingJob(recipe, entries.model_folder, "bench", inputs, entries.text_spec(""), prompts)

    def _keep(self, asset: str, stage: _CacheStage, source: str, launch: Launch) -> None:
        tables = self.project.tables
        rows = tables.read(source)
        tables.write(asset, stage(self.recipe, rows, tables, launch=launch, log=_silent).table)


class _CacheStage(Protocol):
    def __call__(
        self, recipe: Recipe, rows: pl.DataFrame, tables: Tables, /, *, launch: Launch, log: Log
    ) -> StageResult: ...


@dataclass(frozen=True)
class RecordedEncoding:
    """An encoding of a cache stage, with its jobs in memory."""

    encoding: Encoding
    jobs: Sequence[Job]

    def computing(self, dtype: str, vae: Path | None = None) -> RecordedEncoding:
        """Return the same encoding with another compute dtype and optionally another VAE."""
        component_folders = {} if vae is None else {"vae": vae}
        settings = {**self.encoding.settings, "compute_dtype": dtype}
        return replace(
            self, encoding=replace(self.encoding, settings=settings, component_folders=component_folders)
        )


class _RecordingLaunch:
    """A `Launch` that encodes in this process and records the encoding."""

    def __init__(self) -> None:
        self.encoding: Encoding | None = None
        self.jobs: list[Job] = []

    def __call__(self, module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
        from pipeline.encoding.jobs import read_encoding

        if meanwhile is not None:
            meanwhile()
        encoding = read_encoding(job_file)
        # The file of the jobs ends with the stage.
        self.jobs = list(encoding.jobs)
        self.encoding = replace(encoding, jobs=self.jobs)
        import_module(f"{module}.__main__").run(job_file, Silent(), rank=0, num_ranks=1)


class Silent:
    """A reporter that discards all messages."""

    def info(self, text: str) -> None:
        """Discard the message."""

    def phase(self, text: str) -> None:
        """Discard the message."""

    def progress(self, done: int, total: int, text: str, **details: str) -> None:
        """Discard the message."""


def _silent(line: str) -> None:
    """Discard a log line of a stage."""
