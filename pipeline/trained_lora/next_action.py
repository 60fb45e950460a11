"""What a recipe's next training does: nothing, publish a saved LoRA, resume a run, or train a new one.

The stage writes it to the log before it trains, and `latentline plan` shows it before the job is started.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipeline.errors import counted
from pipeline.trained_lora.differences import difference_from_latest
from pipeline.trained_lora.export.lora_files import lora_file_names
from pipeline.trained_lora.export.publish import read_finished, saved_lora
from pipeline.trained_lora.run_folder import (
    MARKER,
    RunLayout,
    checkpoints_with,
    complete_steps,
    lora_steps,
    read_record,
)

if TYPE_CHECKING:
    import polars as pl

    from pipeline.recipe import Recipe
    from pipeline.trained_lora.job import TrainingJob
    from pipeline.trained_lora.recipe_facts import Facts

Kind = Literal["finished", "publish", "resume", "restart", "new"]


@dataclass(frozen=True)
class NextAction:
    """What a training job does. The attributes are keys of `latentline plan --json`.

    Attributes:
        kind: "finished" if the run is complete, "publish" if a checkpoint has saved the LoRA of its last
            step, "resume" if it continues from a checkpoint, "restart" if it has none to continue from, "new"
            if no training has started yet.
        run: Id of the run, which is also the name of its folder. In a forecast, it is empty if captions that
            a model has not written yet decide it.
        steps: Number of steps of the run.
        first_step: Number of steps that are done already.
        reason: Why, with the names of changed samples and settings; empty if nothing is trained.
        difference: Differences between a new run and the run before it; None without such a run.
    """

    kind: Kind
    run: str
    steps: int
    first_step: int = 0
    reason: str = ""
    difference: str | None = None

    @property
    def steps_left(self) -> int:
        """Number of steps that are trained."""
        return 0 if self.kind in ("finished", "publish") else self.steps - self.first_step

    @property
    def work(self) -> str:
        """Number of steps that are trained, such as "112 steps to train"."""
        return f"{counted(self.steps_left, 'step')} to train" if self.steps_left else "nothing to train"

    @property
    def state(self) -> str:
        """State of the run, such as "run 2da5... resumes at step 288 of 400"."""
        if not self.run:
            return "the run depends on captions that are not written yet"
        states = {
            "finished": "is finished and unchanged",
            "publish": f"has saved the LoRA of step {self.steps:,}",
            "resume": f"resumes at step {self.first_step:,} of {self.steps:,}",
            "restart": "starts again at step 0",
            "new": "is new",
        }
        return f"run {self.run} {states[self.kind]}"

    def text(self, duration: str = "") -> str:
        """Return one line for the log: `work` with its duration, `state` and `reason`."""
        line = f"{self.work}, {duration}" if duration else self.work
        return f"{line}: {self.state}" + (f"; {self.reason}" if self.reason else "")


def next_action(
    job: TrainingJob, facts: Facts, samples: pl.DataFrame, *, uploaded: Collection[str] | None = None
) -> NextAction:
    """Return what training `job` does, from the files of its run.

    `samples` is the table of the run's samples. If the output folder is at an address, `uploaded` has the
    names of the run's files there, because only records are on this machine; LoRA files are not read then.
    """
    recipe, layout, steps = job.recipe, RunLayout(job.folder), job.recipe.training.num_steps
    if _is_finished(layout, steps=steps, recipe=recipe, uploaded=uploaded):
        return NextAction("finished", job.run, steps, steps)
    if _has_saved_lora(job, steps, uploaded):
        return NextAction("publish", job.run, steps, steps)
    if not layout.facts.is_file():
        difference = difference_from_latest(layout, facts, samples)
        reason = difference or "it is the first run of this recipe"
        first_step = 0
        if continued := facts.get("continues"):
            first_step = continued["step"]
            reason = f"it continues run {continued['run']} at step {first_step:,}; {reason}"
        return NextAction("new", job.run, steps, first_step, reason, difference)

    states = checkpoints_with(layout, MARKER) if uploaded is None else complete_steps(uploaded)
    # The checkpoint of step 0 is a test before training. Those after the last step are from a longer run.
    first_step = max((step for step in states if 0 < step <= steps), default=0)
    kind: Kind = "resume" if first_step else "restart"
    return NextAction(kind, job.run, steps, first_step, _reason(job, layout, first_step))


def _is_finished(layout: RunLayout, *, steps: int, recipe: Recipe, uploaded: Collection[str] | None) -> bool:
    if uploaded is None:
        return read_finished(layout, steps=steps, names=lora_file_names(recipe)) is not None
    names = {Path(name).name for name in uploaded if Path(name).parent.name == layout.exported.name}
    expected = set(lora_file_names(recipe))
    return read_record(layout.finished).get("steps") == steps and expected <= names


def _has_saved_lora(job: TrainingJob, steps: int, uploaded: Collection[str] | None) -> bool:
    layout = RunLayout(job.folder)
    if uploaded is None:
        return saved_lora(layout, run=job.run, steps=steps, names=lora_file_names(job.recipe)) is not None
    finished = read_record(layout.finished)
    return bool(finished) and finished.get("steps") != steps and steps in lora_steps(layout)


def _reason(job: TrainingJob, layout: RunLayout, first_step: int) -> str:
    """Return why a run with facts is not finished."""
    steps = job.recipe.training.num_steps
    saved, trained = lora_steps(layout), read_record(layout.finished).get("steps")
    no_state = f"no checkpoint up to step {steps:,} has its optimizer state, see training.keep_checkpoints"
    if first_step == steps:
        return "its LoRA files are missing or have changed, and are exported again"
    if trained == steps:
        return "its LoRA files are missing or have changed"
    if trained is not None:
        finished = f"it has finished with {trained:,} steps"
        return finished if first_step else f"{finished}, and {no_state}"
    if steps in saved:
        command = f"latentline export {job.recipe.name} --step {steps}"
        return f"step {steps} is trained again; {command} publishes the LoRA that was saved then"
    if first_step or not saved:
        return "it was stopped" if first_step else "it was stopped before its first checkpoint"
    return no_state
