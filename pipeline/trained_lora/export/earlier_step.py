"""Publishing the LoRA of an earlier step, which stays in `lora/` until another run finishes.

<output_dir>/runs/
exported_step.json                   the run and its step, see `ExportedStep`; absent for a last step
<run>/checkpoints/step-00000500/     the LoRA files and their hashes
<run>/exported_step/                 model card, previews, provenance and table of samples at that step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from pipeline.errors import RUN_RECIPE, TrainingError, counted
from pipeline.storage.atomic import write_bytes
from pipeline.storage.checked_json import read_checked, write_checked
from pipeline.storage.regular_files import file_sha256
from pipeline.storage.tables import read_rows
from pipeline.trained_lora.export.lora_files import (
    CARD_FILE,
    LORA_FOLDER,
    PROVENANCE_FILE,
    SAMPLES_FILE,
    SHEET_FILE,
)
from pipeline.trained_lora.export.publish import (
    COMPANION_HASHES,
    damaged_companions,
    publish,
    publish_files,
    read_finished,
    write_companions,
)
from pipeline.trained_lora.job import INPUTS_FILE, JOB_FILE, read_job
from pipeline.trained_lora.previews import preview_sheet, read_previews
from pipeline.trained_lora.run_folder import (
    LORA_RECORD,
    RunLayout,
    checkpoint_step,
    lora_steps,
    read_record,
    run_folder,
)

if TYPE_CHECKING:
    from pipeline.trained_lora.job import TrainingJob

EXPORTED_STEP_FILE = "exported_step.json"

_COMPANIONS_FOLDER = "exported_step"

_KEYS = {"run", "step", "why", "automatic"}


@dataclass(frozen=True)
class ExportedStep:
    """A step in `lora/` that need not be the last one of its run.

    Attributes:
        why: Reason of the evaluation that chose the step; empty for a step of `latentline export --step`.
        automatic: Whether an evaluation published it, because of `evaluation.publish: best`, and not a
            person with `latentline export`.
    """

    run: str
    step: int
    why: str = ""
    automatic: bool = False


def exported_step(output_dir: Path, run: str) -> ExportedStep | None:
    """Return the step of `run` that was published last; None if the last step is to be published.

    Raises:
        TrainingError: The record is damaged.
    """
    exported = _read_exported_step(output_dir)
    return exported if exported is not None and exported.run == run else None


def forget_exported_step(output_dir: Path) -> tuple[str, int] | None:
    """Remove the record of an earlier step, and return its run and step; jobs then publish the last step."""
    record = read_record(_record_path(output_dir))
    _record_path(output_dir).unlink(missing_ok=True)
    return (str(record["run"]), int(record["step"])) if record.keys() >= {"run", "step"} else None


def exportable_run(output_dir: Path) -> str:
    """Return the run in `lora/` if it has checkpoints with LoRA files, or else the one with the newest.

    Raises:
        TrainingError: No checkpoint holds LoRA files.
    """
    published = read_record(output_dir / LORA_FOLDER / PROVENANCE_FILE).get("run")
    if published and lora_steps(RunLayout(run_folder(output_dir, published))):
        return str(published)

    records = [
        path
        for path in (output_dir / "runs").glob(f"*/checkpoints/*/{LORA_RECORD}")
        if checkpoint_step(path.parent) is not None
    ]
    if not records:
        raise TrainingError(
            "no checkpoint holds LoRA files",
            where=str(output_dir / "runs"),
            fix="train the recipe first; checkpoints of Latentline 0.2 and earlier hold none",
        )
    # By time, because run ids have no order.
    return max(records, key=lambda path: path.stat().st_mtime_ns).parents[2].name


def publish_step(output_dir: Path, exported: ExportedStep) -> list[str]:
    """Publish the LoRA of a checkpoint to `output_dir/lora`, and return the names of the replaced files.

    Raises:
        TrainingError: The run has no LoRA of this step, or its files are damaged.
    """
    run, step = exported.run, exported.step
    layout = RunLayout(run_folder(output_dir, run))
    folder = lora_steps(layout).get(step)
    if folder is None:
        raise _not_available(layout, f"run {run} did not save a LoRA at step {step}")
    hashes: dict[str, str] = read_record(folder / LORA_RECORD).get("sha256", {})
    damaged = [name for name, sha256 in hashes.items() if _sha256_or_none(folder / name) != sha256]
    if damaged or not hashes:
        reason = f"{', '.join(damaged) or LORA_RECORD} is missing or changed after it was saved"
        raise _not_available(layout, f"the LoRA of step {step} is damaged: {reason}", without=step)

    # The run's own companions describe its last step.
    companions = _write_companions(layout, step, {name: folder / name for name in hashes}, why=exported.why)
    sources = {**{name: folder / name for name in hashes}, **companions}

    # The record comes first, so that a job after a crash publishes this step and not the last one.
    record = {name: value for name, value in asdict(exported).items() if value}
    write_checked(_record_path(output_dir), record)
    return publish_files(sources, output_dir / LORA_FOLDER)


def publish_last_step(output_dir: Path, run: str, names: Sequence[str]) -> tuple[int, list[str]]:
    """Publish the last step of a finished run, with files of these names, to `output_dir/lora` again.

    Returns:
        The step, and the names of the files that were replaced.

    Raises:
        TrainingError: The run has not finished, or its files are damaged.
    """
    layout = RunLayout(run_folder(output_dir, run))
    steps = read_record(layout.finished).get("steps", 0)
    finished = read_finished(layout, steps=steps, names=names)
    if finished is None:
        # The job trains what is missing and publishes it, which no earlier step would replace.
        raise TrainingError(
            f"run {run} has not finished, or its files changed since",
            where=str(layout.folder),
            fix=f"start the recipe's job, which trains the rest of it: {RUN_RECIPE} <recipe>",
        )
    # First, so that a job after a crash publishes the last step too.
    forget_exported_step(output_dir)
    if COMPANION_HASHES in finished and damaged_companions(layout, finished):
        files = {item["name"]: layout.exported / item["name"] for item in finished["files"]}
        companions = _write_companions(layout, steps, files)
        return steps, publish_files({**files, **companions}, output_dir / LORA_FOLDER)
    return steps, publish(layout, output_dir / LORA_FOLDER, finished)


def _write_companions(
    layout: RunLayout, step: int, lora_files: Mapping[str, Path], *, why: str = ""
) -> dict[str, Path]:
    """Write the files that accompany the LoRA of a step; return the path of each published name."""
    try:
        job = read_job(layout.folder / JOB_FILE)
        samples = _samples_at(layout, job, step)
    except (OSError, ValueError, TypeError, KeyError, pl.exceptions.PolarsError) as err:
        raise TrainingError(
            f"{JOB_FILE}, {INPUTS_FILE} or {SAMPLES_FILE} is damaged: {type(err).__name__}: {err}"[:500],
            where=str(layout.folder),
            fix=f"start the recipe's job, which writes the files of its run again: {RUN_RECIPE} <recipe>",
        ) from err
    folder = layout.folder / _COMPANIONS_FOLDER

    # The run's own sheet also shows pictures of later steps, which this LoRA does not draw (FAILURES R14).
    sheet = folder / SHEET_FILE
    if picture := preview_sheet(read_previews(layout.previews, last_step=step)):
        write_bytes(sheet, picture)
    else:
        sheet.unlink(missing_ok=True)
    files = [
        {"name": name, "bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for name, path in lora_files.items()
    ]
    record = {
        "run": job.run,
        "steps": step,
        "step": step,
        # A run that has not finished has no record of its device yet.
        "device": read_record(layout.finished).get("device"),
        "files": files,
        **({"why": why} if why else {}),
    }
    write_companions(folder, job, samples, record, has_sheet=sheet.is_file())
    return {
        SAMPLES_FILE: folder / SAMPLES_FILE,
        SHEET_FILE: sheet,
        CARD_FILE: folder / CARD_FILE,
        PROVENANCE_FILE: folder / PROVENANCE_FILE,
    }


def _samples_at(layout: RunLayout, job: TrainingJob, step: int) -> pl.DataFrame:
    times_seen = (
        job.inputs.trained.table.select("sample_id")
        .with_columns(times_seen=pl.Series(job.plan(step).times_seen(), dtype=pl.Int32))
        .group_by("sample_id")
        .agg(pl.col("times_seen").sum())
    )
    table = read_rows(layout.folder / SAMPLES_FILE)
    joined = table.drop("times_seen").join(times_seen, on="sample_id", how="left", maintain_order="left")
    return joined.with_columns(pl.col("times_seen").fill_null(0).cast(pl.Int32)).select(table.columns)


def _not_available(layout: RunLayout, what: str, *, without: int | None = None) -> TrainingError:
    steps = [str(step) for step in lora_steps(layout) if step != without]
    if steps:
        fix = f"choose one of its {counted(len(steps), 'step')}: {', '.join(steps)}"
    elif layout.finished.is_file():
        fix = f"publish its last step: latentline export <recipe> --latest --run {layout.folder.name}"
    else:
        fix = f"start the recipe's job, which trains the rest of it: {RUN_RECIPE} <recipe>"
    return TrainingError(what, where=str(layout.checkpoints), fix=fix)


def _read_exported_step(output_dir: Path) -> ExportedStep | None:
    path = _record_path(output_dir)
    try:
        record = read_checked(path)
        if not {"run", "step"} <= record.keys() <= _KEYS:
            raise ValueError(f"{path.name} must have the keys run and step")
        return ExportedStep(
            str(record["run"]),
            int(record["step"]),
            why=str(record.get("why", "")),
            automatic=bool(record.get("automatic")),
        )
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as err:
        # Neither the last step nor a changed one may replace the step that a person chose.
        fix = "run latentline export <recipe> --latest, or --step with the step to publish"
        raise TrainingError(f"the exported step is unknown: {err}", where=str(path), fix=fix) from err


def _record_path(output_dir: Path) -> Path:
    return output_dir / "runs" / EXPORTED_STEP_FILE


def _sha256_or_none(path: Path) -> str | None:
    return file_sha256(path) if path.is_file() else None
