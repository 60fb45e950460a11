"""Publishing the step that an evaluation has chosen, for `evaluation.publish: best`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.reporting.reports import read_report
from pipeline.trained_lora.export.earlier_step import (
    ExportedStep,
    exported_step,
    publish_last_step,
    publish_step,
)
from pipeline.trained_lora.export.lora_files import lora_file_names
from pipeline.trained_lora.run_folder import RunLayout, lora_steps, run_folder
from pipeline.trained_lora.run_upload import replacing_lora

if TYPE_CHECKING:
    from pipeline.evaluation.choice import Choice
    from pipeline.log import Log
    from pipeline.recipe import Recipe
    from pipeline.trained_lora.next_action import NextAction


def publish_choice(recipe: Recipe, run: str, choice: Choice, *, log: Log) -> tuple[int | None, str]:
    """Publish the chosen step of a finished run in `lora/`, or the last one if none is chosen.

    A step that a person has exported stays, and closed gates of trained_lora publish nothing.

    Returns:
        The step in `lora/`, None if nothing was published, and what it holds in words.

    Raises:
        StoreError: The service of the output folder does not answer.
        TrainingError: The run is being trained, or its files are damaged.
    """
    layout = RunLayout(run_folder(recipe.output_dir, run))
    if reason := _held_back(recipe, layout):
        return None, f"lora/ is unchanged: {reason}"

    # Runs of 0.2 have only the LoRA of their last step, which is the only one to choose then.
    step = choice.step if choice.step in lora_steps(layout) else None
    with replacing_lora(recipe, run, log, step=step):
        # Under the lock, because a person may have exported a step meanwhile.
        exported = exported_step(recipe.output_dir, run)
        if exported is not None and not exported.automatic:
            publish = f"latentline export {recipe.name} --best"
            shown = f"lora/ holds step {exported.step:,}, as exported; {publish} publishes the chosen step"
            return exported.step, shown
        if step is not None:
            chosen = ExportedStep(run, step, choice.why, automatic=True)
            replaced = publish_step(recipe.output_dir, chosen)
            shown = f"lora/ holds step {step:,}, which the evaluation has chosen"
        else:
            step, replaced = publish_last_step(recipe.output_dir, run, lora_file_names(recipe))
            shown = f"lora/ holds step {step:,}, the last one"
    log(f"{shown}: " + (f"wrote {', '.join(replaced)}" if replaced else "unchanged"))
    return step, shown


def _held_back(recipe: Recipe, layout: RunLayout) -> str:
    """Return why nothing of the run may be published; empty if it may."""
    if not layout.finished.is_file():
        return f"run {layout.folder.name} has not finished"
    findings = read_report(recipe.output_dir, "trained_lora_checks") or {}
    closed = [each["name"] for each in findings.get("checks", []) if each["closed"]]
    return f"closed gates of trained_lora: {', '.join(closed)}" if closed else ""


def expected_publication(recipe: Recipe, action: NextAction) -> str:
    """Return which step the next job would publish, in words.

    Raises:
        TrainingError: The record of an exported step is damaged.
    """
    if action.kind == "finished":
        exported = exported_step(recipe.output_dir, action.run)
        if exported is not None and not exported.automatic:
            return f"step {exported.step:,} of run {action.run} stays in lora/, as exported"
        report = read_report(recipe.output_dir, "evaluation") or {}
        if report.get("run") == action.run and report.get("chosen_step") is not None:
            return (
                f"step {report['chosen_step']:,} is published, unless the evaluation changes: {report['why']}"
            )
        if report.get("run") == action.run:
            return f"step {action.steps:,}, the last one, is published: {report.get('why')}"
    return f"the step that the evaluation chooses is published, or else step {action.steps:,}, the last one"
