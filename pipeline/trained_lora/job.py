"""The job of a training run, which the launching process writes and each launched worker reads.

runs/<run>/
order.json         recipe, base model, run id, entries of the empty caption and of the preview prompts
inputs.parquet     one row per training input: bucket, repeats, geometry, cache entries
dropped.parquet    only with `underfilled: drop`: the draws that each epoch leaves out
result.json        the worker's answer
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import polars as pl

from pipeline.cache.pack_copies import CopySettings
from pipeline.cache.store import EntrySpec, Store
from pipeline.errors import TrainingError, counted
from pipeline.escaping import without_secrets
from pipeline.migrations import migrated_order
from pipeline.recipe import Recipe
from pipeline.recipe.datasets import side_input_sections
from pipeline.storage.atomic import write_atomically, write_text
from pipeline.storage.tables import write_rows
from pipeline.trained_lora.inputs import (
    IDENTITY,
    SLIDER_COLUMNS,
    TrainingInputs,
    read_inputs,
    when_exhausted,
    write_inputs,
)
from pipeline.trained_lora.plan.inputs import PlanInputs
from pipeline.trained_lora.plan.steps import PlanSettings, TrainingPlan
from pipeline.trained_lora.prompts import (
    Prompt,
    entry_from_json,
    entry_to_json,
    prompts_from_json,
    prompts_to_json,
)
from pipeline.trained_lora.run_folder import run_folder

JOB_FILE = "order.json"
INPUTS_FILE = "inputs.parquet"
DROPPED_FILE = "dropped.parquet"
"""Draws left out by `underfilled: drop`, one row per epoch and sample: epoch, sample_id, times."""


@dataclass(frozen=True)
class TrainingJob:
    """Everything that a worker process needs to train one run.

    Attributes:
        recipe: Recipe with absolute paths.
        base: Local folder of the base model.
        run: Run id, the fingerprint of everything that decides the weights.
        inputs: Training inputs, including those held out for validation.
        empty_text: Entry of the empty caption, for caption dropout and guidance.
        provenance: JSON-serializable record that goes into each exported file.
        component_folders: Folders of model components that replace those in `base`, by role.
        copies: Where this process copies packs of a remote cache; None to read them remotely.
        stop_after: Number of steps after which the training stops with a checkpoint, as on request; None for
            all steps. It is not part of the run's identity.
        left_out: Inputs that the plan shows with weight 0, by variant_id.
    """

    recipe: Recipe
    base: Path
    run: str
    inputs: TrainingInputs
    empty_text: EntrySpec
    prompts: tuple[Prompt, ...]
    provenance: dict[str, Any] = field(default_factory=dict[str, Any])
    component_folders: Mapping[str, Path] = field(default_factory=dict[str, Path])
    training_adapter: Path | None = None
    copies: CopySettings | None = None
    stop_after: int | None = None
    left_out: frozenset[str] = frozenset()

    @cached_property
    def store(self) -> Store:
        """Store of the recipe's cache, shared by all readers of this process."""
        # One for all, because a store reads the headers of all packs when it first misses a single entry.
        return Store(self.recipe.cache_dir, copies=self.copies)

    @property
    def folder(self) -> Path:
        """The run's folder, `output_dir/runs/<run>`."""
        return run_folder(self.recipe.output_dir, self.run)

    def plan(self, steps: int | None = None) -> TrainingPlan:
        """Return the run's plan, which is the same in every process, or only its first `steps` steps.

        Raises:
            TrainingError: No inputs are left to train on.
        """
        # The plan of a shorter run begins with the same steps.
        settings = plan_settings(self.recipe, self.inputs, steps=steps)
        return TrainingPlan(self._plan_inputs, replace(settings, left_out=self.left_out))

    @cached_property
    def _plan_inputs(self) -> PlanInputs:
        # A job is planned ten times, and sorting its inputs takes most of the time.
        return plan_inputs(self.inputs)

    def write(self) -> Path:
        """Write the job's files into the run's folder, and return the argument of `read_job`."""
        write_atomically(self.folder / INPUTS_FILE, partial(write_inputs, self.inputs))
        self._write_dropped()

        job = {
            "recipe": _without_secrets(self.recipe),
            "base": str(self.base),
            "elsewhere": {role: str(folder) for role, folder in self.component_folders.items()},
            "training_adapter": str(self.training_adapter) if self.training_adapter else None,
            "run": self.run,
            "provenance": self.provenance,
            "empty_text": entry_to_json(self.empty_text),
            "prompts": prompts_to_json(self.prompts),
            **({} if self.stop_after is None else {"stop_after": self.stop_after}),
            **({"left_out": sorted(self.left_out)} if self.left_out else {}),
        }
        path = self.folder / JOB_FILE
        write_text(path, json.dumps(job, indent=2, ensure_ascii=False) + "\n")
        return path

    def _write_dropped(self) -> None:
        plan = self.plan()

        # Other policies train on every draw.
        if plan.settings.underfilled != "drop":
            return

        rows = [
            (epoch, variant_id, times)
            for epoch in range(plan.num_epochs)
            for variant_id, times in plan.dropped(epoch).items()
        ]
        schema = {"epoch": pl.Int32, "sample_id": pl.String, "times": pl.Int32}
        table = pl.DataFrame(rows, schema=schema, orient="row")
        write_atomically(self.folder / DROPPED_FILE, partial(write_rows, table))


def read_job(path: Path, *, copies: CopySettings | None = None) -> TrainingJob:
    """Read the job that `TrainingJob.write` wrote to `path` and its folder."""
    job = json.loads(path.read_text(encoding="utf-8"))
    recipe = recipe_from_json(job["recipe"])
    # On another machine, the output folder may be at another path. A fetched copy of the job is in no output
    # folder at all.
    output_dir = path.absolute().parents[2]
    if run_folder(output_dir, job["run"]) == path.absolute().parent:
        recipe = recipe.model_copy(update={"output_dir": output_dir})
    return TrainingJob(
        recipe=recipe,
        base=Path(job["base"]),
        component_folders={role: Path(folder) for role, folder in job["elsewhere"].items()},
        training_adapter=Path(job["training_adapter"]) if job["training_adapter"] else None,
        run=job["run"],
        provenance=job["provenance"],
        inputs=read_inputs(path.with_name(INPUTS_FILE)),
        empty_text=entry_from_json(job["empty_text"]),
        prompts=prompts_from_json(job["prompts"]),
        copies=copies,
        stop_after=job.get("stop_after"),
        left_out=frozenset(job.get("left_out", ())),
    )


def read_recipe_and_prompts(path: Path) -> tuple[Recipe, tuple[Prompt, ...]]:
    """Read the recipe and the preview prompts of the job at `path`, but not its training inputs."""
    job = migrated_order(json.loads(path.read_text(encoding="utf-8")))
    return recipe_from_json(job["recipe"]), prompts_from_json(job["prompts"])


def plan_inputs(inputs: TrainingInputs) -> PlanInputs:
    """Return the columns of the trained inputs that decide the plan."""
    trained = inputs.trained
    table = trained.table
    columns = table.select(
        "variant_id",
        *sorted({*SLIDER_COLUMNS, IDENTITY} & {*table.columns}),
        "bucket",
        "repeats",
        "dataset",
        variants=pl.col("captions").list.len(),
        views=pl.col("latents").list.len(),
        references=trained.reference_shapes,
    )
    return PlanInputs(columns)


def plan_settings(recipe: Recipe, inputs: TrainingInputs, *, steps: int | None = None) -> PlanSettings:
    """Return the plan's settings, with `steps` in place of `training.steps` if it is not None."""
    training = recipe.training
    return PlanSettings(
        steps=training.num_steps if steps is None else steps,
        batch_size=training.batch_size,
        gradient_accumulation=training.gradient_accumulation,
        num_processes=recipe.accelerate.num_processes,
        caption_dropout=recipe.text.caption_dropout,
        dataset_dropouts=recipe.caption_dropouts,
        seed=training.seed,
        underfilled=recipe.buckets.underfilled,
        weights={dataset.name: dataset.weight for dataset in recipe.datasets if dataset.weight is not None},
        exhausted=when_exhausted(recipe, inputs),
    )


def with_steps(recipe: Recipe, inputs: TrainingInputs) -> Recipe:
    """Return the recipe with `training.epochs` converted to `training.steps`.

    Raises:
        TrainingError: Warm-up and decay together need more steps than the epochs have.
    """
    training = recipe.training
    if training.epochs is None:
        return recipe

    # The plan needs a number of steps, which does not change the length of its epochs.
    settings = plan_settings(recipe, inputs, steps=1)
    steps = TrainingPlan.steps_in(plan_inputs(inputs), settings, training.epochs)
    scheduled = training.warmup_steps + training.decay_steps
    if scheduled > steps:
        epochs = counted(training.epochs, "epoch has only", "epochs have only")
        raise TrainingError(
            f"warmup_steps {training.warmup_steps} and decay_steps {training.decay_steps} add up to "
            f"{counted(scheduled, 'step')}, but {epochs} {counted(steps, 'step')}",
            where="training.epochs",
            fix=f"raise epochs, or lower warmup_steps and decay_steps to at most {steps} together",
        )
    in_steps = training.model_copy(update={"steps": steps, "epochs": None})
    return recipe.model_copy(update={"training": in_steps})


def recipe_from_json(value: Mapping[str, Any]) -> Recipe:
    """Return the recipe from its `model_dump(mode="json")`."""
    return Recipe.model_validate_json(json.dumps(value))


def _without_secrets(recipe: Recipe) -> dict[str, Any]:
    # A run's folder may be shared. The worker can do without the secrets, because it reads no dataset.
    values = recipe.model_dump(mode="json")
    values["output_address"] = without_secrets(values["output_address"])
    values["packed_paths"] = [[name, without_secrets(path)] for name, path in values["packed_paths"]]
    for dataset in values["datasets"]:
        addresses = {key: dataset[key] for key in ("path", "images") if dataset[key] is not None}
        dataset |= {key: without_secrets(address) for key, address in addresses.items()}
        for _, section in side_input_sections(dataset):
            if section["path"] is not None:
                section["path"] = without_secrets(section["path"])
    return values
