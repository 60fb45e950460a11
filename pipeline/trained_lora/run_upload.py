"""A training run with its output folder at an address: one machine at a time trains it, others can resume it.

runs/<run>/lease    held by the machine that trains the run; exists only at the address
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.background import in_background
from pipeline.errors import LatentlineError, LaunchError, TrainingError
from pipeline.log import Log
from pipeline.outputs.folder import OutputFolder, outputs_of
from pipeline.outputs.lease import Lease, hold_lease, holder_text, lease_at, still_held
from pipeline.outputs.lora_lock import hold_lora
from pipeline.outputs.stage_files import EXPORTED_STEP
from pipeline.storage.regular_files import file_sha256
from pipeline.trained_lora.differences import latest_other_run
from pipeline.trained_lora.export.earlier_step import exported_step
from pipeline.trained_lora.export.lora_files import SAMPLES_FILE, lora_file_names
from pipeline.trained_lora.export.publish import read_finished
from pipeline.trained_lora.run_folder import (
    MARKER,
    STATE_FILES,
    RunLayout,
    checkpoint_name,
    complete_steps,
    hold_idle_run,
    run_folder,
)

if TYPE_CHECKING:
    from pipeline.processes.launch import Launch, Meanwhile
    from pipeline.recipe import Recipe

LEASE_FILE = "lease"

# Locks and requests between processes of this machine.
_LOCAL_FILES = ("lock", "training.lock", "stop_request")

_PREFLIGHT = f"checkpoints/{checkpoint_name(0)}/"
"""Checkpoint of the pre-flight, which is only a test."""

_POLL_S = 1.0

_PAUSE_AFTER_FAILURE_S = 30.0


class RunUpload:
    """Fetches one run and uploads it while it trains; for a local output folder it does nothing."""

    def __init__(
        self, recipe: Recipe, layout: RunLayout, outputs: OutputFolder, lease: Lease | None, log: Log
    ) -> None:
        self._recipe = recipe
        self._layout = layout
        self._outputs = outputs
        self._lease = lease
        self._log = log
        self._top = f"runs/{layout.folder.name}"
        self._sent: dict[str, tuple[int, int]] = {}

    def uploading(self, launch: Launch) -> Launch:
        """Return a `Launch` that also uploads what its processes write, until they have ended.

        A failed upload during the training is a warning, and is repeated. If the last one fails, the launch
        raises StoreError. If another machine takes over the run, the launch raises TrainingError.
        """
        if not self._outputs.is_remote:
            return launch

        def launch_and_upload(module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
            # An attempt that lost its lease may have left a request, which would stop this one.
            self._layout.stop_request.unlink(missing_ok=True)
            self.upload()
            try:
                with self._uploads():
                    launch(module, job_file, meanwhile)
            except LaunchError as err:
                if self._is_lost:
                    raise self._lost_error() from err
                raise
            finally:
                self._layout.stop_request.unlink(missing_ok=True)

        return launch_and_upload

    def fetch(self) -> None:
        """Fetch the run's files, of its checkpoints only the one that the run resumes from."""
        # The log compares a new run with the recipe's newest other run: its facts and its samples.
        infos = self._outputs.infos("runs")
        others = {name: info for name, info in infos.items() if name.endswith("/run.json")}
        self._outputs.fetch_listed(others)
        if (latest := latest_other_run(self._layout)) is not None and f"{self._top}/run.json" not in infos:
            samples = f"runs/{latest.folder.name}/{SAMPLES_FILE}"
            self._outputs.fetch_listed({name: info for name, info in infos.items() if name == samples})
        infos = {name: info for name, info in infos.items() if name.startswith(f"{self._top}/")}

        self._delete_damaged_state()
        if not self._is_up_to_date(infos):
            self._fetch_state(infos)
        self._note_uploaded(infos)
        self._outputs.fetch(EXPORTED_STEP)
        exported = exported_step(self._recipe.output_dir, self._layout.folder.name)
        if exported is not None:
            fetch_lora(self._outputs, self._layout, exported.step)

    @contextmanager
    def publishing(self) -> Generator[None]:
        """Upload the run, then what the body writes to `lora/`."""
        self.upload()
        with hold_lora(self._outputs, self._log, guard=self._require_lease):
            yield

    def upload(self) -> None:
        """Upload all files of the run that changed, then delete expired checkpoints at the address.

        Raises:
            TrainingError: Another machine took over the run.
        """
        if not self._outputs.is_remote:
            return
        self._require_lease()
        changed = {name: stat for name, stat in self._local_stats().items() if self._sent.get(name) != stat}
        self._outputs.upload(*changed, guard=self._require_lease)
        self._sent |= changed
        self._remove_expired()

    @property
    def _is_lost(self) -> bool:
        return self._lease is not None and self._lease.lost

    def _require_lease(self) -> None:
        # Read before each change of the address: a machine that took over the run may have replaced these
        # files.
        if self._lease is not None and not still_held(
            self._lease, self._outputs, f"{self._top}/{LEASE_FILE}"
        ):
            raise self._lost_error()

    def _lost_error(self) -> TrainingError:
        return TrainingError(
            "another machine took over the run, because this one did not answer for too long; its training "
            "was stopped, and nothing more is uploaded",
            where=self._outputs.where(self._top),
            fix="start the job again; it waits until that machine has finished, and then reuses its result",
        )

    def _delete_damaged_state(self) -> None:
        # Before the comparison with the address: damaged state must neither be used nor be uploaded.
        for step in sorted(self._local_steps()):
            folder = self._folder_of(step)
            if not _is_undamaged(folder):
                self._log(f"warning: deleted the damaged checkpoint {folder}")
                for name in STATE_FILES:
                    (folder / name).unlink(missing_ok=True)

    def _is_up_to_date(self, infos: Mapping[str, Any]) -> bool:
        """Return whether the local run is at least as far as the run at the address."""
        finished = f"{self._top}/{self._layout.finished.name}"
        local_finished = self._read_finished()
        if finished in infos:
            # A run that finished with fewer steps is a place to resume from, like a checkpoint.
            data = self._outputs.read(finished)
            if _steps_in(data) == self._num_steps:
                return local_finished is not None and data == self._layout.finished.read_bytes()
        # A finished run that could not be uploaded is further than any checkpoint.
        if local_finished is not None:
            return True

        local = max(self._within_plan(self._local_steps()), default=0)
        remote = max(self._within_plan(complete_steps(infos)), default=0)
        if local != remote or remote == 0:
            return local >= remote

        # Checkpoints of one step from two machines are interchangeable, but their files must not be mixed.
        marker = f"{_checkpoint_at(self._layout, remote)}/{MARKER}"
        return self._outputs.read(marker) == (self._layout.folder.parents[1] / marker).read_bytes()

    def _fetch_state(self, infos: Mapping[str, Mapping[str, Any]]) -> None:
        self._outputs.fetch_listed(_without_checkpoints(self._top, infos))

        # A finished run is never resumed, so its checkpoints stay at the address until a command needs one.
        if self._read_finished() is not None:
            return

        for step in sorted(self._within_plan(complete_steps(infos)), reverse=True):
            top = f"{_checkpoint_at(self._layout, step)}/"
            files = {name: info for name, info in infos.items() if name.startswith(top)}
            self._outputs.fetch_listed(files)
            if _is_undamaged(self._folder_of(step)):
                return
            self._log(f"warning: deleted the damaged checkpoint {self._outputs.where(top)}")

            # Otherwise each machine that resumes the run would fetch this checkpoint and reject it again.
            self._outputs.remove(*files, guard=self._require_lease)
            # Fetching files that no longer exist at the address deletes the local copies.
            self._outputs.fetch_listed(files)

    def _note_uploaded(self, infos: Mapping[str, Mapping[str, Any]]) -> None:
        finished = f"{self._top}/{self._layout.finished.name}"
        is_same_run = (
            finished in infos
            and self._layout.finished.is_file()
            and self._outputs.read(finished) == self._layout.finished.read_bytes()
        )
        # A checkpoint never changes after it was written, so equal sizes mean that it is complete there.
        stats = self._local_stats()
        incomplete = {
            name.rpartition("/")[0]
            for name, (num_bytes, _) in stats.items()
            if name not in infos or infos[name].get("size") != num_bytes
        }
        for name, stat in stats.items():
            never_changes = is_same_run or name.startswith(f"{self._top}/checkpoints/")
            if never_changes and name.rpartition("/")[0] not in incomplete:
                self._sent[name] = stat

    def _local_stats(self) -> dict[str, tuple[int, int]]:
        excluded = (f"{self._top}/{_PREFLIGHT}", *(f"{self._top}/{name}" for name in _LOCAL_FILES))
        stats: dict[str, tuple[int, int]] = {}
        for name in self._outputs.local_names(f"{self._top}/"):
            if not name.startswith(excluded):
                with suppress(FileNotFoundError):  # an old checkpoint is pruned meanwhile
                    stat = (self._outputs.folder / name).stat()
                    stats[name] = stat.st_size, stat.st_mtime_ns
        return stats

    @property
    def _num_steps(self) -> int:
        return self._recipe.training.num_steps

    def _read_finished(self) -> dict[str, Any] | None:
        return read_finished(self._layout, steps=self._num_steps, names=lora_file_names(self._recipe))

    def _within_plan(self, steps: Iterable[int]) -> set[int]:
        return {step for step in steps if step <= self._num_steps}

    def _folder_of(self, step: int) -> Path:
        return self._layout.checkpoints / checkpoint_name(step)

    def _local_steps(self) -> set[int]:
        return complete_steps(self._layout.checkpoints.glob(f"*/{MARKER}"))

    def _remove_expired(self) -> None:
        keep = self._recipe.training.keep_checkpoints
        local = self._local_steps()
        if keep is None or not local:
            return

        # As in `prune_checkpoints`, later checkpoints than the newest local one do not count: a longer run
        # with this id can resume from them.
        names = self._outputs.names(f"{self._top}/checkpoints")
        expired = sorted(step for step in complete_steps(names) if step <= max(local))[:-keep]
        folders = [_checkpoint_at(self._layout, step) for step in expired]
        state = [f"{folder}/{name}" for folder in folders for name in STATE_FILES]
        self._outputs.remove(*state, guard=self._require_lease)

    @contextmanager
    def _uploads(self) -> Generator[None]:
        try:
            with in_background(self._follow, name="uploads"):
                yield
        except BaseException:
            # Another machine can then resume from what was trained before the error.
            self._upload_or_warn()
            raise
        self.upload()

    def _follow(self, stop: threading.Event) -> None:
        uploaded = self._markers()
        next_attempt_s = 0.0
        while not stop.wait(_POLL_S):
            if self._is_lost:
                # Repeatedly, because a training that starts deletes an old request.
                self._layout.stop_request.touch()
                continue
            markers = self._markers()
            if markers - uploaded and time.monotonic() >= next_attempt_s:
                if self._upload_or_warn():
                    uploaded = markers
                else:
                    next_attempt_s = time.monotonic() + _PAUSE_AFTER_FAILURE_S

    def _upload_or_warn(self) -> bool:
        # It must not end the training, or hide its error.
        try:
            self.upload()
        except (LatentlineError, OSError) as err:
            reason = err.what if isinstance(err, LatentlineError) else str(err)
            self._log(f"warning: the run is not uploaded yet: {reason}")
            return False
        return True

    def _markers(self) -> set[tuple[str, tuple[int, int]]]:
        return {(name, stat) for name, stat in self._local_stats().items() if name.endswith(f"/{MARKER}")}


@contextmanager
def uploaded_run(recipe: Recipe, layout: RunLayout, log: Log) -> Generator[RunUpload]:
    """Provide a run that is fetched before the body and uploaded after it, held by this machine.

    Raises:
        TrainingError: Another machine took over the run.
    """
    outputs = outputs_of(recipe, log)
    if not outputs.is_remote:
        yield RunUpload(recipe, layout, outputs, None, log)
        return

    with hold_lease(outputs, f"runs/{layout.folder.name}/{LEASE_FILE}", log) as lease:
        run = RunUpload(recipe, layout, outputs, lease, log)
        run.fetch()
        yield run
        run.upload()


def fetch_lora(outputs: OutputFolder, layout: RunLayout, step: int) -> None:
    """Fetch the LoRA files of a checkpoint, without the state that a run resumes from."""
    top = _checkpoint_at(layout, step)
    state = {f"{top}/{name}" for name in STATE_FILES}
    outputs.fetch_listed({name: info for name, info in outputs.infos(top).items() if name not in state})


def fetch_run(outputs: OutputFolder, run: str) -> None:
    """Fetch the files of a run, without its checkpoints."""
    top = f"runs/{run}"
    outputs.fetch_listed(_without_checkpoints(top, outputs.infos(top)))


def require_idle_at_address(outputs: OutputFolder, run: str) -> None:
    """Raise TrainingError, which names the machine, if another machine holds the run's lease."""
    if not outputs.is_remote:
        return
    name = f"runs/{run}/{LEASE_FILE}"
    try:
        _, current = lease_at(outputs, name).read()
    except OSError as err:
        raise outputs.error(f"the output folder cannot be read: {err}", name) from err
    if current is not None and current.get("owner") != outputs.owner:
        raise TrainingError(
            f"run {run} is in use: {holder_text(current)}, since {current.get('time')} at least",
            where=outputs.where(name),
            fix="wait until it has finished; if that machine has stopped for good, delete this file",
        )


@contextmanager
def replacing_lora(recipe: Recipe, run: str, log: Log, *, step: int | None = None) -> Generator[None]:
    """Hold a run that nobody trains and `lora/` for the body, which publishes a LoRA of the run.

    With outputs at an address, the files of the run and the LoRA of `step` are fetched before the body, and
    `lora/` is uploaded after it.

    Raises:
        StoreError: The service does not answer.
        TrainingError: The run does not exist, or is being trained.
    """
    outputs, layout = outputs_of(recipe, log), RunLayout(run_folder(recipe.output_dir, run))

    # At an address, another machine may be training the run, and files here may be older than files there.
    require_idle_at_address(outputs, run)
    fetch_run(outputs, run)
    if step is not None:
        fetch_lora(outputs, layout, step)
    with hold_idle_run(layout), hold_lora(outputs, log):
        yield


def _without_checkpoints(top: str, infos: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    excluded = (f"{top}/checkpoints/", f"{top}/{LEASE_FILE}")
    return {name: info for name, info in infos.items() if not name.startswith(excluded)}


def _checkpoint_at(layout: RunLayout, step: int) -> str:
    return f"runs/{layout.folder.name}/checkpoints/{checkpoint_name(step)}"


def _steps_in(finished: bytes) -> int | None:
    try:
        return int(json.loads(finished)["steps"])
    except (ValueError, KeyError, TypeError):
        return None


def _is_undamaged(folder: Path) -> bool:
    try:
        hashes: dict[str, str] = json.loads((folder / MARKER).read_text(encoding="utf-8"))["sha256"]
        return all(file_sha256(folder / name) == sha256 for name, sha256 in hashes.items())
    # A damaged marker may hold any JSON, or none.
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
