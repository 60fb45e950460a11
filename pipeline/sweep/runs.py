"""The runs of variants: planned as the jobs of plain recipes, and trained in parts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.captions.stage import caption_images
from pipeline.errors import LatentlineError, StoppedError, StoreError, SweepError
from pipeline.log import Log, discard
from pipeline.raw_images.stage import scan
from pipeline.recipe.sweep import plain_key
from pipeline.reporting.reports import StageResult, write_report
from pipeline.storage.tables import Tables
from pipeline.sweep.halving import position
from pipeline.sweep.scores import BY_IMAGE
from pipeline.text_embeddings.stage import cache_text
from pipeline.trained_lora.export.lora_files import layout_file, lora_file_names
from pipeline.trained_lora.export.publish import read_finished, saved_lora
from pipeline.trained_lora.run_folder import (
    MARKER,
    RunLayout,
    checkpoints_with,
    lora_steps,
    read_metrics,
    read_record,
)
from pipeline.trained_lora.stage import plan_run, require_open_gates, train_part
from pipeline.vae_latents.stage import cache_latents
from pipeline.validated_dataset.edited_captions import FOLDER as EDITS_FOLDER
from pipeline.validated_dataset.stage import validate

if TYPE_CHECKING:
    from pipeline.processes.launch import Launch
    from pipeline.recipe import Recipe
    from pipeline.sweep.variants import Variant
    from pipeline.trained_lora.job import TrainingJob
    from pipeline.trained_lora.recipe_facts import Facts

_PLAN_ONLY = (
    "text.caption_dropout",
    "datasets.weight",
    "datasets.repeats",
    "datasets.loss_weight",
    "datasets.caption_dropout",
)
"""Keys outside of `training` with which all tables and cache entries stay the same."""


@dataclass(frozen=True)
class VariantRun:
    """The run of a variant with one seed."""

    entries: RecipeEntries
    job: TrainingJob
    facts: Facts
    table: pl.DataFrame

    @cached_property
    def steps(self) -> int:
        """Number of steps of the complete training."""
        return self.job.recipe.training.num_steps

    @property
    def seed(self) -> int:
        """Seed of the training."""
        return self.job.recipe.training.seed

    @property
    def layout(self) -> RunLayout:
        """Paths in the run's folder."""
        return RunLayout(self.job.folder)

    def step_at(self, fraction: float) -> int:
        """Return the number of steps after which the run is judged at a rung; 0 before the first one."""
        return position(fraction, self.steps) if fraction else 0

    def train(self, step: int, *, measured: bool, launch: Launch, log: Log) -> bool:
        """Train until `step` steps are done; return whether the LoRA of that step can be judged.

        It cannot if the run has been trained further already and has saved no LoRA of that step. With
        `measured`, it needs the validation loss of the step too.
        """
        if step >= self.steps:
            train_part(self.entries, self.job, self.facts, self.table, launch=launch, log=log)
            return True
        if self._is_saved(step, measured=measured):
            return True
        if self._trained_steps() > step:
            return False
        part = replace(self.job, stop_after=step)
        log(f"run {self.job.run}: training to step {step:,} of {self.steps:,}")
        train_part(self.entries, part, self.facts, self.table, launch=launch, log=log)
        return True

    def is_trained(self, step: int, *, measured: bool) -> bool:
        """Return whether `train` has nothing to launch."""
        if step < self.steps:
            return self._is_saved(step, measured=measured) or self._trained_steps() > step
        names = lora_file_names(self.job.recipe)
        finished = read_finished(self.layout, steps=self.steps, names=names)
        saved = saved_lora(self.layout, run=self.job.run, steps=self.steps, names=names)
        return finished is not None or saved is not None

    def _is_saved(self, step: int, *, measured: bool) -> bool:
        if step not in lora_steps(self.layout):
            return False
        lines = read_metrics(self.layout.validation, step + 1) if measured else []
        return not measured or any(line["step"] == step and BY_IMAGE in line for line in lines)

    def _trained_steps(self) -> int:
        finished = read_record(self.layout.finished).get("steps", 0)
        return max([finished, *checkpoints_with(self.layout, MARKER)])

    def num_trained(self) -> int:
        """Return the number of steps that were trained, whether or not a checkpoint has them."""
        return len(read_metrics(self.layout.metrics, self.steps))

    def seconds(self) -> float:
        """Return the time of all steps that were trained."""
        return sum(line.get("seconds", 0.0) for line in read_metrics(self.layout.metrics, self.steps))

    def lora_bytes(self, step: int) -> int:
        """Return the size of the LoRA of a step; 0 if it is not saved."""
        folder = lora_steps(self.layout).get(step)
        file = None if folder is None else folder / layout_file("diffusers", "")
        return file.stat().st_size if file is not None and file.is_file() else 0


@dataclass(frozen=True)
class _Cached:
    """The tables of a variant's cache; `tables` is the recipe's, or a temporary copy."""

    latents: pl.DataFrame
    text: pl.DataFrame
    tables: Tables


class Planner:
    """Plans the runs of variants, and fills the cache with what only some of them need."""

    def __init__(
        self, recipe: Recipe, latents: pl.DataFrame, text: pl.DataFrame, *, launch: Launch, log: Log
    ) -> None:
        """`latents` and `text` are the recipe's tables of the cache stages."""
        self._recipe = recipe
        self._tables = Tables(recipe.output_dir, log=log)
        self._launch, self._log = launch, log
        self._own = _Cached(latents, text, self._tables)
        self._cached: dict[str, _Cached] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="latentline-")

    def close(self) -> None:
        """Delete the temporary tables."""
        self._folder.cleanup()

    def runs_of(self, variant: Variant) -> tuple[VariantRun, ...]:
        """Return the runs of a variant, one for each seed.

        Raises:
            LatentlineError: As a job of the variant's recipe.
        """
        cached = self._cache_of(variant)
        return tuple(self._planned(recipe, cached) for recipe in variant.recipes)

    def _planned(self, recipe: Recipe, cached: _Cached) -> VariantRun:
        entries = RecipeEntries(recipe, log=self._log)
        planned = plan_run(entries, cached.latents, cached.text, tables=cached.tables, log=self._log)
        return VariantRun(entries, *planned)

    def _cache_of(self, variant: Variant) -> _Cached:
        keys = [plain_key(key) for key in variant.overrides]
        if all(key.startswith("training.") or key in _PLAN_ONLY for key in keys):
            return self._own
        recipe = variant.recipes[0]
        deciding = {"datasets", "model", "buckets", "latents", "text", "checks"}
        name = recipe.model_dump_json(include=deciding)
        if name not in self._cached:
            self._cached[name] = self._filled(recipe, Path(self._folder.name, str(len(self._cached))))
        return self._cached[name]

    def _filled(self, recipe: Recipe, folder: Path) -> _Cached:
        """Run the stages before the training, with all of their tables and reports in `folder`."""
        log, known = self._log, self._tables
        stages = recipe.model_copy(update={"output_dir": folder})
        tables = Tables(folder, log=log)
        # What a person has corrected is a part of the data.
        if (edits := self._recipe.output_dir / EDITS_FOLDER).is_dir():
            shutil.copytree(edits, folder / EDITS_FOLDER, symlinks=True)

        def written(asset: str, result: StageResult) -> pl.DataFrame:
            tables.write(asset, result.table)
            tables.write_rejected(asset, result.rejected)
            write_report(folder, asset, result.report)
            return result.table

        # The recipe's own tables remember files and entries that are unchanged.
        raw = written("raw_images", scan(stages, known, log=log, remember=False))
        captions = None
        if stages.has_model_captions:
            captions = written("captions", caption_images(stages, raw, known, launch=self._launch, log=log))
        validated = validate(stages, raw, known, log=log, written=captions, remember=False)
        valid = written("validated_dataset", validated)
        buckets = written("aspect_buckets", assign_buckets(stages, valid, log=discard))
        latents = written("vae_latents", cache_latents(stages, buckets, known, launch=self._launch, log=log))
        text = written("text_embeddings", cache_text(stages, valid, known, launch=self._launch, log=log))
        require_open_gates(stages, log=log)
        return _Cached(latents, text, tables)


@contextmanager
def planner(
    recipe: Recipe, latents: pl.DataFrame, text: pl.DataFrame, *, launch: Launch, log: Log
) -> Generator[Planner]:
    """Provide a `Planner`."""
    planned = Planner(recipe, latents, text, launch=launch, log=log)
    try:
        yield planned
    finally:
        planned.close()


def require_distinct(runs: Mapping[int, tuple[VariantRun, ...]], names: Mapping[int, str]) -> None:
    """Raise SweepError if two variants have the same run, because the keys do not decide the weights."""
    owners: dict[str, int] = {}
    for variant, of_variant in runs.items():
        for run in of_variant:
            owner = owners.setdefault(run.job.run, variant)
            if owner != variant:
                raise SweepError(
                    f"{names[owner]} and {names[variant]} are the same run, {run.job.run}: what differs "
                    "between them does not change the weights",
                    where="sweep",
                    fix="remove one of the values, or a key without effect. Runs that differ in their steps "
                    "alone are steps of one run, which latentline evaluate compares",
                )


def recorded(action: Callable[[], Any], failed: dict[int, LatentlineError], variant: int) -> Any:
    """Return what `action` returns, or record its error as the failure of a variant and return None."""
    try:
        return action()
    except (StoppedError, StoreError):
        # Not about the variant: a stop, or a cache that does not answer.
        raise
    except LatentlineError as err:
        failed[variant] = err
        return None
