"""The files of a finished run: written at its end, and verified and repaired by later jobs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.storage.atomic import write_atomically, write_bytes
from pipeline.storage.tables import write_rows
from pipeline.trained_lora.export.lora_files import (
    SAMPLES_FILE,
    SHEET_FILE,
    lora_file_names,
    read_provenance,
)
from pipeline.trained_lora.export.publish import (
    COMPANION_HASHES,
    JOB_HASHES,
    MEASURED_HASHES,
    companion_hashes,
    damaged_companions,
    job_hashes,
    mark_finished,
    measured_hashes,
    read_finished,
    write_companions,
)
from pipeline.trained_lora.fingerprint import write_facts
from pipeline.trained_lora.recipe_facts import Facts
from pipeline.trained_lora.report import write_run_report
from pipeline.trained_lora.run_folder import RunLayout

if TYPE_CHECKING:
    import polars as pl

    from pipeline.log import Log
    from pipeline.trained_lora.job import TrainingJob


def repaired_run(job: TrainingJob, facts: Facts, table: pl.DataFrame, *, log: Log) -> dict[str, Any] | None:
    """Return the record of the job's run if it has finished with intact weights, else None.

    Files that changed since the run ended are written again, without training.
    """
    recipe, layout = job.recipe, RunLayout(job.folder)
    finished = read_finished(layout, steps=recipe.training.num_steps, names=lora_file_names(recipe))
    if finished is None:
        return None
    log(f"run {job.run} is finished and unchanged: nothing is launched")
    _warn_of_changed_losses(layout, finished, log)
    if damaged := damaged_companions(layout, finished):
        reason = "changed after the run wrote them"
        if COMPANION_HASHES not in finished:
            reason = "are from an earlier release, which recorded no hashes of them"
        log(f"{', '.join(damaged)} in {layout.exported} {reason}: written again")

    # `latentline export` and `sample` read them, and later runs are compared with the facts.
    is_job_changed = JOB_HASHES in finished and job_hashes(layout) != finished[JOB_HASHES]
    if is_job_changed:
        log(f"the files of the job in {layout.folder} changed after the run wrote them: written again")
        write_facts(layout, facts)
        write_job(_as_trained(job), table)
    if damaged or is_job_changed:
        complete_run(_as_trained(job), table, finished)
    return finished


def _warn_of_changed_losses(layout: RunLayout, finished: dict[str, Any], log: Log) -> None:
    # Runs of 0.3.0 and earlier have no hashes of them.
    recorded, current = finished.get(MEASURED_HASHES, {}), measured_hashes(layout)
    changed = [name for name in recorded if current.get(name) != recorded[name]]
    if changed:
        log(
            f"warning: {', '.join(changed)} in {layout.folder} changed after the run wrote them: losses in "
            f"reports may be wrong, the LoRA is unchanged. To train the run again, delete {layout.folder} "
            "and start the job again"
        )


def _as_trained(job: TrainingJob) -> TrainingJob:
    # The LoRA has the record of its training, while the job describes the current recipe.
    return replace(job, provenance=read_provenance(RunLayout(job.folder).exported))


def write_job(job: TrainingJob, table: pl.DataFrame) -> Path:
    """Write the files of a job, and return the path of the one that the training reads first."""
    write_atomically(job.folder / SAMPLES_FILE, partial(write_rows, table))
    return job.write()


def complete_run(job: TrainingJob, table: pl.DataFrame, result: dict[str, Any]) -> None:
    """Write what accompanies the exported LoRA of a run, and mark the run as finished."""
    layout = RunLayout(job.folder)
    write_run_report(job, layout)
    sheet = layout.report / SHEET_FILE
    if sheet.is_file():
        write_bytes(layout.exported / SHEET_FILE, sheet.read_bytes())
    else:
        (layout.exported / SHEET_FILE).unlink(missing_ok=True)
    record = {name: result[name] for name in ("run", "steps", "device", "files")}
    record["step"] = result["steps"]
    write_companions(layout.exported, job, table, record, has_sheet=sheet.is_file())
    result[COMPANION_HASHES] = companion_hashes(layout.exported)
    result[JOB_HASHES] = job_hashes(layout)
    # Losses that changed after the training stay changed.
    result.setdefault(MEASURED_HASHES, measured_hashes(layout))

    # The marker comes last: a run with it is never launched again, so all of its files must exist.
    mark_finished(layout, result)
