"""Old training runs at an address: list them, and delete those that are not needed.

The deletion of a run starts with `run.json`. If it is interrupted, the next one recognizes the rest by the
missing file. It continues with the files that show that others are complete, so that a job which resumes the
run in between finds complete checkpoints or none.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.errors import counted
from pipeline.maintenance.old_runs import (
    Run,
    RunSurvey,
    delete_run_folder,
    needed_error,
    published_reason,
    read_json,
    start_files,
)
from pipeline.recipe import Recipe
from pipeline.reporting.reports import Log, discard
from pipeline.storage.lease import DELETING, STALE_S, Lease, hold_free_lease, holder_text
from pipeline.storage.mirror import Mirror
from pipeline.storage.mirror_state import remote_version
from pipeline.storage.remote_folder import RemoteFolder
from pipeline.storage.remote_stat import stat_from_info
from pipeline.trained_lora.export.lora_files import LORA_FOLDER, PROVENANCE_FILE
from pipeline.trained_lora.fingerprint import is_run_id
from pipeline.trained_lora.job import JOB_FILE
from pipeline.trained_lora.registered_run import unregister_folder
from pipeline.trained_lora.run_folder import (
    MARKER,
    RunLayout,
    hold_idle_run,
    hold_training,
    is_being_trained,
    run_folder,
)
from pipeline.trained_lora.run_mirror import LEASE_FILE

_PROVENANCE = f"{LORA_FOLDER}/{PROVENANCE_FILE}"

_PUBLISHED_FILES = ("runs/exported_step.json", _PROVENANCE)
"""Files that name the run whose LoRA is in `lora/`."""

_NEEDED_FILES = ("runs/*/run.json", "runs/*/finished.json", f"runs/*/{JOB_FILE}")

_FIRST_DELETED = "run.json"

SILENCE_S = 300.0
"""Time without a heartbeat after which a machine counts as dead.

It is longer than `STALE_S`, because a training that is taken over continues, but a deleted one is lost.
"""


@dataclass
class _Files:
    """Files of a run at the address.

    Attributes:
        versions: Version of each file, by its name relative to the run's folder.
        num_bytes: Size of all files.
        changed_s: Time of the last change, in seconds since the epoch; 0 if the service states no times.
        has_lease: Whether the file of a lease exists.
    """

    versions: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    num_bytes: int = 0
    changed_s: float = 0.0
    has_lease: bool = False

    @property
    def last_step(self) -> int | None:
        """Step of the newest complete checkpoint."""
        markers = (name for name in self.versions if PurePosixPath(name).name == MARKER)
        return max(
            (int(PurePosixPath(name).parent.name.removeprefix("step-")) for name in markers), default=None
        )


class RemoteRuns:
    """The runs of an output folder at an address."""

    def __init__(self, mirror: Mirror, *, log: Log = discard) -> None:
        """Use the mirror of a recipe's output folder, and report a long wait to `log`; reads nothing."""
        self._mirror = mirror
        self._log = log
        self._stale_leases: dict[str, dict[str, Any]] = {}
        self._surveyed: dict[str, _Files] = {}
        self._hides_run = False

    def survey(self, *, num_newest: int, recipes: Iterable[Recipe], wait: bool) -> RunSurvey:
        """Classify the runs, without changing any.

        A run is kept for the reasons of `survey_runs`, if its lease is held, and if it is the newest one and
        a job can resume it.

        Args:
            num_newest: Number of runs that are kept for being the newest.
            recipes: All recipes whose `start_from` may name a run.
            wait: Whether to wait until the leases of dead machines are stale, if there are leases.

        Raises:
            StoreError: The service does not answer.
        """
        mirror = self._mirror
        if wait:
            self._find_stale_leases()
        self._pull_published()
        mirror.pull(*_NEEDED_FILES)
        survey = RunSurvey(mirror.where("runs"))
        files_by_run = self._surveyed = _files_by_run(mirror)
        training = self._runs_in_training(files_by_run)
        for run, files in files_by_run.items():
            folder = run_folder(mirror.folder, run)
            if _FIRST_DELETED in files.versions:
                survey.runs.append(Run(folder, files.num_bytes, files.changed_s, _state(folder, files)))
            elif is_being_trained(RunLayout(folder)):
                continue  # its first upload has begun
            elif run in training:
                state = f"{training[run]}, or has stopped: --delete then deletes the rest"
                survey.incomplete.append(Run(folder, files.num_bytes, files.changed_s, state))
            elif not self._published(folder):
                survey.leftovers[folder] = files.num_bytes

        survey.runs.sort(key=lambda run: run.changed_s, reverse=True)
        starts = start_files(survey.runs, recipes)
        survey.runs = [
            replace(
                run,
                kept=self._reason_to_keep(run, training, starts) or _reason_of_age(run, number, num_newest),
            )
            for number, run in enumerate(survey.runs)
        ]
        return survey

    def delete(self, folder: Path, *, log: Log = discard) -> None:
        """Delete a run at the address and in the working copy, or the rest of an interrupted deletion.

        The run's lease is held meanwhile: a job that wants to train the run waits, and then starts it anew.

        Args:
            folder: Folder of the run in the working copy.
            log: Receives a warning if the registration of the run cannot be deleted.

        Raises:
            StoreError: The service does not answer.
            TrainingError: The run was published or is trained since the survey, or cannot be deleted.
        """
        mirror, run = self._mirror, folder.name
        top, lease = f"runs/{run}", self._lease(run)

        def require_lease() -> None:
            if not lease.is_held():
                raise needed_error(run, "another machine took it over", where=mirror.where(top))

        folder.mkdir(parents=True, exist_ok=True)
        layout = RunLayout(folder)
        with hold_idle_run(layout), hold_training(layout, wait_s=0.0):
            try:
                with hold_free_lease(lease, stale=self._stale_leases.get(run)) as is_held:
                    if not is_held:
                        raise needed_error(run, "another machine uses it", where=mirror.where(top))
                    self._pull_published()
                    if reason := self._published(folder):
                        raise needed_error(run, reason, where=mirror.where(top))

                    versions = _files_by_run(mirror).get(run, _Files()).versions
                    if versions != self._surveyed.get(run, _Files()).versions:
                        raise needed_error(run, "its files have changed", where=mirror.where(top))

                    mirror.remove(f"{top}/{_FIRST_DELETED}", guard=require_lease)
                    unregister_folder(folder, mirror.address, log=log)
                    mirror.remove(*(f"{top}/{name}" for name in versions), guard=require_lease)
            except OSError as err:
                raise mirror.error(f"run {run} cannot be deleted: {err}", top) from err
            delete_run_folder(folder)

    def _lease(self, run: str) -> Lease:
        # A folder of its own, see `hold_lease_at`.
        remote, copy_id = RemoteFolder(self._mirror.remote.url, key="output_dir"), self._mirror.copy_id
        return Lease(remote, f"runs/{run}/{LEASE_FILE}", copy_id=copy_id, log=discard, doing=DELETING)

    def _find_stale_leases(self) -> None:
        """Wait, if other working copies hold leases, and remember those that were not replaced meanwhile."""
        files_by_run = _files_by_run(self._mirror)
        holders = self._holders(files_by_run)
        if holders:
            # The rest of an interrupted deletion is of no use to a machine that has only been cut off.
            only_deletions = all(held.get("doing") == DELETING for held in holders.values())
            silence_s = STALE_S if only_deletions else SILENCE_S
            runs = counted(len(holders), "run")
            self._log(f"waiting {silence_s:.0f} s: {runs} may be in use on machines that have stopped")
            time.sleep(silence_s)
            later = self._holders(files_by_run)
            self._stale_leases = {run: held for run, held in holders.items() if later.get(run) == held}

    def _runs_in_training(self, files_by_run: Mapping[str, _Files]) -> dict[str, str]:
        """Return where runs are being trained, by run."""
        holders = self._holders(files_by_run)
        holders = {run: held for run, held in holders.items() if held != self._stale_leases.get(run)}
        training = {run: f"in use: {holder_text(held)}" for run, held in holders.items()}
        here = (
            run for run in files_by_run if is_being_trained(RunLayout(run_folder(self._mirror.folder, run)))
        )
        return training | dict.fromkeys(here, "being trained")

    def _holders(self, files_by_run: Mapping[str, _Files]) -> dict[str, dict[str, Any]]:
        """Return the contents of the leases that other working copies hold, by run."""
        try:
            contents = {
                run: self._lease(run).read() for run, files in files_by_run.items() if files.has_lease
            }
        except OSError as err:
            raise self._mirror.error(f"the leases of runs cannot be read: {err}", "runs") from err
        copy_id = self._mirror.copy_id
        return {
            run: held for run, held in contents.items() if held is not None and held.get("copy") != copy_id
        }

    def _reason_to_keep(
        self, run: Run, training: Mapping[str, str], starts: Iterable[tuple[Path, str]]
    ) -> str:
        """Return why something needs the run; empty if nothing does."""
        if reason := self._published(run.folder) or training.get(run.folder.name):
            return reason
        folder = run.folder.resolve()
        return next((f"start_from of {user}" for file, user in starts if file.is_relative_to(folder)), "")

    def _pull_published(self) -> None:
        """Pull the files that name the run whose LoRA is in `lora/`."""
        names = self._mirror.names(f"{LORA_FOLDER}/*")
        self._hides_run = bool(names) and _PROVENANCE not in names
        self._mirror.pull(*_PUBLISHED_FILES)

    def _published(self, folder: Path) -> str:
        """Return why the run's LoRA may be in `lora/`, as `published_reason`."""
        return f"{_PROVENANCE} does not exist" if self._hides_run else published_reason(folder)


def _reason_of_age(run: Run, number: int, num_newest: int) -> str:
    if number < num_newest:
        return "newest"
    return "newest, and can be resumed" if number == 0 and run.state.startswith("unfinished") else ""


def _files_by_run(mirror: Mirror) -> dict[str, _Files]:
    by_run: dict[str, _Files] = {}
    for name, info in mirror.infos("runs/*").items():
        _, run, *rest = PurePosixPath(name).parts
        if not rest or not is_run_id(run):
            continue

        files, name_in_run = by_run.setdefault(run, _Files()), "/".join(rest)
        if name_in_run == LEASE_FILE:
            files.has_lease = True
            continue
        num_bytes, time_ns, _, _ = stat_from_info(info)
        files.versions[name_in_run] = remote_version(info)
        files.num_bytes += max(0, num_bytes)
        files.changed_s = max(files.changed_s, time_ns / 1e9)
    return by_run


def _state(folder: Path, files: _Files) -> str:
    finished = RunLayout(folder).finished
    if finished.name in files.versions and (steps := read_json(finished).get("steps")):
        return f"finished at step {steps:,}"
    step = files.last_step
    return "unfinished" if step is None else f"unfinished, resumes from step {step:,}"
