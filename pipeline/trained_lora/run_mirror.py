"""A training run with its output folder at an address: one machine at a time trains it, others can resume it.

A run lives in the working copy. While it trains, a thread uploads each complete checkpoint with the logs and
previews so far; the marker of a checkpoint is uploaded last. At its start, a run pulls what it lacks, and of
the checkpoints only the newest complete one.

    runs/<run>/lease    held by the machine that trains the run; exists only at the address
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import LatentlineError, LaunchError, TrainingError
from pipeline.recipe.outputs import PUBLISHED_FILES, mirror_of
from pipeline.storage.lease import Lease, holder_text
from pipeline.trained_lora.export.earlier_step import exported_step
from pipeline.trained_lora.export.publish import read_finished
from pipeline.trained_lora.fingerprint import file_sha256
from pipeline.trained_lora.publishing import hold_lease_at, publishing
from pipeline.trained_lora.run_folder import ADAPTER_FILE, MARKER, OPTIMIZER_FILE, RunLayout

if TYPE_CHECKING:
    from pipeline.processes.launch import Launch, Meanwhile
    from pipeline.recipe import Recipe
    from pipeline.storage.mirror import Mirror

LEASE_FILE = "lease"

_STATE_FILES = (MARKER, OPTIMIZER_FILE, ADAPTER_FILE)
"""Files of a checkpoint that a run resumes from, in the order in which they are deleted."""

_POLL_S = 1.0

_PAUSE_AFTER_FAILURE_S = 30.0

Log = Callable[[str], None]


class RunMirror:
    """Uploads one run while it trains; for a local output folder it does nothing."""

    def __init__(self, recipe: Recipe, layout: RunLayout, log: Log) -> None:
        """Open nothing.

        Args:
            recipe: Recipe of the run.
            layout: The run's folder in the working copy.
            log: Receives warnings.
        """
        self._recipe = recipe
        self._layout = layout
        self._log = log
        self._top = f"runs/{layout.folder.name}"
        self.mirror: Mirror = mirror_of(recipe, log)
        self.lease: Lease | None = None

    def uploading(self, launch: Launch) -> Launch:
        """Return a `Launch` that also uploads what its processes write, until they have ended.

        A failed upload during the training is a warning, and is repeated. If the last one fails, the launch
        raises StoreError, unless the training has failed too. If another machine takes over the run, the
        processes stop after their current step, and the launch raises TrainingError.
        """
        if not self.mirror.is_remote:
            return launch

        def launch_and_upload(module: str, order: Path, meanwhile: Meanwhile | None = None) -> None:
            self._layout.stop_request.unlink(missing_ok=True)
            self._push()
            try:
                with self._uploads():
                    launch(module, order, meanwhile)
            except LaunchError as err:
                if self._is_lost:
                    raise self._lost_error() from err
                raise
            finally:
                self._layout.stop_request.unlink(missing_ok=True)

        return launch_and_upload

    def pull(self) -> None:
        """Pull the run's files, of its checkpoints only the one that the run resumes from.

        Raises:
            StoreError: The service does not answer.
        """
        if not self.mirror.is_remote:
            return
        lasting = (f"{self._top}/*", f"!{self._top}/{LEASE_FILE}", f"!{self._top}/checkpoints/*")
        self.mirror.pull(*lasting, "runs/*/run.json", *PUBLISHED_FILES)
        self.mirror.delete_missing(f"{self._top}/checkpoints/*")
        exported = exported_step(self._recipe.output_dir, self._layout.folder.name)
        if exported is not None:
            pull_step(self.mirror, self._layout, exported)

        local = self._undamaged_steps()
        steps = self._recipe.training.num_steps
        if read_finished(self._layout, steps=steps, recipe_name=self._recipe.name) is None:
            self._pull_newest_checkpoint(local, last_step=steps)

    @contextmanager
    def publishing(self) -> Generator[None]:
        """Push the run, then what the body publishes in `lora/`.

        Raises:
            StoreError: The service does not answer.
            TrainingError: Another machine took over the run.
        """
        if self.mirror.is_remote:
            self._push()
        with publishing(self.mirror, self._log, guard=self._require_lease):
            yield

    def push(self) -> None:
        """Push the run after all work.

        Raises:
            StoreError: The service does not answer.
            TrainingError: Another machine took over the run.
        """
        self._push()

    def delete_unpushed(self) -> None:
        """Delete what was not uploaded before another machine took over the run, so that it never will be.

        Otherwise, the next job on this machine would replace the files of the other one.
        """
        if self._is_lost:
            self.mirror.delete_unpushed(*self._pushed, *PUBLISHED_FILES)

    @property
    def _is_lost(self) -> bool:
        return self.lease is not None and self.lease.lost

    @property
    def _pushed(self) -> tuple[str, ...]:
        """Patterns of the run's files, without locks and the checkpoint of the pre-flight, only a test."""
        local = ("lock", "training.lock", "stop_request", "checkpoints/step-00000000/*")
        return (f"{self._top}/*", *(f"!{self._top}/{name}" for name in local))

    def _push(self) -> None:
        """Push all complete files of the run, then remove expired checkpoints at the address."""
        self._require_lease()
        self.mirror.push(*self._pushed, guard=self._require_lease)
        self._remove_expired()

    def _require_lease(self) -> None:
        """Read the lease before a change of the address.

        Raises:
            StoreError: The service does not answer.
            TrainingError: Another machine took over the run.
        """
        if self.lease is None:
            return
        try:
            is_held = self.lease.is_held()
        except OSError as err:
            name, what = f"{self._top}/{LEASE_FILE}", f"the output folder cannot be read: {err}"
            raise self.mirror.error(what, name, is_upload=True) from err
        if not is_held:
            raise self._lost_error()

    def _lost_error(self) -> TrainingError:
        return TrainingError(
            "another machine took over the run, because this one did not answer for too long; its training "
            "was stopped, and what it had not uploaded is deleted",
            where=self.mirror.where(self._top),
            fix="start the job again; it waits for the other machine, and then reuses its result",
        )

    def _undamaged_steps(self) -> set[int]:
        """Return the local steps to resume from, after deleting the state of damaged ones.

        A crash may have damaged them. They must neither be uploaded nor keep the good one from being pulled.
        """
        steps = self._local_steps()
        for step in sorted(steps):
            folder = self._layout.checkpoints / f"step-{step:08d}"
            if not _is_undamaged(folder):
                self._log(f"warning: deleted the damaged checkpoint {folder}")
                for name in _STATE_FILES:
                    (folder / name).unlink(missing_ok=True)
        return self._local_steps()

    def _local_steps(self) -> set[int]:
        return _steps(str(path) for path in self._layout.checkpoints.glob(f"step-*/{MARKER}"))

    def _pull_newest_checkpoint(self, local: set[int], *, last_step: int) -> None:
        for step in sorted(self._remote_steps(), reverse=True):
            if step > last_step:
                continue
            if any(step <= other <= last_step for other in local):
                return
            pull_step(self.mirror, self._layout, step, state=True)
            folder = self._layout.checkpoints / f"step-{step:08d}"
            if _is_undamaged(folder):
                return
            self._log(
                f"warning: skipped the damaged checkpoint {self.mirror.where(self._top)} of step {step}"
            )

    def _remote_steps(self) -> set[int]:
        return _steps(self.mirror.names(f"{self._top}/checkpoints/*/{MARKER}"))

    def _remove_expired(self) -> None:
        keep = self._recipe.training.keep_checkpoints
        local = self._local_steps()
        if keep is None or not local:
            return
        expired = sorted(step for step in self._remote_steps() if step <= max(local))[:-keep]
        folders = [f"{self._top}/checkpoints/step-{step:08d}" for step in expired]
        names = [f"{folder}/{name}" for folder in folders for name in _STATE_FILES]
        self.mirror.remove(*names, guard=self._require_lease)

    @contextmanager
    def _uploads(self) -> Generator[None]:
        """Upload new checkpoints during the body, and everything after it."""
        stop = threading.Event()
        thread = threading.Thread(target=self._follow, args=(stop,), name="uploads", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            stop.set()
            thread.join()
            self._push_or_warn()
            raise
        stop.set()
        thread.join()
        self._push()

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
                if self._push_or_warn():
                    uploaded = markers
                else:
                    next_attempt_s = time.monotonic() + _PAUSE_AFTER_FAILURE_S

    def _push_or_warn(self) -> bool:
        """Push; a failure is a warning, because it must not end or hide what happens to the training."""
        try:
            self._push()
        except (LatentlineError, OSError) as err:
            reason = err.what if isinstance(err, LatentlineError) else str(err)
            self._log(f"warning: the run is not uploaded yet: {reason}")
            return False
        return True

    def _markers(self) -> set[tuple[str, int]]:
        """Return name and time of the marker of each complete checkpoint, without that of the pre-flight."""
        markers = self._layout.checkpoints.glob(f"step-*/{MARKER}")
        return {
            (path.parent.name, path.stat().st_mtime_ns)
            for path in markers
            if path.parent.name != "step-00000000" and path.is_file()
        }


@contextmanager
def mirrored_run(recipe: Recipe, layout: RunLayout, log: Log) -> Generator[RunMirror]:
    """Provide a run whose files are pulled before the body and pushed after it, held by this machine.

    Raises:
        StoreError: The service does not answer.
        TrainingError: Another machine took over the run.
    """
    run = RunMirror(recipe, layout, log)
    if not run.mirror.is_remote:
        yield run
        return

    with hold_lease_at(run.mirror, f"runs/{layout.folder.name}/{LEASE_FILE}", log) as run.lease:
        try:
            run.pull()
            yield run
            run.push()
        finally:
            run.delete_unpushed()


def pull_step(mirror: Mirror, layout: RunLayout, step: int, *, state: bool = False) -> None:
    """Pull the LoRA files of a checkpoint, and with `state` also those that a run resumes from."""
    folder = f"runs/{layout.folder.name}/checkpoints/step-{step:08d}"
    excluded = () if state else tuple(f"!*/{name}" for name in _STATE_FILES)
    mirror.pull(f"{folder}/*", *excluded)


def require_idle_at_address(mirror: Mirror, run: str) -> None:
    """Raise TrainingError if another machine holds the run's lease.

    Raises:
        StoreError: The service does not answer.
        TrainingError: Names the machine.
    """
    if not mirror.is_remote:
        return
    name = f"runs/{run}/{LEASE_FILE}"
    lease = Lease(mirror.remote, name, copy_id=mirror.copy_id, log=lambda _line: None)
    try:
        current = lease.read()
    except OSError as err:
        raise mirror.error(f"the output folder cannot be read: {err}", name) from err
    if current is not None and current.get("copy") != mirror.copy_id:
        raise TrainingError(
            f"run {run} is in use: {holder_text(current)}, since {current.get('time')} at least",
            where=mirror.where(name),
            fix="wait until it has finished; if that machine has stopped for good, delete this file",
        )


def _steps(paths: Iterable[str]) -> set[int]:
    return {int(Path(path).parent.name.removeprefix("step-")) for path in paths} - {0}


def _is_undamaged(folder: Path) -> bool:
    """Return whether the files that a checkpoint's marker lists have the hashes stated there."""
    try:
        hashes: dict[str, str] = json.loads((folder / MARKER).read_text(encoding="utf-8"))["sha256"]
        return all(file_sha256(folder / name) == sha256 for name, sha256 in hashes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
