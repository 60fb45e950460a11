"""Checkpoints: folders that appear whole, and are believed only after their hashes are checked.

    checkpoints/step-00000500/
        adapter.safetensors    the LoRA's weights, float32, by peft's names
        optimizer.pt           states of optimizer, schedule and gradient scaler
        COMPLETE               {"step": 500, "run": ..., "sha256": {file name: hash}}, written last

The folder is written under another name, synced and renamed. A number is that of the optimizer steps done.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
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
from pipeline.storage.atomic import TEMP_SUFFIX, sync_file, sync_folder
from pipeline.storage.os_errors import attach_path

MARKER = "COMPLETE"
ADAPTER_FILE = "adapter.safetensors"
OPTIMIZER_FILE = "optimizer.pt"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class TrainingState:
    """All that a run needs to go on, beside its plan.

    Attributes:
        step: Optimizer steps done.
        adapter: The LoRA's weights by peft's names, float32 on the CPU.
        optimizer: State dicts by name: "optimizer", "schedule", and "scaler" where there is one.
    """

    step: int
    adapter: dict[str, Tensor]
    optimizer: dict[str, Any]


def checkpoint_path(folder: Path, step: int) -> Path:
    """`folder/step-<step, eight digits>`."""
    return folder / f"step-{step:08d}"


def save_checkpoint(folder: Path, run: str, state: TrainingState) -> Path:
    """Write `state` below `folder`; a checkpoint of that step that lies there is replaced.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: It could not be written, and `filename` is its folder; what was there before still is.
    """
    final = checkpoint_path(folder, state.step)
    temp = folder / f".{final.name}-{os.getpid()}-{secrets.token_hex(4)}{TEMP_SUFFIX}"
    temp.mkdir(parents=True)
    try:
        # Python's own file, because torch's does not say why it cannot be written
        with attach_path(final), (temp / OPTIMIZER_FILE).open("wb") as file:
            save_file(state.adapter, temp / ADAPTER_FILE)
            torch.save(state.optimizer, file)
        hashes = {name: _synced_hash(temp / name) for name in (ADAPTER_FILE, OPTIMIZER_FILE)}
        marker = {"step": state.step, "run": run, "sha256": hashes}
        (temp / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        sync_file(temp / MARKER)
        if final.exists():
            final.rename(temp.with_name(f"{temp.name}-before"))
        temp.rename(final)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    sync_folder(folder)
    shutil.rmtree(temp.with_name(f"{temp.name}-before"), ignore_errors=True)
    return final


def remove_leftovers(folder: Path) -> None:
    """Delete what killed processes left half-written; only while no other process trains this run."""
    for path in folder.glob(f".step-*{TEMP_SUFFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def prune_checkpoints(folder: Path, *, keep: int, newest: int) -> list[int]:
    """Delete all but the last `keep` checkpoints up to step `newest`, oldest first; their steps.

    One is renamed before it is deleted, so that a torn one is never taken for a checkpoint.
    """
    steps = sorted(int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))
    old = [step for step in steps if step <= newest][:-keep]
    for step in old:
        path = checkpoint_path(folder, step)
        away = folder / f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}{TEMP_SUFFIX}"
        path.rename(away)
        shutil.rmtree(away, ignore_errors=True)
    return old


def load_checkpoint(path: Path, run: str) -> TrainingState:
    """The state in `path`, after its marker and hashes are checked.

    Raises:
        TrainingError: It is torn, damaged, or another run's.
    """
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
        expected: dict[str, str] = marker["sha256"]
        step = int(marker["step"])
        whose = marker["run"]
        wrong = [name for name, sha256 in expected.items() if _hash(path / name) != sha256]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise _invalid(path, f"it has no readable {MARKER} and files: {err}") from err
    if set(expected) != {ADAPTER_FILE, OPTIMIZER_FILE} or path.name != checkpoint_path(path, step).name:
        raise _invalid(path, f"its {MARKER} names other files or another step")
    if whose != run:
        raise _invalid(path, f"it belongs to run {whose}, not to {run}")
    if wrong:
        raise _invalid(path, f"{', '.join(wrong)} has other bytes than when it was saved")
    adapter = load_file(path / ADAPTER_FILE)
    optimizer = torch.load(path / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
    return TrainingState(step=step, adapter=adapter, optimizer=optimizer)


def newest_checkpoint(
    folder: Path, run: str, *, last_step: int, log: Callable[[str], None]
) -> TrainingState | None:
    """The newest valid checkpoint of `run` at or before `last_step`; None when there is none.

    What is torn or damaged is passed over, and named through `log` (FAILURES R07).
    """
    if not folder.is_dir():
        return None
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    for step, path in sorted(found, reverse=True):
        if step > last_step:
            continue
        try:
            return load_checkpoint(path, run)
        except TrainingError as err:
            log(f"passed over a checkpoint: {err.what} ({err.where})")
    return None


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _synced_hash(path: Path) -> str:
    sync_file(path)
    return _hash(path)


def _invalid(path: Path, reason: str) -> TrainingError:
    fix = "delete the folder; training goes on from the checkpoint before it"
    return TrainingError(f"the checkpoint cannot be used: {reason}", where=str(path), fix=fix)
