"""Choosing the LoRAs that `latentline sample` draws with: the published one, steps of a run, or a file."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.errors import DrawingError, counted
from pipeline.storage.regular_files import file_sha256
from pipeline.trained_lora.export.earlier_step import exportable_run
from pipeline.trained_lora.export.lora_files import (
    LORA_FOLDER,
    PROVENANCE_FILE,
    layout_file,
    lora_file,
)
from pipeline.trained_lora.pictures.job import LoraChoice
from pipeline.trained_lora.run_folder import (
    ADAPTER_FILE,
    LORA_RECORD,
    OPTIMIZER_FILE,
    RunLayout,
    lora_steps,
    read_record,
    run_folder,
)

Steps = tuple[int, ...] | Literal["all"]
"""Steps to draw; empty for the published or last one."""

_MAX_LISTED = 20

_FILE = layout_file("diffusers", "")


@dataclass(frozen=True)
class ChosenLoras:
    """LoRAs of one run, by ascending step unless the user listed them.

    `run` is None for a file that was given by its path.
    """

    run: str | None
    loras: tuple[LoraChoice, ...]


def choose_loras(output_dir: Path, run: str | None, steps: Steps) -> ChosenLoras:
    """Return the LoRAs of the requested steps.

    Without a run, it is the run of the published LoRA, or else the one with the newest checkpoint. Without
    steps, it is the published LoRA, or the last step of a requested run.

    Raises:
        DrawingError: The run or a step does not exist, or its file is damaged.
        TrainingError: No run has a LoRA.
    """
    if run is None and not steps and (published := _published(output_dir)):
        return published

    name = run or exportable_run(output_dir)
    layout = RunLayout(run_folder(output_dir, name))
    if not layout.facts.is_file():
        raise _no_such_run(output_dir, name)

    # No lock: checkpoints of a run that is being trained appear atomically, and their LoRA files never
    # change.
    folders = lora_steps(layout)
    if not folders:
        return _finished_without_checkpoints(layout, steps)
    numbers = list(folders) if steps == "all" else list(dict.fromkeys(steps)) or [max(folders)]
    for step in numbers:
        if step not in folders:
            raise _no_such_step(layout, step, list(folders))
    return ChosenLoras(name, tuple(LoraChoice(_undamaged(folders[step]), step) for step in numbers))


def choose_file(path: Path) -> ChosenLoras:
    """Return the LoRA file at `path`, or the diffusers one in that folder.

    Raises:
        DrawingError: The file is missing, is not a safetensors file, or is the state of a checkpoint.
    """
    from safetensors import SafetensorError, safe_open

    file = lora_file(path)
    if file.name == ADAPTER_FILE and file.with_name(OPTIMIZER_FILE).exists():
        raise DrawingError(
            "the file is the resume state of a run, not a LoRA",
            where=f"--lora {file}",
            fix=f"use {file.with_name(_FILE)}",
        )
    if not file.is_file():
        names = [each.name for each in file.parent.glob("*.safetensors")] if file.parent.is_dir() else []
        closest = difflib.get_close_matches(file.name, names, n=1)
        fix = f"did you mean {file.with_name(closest[0])}?" if closest else "pass a .safetensors file"
        raise DrawingError("the LoRA file does not exist", where=f"--lora {file}", fix=fix)
    try:
        # Opening reads the header, which is enough to refuse files of another format.
        with safe_open(file, framework="np") as opened:
            opened.keys()
    except (OSError, SafetensorError) as err:
        raise DrawingError(
            f"the LoRA file cannot be read: {err}",
            where=f"--lora {file}",
            fix="pass a complete .safetensors file, and make sure that your user may read it",
        ) from err
    return ChosenLoras(None, (LoraChoice(file.absolute()),))


def _published(output_dir: Path) -> ChosenLoras | None:
    file = output_dir / LORA_FOLDER / _FILE
    record = read_record(file.with_name(PROVENANCE_FILE))
    step = record.get("step", record.get("steps"))
    if not file.is_file() or "run" not in record or step is None:
        return None
    return ChosenLoras(str(record["run"]), (LoraChoice(file, int(step)),))


def _finished_without_checkpoints(layout: RunLayout, steps: Steps) -> ChosenLoras:
    # Checkpoints of Latentline 0.2 and earlier have no LoRA, so only the last step of a finished run can be
    # drawn.
    num_steps = read_record(layout.finished).get("steps")
    file = layout.exported / _FILE
    if num_steps is None or not file.is_file():
        raise DrawingError(
            f"run {layout.folder.name} has not saved a LoRA yet",
            where=str(layout.checkpoints),
            fix="wait for its first checkpoint, or choose another run with --run",
        )
    for step in () if steps == "all" else steps:
        if step != num_steps:
            raise _no_such_step(layout, step, [num_steps])
    return ChosenLoras(layout.folder.name, (LoraChoice(file, num_steps),))


def _undamaged(folder: Path) -> Path:
    file = folder / _FILE
    expected = read_record(folder / LORA_RECORD).get("sha256", {}).get(_FILE)
    if not file.is_file() or file_sha256(file) != expected:
        raise DrawingError(
            f"the LoRA of {folder.name} is damaged: {_FILE} is missing or changed after it was saved",
            where=str(file),
            fix="choose another step with --step",
        )
    return file


def _no_such_run(output_dir: Path, run: str) -> DrawingError:
    names = [path.parent.name for path in sorted((output_dir / "runs").glob("*/run.json"))]
    closest = difflib.get_close_matches(run, names, n=1)
    if closest:
        fix = f"did you mean {closest[0]}?"
    else:
        fix = f"use one of {', '.join(names[:_MAX_LISTED])}" if names else "train the recipe first"
    return DrawingError(f"the run {run} does not exist", where=str(output_dir / "runs"), fix=fix)


def _no_such_step(layout: RunLayout, step: int, steps: Sequence[int]) -> DrawingError:
    closest = min(steps, key=lambda each: (abs(each - step), each))
    listed = ", ".join(map(str, steps[:_MAX_LISTED])) + (", ..." if len(steps) > _MAX_LISTED else "")
    return DrawingError(
        f"run {layout.folder.name} did not save a LoRA at step {step}; the closest is step {closest}",
        where=str(layout.checkpoints),
        fix=f"use --step {closest}, or another of its {counted(len(steps), 'step')}: {listed}",
    )
