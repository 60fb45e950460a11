"""Old training runs at an address: list them, and delete the runs that are not needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.maintenance.old_runs import (
    Run,
    RunSurvey,
    delete_run_folder,
    needed_error,
    published_reason,
    training_state,
    with_reasons,
)
from pipeline.outputs.folder import OutputFolder
from pipeline.outputs.lease import DELETING, STALE_S, Lease, holder_text, kept, lease_at, still_held
from pipeline.outputs.stage_files import EXPORTED_STEP, run_records
from pipeline.recipe import Recipe
from pipeline.storage.file_systems import stat_from_info
from pipeline.trained_lora.export.lora_files import LORA_FOLDER, PROVENANCE_FILE
from pipeline.trained_lora.fingerprint import is_run_id
from pipeline.trained_lora.run_folder import (
    RunLayout,
    complete_steps,
    hold_idle_run,
    hold_training,
    is_being_trained,
    read_record,
    run_folder,
)
from pipeline.trained_lora.run_upload import LEASE_FILE

_PROVENANCE = f"{LORA_FOLDER}/{PROVENANCE_FILE}"

_FIRST_DELETED = "run.json"

SILENCE_S = 300.0
"""Time without a heartbeat after which a machine counts as dead.

It is longer than `STALE_S`, because a training that is taken over continues, but a deleted one is lost.
"""

_CLOCK_FILE = "runs/.clock"


@dataclass
class _Files:
    """Files of a run at the address.

    Attributes:
        versions: Stat of each file, by its name relative to the run's folder.
        num_bytes: Size of all files.
        changed_s: Time of the last change, in seconds since the epoch; 0 if the service has no times.
        lease_ns: Time of the last heartbeat in nanoseconds since the epoch; None without a lease.
    """

    versions: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    num_bytes: int = 0
    changed_s: float = 0.0
    lease_ns: int | None = None

    @property
    def last_step(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return max(complete_steps(self.versions), default=None)


class RemoteRuns:
    """The runs of an output folder at an address."""

    def __init__(self, outputs: OutputFolder) -> None:
        """Use a recipe's output folder; reads nothing."""
        self._outputs = outputs
        self._dead_leases: dict[str, str] = {}
        self._surveyed: dict[str, _Files] = {}
        self._hides_run = False

    def survey(self, *, num_newest: int, recipes: Iterable[Recipe], will_delete: bool) -> RunSurvey:
        """Classify the runs, without changing any.

        A run is kept for the reasons of `survey_runs`, if its lease is held, and if it is the newest one and
        a job can resume it. `will_delete` also finds the leases of dead machines, which needs a write at the
        address.

        Raises:
            StoreError: The service does not answer.
        """
        # Leases are read before their times: a lease with an old time has not been replaced in between.
        leases = self._read_leases()
        self._surveyed = _files_by_run(self._outputs)
        training = self._runs_in_training(leases, will_delete=will_delete)
        self._outputs.fetch_listed(run_records(self._outputs))
        self._fetch_published()

        survey = RunSurvey(self._outputs.where("runs"))
        for run, files in self._surveyed.items():
            folder = run_folder(self._outputs.folder, run)
            if _FIRST_DELETED in files.versions:
                survey.runs.append(Run(folder, files.num_bytes, files.changed_s, _state(folder, files)))
            elif is_being_trained(RunLayout(folder)):
                continue  # its first upload has begun
            elif run in training:
                state = f"{training[run]}, or has stopped: a later --delete then deletes the rest"
                survey.incomplete.append(Run(folder, files.num_bytes, files.changed_s, state))
            elif not self._published(folder):
                survey.leftovers[folder] = files.num_bytes

        def in_use(folder: Path) -> str:
            return self._published(folder) or training.get(folder.name, "")

        survey.runs = with_reasons(survey.runs, recipes, num_newest=num_newest, in_use=in_use)

        # The next job of the recipe resumes the newest run, on whatever machine that runs.
        if survey.runs and not survey.runs[0].kept and survey.runs[0].state.startswith("unfinished"):
            survey.runs[0] = replace(survey.runs[0], kept="newest, and can be resumed")
        return survey

    def delete(self, folder: Path) -> None:
        """Delete a run at the address and in its local folder, or the rest of an interrupted deletion.

        Raises:
            StoreError: The service does not answer.
            TrainingError: The run was published or is trained since the survey, or cannot be deleted.
        """
        outputs, run = self._outputs, folder.name
        top, lease = f"runs/{run}", self._lease(run)

        def require_lease() -> None:
            if not still_held(lease, outputs, top):
                raise needed_error(run, "another machine took it over", where=outputs.where(top))

        # Its locks exclude other processes of this machine. A run that another machine trained has no local
        # folder yet.
        folder.mkdir(parents=True, exist_ok=True)
        layout = RunLayout(folder)
        with hold_idle_run(layout), hold_training(layout, wait_s=0.0):
            try:
                is_held = lease.acquire_at_once(dead_version=self._dead_leases.get(run, ""))
            except OSError as err:
                raise outputs.error(f"run {run} cannot be deleted: {err}", top) from err
            if not is_held:
                raise needed_error(run, "another machine uses it", where=outputs.where(top))
            # A job that wants to train the run waits for the lease, and then starts the run again.
            with kept(lease):
                self._fetch_published()
                if reason := self._published(folder):
                    raise needed_error(run, reason, where=outputs.where(top))

                # A machine that trained the run since the survey has released its lease and left other files.
                versions = _files_by_run(outputs).get(run, _Files()).versions
                if versions != self._surveyed.get(run, _Files()).versions:
                    raise needed_error(run, "its files have changed", where=outputs.where(top))

                # The next gc recognizes the rest of an interrupted deletion by this missing file.
                outputs.remove(f"{top}/{_FIRST_DELETED}", guard=require_lease)
                # Markers are deleted first, so that a job which resumes the run in between finds complete
                # checkpoints or none.
                outputs.remove(*(f"{top}/{name}" for name in versions), guard=require_lease)
            delete_run_folder(folder)

    def _lease(self, run: str) -> Lease:
        return lease_at(self._outputs, f"runs/{run}/{LEASE_FILE}", doing=DELETING)

    def _read_leases(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Return version and content of each lease that another local folder holds, by run."""
        leases: dict[str, tuple[str, dict[str, Any]]] = {}
        for run, files in _files_by_run(self._outputs).items():
            if files.lease_ns is None:
                continue
            try:
                version, content = self._lease(run).read()
            except OSError as err:
                raise self._outputs.error(f"the leases of runs cannot be read: {err}", "runs") from err
            if content is not None and content.get("owner") != self._outputs.owner:
                leases[run] = version, content
        return leases

    def _runs_in_training(
        self, leases: Mapping[str, tuple[str, dict[str, Any]]], *, will_delete: bool
    ) -> dict[str, str]:
        """Return where runs are in use, by run, and remember the leases of dead machines."""
        now_ns = self._service_time_ns() if leases and will_delete else 0
        training: dict[str, str] = {}
        for run, (version, content) in leases.items():
            files = self._surveyed.get(run, _Files())
            # The rest of an interrupted deletion is of no use to a machine that has only been cut off.
            silence_s = STALE_S if content.get("doing") == DELETING else SILENCE_S
            if files.lease_ns and now_ns - files.lease_ns > silence_s * 1e9:
                self._dead_leases[run] = version
            else:
                training[run] = f"in use: {holder_text(content)}"
        here = (
            run
            for run in self._surveyed
            if is_being_trained(RunLayout(run_folder(self._outputs.folder, run)))
        )
        return training | dict.fromkeys(here, "being trained")

    def _service_time_ns(self) -> int:
        # The times of files are the service's, so the clock of this machine may not be compared with them.
        remote = self._outputs.remote
        try:
            remote.put(_CLOCK_FILE, b"")
            time_ns = stat_from_info(remote.info(_CLOCK_FILE))[1]
            remote.remove(_CLOCK_FILE)
        except OSError as err:
            raise self._outputs.error(f"the output folder cannot be written: {err}", _CLOCK_FILE) from err
        return time_ns

    def _fetch_published(self) -> None:
        # A LoRA without provenance hides which run it belongs to, so every run is kept.
        names = self._outputs.names(LORA_FOLDER)
        self._hides_run = bool(names) and _PROVENANCE not in names
        self._outputs.fetch(EXPORTED_STEP, _PROVENANCE)

    def _published(self, folder: Path) -> str:
        return f"{_PROVENANCE} does not exist" if self._hides_run else published_reason(folder)


def _files_by_run(outputs: OutputFolder) -> dict[str, _Files]:
    by_run: dict[str, _Files] = {}
    for name, info in outputs.infos("runs").items():
        _, run, *rest = PurePosixPath(name).parts
        if not rest or not is_run_id(run):
            continue

        files, name_in_run, stat = by_run.setdefault(run, _Files()), "/".join(rest), stat_from_info(info)
        if name_in_run == LEASE_FILE:
            files.lease_ns = stat[1]
            continue
        files.versions[name_in_run] = stat
        files.num_bytes += max(0, stat[0])
        files.changed_s = max(files.changed_s, stat[1] / 1e9)
    return by_run


def _state(folder: Path, files: _Files) -> str:
    finished = RunLayout(folder).finished
    num_steps = read_record(finished).get("steps") if finished.name in files.versions else None
    return training_state(num_steps, files.last_step)
