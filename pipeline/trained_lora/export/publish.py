"""Accepting the result of a run, marking the run as finished, and publishing its files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import TrainingError
from pipeline.storage.atomic import remove_temp_files, write_atomically, write_text
from pipeline.storage.checked_json import read_checked, write_checked
from pipeline.storage.regular_files import file_sha256
from pipeline.storage.tables import write_rows
from pipeline.trained_lora.export.lora_files import (
    CARD_FILE,
    PROVENANCE_FILE,
    SAMPLES_FILE,
    SHEET_FILE,
)
from pipeline.trained_lora.export.model_card import model_card
from pipeline.trained_lora.job import DROPPED_FILE, INPUTS_FILE, JOB_FILE
from pipeline.trained_lora.run_folder import LORA_RECORD, RunLayout, lora_steps, read_record

if TYPE_CHECKING:
    import polars as pl

    from pipeline.trained_lora.job import TrainingJob

# The provenance record comes last: its hashes show a reader whether all files belong to one run (FAILURES
# R14).
COMPANIONS = (SAMPLES_FILE, SHEET_FILE, CARD_FILE, PROVENANCE_FILE)
"""Files that accompany LoRA files, in the order in which they are published. The sheet may be missing."""

COMPANION_HASHES = "companions"
"""Key in the record of a finished run: the SHA-256 of each companion, by name."""

JOB_HASHES = "job_files"
"""Key in the record of a finished run: the SHA-256 of each file of `job_hashes`."""

MEASURED_HASHES = "measured_files"
"""Key in the record of a finished run: the SHA-256 of each file of `measured_hashes`."""


def accept_result(layout: RunLayout, *, run: str, steps: int, names: Sequence[str]) -> dict[str, Any]:
    """Return the worker's result, with the size and SHA-256 of each file as this process reads it.

    `names` are those of `lora_file_names`.

    Raises:
        TrainingError: The result is missing or belongs to another run or plan, or a file is missing.
    """
    try:
        result = json.loads(layout.result.read_text(encoding="utf-8"))
        matches = result["run"] == run and result["steps"] == steps
        written = [item["name"] for item in result["files"]]
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise _unusable(layout.result, f"cannot be read: {err}") from err

    if not matches or written != list(names):
        raise _unusable(layout.result, f"belongs to another run, plan or recipe: {result['run']}, {written}")

    for item in result["files"]:
        path = layout.exported / item["name"]
        if not path.is_file():
            raise _unusable(path, "is missing")
        item["bytes"] = path.stat().st_size
        item["sha256"] = file_sha256(path)
    return result


def mark_finished(layout: RunLayout, result: Mapping[str, Any]) -> None:
    """Write the marker of a finished run, for `read_finished`."""
    write_checked(layout.finished, result)


def read_finished(layout: RunLayout, *, steps: int, names: Sequence[str]) -> dict[str, Any] | None:
    """Return the marker if the run finished at `steps` and its files `names` are unchanged, else None."""
    try:
        finished = read_checked(layout.finished)
        hashes = {item["name"]: item["sha256"] for item in finished["files"]}
        is_intact = (
            finished["steps"] == steps
            and set(hashes) == set(names)
            and all(file_sha256(layout.exported / name) == sha256 for name, sha256 in hashes.items())
            # The checks read these keys.
            and {"output_change", "loss_trend"} <= set(finished)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return finished if is_intact else None


def companion_hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file that accompanies the LoRA files in `folder`, by name."""
    return _hashes(folder, COMPANIONS)


def job_hashes(layout: RunLayout) -> dict[str, str]:
    """Return the SHA-256 of each file of the run's job, its facts and its report, by name.

    A job can write all of them again without training.
    """
    report = sorted(layout.report.iterdir()) if layout.report.is_dir() else []
    names = (JOB_FILE, INPUTS_FILE, DROPPED_FILE, SAMPLES_FILE, layout.facts.name)
    return _hashes(layout.folder, (*names, *(f"{layout.report.name}/{path.name}" for path in report)))


def measured_hashes(layout: RunLayout) -> dict[str, str]:
    """Return the SHA-256 of each file that only a training can write again, by name: losses, not weights."""
    files = (layout.metrics, layout.sample_losses, layout.validation)
    return _hashes(layout.folder, (path.relative_to(layout.folder).as_posix() for path in files))


def _hashes(folder: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: file_sha256(folder / name) for name in names if (folder / name).is_file()}


def damaged_companions(layout: RunLayout, finished: Mapping[str, Any]) -> list[str]:
    """Return the companions of a finished run that differ from its record, which may be missing or added.

    Runs of 0.3.0 and earlier have no record of them, so that all of them count.
    """
    recorded: dict[str, str] | None = finished.get(COMPANION_HASHES)
    current = companion_hashes(layout.exported)
    if recorded is None:
        return [name for name in COMPANIONS if name in current or name != SHEET_FILE]
    return [name for name in COMPANIONS if current.get(name) != recorded.get(name)]


def saved_lora(layout: RunLayout, *, run: str, steps: int, names: Sequence[str]) -> dict[str, Path] | None:
    """Return the LoRA files of the checkpoint at `steps`, by name in `lora/`, or None.

    None unless the run has finished with another number of steps, and has an undamaged LoRA of this step.
    Runs of different lengths have the same id only if their first steps are equal, so this LoRA is the one
    that a training with `steps` would export.
    """
    finished, folder = read_record(layout.finished), lora_steps(layout).get(steps)
    if folder is None or finished.get("run") != run or finished.get("steps") == steps:
        return None
    hashes = read_record(folder / LORA_RECORD).get("sha256", {})
    sources = {name: folder / name for name in names}
    is_intact = all(
        path.is_file() and file_sha256(path) == hashes.get(name) for name, path in sources.items()
    )
    return sources if is_intact and {"modules", "output_change"} <= set(finished) else None


def saved_result(layout: RunLayout, *, run: str, steps: int, names: Sequence[str]) -> dict[str, Any] | None:
    """Copy the files of `saved_lora` to the run's exported files and return its result; None without them."""
    sources = saved_lora(layout, run=run, steps=steps, names=names)
    if sources is None:
        return None

    publish_files(sources, layout.exported)
    files = [
        {"name": name, "bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for name, path in sources.items()
    ]
    # Device, modules and memory are the same for all steps of a run. The change of the output is not.
    step = {"steps": steps, "resumed_from": steps, "files": files, "output_change": None, "difference": None}
    return {**read_record(layout.finished), **step}


def write_companions(
    folder: Path, job: TrainingJob, table: pl.DataFrame, record: Mapping[str, Any], *, has_sheet: bool
) -> None:
    """Write the files that accompany LoRA files: their samples, model card and provenance.

    `record` begins the provenance; its `steps` is the number of steps that trained the LoRA, and `why` the
    reason for which an evaluation chose them.
    """
    write_atomically(folder / SAMPLES_FILE, partial(write_rows, table))

    headings = [prompt.heading for prompt in job.prompts]
    why = record.get("why", "")
    card = model_card(job.provenance, steps=record["steps"], headings=headings, has_sheet=has_sheet, why=why)
    write_text(folder / CARD_FILE, card)

    values = {**record, **job.provenance}
    write_text(
        folder / PROVENANCE_FILE, json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    )


def publish(layout: RunLayout, lora: Path, finished: dict[str, Any]) -> list[str]:
    """Copy the run's files to the folder `lora`, and return the names of the replaced files."""
    names = [item["name"] for item in finished["files"]]
    return publish_files({name: layout.exported / name for name in (*names, *COMPANIONS)}, lora)


def publish_files(sources: Mapping[str, Path], lora: Path) -> list[str]:
    """Copy files to the folder `lora`, in their order, each atomically and only if it differs.

    `sources` maps names in `lora` to the files. A missing preview sheet is removed from `lora`. So are
    temporary files of processes that were killed, because the caller holds the lock of `lora`.

    Returns:
        Names of the files that were replaced.
    """
    replaced: list[str] = []
    remove_temp_files(lora)
    for name, source in sources.items():
        target = lora / name
        # The sheet of an earlier run would show pictures of another LoRA.
        if name == SHEET_FILE and not source.is_file():
            target.unlink(missing_ok=True)
        elif _copy_if_different(source, target):
            replaced.append(name)
    return replaced


def mirror_folder(source: Path, target: Path) -> None:
    """Make the folder `target` hold exactly the files of `source`, each copied atomically if it differs."""
    names = {path.name for path in source.iterdir()} if source.is_dir() else set[str]()
    for name in sorted(names):
        _copy_if_different(source / name, target / name)
    for path in list(target.iterdir()) if target.is_dir() else []:
        if path.name not in names:
            path.unlink()


def _copy_if_different(source: Path, target: Path) -> bool:
    if target.is_file() and file_sha256(target) == file_sha256(source):
        return False
    with source.open("rb") as original:
        write_atomically(target, lambda file: shutil.copyfileobj(original, file))
    return True


def _unusable(path: Path, reason: str) -> TrainingError:
    return TrainingError(
        f"training ended without a usable result: {path.name} {reason}",
        where=str(path),
        fix="start the job again; it resumes from the last checkpoint",
    )
