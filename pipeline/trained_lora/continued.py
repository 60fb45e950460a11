"""Continuing a run after a change of its data: its weights, optimizer and step count go on in a new run.

The id of the new run contains the run and step that it continues (`FACT`). Its folder gets a copy of the
checkpoint, so that it resumes like any other run, also after it was stopped.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import TrainingError
from pipeline.storage.atomic import sync_file, write_text
from pipeline.trained_lora.differences import describe_difference
from pipeline.trained_lora.export.lora_files import layout_file
from pipeline.trained_lora.fingerprint import run_id
from pipeline.trained_lora.job import JOB_FILE
from pipeline.trained_lora.recipe_facts import Facts
from pipeline.trained_lora.run_folder import (
    ADAPTER_FILE,
    MARKER,
    OPTIMIZER_FILE,
    RunLayout,
    checkpoint_name,
    checkpoints_with,
    read_metrics,
    read_record,
    require_run,
    run_folder,
)

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

FACT = "continues"
"""Key in the facts and in the provenance of a run that continues another one."""

LATEST = "latest"
"""Name of the run that trained last, instead of its id."""

_MAY_DIFFER = ("samples", "empty_text", "plan", "loss", "noise", "guidance", "quantize", "compile")
"""Sections of facts that a checkpoint does not depend on.

The other sections decide the shapes of its state, which also contains the learning rate.
"""

_OPTIMIZER_MAY_DIFFER = ("max_grad_norm",)


@dataclass(frozen=True)
class Continued:
    """A run that is continued, and the number of steps that it has done."""

    run: str
    step: int


def choose_continued(recipe: Recipe, facts: Facts, wanted: str) -> Continued | None:
    """Return the run and step to continue; None if nothing has changed, so that the run itself resumes.

    `facts` are those of the recipe's run as it would be without a run before it. `wanted` is the id of a run,
    or `LATEST`. A run that already continues the wanted one is resumed.

    Raises:
        TrainingError: The run is missing, has no checkpoint that fits, or other settings than the recipe.
    """
    by_run = dict(_runs(recipe.output_dir))
    for run, of_run in by_run.items():
        before = of_run.get(FACT)
        is_same = run_id({**facts, FACT: before} if before else facts) == run
        if is_same and wanted in (LATEST, run, *([before["run"]] if before else [])):
            return Continued(**before) if before else None
        if wanted == LATEST:
            break

    run = next(iter(by_run), "") if wanted == LATEST else wanted
    layout = RunLayout(run_folder(recipe.output_dir, run))
    if not run:
        raise TrainingError(
            "there is no run to continue", where=str(layout.folder), fix="run the recipe without --continue"
        )
    require_run(layout)
    _require_equal_settings(layout, by_run.get(run, {}), facts)
    steps = [step for step in checkpoints_with(layout, MARKER) if 0 < step < recipe.training.num_steps]
    if not steps:
        raise TrainingError(
            f"run {run} has no checkpoint with its optimizer state before step {recipe.training.num_steps:,}",
            where=str(layout.checkpoints),
            fix="raise training.steps, which counts the steps of both runs, or continue another run",
        )
    return Continued(run, max(steps))


def _runs(output_dir: Path) -> Iterator[tuple[str, Facts]]:
    """Yield id and facts of each run, the newest first."""
    files = sorted(output_dir.glob("runs/*/run.json"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for file in files:
        try:
            yield file.parent.name, json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # a damaged record is of no use here
            continue


def _require_equal_settings(layout: RunLayout, before: Facts, after: Facts) -> None:
    differences = [text for text in describe_difference(_state_facts(before), _state_facts(after)) if text]
    if not differences:
        return
    folder = max(checkpoints_with(layout, MARKER).values(), default=layout.checkpoints)
    raise TrainingError(
        f"run {layout.folder.name} cannot be continued with other settings: {'; '.join(differences)}",
        where=str(layout.folder),
        fix="set these values as in that run, or begin with its weights alone: "
        f"training.lora.start_from: {folder / layout_file('diffusers', '')}",
    )


def _state_facts(facts: Facts) -> Facts:
    """Return the facts that the state of a checkpoint depends on."""
    kept = {name: value for name, value in facts.items() if name not in (*_MAY_DIFFER, FACT)}
    optimizer: Mapping[str, Any] = kept.get("optimizer", {})
    kept["optimizer"] = {
        name: value for name, value in optimizer.items() if name not in _OPTIMIZER_MAY_DIFFER
    }
    return kept


def continued_record(recipe: Recipe, continued: Continued) -> dict[str, Any]:
    """Return what the provenance says about the run that is continued: its data, and what it continued."""
    job = read_record_of_job(run_folder(recipe.output_dir, continued.run) / JOB_FILE)
    earlier = job.get("provenance", {})
    record = {**asdict(continued), "samples": earlier.get("samples", {"number": 0})}
    return {**record, FACT: earlier[FACT]} if FACT in earlier else record


def read_record_of_job(file: Path) -> dict[str, Any]:
    """Return the values of a job's file; empty if it is missing or damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def prepare_continued(layout: RunLayout, continued: Continued) -> None:
    """Copy the checkpoint and losses of the continued run to a new run's folder, unless they are there.

    Raises:
        OSError: A file cannot be read or written.
    """
    copy_checkpoint(RunLayout(layout.folder.with_name(continued.run)), continued.step, layout)


def copy_checkpoint(source: RunLayout, step: int, layout: RunLayout) -> None:
    """Copy a checkpoint of a run and the losses before it to another run's folder, unless they are there.

    Raises:
        OSError: A file cannot be read or written.
    """
    name = checkpoint_name(step)
    final = layout.checkpoints / name
    if final.is_dir():
        return

    # Complete under a temporary name, as `save_checkpoint` writes it. LoRA files would name another run.
    temp = layout.checkpoints / f".{name}-{os.getpid()}.tmp"
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir(parents=True)
    for file in (ADAPTER_FILE, OPTIMIZER_FILE):
        shutil.copyfile(source.checkpoints / name / file, temp / file)
    record = read_record(source.checkpoints / name / MARKER)
    (temp / MARKER).write_text(
        json.dumps({**record, "run": layout.folder.name}, indent=2) + "\n", encoding="utf-8"
    )
    for file in temp.iterdir():
        sync_file(file)

    # The losses come first, because a run with a checkpoint is never prepared again.
    for before, after, last in (
        (source.metrics, layout.metrics, step),
        (source.validation, layout.validation, step + 1),
    ):
        if lines := read_metrics(before, last):
            write_text(after, "".join(f"{json.dumps(line)}\n" for line in lines))
    temp.rename(final)
