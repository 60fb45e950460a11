"""Preparing an evaluation: its run, steps, prompts and settings, checked before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import polars as pl

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.errors import EvaluationError
from pipeline.evaluation.prompts import RolePrompt, evaluation_prompts
from pipeline.log import Log, discard
from pipeline.outputs.folder import outputs_of
from pipeline.recipe.evaluation import EvaluationSettings
from pipeline.trained_lora.export.earlier_step import exportable_run
from pipeline.trained_lora.inputs import read_inputs
from pipeline.trained_lora.job import INPUTS_FILE
from pipeline.trained_lora.pictures.choice import Steps, choose_loras
from pipeline.trained_lora.pictures.job import DrawingJob
from pipeline.trained_lora.pictures.prepare import fetch_loras, trained_recipe
from pipeline.trained_lora.run_folder import RunLayout, lora_steps, read_record, run_folder

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.recipe import Recipe
    from pipeline.recipe.prompt_set import PromptSet


@dataclass(frozen=True)
class Request:
    """Options of one evaluation.

    Attributes:
        run: Name of the run's folder; None for the run of the published LoRA, or else the newest.
        steps: Steps to evaluate; None for the recipe's `evaluation.steps`.
        prompt_set: Prompts in place of the recipe's `evaluation.prompts`.
    """

    run: str | None = None
    steps: Steps | None = None
    prompt_set: PromptSet | None = None

    @property
    def is_default(self) -> bool:
        """Whether the evaluation is the one of the recipe's job."""
        return self == Request()


@dataclass(frozen=True)
class Evaluation:
    """Everything that decides an evaluation.

    Attributes:
        recipe: The recipe as it is now.
        entries: Entries of the recipe with which the run was trained.
        settings: The recipe's section `evaluation`, or its defaults.
        run: Name of the run's folder.
        inputs: The run's training inputs, see `trained_lora.inputs.COLUMNS`.
        prompts: Prompts with their roles.
        job: LoRAs, strengths, and each prompt once per seed, in this order; see `prompt_of`.
        folder: Folder of the pictures of the result.
    """

    recipe: Recipe
    entries: RecipeEntries
    settings: EvaluationSettings
    run: str
    inputs: pl.DataFrame
    prompts: tuple[RolePrompt, ...]
    job: DrawingJob
    folder: Path

    @property
    def steps(self) -> list[int]:
        """Steps of the LoRAs, ascending."""
        return [lora.step or 0 for lora in self.job.loras]

    @property
    def num_pictures(self) -> int:
        """Number of all pictures, including the base model's."""
        return len(self.job.prompts) * (1 + len(self.job.loras) * len(self.job.strengths))

    def prompt_of(self, number: int) -> tuple[RolePrompt, int]:
        """Return the prompt and the seed of the job's prompt `number`."""
        prompt, seed = divmod(number, self.settings.pictures)
        return self.prompts[prompt], seed


def prepare_evaluation(recipe: Recipe, request: Request, *, log: Log = discard) -> Evaluation:
    """Return the evaluation of a run. Nothing is written, except files fetched from an address.

    Raises:
        DrawingError: The run or a step does not exist, or its LoRA is damaged.
        EvaluationError: The record of the run's training inputs is missing.
        ModelError: The base model cannot be found.
        RecipeError: A prompt does not suit the base model, which may need written prompts.
        TrainingError: No run has a LoRA.
    """
    settings, source = recipe.evaluation or EvaluationSettings(), recipe.source
    folder = recipe.output_dir / "reports" / "evaluation"
    if request.prompt_set is not None:
        # Mistakes about a prompt name this file.
        source, prompts = request.prompt_set.file, request.prompt_set.prompts
        settings = settings.model_copy(update={"prompts": prompts})
        folder = prompt_set_folder(recipe.output_dir, request.prompt_set)
    # With a name, `choose_loras` does not take the file in lora/, which may be an earlier step.
    run = request.run or exportable_run(recipe.output_dir)
    steps = _steps(recipe, run, settings.steps) if request.steps is None else request.steps
    fetch_loras(recipe, run, steps)
    chosen = choose_loras(recipe.output_dir, run, steps)

    # The pictures are drawn with the base model, quantization and precision of the run's training, even if
    # the recipe has changed since then.
    trained, _ = trained_recipe(recipe, run)
    num_processes = recipe.accelerate.num_processes
    update = {
        "evaluation": settings,
        "source": source,
        "accelerate": trained.accelerate.model_copy(update={"num_processes": num_processes}),
    }
    trained = trained.model_copy(update=update)
    entries = RecipeEntries(trained, log=log)
    inputs = _inputs(recipe, run)
    prompts = evaluation_prompts(trained, entries, inputs)
    job = DrawingJob(
        recipe=trained,
        base=entries.model_folder,
        component_folders=entries.component_folders,
        empty_text=entries.text_spec(""),
        prompts=tuple(
            replace(each.prompt, seed=seed) for each in prompts for seed in range(settings.pictures)
        ),
        loras=tuple(sorted(chosen.loras, key=lambda lora: lora.step or 0)),
        strengths=settings.strengths,
        seed=0,
        folder=recipe.output_dir,
        run=run,
    )
    return Evaluation(recipe, entries, settings, run, inputs, prompts, job, folder)


def _steps(recipe: Recipe, run: str, wanted: tuple[int, ...] | Literal["all", "last"]) -> Steps:
    """Return the steps of a run that the recipe's setting means."""
    if wanted not in ("all", "last"):
        return wanted
    layout = RunLayout(run_folder(recipe.output_dir, run))

    # A run that was trained further before its recipe asked for fewer steps still has the later ones.
    last = read_record(layout.finished).get("steps", math.inf)
    steps = tuple(step for step in lora_steps(layout) if step <= last)
    return steps if wanted == "all" else steps[-1:]


def prompt_set_folder(output_dir: Path, prompt_set: PromptSet) -> Path:
    """Return the folder of all results of an evaluation with a prompt set."""
    return output_dir / "reports" / "prompt_sets" / prompt_set.name


def _inputs(recipe: Recipe, run: str) -> pl.DataFrame:
    outputs_of(recipe).fetch(f"runs/{run}/{INPUTS_FILE}")
    file = run_folder(recipe.output_dir, run) / INPUTS_FILE
    if not file.is_file():
        raise EvaluationError(
            f"the run {run} has no record of its training images",
            where=str(file),
            fix="evaluate another run with --run, or start the training again, which writes the record",
        )
    return read_inputs(file).table
