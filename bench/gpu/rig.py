"""What experiments share: base models on the disk, photographs, and a cache filled by the stages."""

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
from pipeline.cache.requests import RecipeEntries
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.recipe import TrainingSettings, recipe_from_mapping
from pipeline.text_embeddings.stage import cache_text
from pipeline.vae_latents.stage import cache_latents

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

    from pipeline.encoding.jobs import Job, Order
    from pipeline.processes.launch import Launch, Meanwhile
    from pipeline.recipe import Recipe
    from pipeline.reporting.reports import Log, StageResult
    from pipeline.storage.tables import Tables
    from pipeline.trained_lora.job import TrainingJob

RANK = 16
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Scale:
    """How much of everything.

    Attributes:
        full: Networks of published size; otherwise tiny ones of the same classes.
        resolution: Edge of the images, which are squares.
        images: In the dataset, each with a caption of its own.
        steps: Of training, in one round.
        job_steps: Of the training that ends a whole job.
        batches: Images a pass that the sweep tries.
        workers: Decoding threads that the sweep tries.
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
    """Where experiments work; models and photographs are made when they are first asked for.

    Attributes:
        folder: Holds everything, 50 GB at full size.
        device: "cuda" or "cpu".
        scale: How much of everything.
    """

    folder: Path
    device: str
    scale: Scale

    @property
    def photos(self) -> Path:
        """The dataset."""
        folder = self.folder / "photos"
        if not folder.exists():
            photographs(folder, self.scale.images, max_px=4_000_000)
        return folder

    def base(self, model: BaseModel) -> Path:
        """The model's folder."""
        folder = self.folder / model.name
        if not folder.exists():
            if self.scale.full:
                model.write(folder, self.device)
            else:
                model.tiny(folder)
        return folder

    def rig(self, model: BaseModel, place: str, **training: Any) -> Rig:
        """The model with a recipe; rigs of one place share a cache. `training` are settings of its own."""
        return Rig(self, model, training, self.folder / place / model.name)

    def fresh_folder(self, name: str) -> Path:
        """An empty place, its last content removed."""
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
        """Of the model."""
        return load_family(self.bench.base(self.model))

    @cached_property
    def project(self) -> Project:
        """The recipe: squares, full batches, bf16, no pictures and one checkpoint."""
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
        """The project's."""
        return self.project.recipe

    def prepare(self) -> None:
        """The tables that caching starts from; nothing is done twice."""
        if not self.project.tables.path("aspect_buckets").exists():
            for stage in (self.project.scan, self.project.validate, self.project.buckets):
                stage()

    def encoding(self) -> Encoding:
        """The order for all latents as the stage writes it; they are in the rig's cache afterwards."""
        self.prepare()
        taken = _TakeOrder()
        shutil.rmtree(self.recipe.cache_dir, ignore_errors=True)
        self._keep("vae_latents", cache_latents, "aspect_buckets", taken)
        assert taken.order is not None
        return Encoding(taken.order, taken.jobs)

    def order(self, **training: Any) -> TrainingJob:
        """A training on the cache, which is filled in this process if it is not; nothing is launched."""
        from pipeline.trained_lora.job import TrainingJob
        from pipeline.trained_lora.samples import training_inputs

        if not self.project.tables.path("text_embeddings").exists():
            self.prepare()
            self._keep("vae_latents", cache_latents, "aspect_buckets", _TakeOrder())
            self._keep("text_embeddings", cache_text, "validated_dataset", _TakeOrder())
        tables, entries = self.project.tables, RecipeEntries(self.recipe)
        inputs = training_inputs(
            self.recipe, entries, tables.read("vae_latents"), tables.read("text_embeddings")
        )
        settings = TrainingSettings.model_validate({**self.recipe.training.model_dump(), **training})
        recipe = self.recipe.model_copy(update={"training": settings})
        return TrainingJob(recipe, entries.model_folder, "bench", inputs, entries.text_spec(""), prompts=())

    def _keep(self, asset: str, stage: _CacheStage, source: str, launch: Launch) -> None:
        tables = self.project.tables
        rows = tables.read(source)
        tables.write(asset, stage(self.recipe, rows, tables, launch=launch, log=_silent).table)


class _CacheStage(Protocol):
    def __call__(
        self, recipe: Recipe, rows: pl.DataFrame, tables: Tables, /, *, launch: Launch, log: Log
    ) -> StageResult: ...


@dataclass(frozen=True)
class Encoding:
    """What a cache stage has its encoder do."""

    order: Order
    jobs: Sequence[Job]

    def computing(self, dtype: str, vae: Path | None = None) -> Encoding:
        """The same in another number format, by another VAE."""
        elsewhere = {} if vae is None else {"vae": vae}
        settings = {**self.order.settings, "compute_dtype": dtype}
        return replace(self, order=replace(self.order, settings=settings, component_folders=elsewhere))


class _TakeOrder:
    """A `Launch` that does the encoder's work in this process, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.order: Order | None = None
        self.jobs: list[Job] = []

    def __call__(self, module: str, order: Path, meanwhile: Meanwhile | None = None) -> None:
        from pipeline.encoding.jobs import read_order

        if meanwhile is not None:
            meanwhile()
        self.order = read_order(order)
        self.jobs = list(self.order.jobs)
        import_module(f"{module}.run").run(order, Silent(), rank=0, num_ranks=1)


class Silent:
    """A report that nobody reads."""

    def info(self, text: str) -> None:
        """Nothing."""

    def progress(self, done: int, total: int, text: str) -> None:
        """Nothing."""


def _silent(line: str) -> None:
    """Stage logs are no part of a figure."""
