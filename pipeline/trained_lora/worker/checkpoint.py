"""Checkpoints: folders that appear atomically and are trusted only after their hashes are verified.

    checkpoints/step-00000500/
        adapter.safetensors    the LoRA's weights, float32, under peft's names
        optimizer.pt           states of the optimizer, the schedule and the gradient scaler
        <LoRA files>           the LoRA of this step in each layout, with averaged weights if the run has them
        lora.json              {"step": 500, "run": ..., "sha256": {LoRA file name: hash}}
        COMPLETE               {"step": 500, "run": ..., "sha256": {file name: hash}}, written last

A folder is written under a temporary name, synced and renamed. Its number counts the optimizer steps done.

Pruning a checkpoint removes COMPLETE and the files that it lists. The LoRA files stay. Checkpoints of step 0,
and checkpoints that Latentline 0.2 or earlier saved, have no LoRA files.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.errors import TrainingError
from pipeline.storage.atomic import TEMP_SUFFIX, allow_readers, sync_file, sync_folder
from pipeline.storage.os_errors import attach_path
from pipeline.storage.regular_files import file_sha256
from pipeline.trained_lora.run_folder import (
    ADAPTER_FILE,
    LORA_RECORD,
    MARKER,
    OPTIMIZER_FILE,
    STATE_FILES,
    checkpoint_name,
    checkpoint_step,
)


@dataclass(frozen=True)
class TrainingState:
    """Everything that a run needs to resume, except its plan.

    Attributes:
        step: Number of optimizer steps done.
        adapter: The LoRA's weights under peft's names, float32 on the CPU.
        optimizer: State dicts under "optimizer" and "schedule", and under "scaler" and "ema" if they exist.
    """

    step: int
    adapter: dict[str, Tensor]
    optimizer: dict[str, Any]


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return `folder/step-<step>`, the step with at least eight digits."""
    return folder / checkpoint_name(step)


def save_checkpoint(
    folder: Path, run: str, state: TrainingState, *, export: Callable[[Path], object] | None = None
) -> Path:
    """Write `state` below `folder`, replace an existing checkpoint of that step, and return its folder.

    `export` writes the LoRA files of this step into an empty folder and verifies them. An error leaves an
    existing checkpoint unchanged.

    Raises:
        OSError: Writing failed; `filename` is the checkpoint's folder.
        TrainingError: `export` failed.
    """
    final = checkpoint_path(folder, state.step)
    temp = _temp_path(final)
    replaced = temp.with_name(f"{temp.name}-before")
    temp.mkdir(parents=True)
    try:
        with attach_path(final):
            if export is not None:
                export(temp)

                # The record lists the LoRA files only, so it is written before the training state.
                lora_files = sorted(path.name for path in temp.iterdir())
                _write_record(temp / LORA_RECORD, run, state.step, lora_files)

            # torch.save gets an open file, because given a path it hides the reason of a failed write.
            with (temp / OPTIMIZER_FILE).open("wb") as file:
                save_file(state.adapter, temp / ADAPTER_FILE)
                allow_readers(temp / ADAPTER_FILE)
                torch.save(state.optimizer, file)

        # The marker comes last: a folder without it is not a checkpoint.
        _write_record(temp / MARKER, run, state.step, [ADAPTER_FILE, OPTIMIZER_FILE])
        for path in temp.iterdir():
            sync_file(path)

        # A folder cannot be replaced atomically, so the previous checkpoint is moved aside first.
        if final.exists():
            final.rename(replaced)
        temp.rename(final)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise

    # The rename must be on the disk before the replaced checkpoint is deleted.
    sync_folder(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def _write_record(path: Path, run: str, step: int, names: list[str]) -> None:
    hashes = {name: file_sha256(path.with_name(name)) for name in names}
    record = {"step": step, "run": run, "sha256": hashes}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def remove_leftovers(folder: Path) -> None:
    """Delete the partial checkpoints of killed processes; no other process may train the run meanwhile."""
    for path in folder.glob(f".*{TEMP_SUFFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def prune_checkpoints(folder: Path, *, keep: int, newest: int) -> list[int]:
    """Delete the training state of old checkpoints, and return their steps.

    The newest `keep` checkpoints up to step `newest` keep their state, and so do all later ones. Checkpoints
    without LoRA files are deleted completely.
    """
    # A folder with LoRA files alone has no state left to prune, and must not count towards `keep`.
    steps = sorted(step for step, path in _checkpoints(folder) if not _holds_only_lora(path))
    expired = [step for step in steps if step <= newest][:-keep]
    for step in expired:
        path = checkpoint_path(folder, step)

        # The LoRA files stay, so that users can choose among the LoRAs of all steps.
        if (path / LORA_RECORD).is_file():
            # The marker is removed first: without it, the folder is not a checkpoint to resume from.
            for name in STATE_FILES:
                (path / name).unlink(missing_ok=True)
            continue

        # Renamed first: a partially deleted folder must not look like a checkpoint.
        temp = _temp_path(path)
        path.rename(temp)
        shutil.rmtree(temp, ignore_errors=True)
    return expired


def load_checkpoint(path: Path, run: str) -> TrainingState:
    """Verify the checkpoint's marker and hashes, and load it.

    Raises:
        TrainingError: The checkpoint is incomplete, damaged, or belongs to another run.
    """
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
        hashes: dict[str, str] = marker["sha256"]
        step, marker_run = int(marker["step"]), marker["run"]
        damaged = [name for name, sha256 in hashes.items() if file_sha256(path / name) != sha256]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise _invalid(path, f"{MARKER} or a file that it lists is not readable: {err}") from err

    # The names must match, or a file to be loaded below would not be verified.
    if set(hashes) != {ADAPTER_FILE, OPTIMIZER_FILE} or path.name != checkpoint_path(path, step).name:
        raise _invalid(path, f"its {MARKER} lists other files or another step")
    if marker_run != run:
        raise _invalid(path, f"it belongs to run {marker_run}, not to {run}")
    if damaged:
        raise _invalid(path, f"{', '.join(damaged)} changed after it was saved")

    adapter = load_file(path / ADAPTER_FILE)

    # `weights_only`, because a checkpoint may come from another machine, and a pickle can run code.
    optimizer = torch.load(path / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
    return TrainingState(step=step, adapter=adapter, optimizer=optimizer)


def newest_checkpoint(
    folder: Path, run: str, *, last_step: int, log: Callable[[str], None]
) -> TrainingState | None:
    """Load the newest valid checkpoint of `run` at or before `last_step`; return None without one."""
    if not folder.is_dir():
        return None
    for step, path in sorted(_checkpoints(folder), reverse=True):
        # A longer run may have the same id, and may have left later checkpoints.
        if step > last_step or _holds_only_lora(path):
            continue
        try:
            return load_checkpoint(path, run)
        except TrainingError as err:
            # An older checkpoint costs some steps, but a damaged one must not end the run (FAILURES R07).
            log(f"skipped a checkpoint: {err.what} ({err.where})")
    return None


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    return [(step, path) for path in folder.iterdir() if (step := checkpoint_step(path)) is not None]


def _holds_only_lora(path: Path) -> bool:
    return (path / LORA_RECORD).is_file() and not (path / MARKER).exists()


def _temp_path(path: Path) -> Path:
    return path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}{TEMP_SUFFIX}")


def _invalid(path: Path, reason: str) -> TrainingError:
    return TrainingError(
        f"the checkpoint is invalid: {reason}",
        where=str(path),
        fix="delete the folder; training resumes from the checkpoint before it",
    )
