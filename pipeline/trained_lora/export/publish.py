"""A finished run: believing its files, marking it, and putting them where users look."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from pipeline.errors import TrainingError
from pipeline.storage.atomic import write_atomically, write_text
from pipeline.trained_lora.export.lora_files import LAYOUTS, PROVENANCE_FILE, SAMPLES_FILE, layout_file
from pipeline.trained_lora.export.model_card import CARD_FILE, SHEET_FILE
from pipeline.trained_lora.run_folder import RunLayout


def accept_result(layout: RunLayout, *, run: str, steps: int, recipe_name: str) -> dict[str, Any]:
    """The launched processes' result, with the size and sha256 of each file as found by this process.

    Raises:
        TrainingError: There is no result, it is of another run or plan, or a file is missing.
    """
    try:
        result = json.loads(layout.result.read_text(encoding="utf-8"))
        matches = result["run"] == run and result["steps"] == steps
        names = [item["name"] for item in result["files"]]
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise _no_result(layout.result, f"cannot be read: {err}") from err
    expected = [layout_file(each, recipe_name) for each in LAYOUTS]
    if not matches or names != expected:
        raise _no_result(layout.result, f"is of another run, plan or recipe: {result['run']}, {names}")
    for item in result["files"]:
        path = layout.exported / item["name"]
        if not path.is_file():
            raise _no_result(path, "is missing")
        item["bytes"] = path.stat().st_size
        item["sha256"] = file_sha256(path)
    return result


def mark_finished(layout: RunLayout, result: dict[str, Any]) -> None:
    """Leave the marker that lets the next materialization do nothing."""
    write_text(layout.finished, json.dumps(result, indent=2) + "\n")


def read_finished(layout: RunLayout, *, steps: int, recipe_name: str) -> dict[str, Any] | None:
    """The marker of a run finished at `steps`, its files being those it was marked with; else None."""
    try:
        finished = json.loads(layout.finished.read_text(encoding="utf-8"))
        files = {item["name"]: item["sha256"] for item in finished["files"]}
        same = finished["steps"] == steps and set(files) == {
            layout_file(each, recipe_name) for each in LAYOUTS
        }
        same = same and all(file_sha256(layout.exported / name) == sha256 for name, sha256 in files.items())
        beside = (PROVENANCE_FILE, SAMPLES_FILE, CARD_FILE)
        same = same and all((layout.exported / name).is_file() for name in beside)
        same = same and {"output_change", "loss_trend"} <= set(finished)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return finished if same else None


def publish(layout: RunLayout, lora: Path, finished: dict[str, Any]) -> list[str]:
    """Make `lora` hold the run's files, each replaced whole; what is the same already is left alone.

    The provenance record comes last: its hashes tell a reader whether the files beside it are all of one run.

    Returns:
        The names of the files that were replaced.
    """
    names = [item["name"] for item in finished["files"]]
    replaced: list[str] = []
    for name in (*names, SAMPLES_FILE, SHEET_FILE, CARD_FILE, PROVENANCE_FILE):
        source, target = layout.exported / name, lora / name
        if name == SHEET_FILE and not source.is_file():
            target.unlink(missing_ok=True)
            continue
        if target.is_file() and file_sha256(target) == file_sha256(source):
            continue
        _copy(source, target)
        replaced.append(name)
    return replaced


def copy_changed(source: Path, target: Path) -> None:
    """Make the folder `target` hold the files of `source`, each replaced whole if changed, and no others."""
    names = {path.name for path in source.iterdir()} if source.is_dir() else set[str]()
    for name in sorted(names):
        there = target / name
        if not there.is_file() or file_sha256(there) != file_sha256(source / name):
            _copy(source / name, there)
    for path in list(target.iterdir()) if target.is_dir() else []:
        if path.name not in names:
            path.unlink()


def file_sha256(path: Path) -> str:
    """Of the file's bytes, as hex digits.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as original:
        write_atomically(target, lambda file: shutil.copyfileobj(original, file))


def _no_result(path: Path, reason: str) -> TrainingError:
    fix = "materialize trained_lora again: it goes on from the last checkpoint"
    return TrainingError(
        f"training ended without a usable result: {path.name} {reason}", where=str(path), fix=fix
    )
