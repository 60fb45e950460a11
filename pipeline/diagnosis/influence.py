"""Influence: which trained images make the loss of held-out images higher, and by how much.

Gradients at the saved steps estimate it for each image (`worker/influence.py`). Trainings from the first of
these steps without the worst images then measure it: every other image has the same place, noise and level.

<output_dir>/influence/runs/<run>-without-<hash>/    a training without some images, see `run_folder`
<output_dir>/reports/influence.json                  the result
<output_dir>/reports/influence.parquet               the estimate of each image
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from pipeline.cache.entry_format import INFLUENCE
from pipeline.cache.recipe_entries import STATS, RecipeEntries
from pipeline.cache.store import EntrySpec, TensorSpec
from pipeline.encoding.fill import EntryRequests, FillResult, Row, fill
from pipeline.encoding.jobs import Job
from pipeline.errors import RUN_RECIPE, TrainingError, counted
from pipeline.log import Log
from pipeline.models.fingerprints import canonical_hash
from pipeline.outputs.folder import outputs_of
from pipeline.processes.launch import TRAINING_MODULE
from pipeline.reporting.reports import Report, Stopwatch, report_path, write_report
from pipeline.storage.atomic import write_atomically
from pipeline.storage.tables import write_rows
from pipeline.trained_lora.continued import copy_checkpoint
from pipeline.trained_lora.export.earlier_step import exportable_run
from pipeline.trained_lora.job import JOB_FILE, TrainingJob, read_job
from pipeline.trained_lora.run_folder import (
    MARKER,
    RunLayout,
    checkpoints_with,
    hold_idle_run,
    read_metrics,
    read_record,
    run_folder,
)
from pipeline.versions import INFLUENCE_VERSION

if TYPE_CHECKING:
    from pipeline.processes.launch import Launch
    from pipeline.recipe import Recipe

REPORT = "influence"
"""Name of the report and of the folder of trainings without images."""

JOB_FILE_SETTING = "job_file"
"""Key of the path of the run's job in the settings of an encoding of influences."""

MIN_HELD_OUT = 2
"""Minimum number of held-out images: an interval needs their spread."""

NUM_WORST = 20
"""Number of images in the report, the most harmful first."""

_PROBABILITY = 0.95


@dataclass(frozen=True)
class Change:
    """Relative change of the held-out loss without some images; negative if it is lower.

    Attributes:
        low: Lower end of the interval of 95% over held-out images.
        high: Upper end of the interval.
    """

    change: float
    low: float
    high: float

    def text(self) -> str:
        """Return the change as "2.1% lower (1.4 to 2.8)"."""
        sign = -1 if self.change < 0 else 1
        ends = sorted(100 * sign * end for end in (self.low, self.high))
        direction = "lower" if sign < 0 else "higher"
        return f"{100 * abs(self.change):.1f}% {direction} ({ends[0]:.1f} to {ends[1]:.1f})"


def measure_influence(
    recipe: Recipe, *, run: str | None, num_left_out: int, launch: Launch, log: Log
) -> Report:
    """Estimate the influence of each image of a run, measure that of the worst, and write the report.

    Gradients are entries of the cache, and a training without images resumes from its checkpoint, so that a
    command which was stopped continues where it ended.

    Args:
        recipe: The recipe.
        run: Id of the run; None for the one of lora/.
        num_left_out: Maximum number of images to leave out.
        launch: Launches the processes with the base model.
        log: Receives the progress.

    Raises:
        TrainingError: The run has no holdout, or no checkpoint to begin from, or is being trained.
        ModelError: The base model cannot be found or loaded.
        StoreError: The cache cannot be read or written.
    """
    watch = Stopwatch()
    if outputs_of(recipe).is_remote:
        raise TrainingError(
            "the influence of images needs the checkpoints of a run, and its outputs are at an address",
            where=f"{recipe.source}, output_dir",
            fix="copy the recipe with latentline new, set output_dir to a local folder, and train it there",
        )
    layout = RunLayout(run_folder(recipe.output_dir, run or exportable_run(recipe.output_dir)))
    with hold_idle_run(layout):
        job = _read_job(layout)
        measured = _measured_losses(layout, len(job.plan()))
        steps = _steps(layout, len(job.plan()), recipe.name)
        requests = influence_requests(job, steps)
        entries = RecipeEntries(job.recipe, log=log)
        filled = fill(entries, requests, launch=launch, log=log, watch=watch)
        table = _table(job, requests, entries, steps, loss=float(measured.mean()))

        # The images in the middle show what leaving out any images does, and the noise of a GPU.
        number = min(num_left_out, len(table) // 3)
        harmful = table.head(number).filter(pl.col("estimate") < 0)["sample_id"].to_list()
        middle = table[(len(table) - len(harmful)) // 2 :].head(len(harmful))["sample_id"].to_list()
        changes = [
            _change_without(job, left_out, steps[0], measured, launch=launch, log=log)
            for left_out in (harmful, middle)
            if left_out
        ]

    report = _report(job, table, steps, filled, list(zip((harmful, middle), changes, strict=False)))
    report |= {"held_out_loss": float(measured.mean()), **watch.numbers()}
    file = report_path(recipe.output_dir, REPORT).with_suffix(".parquet")
    write_atomically(file, partial(write_rows, table))
    write_report(recipe.output_dir, REPORT, report)
    return report


def _read_job(layout: RunLayout) -> TrainingJob:
    job = read_job(layout.folder / JOB_FILE)
    if job.recipe.accelerate.shard:
        raise TrainingError(
            "accelerate.shard divides the base model among processes, but each one computes gradients alone",
            where=str(layout.folder / JOB_FILE),
            fix="train a copy of the recipe without accelerate.shard",
        )
    if len(job.inputs.held_out) < MIN_HELD_OUT:
        raise TrainingError(
            f"influence is measured on at least {MIN_HELD_OUT} held-out images, and the run has "
            f"{len(job.inputs.held_out)}",
            where=str(layout.folder),
            fix="set validation_fraction of a dataset, for example to 0.2, and train again",
        )
    return job


def _measured_losses(layout: RunLayout, num_steps: int) -> npt.NDArray[np.float64]:
    """Return the loss of each held-out image after the last step."""
    lines = [line for line in read_metrics(layout.validation, num_steps + 1) if line["step"] == num_steps]
    if not lines or "by_image" not in lines[0]:
        raise TrainingError(
            f"run {layout.folder.name} has not measured the loss of each held-out image after its last step",
            where=str(layout.validation),
            fix="finish the run, with training.validate_every above 0",
        )
    return np.array(lines[0]["by_image"], dtype=np.float64)


def _steps(layout: RunLayout, num_steps: int, recipe_name: str) -> list[int]:
    """Return the steps with their training state, except the last one."""
    steps = [step for step in checkpoints_with(layout, MARKER) if 0 < step < num_steps]
    if not steps:
        raise TrainingError(
            f"run {layout.folder.name} has no training state from before its last step, to begin from",
            where=str(layout.checkpoints),
            fix="set training.checkpoint_every to a fifth of the steps and training.keep_checkpoints to "
            f"null, and train again, for example with another training.seed: {RUN_RECIPE} {recipe_name}",
        )
    return steps


def influence_requests(job: TrainingJob, steps: Sequence[int]) -> EntryRequests:
    """Return the requests of the influence of each training input at each step.

    The columns of their rows are `variant_id` and `step` besides those of all requests.
    """
    layout = RunLayout(job.folder)
    held_out = job.inputs.held_out
    common = {
        "version": INFLUENCE_VERSION,
        # Everything that decides the weights and the training objective.
        "run": job.run,
        "held_out": held_out.table.select("latents", "texts").to_dicts(),
        "noise": held_out.identities.to_list(),
    }
    trained = job.inputs.trained
    rows: list[dict[str, Any]] = []
    for step in steps:
        state = read_record(checkpoints_with(layout, MARKER)[step] / MARKER)
        at_step = canonical_hash({**common, "step": step, "state": state.get("sha256")})
        for name, identity in zip(trained.table["variant_id"], trained.identities, strict=True):
            key = canonical_hash({"influence": at_step, "of": identity})
            rows.append({"key": key, "variant_id": name, "step": step, "name": f"{name}, step {step}"})
    num_bytes = _spec({"key": "0" * 64}).file_bytes
    schema = {"key": pl.String, "variant_id": pl.String, "step": pl.Int64, "name": pl.String}
    return EntryRequests(
        kind="influences",
        rows=pl.DataFrame(rows, schema=schema).with_columns(
            num_bytes=pl.lit(num_bytes, pl.Int64),
            about_bytes=pl.lit(num_bytes, pl.Int64),
            cost=pl.lit(1, pl.Int64),
            **{name: pl.lit(None, kind) for name, kind in STATS.items()},
        ),
        settings={JOB_FILE_SETTING: str(job.folder / JOB_FILE)},
        spec=_spec,
        job=_job,
        facts={},
    )


def _spec(row: Row) -> EntrySpec:
    return EntrySpec("influences", row["key"], {INFLUENCE: TensorSpec("float32", (1,))})


def _job(row: Row) -> Job:
    work = {"variant_id": row["variant_id"], "step": row["step"]}
    return Job(_spec(row), {}, work, row["name"], row["cost"])


def _table(
    job: TrainingJob, requests: EntryRequests, entries: RecipeEntries, steps: Sequence[int], *, loss: float
) -> pl.DataFrame:
    """Return `sample_id`, `caption` and `estimate` of each trained image, the most harmful first."""
    influences = {
        (row["variant_id"], row["step"]): float(entries.store.read(requests.spec(row))[INFLUENCE][0])
        for row in requests.rows.iter_rows(named=True)
    }
    estimates = estimated_changes(job, influences, learning_rates(job), steps)
    # A sample with several buckets is several inputs.
    inputs = job.inputs.trained.table.select(
        "variant_id", "sample_id", caption=pl.col("captions").list.first()
    )
    inputs = inputs.with_columns(
        estimate=pl.Series([estimates[name] / loss for name in inputs["variant_id"]])
    )
    table = inputs.group_by("sample_id").agg(pl.col("caption").first(), pl.col("estimate").sum())
    return table.sort("estimate", "sample_id")


def learning_rates(job: TrainingJob) -> dict[int, float]:
    """Return the learning rate of each step of a run, from its metrics."""
    lines = read_metrics(RunLayout(job.folder).metrics, len(job.plan()))
    return {line["step"]: line["learning_rate"] for line in lines}


def estimated_changes(
    job: TrainingJob,
    influences: Mapping[tuple[str, int], float],
    rates: Mapping[int, float],
    steps: Sequence[int],
) -> dict[str, float]:
    """Return the estimated change of the held-out loss without each training input, from `steps[0]` on.

    Args:
        job: Job of the run.
        influences: Influence of each input at each of `steps`, by variant_id and step.
        rates: Learning rate by step.
        steps: Steps with influences; each one counts until the next.
    """
    changes = dict.fromkeys(job.inputs.trained.table["variant_id"].to_list(), 0.0)
    ends = [*steps[1:], len(job.plan())]
    intervals = list(zip(steps, ends, strict=True))
    for number, batch in job.plan().iterate(steps[0]):
        at = next(start for start, end in intervals if start <= number < end)
        for slot in batch.slots():
            dose = rates.get(number, 0.0) / batch.num_samples
            changes[slot.variant_id] += dose * influences[slot.variant_id, at]
    return changes


def fork_without(job: TrainingJob, samples: Collection[str], step: int) -> TrainingJob:
    """Return the job of a run's training from `step` on without some samples, in a folder of its own."""
    inputs = job.inputs.trained.table
    left_out = frozenset(inputs.filter(pl.col("sample_id").is_in(list(samples)))["variant_id"])
    training = job.recipe.training.model_copy(
        update={"sample_every": 0, "trackers": (), "validate_every": job.recipe.training.num_steps}
    )
    recipe = job.recipe.model_copy(
        update={"training": training, "output_dir": job.recipe.output_dir / REPORT}
    )
    # By content, as the run itself; the id of a run may not depend on its number of steps.
    trained = job.inputs.trained
    facts = {
        "left_out": trained.identities.filter(inputs["variant_id"].is_in(list(left_out))).to_list(),
        "steps": [step, job.recipe.training.num_steps],
    }
    name = f"{job.run}-without-{canonical_hash(facts)[:12]}"
    return replace(job, recipe=recipe, run=name, prompts=(), left_out=left_out)


def _change_without(
    job: TrainingJob,
    samples: Sequence[str],
    step: int,
    measured: npt.NDArray[np.float64],
    *,
    launch: Launch,
    log: Log,
) -> Change:
    """Train from `step` on without some samples, unless that is done, and return the change of the loss."""
    fork = fork_without(job, samples, step)
    layout, num_steps = RunLayout(fork.folder), len(fork.plan())
    if not layout.result.is_file():
        log(f"training from step {step} on without {counted(len(samples), 'image')}: {', '.join(samples)}")
        copy_checkpoint(RunLayout(job.folder), step, layout)
        launch(TRAINING_MODULE, fork.write())
    # The losses are the result; the LoRA would only be one more to confuse with the run's own.
    for folder in (layout.checkpoints, layout.exported):
        shutil.rmtree(folder, ignore_errors=True)
    return paired_change(measured, _measured_losses(layout, num_steps))


def paired_change(before: npt.NDArray[np.float64], after: npt.NDArray[np.float64]) -> Change:
    """Return the relative change of the mean of losses, with Student's interval of the paired differences."""
    from scipy.special import stdtrit

    differences = (after - before) / before.mean()
    mean = float(differences.mean())
    error = float(differences.std(ddof=1)) / len(differences) ** 0.5
    half = float(stdtrit(len(differences) - 1, (1 + _PROBABILITY) / 2)) * error
    return Change(mean, mean - half, mean + half)


def _report(
    job: TrainingJob,
    table: pl.DataFrame,
    steps: Sequence[int],
    filled: FillResult,
    changes: Sequence[tuple[Sequence[str], Change]],
) -> Report:
    names = ("without", "comparison")
    measured = {
        name: {"images": list(images), **asdict(change)}
        for name, (images, change) in zip(names, changes, strict=False)
    }
    counters = filled.counters(0)
    return {
        "run": job.run,
        "steps": len(job.plan()),
        "from_step": steps[0],
        "gradients_at": list(steps),
        "samples": len(table),
        "held_out": len(job.inputs.held_out),
        "why": _summary(changes),
        "worst": table.head(NUM_WORST).to_dicts(),
        **measured,
        **{name: counters[name] for name in ("encoded", "reused")},
    }


def _summary(changes: Sequence[tuple[Sequence[str], Change]]) -> str:
    if not changes:
        return "no image makes the held-out loss higher, by the gradients"
    (images, change), *comparison = changes
    these = "this image" if len(images) == 1 else f"these {len(images)} images"
    text = f"without {these} the held-out loss is {change.text()}"
    for others, other in comparison:
        text += f"; without {counted(len(others), 'image')} from the middle of the list, {other.text()}"
    return text
