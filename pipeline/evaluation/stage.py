"""Stage evaluation: draw pictures with each step of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.encoding.fill import FillResult, fill
from pipeline.errors import counted
from pipeline.evaluation.known_entries import entry_rows, read_known, write_known
from pipeline.evaluation.pictures import picture_requests, picture_table
from pipeline.evaluation.prepare import Evaluation, Request, prepare_evaluation
from pipeline.log import Log
from pipeline.reporting.reports import Stopwatch

if TYPE_CHECKING:
    from pipeline.processes.launch import Launch
    from pipeline.recipe import Recipe


def evaluate(recipe: Recipe, request: Request, *, launch: Launch, log: Log) -> FillResult:
    """Draw the pictures of an evaluation that are not in the cache.

    Raises:
        DrawingError: The run or a step does not exist, a LoRA does not fit the base model, or memory ran out.
        EvaluationError: The prompts cannot be chosen.
        ModelError: A model cannot be found or loaded.
        RecipeError: A prompt does not suit the base model.
        StoreError: The cache cannot be read or written.
        TrainingError: No run has a LoRA.
    """
    evaluation = prepare_evaluation(recipe, request, log=log)
    log(summary(evaluation))
    requests = picture_requests(evaluation, picture_table(evaluation), read_known(recipe.output_dir))
    drawn = fill(evaluation.entries, requests, launch=launch, log=log, watch=Stopwatch())
    write_known(recipe.output_dir, [entry_rows(requests, drawn)])
    return drawn


def summary(evaluation: Evaluation) -> str:
    """Return what is evaluated, in one line."""
    roles = [each.role for each in evaluation.prompts]
    prompts = ", ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))
    steps = counted(len(evaluation.steps), "step")
    return (
        f"evaluating run {evaluation.run}: {steps}, {counted(len(roles), 'prompt')} ({prompts}), "
        f"{counted(evaluation.num_pictures, 'picture')}"
    )
