"""The folder of one training run: its layout, its lock and its metrics files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from filelock import FileLock, Timeout

from pipeline.errors import TrainingError
from pipeline.storage.checked_json import read_checked

Metrics = dict[str, Any]
"""Parsed line of a metrics file.

Keys are `step` (from 0), `epoch`, `samples`, `loss`, `learning_rate`, `grad_norm`, `seconds`, `memory_bytes`.
"""

MARKER = "COMPLETE"
"""File in the folder of each checkpoint that a run can resume from, with the hashes of its state."""

ADAPTER_FILE = "adapter.safetensors"
"""File in the folder of a checkpoint with the trained weights under peft's names."""

OPTIMIZER_FILE = "optimizer.pt"
"""File in the folder of a checkpoint with the state of optimizer and learning-rate scheduler."""

STATE_FILES = (MARKER, OPTIMIZER_FILE, ADAPTER_FILE)
"""Files of a checkpoint that a run resumes from, in the order in which they are deleted."""

LORA_RECORD = "lora.json"
"""File in the folder of each checkpoint that holds LoRA files, with their hashes."""

TRAINING_LOCK_S = 30.0
"""Longest wait of a training for the end of the run's earlier training, which may still be stopping."""

_POLL_S = 0.5

_CHECKPOINT = re.compile(r"step-(\d{8,})")


def run_folder(output_dir: Path, run: str) -> Path:
    """Return `output_dir/runs/<run>`."""
    return output_dir / "runs" / run


class RunLayout:
    """Paths in the folder of a run; neither reads nor creates any of them.

    Attributes:
        facts: Facts that the run's id is a hash of, as JSON.
        result: Result that the worker reports.
        finished: Marker of a finished run: the result with the hash of each exported file.
        lock: Lock file, held by the step that trains the run.
        training_lock: Lock file, held by the training process that writes the folder.
        stop_request: File that makes the training process stop after its current step if it exists.
        exported: Folder of this run's LoRA files, from which they are published.
        metrics: JSON lines, one per step.
        sample_losses: JSON lines, one per step: `losses` and `timesteps` of its samples, in the order of the
            plan. `samples` holds their indices among the trained inputs, from 0.
        validation: JSON lines, one per measurement: `step` (number of steps done), `loss`, `by_level`,
            `by_image` (in the order of the held-out inputs; absent in runs of 0.3.0 and earlier), and with
            pairs `trained_loss` and `gap`, see `worker/paired_validation.py`.
        report: Folder of the finished run's pictures and tables.
        last_good: Folder of the LoRA files from before a failed step; absent if no step failed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = folder / "run.json"
        self.result = folder / "result.json"
        self.finished = folder / "finished.json"
        self.lock = folder / "lock"
        self.training_lock = folder / "training.lock"
        self.stop_request = folder / "stop_request"
        self.checkpoints = folder / "checkpoints"
        self.exported = folder / "lora"
        self.metrics = folder / "logs" / "metrics.jsonl"
        self.sample_losses = folder / "logs" / "sample_losses.jsonl"
        self.validation = folder / "logs" / "validation.jsonl"
        self.previews = folder / "samples"
        self.report = folder / "report"
        self.last_good = folder / "last_good_lora"


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint's folder, the step with at least eight digits: `step-00000500`."""
    return f"step-{step:08d}"


def checkpoint_step(folder: PurePath) -> int | None:
    """Return the step in a checkpoint's name; None for other folders, such as temporary ones."""
    match = _CHECKPOINT.fullmatch(folder.name)
    return None if match is None else int(match[1])


def checkpoints_with(layout: RunLayout, file: str) -> dict[int, Path]:
    """Return the folder of each checkpoint that holds `file`, by step in ascending order."""
    folders = [path.parent for path in layout.checkpoints.glob(f"*/{file}")]
    numbered = ((checkpoint_step(folder), folder) for folder in folders)
    return dict(sorted((step, folder) for step, folder in numbered if step is not None))


def complete_steps(files: Iterable[str | PurePath]) -> set[int]:
    """Return the steps of complete checkpoints; `files` contains their markers."""
    steps = {checkpoint_step(file.parent) for file in map(PurePath, files) if file.name == MARKER}
    # Step 0 is the checkpoint of the pre-flight, which is only a test.
    return {step for step in steps if step}


@contextmanager
def hold_run(layout: RunLayout, log: Callable[[str], None]) -> Generator[None]:
    """Hold the run's lock for the body, after waiting for a process that already trains the run."""
    layout.folder.mkdir(parents=True, exist_ok=True)
    # The kernel releases the lock when its process ends, however it ends (FAILURES O08). Filelock's fallback,
    # a file that only a regular exit removes, would outlive a killed process.
    lock = FileLock(layout.lock, poll_interval=_POLL_S, fallback_to_soft=False)
    try:
        held = lock.acquire(blocking=False)
    except Timeout:
        log(f"another process is training this run; waiting for it to finish ({layout.lock})")
        held = lock.acquire()
    with held:
        yield


@contextmanager
def hold_training(layout: RunLayout, wait_s: float = TRAINING_LOCK_S) -> Generator[None]:
    """Hold the lock of the only process that writes the run's folder, rank 0 of a training, for the body.

    Raises:
        TrainingError: Another training of the run is active.
    """
    layout.folder.mkdir(parents=True, exist_ok=True)
    # The lock of `hold_run` does not exclude it, because the step that holds it may run on another machine.
    lock = FileLock(layout.training_lock, poll_interval=_POLL_S, fallback_to_soft=False)
    try:
        held = lock.acquire(timeout=wait_s)
    except Timeout as err:
        raise TrainingError(
            f"run {layout.folder.name} is already being trained",
            where=str(layout.training_lock),
            fix="stop the other training, for example an earlier job of the scheduler, or wait until it ends",
        ) from err
    with held:
        # A request that an earlier training has left would stop this one at once.
        layout.stop_request.unlink(missing_ok=True)
        yield


def require_run(layout: RunLayout) -> None:
    """Raise TrainingError, which names the existing runs, if the run does not exist."""
    if layout.folder.is_dir():
        return
    names = ", ".join(path.parent.name for path in sorted(layout.folder.parent.glob("*/run.json")))
    raise TrainingError(
        f"the run {layout.folder.name} does not exist",
        where=str(layout.folder.parent),
        fix=f"choose one of {names}" if names else "train the recipe first",
    )


@contextmanager
def hold_idle_run(layout: RunLayout) -> Generator[None]:
    """Hold the run's lock for the body.

    Raises:
        TrainingError: The run does not exist, or another process is training it.
    """
    require_run(layout)
    lock = FileLock(layout.lock, fallback_to_soft=False)
    try:
        held = lock.acquire(blocking=False)
    except Timeout as err:
        raise TrainingError(
            f"run {layout.folder.name} is being trained, and replaces lora/ when it finishes",
            where=str(layout.lock),
            fix=f"wait until it has finished, stop it, or use the files in {layout.checkpoints}/step-*",
        ) from err
    with held:
        yield


def is_being_trained(layout: RunLayout) -> bool:
    """Return whether a process holds one of the run's locks."""
    return _is_held(layout.lock) or _is_held(layout.training_lock)


def _is_held(file: Path) -> bool:
    if not file.is_file():
        return False
    # The file exists without a holder too, so only an attempt shows whether a process holds it.
    lock = FileLock(file, fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    lock.release()
    return False


def read_record(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file is missing or damaged."""
    try:
        return read_checked(path)
    except (OSError, ValueError):
        return {}


def checkpoint_list(layout: RunLayout) -> list[dict[str, Any]]:
    """Return the `step` and total `bytes` of each complete checkpoint, newest first."""
    rows: list[dict[str, Any]] = []
    for step, folder in reversed(checkpoints_with(layout, MARKER).items()):
        files = [path for path in folder.rglob("*") if path.is_file()]
        rows.append({"step": step, "bytes": sum(path.stat().st_size for path in files)})
    return rows


def lora_steps(layout: RunLayout) -> dict[int, Path]:
    """Return the folder of each checkpoint with LoRA files, by step in ascending order."""
    return checkpoints_with(layout, LORA_RECORD)


def read_metrics(path: Path, num_steps: int) -> list[Metrics]:
    """Return the last complete line of each step below `num_steps`, sorted by step."""
    if not path.is_file():
        return []
    by_step: dict[int, Metrics] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            metrics = json.loads(line)
            # The file is append-only, and a run that resumes writes some steps again: the last line counts.
            by_step[int(metrics["step"])] = metrics
        except (ValueError, KeyError, TypeError):
            # A crash can tear a line; the resumed run writes the step again.
            continue
    return [by_step[step] for step in sorted(by_step) if step < num_steps]
