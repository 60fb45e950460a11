"""Old training runs: list the folders in `output_dir/runs`, and delete the runs that nothing needs."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import polars as pl

from pipeline.errors import TrainingError
from pipeline.recipe import Recipe
from pipeline.storage.atomic import is_temp_name, temp_path_for
from pipeline.storage.tables import Tables
from pipeline.trained_lora.export.earlier_step import exported_step
from pipeline.trained_lora.export.lora_files import LORA_FOLDER, PROVENANCE_FILE
from pipeline.trained_lora.fingerprint import is_run_id
from pipeline.trained_lora.job import JOB_FILE
from pipeline.trained_lora.run_folder import (
    STATE_FILES,
    RunLayout,
    checkpoint_list,
    hold_idle_run,
    hold_training,
    is_being_trained,
    read_record,
)


@dataclass(frozen=True)
class Run:
    """The folder of a training run.

    Attributes:
        folder: Folder of the run.
        num_bytes: Size of all of its files.
        changed_s: Time of the last change of a file, in seconds since the epoch.
        state: State of the training, such as "finished at step 500".
        kept: Reason why the run is not deleted; empty for an old run.
        keeps_lora: Whether only the state for resuming an old run is deleted, because it is a variant of the
            last sweep; `num_bytes` is then the size of this state.
    """

    folder: Path
    num_bytes: int
    changed_s: float
    state: str
    kept: str = ""
    keeps_lora: bool = False


@dataclass
class RunSurvey:
    """The run folders of an output folder.

    Attributes:
        where: Path or address of the folder with the runs.
        runs: All runs, the one changed last first.
        leftovers: Size of each folder that an interrupted deletion left.
        incomplete: Runs at an address without `run.json`, because a machine deletes or starts them.
    """

    where: str
    runs: list[Run] = field(default_factory=list[Run])
    leftovers: dict[Path, int] = field(default_factory=dict[Path, int])
    incomplete: list[Run] = field(default_factory=list[Run])

    @property
    def old(self) -> list[Run]:
        """Runs that nothing keeps."""
        return [run for run in self.runs if not run.kept]


def survey_runs(output_dir: Path, *, num_newest: int, recipes: Iterable[Recipe]) -> RunSurvey:
    """Classify the runs of an output folder, without changing any.

    A run is kept if it is one of the `num_newest` newest, if its LoRA is in `lora/`, if a process trains it,
    if it has won the last sweep, or if `start_from` of a recipe or of a run in training names one of its
    files. Other variants of the sweep keep their LoRA files. Links and folders with other names are ignored.

    Raises:
        OSError: A folder cannot be read.
    """
    survey = RunSurvey(str(output_dir / "runs"))
    folders = sorted((output_dir / "runs").iterdir()) if (output_dir / "runs").is_dir() else []
    for folder in folders:
        if folder.is_symlink() or not folder.is_dir():
            continue
        if is_temp_name(folder.name):
            survey.leftovers[folder] = _size_and_change(folder)[0]
        elif is_run_id(folder.name) and RunLayout(folder).facts.is_file():
            num_bytes, changed_s = _size_and_change(folder)
            survey.runs.append(Run(folder, num_bytes, changed_s, _state(RunLayout(folder))))

    def in_use(folder: Path) -> str:
        return published_reason(folder) or ("being trained" if is_being_trained(RunLayout(folder)) else "")

    runs = with_reasons(survey.runs, recipes, num_newest=num_newest, in_use=in_use)
    swept = _swept_runs(output_dir)
    survey.runs = [
        _as_variant(run, swept[run.folder.name]) if run.folder.name in swept else run for run in runs
    ]
    return survey


def _swept_runs(output_dir: Path) -> dict[str, bool]:
    """Return the runs of the last sweep, each with whether it has won."""
    table = Tables(output_dir).read_previous("sweep", ("variant", "seed", "run", "step", "promoted"))
    if table is None:
        return {}
    last = table.sort("step").unique(["variant", "seed"], keep="last")
    return dict(last.filter(pl.col("run") != "").select("run", "promoted").iter_rows())


def _as_variant(run: Run, has_won: bool) -> Run:
    if run.kept or has_won:
        return run if run.kept else replace(run, kept="winner of the sweep")
    num_bytes = sum(path.stat().st_size for path in _state_files(RunLayout(run.folder)))
    if not num_bytes:
        return replace(run, kept="variant of the sweep, without state")
    return replace(run, num_bytes=num_bytes, keeps_lora=True)


def _state_files(layout: RunLayout) -> list[Path]:
    # The marker first: a checkpoint without it is not resumed.
    folders = sorted(layout.checkpoints.glob("*/"))
    return [folder / name for folder in folders for name in STATE_FILES if (folder / name).is_file()]


def delete_state(folder: Path) -> None:
    """Delete the files from which a run can be resumed, and keep its LoRA files.

    Raises:
        TrainingError: The run is trained since the survey, or a file cannot be deleted.
    """
    layout = RunLayout(folder)
    with hold_idle_run(layout), hold_training(layout, wait_s=0.0):
        try:
            for path in _state_files(layout):
                path.unlink()
        except OSError as err:
            raise _not_deletable(folder, err) from err


def with_reasons(
    runs: Iterable[Run], recipes: Iterable[Recipe], *, num_newest: int, in_use: Callable[[Path], str]
) -> list[Run]:
    """Return the runs with the reasons why they are kept, the one changed last first.

    `in_use` returns why a run's LoRA may be in `lora/` or which process uses its folder; empty for neither.
    """
    newest_first = sorted(runs, key=lambda run: run.changed_s, reverse=True)
    starts = _start_files(newest_first, recipes)
    return [
        replace(
            run,
            kept=in_use(run.folder)
            or _start_reason(run.folder, starts)
            or ("newest" if number < num_newest else ""),
        )
        for number, run in enumerate(newest_first)
    ]


def delete_run(folder: Path) -> None:
    """Delete a run's folder; an interruption leaves a folder that no program takes for a run.

    Raises:
        TrainingError: The run was published or is trained since the survey, or cannot be deleted.
    """
    layout = RunLayout(folder)

    # The reasons to keep the run are examined again under its locks, because a job may have started since the
    # survey.
    with hold_idle_run(layout), hold_training(layout, wait_s=0.0):
        if reason := published_reason(folder):
            raise needed_error(folder.name, reason, where=str(folder))
        delete_run_folder(folder)


def delete_run_folder(folder: Path) -> None:
    """Delete the folder of a run, after locking it; raises TrainingError if the folder cannot be deleted."""
    # An interrupted deletion leaves a folder under a name that no program takes for a run.
    doomed = temp_path_for(folder)
    try:
        folder.rename(doomed)
        # A process that waits for a lock must not mistake the renamed file for the run's lock.
        for lock in (RunLayout(doomed).lock, RunLayout(doomed).training_lock):
            lock.unlink(missing_ok=True)
    except OSError as err:
        raise _not_deletable(folder, err) from err
    delete_leftover(doomed)


def delete_leftover(folder: Path) -> None:
    """Delete a folder that an interrupted deletion left; raises TrainingError if it cannot be deleted."""
    try:
        shutil.rmtree(folder)
    except OSError as err:
        raise _not_deletable(folder, err) from err


def published_reason(folder: Path) -> str:
    """Return why the run's LoRA may be in `lora/`; empty if another run's LoRA is there, or none."""
    output_dir = folder.parents[1]
    if exported_step(output_dir, folder.name) is not None:
        return "exported to lora/"
    lora = output_dir / LORA_FOLDER
    if not lora.is_dir() or not any(lora.iterdir()):
        return ""
    published = read_record(lora / PROVENANCE_FILE).get("run")

    # A LoRA of unknown origin may be any run's, so all runs are kept.
    if published is None:
        return f"lora/{PROVENANCE_FILE} does not name its run"
    return "in lora/" if published == folder.name else ""


def _start_files(runs: Iterable[Run], recipes: Iterable[Recipe]) -> list[tuple[Path, str]]:
    """Return the LoRA files that recipes and runs in training read, each with its key and its user."""
    named = [
        (file, f"{key} of {recipe.name}")
        for recipe in recipes
        for key, file in (
            ("start_from", recipe.training.lora.start_from),
            ("context_lora", recipe.model.context_lora and recipe.model.context_lora.path),
        )
        if file is not None
    ]
    for run in runs:
        if is_being_trained(RunLayout(run.folder)):
            recipe = read_record(run.folder / JOB_FILE).get("recipe", {})
            if start := recipe.get("training", {}).get("lora", {}).get("start_from"):
                named.append((Path(start), f"start_from of run {run.folder.name}"))
            if context := recipe.get("model", {}).get("context_lora"):
                named.append((Path(context["path"]), f"context_lora of run {run.folder.name}"))

    # Resolved on both sides, because a path may lead through a link to the run.
    return [(file.resolve(), use) for file, use in named]


def _start_reason(folder: Path, starts: Iterable[tuple[Path, str]]) -> str:
    folder = folder.resolve()
    return next((use for file, use in starts if file.is_relative_to(folder)), "")


def _state(layout: RunLayout) -> str:
    num_steps, checkpoints = read_record(layout.finished).get("steps"), checkpoint_list(layout)
    return training_state(num_steps, checkpoints[0]["step"] if checkpoints else None)


def training_state(num_steps: int | None, last_step: int | None) -> str:
    """Return the state of a run from the steps of a finished training and the step of the last checkpoint."""
    if num_steps:
        return f"finished at step {num_steps:,}"
    return "unfinished" if last_step is None else f"unfinished, resumes from step {last_step:,}"


def _size_and_change(folder: Path) -> tuple[int, float]:
    """Return the size of all files below a folder in bytes, and the time of the last change of a file."""
    num_bytes, changed_s = 0, 0.0
    # Locks are not counted, because processes that train nothing create them too.
    locks = (RunLayout(folder).lock, RunLayout(folder).training_lock)
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            found = path.lstat()
            if path not in locks and stat.S_ISREG(found.st_mode):
                num_bytes += found.st_size
                changed_s = max(changed_s, found.st_mtime)
    return num_bytes, changed_s


def needed_error(run: str, reason: str, *, where: str) -> TrainingError:
    """Return the error for a run that something needs since the survey."""
    return TrainingError(
        f"run {run} is needed now, after it was listed as old: {reason}",
        where=where,
        fix="run the command again, which keeps this run and deletes all other old runs",
    )


def _not_deletable(folder: Path, err: OSError) -> TrainingError:
    return TrainingError(
        f"a run folder cannot be deleted: {err.strerror or err}",
        where=str(err.filename or folder),
        fix="make the folder writable for this user, or delete it by hand",
    )
