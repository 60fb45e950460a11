"""A variant of a sweep as a recipe of its own, which takes over the variant's run."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.errors import RecipeError
from pipeline.storage.checked_json import write_checked
from pipeline.storage.tables import Tables
from pipeline.trained_lora.export.lora_files import LAYOUTS, layout_file, native_file_name
from pipeline.trained_lora.run_folder import LORA_RECORD, RunLayout, hold_idle_run, read_record, run_folder

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

_LINKED = (".safetensors", ".pt")
"""Suffixes of large files, which no program changes in place."""

_LOCAL = ("lock", "training.lock", "stop_request")


@dataclass(frozen=True)
class SweepVariant:
    """A variant in the table of the last sweep.

    Attributes:
        run: Run of its first seed; empty if it could not be planned.
        settings: Values by recipe key, with the first seed if the sweep had several.
    """

    number: int
    run: str
    settings: dict[str, Any]


def find_variant(source: Recipe, number: int) -> SweepVariant:
    """Return a variant of the last sweep of `source`.

    Raises:
        RecipeError: The recipe was not swept, or its sweep had no such variant.
    """
    table = Tables(source.output_dir).read_previous("sweep")
    if table is None:
        raise RecipeError(
            f"the recipe {source.name} has no table of a sweep",
            where=str(source.output_dir / "tables"),
            fix=f"run the sweep first: latentline sweep {source.name}",
        )
    rows = table.filter(pl.col("variant") == number).sort("seed", "step")
    if rows.is_empty():
        numbers = ", ".join(map(str, table["variant"].unique().sort()))
        raise RecipeError(
            f"the last sweep of {source.name} had no variant {number}",
            where=f"--variant {number}",
            fix=f"use one of {numbers}",
        )
    row = rows.row(0, named=True)
    return SweepVariant(number, row["run"], json.loads(row["overrides"]))


def take_over_run(source: Recipe, variant: SweepVariant, target: Recipe) -> Path | None:
    """Give `target` the variant's run, and return its folder; None if the run does not exist.

    Weights become hard links to the same files where the file system supports them. The LoRA files get the
    name of the target.
    """
    before = RunLayout(run_folder(source.output_dir, variant.run))
    folder = run_folder(target.output_dir, variant.run)
    if not variant.run or not before.facts.is_file() or folder.exists():
        return None
    names = {layout_file(each, source.name): layout_file(each, target.name) for each in LAYOUTS}
    names[native_file_name(source.name)] = native_file_name(target.name)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with hold_idle_run(before):
        for path in sorted(before.folder.rglob("*")):
            name = path.relative_to(before.folder)
            if not path.is_file() or name.as_posix() in _LOCAL:
                continue
            copy = partial / name.with_name(names.get(name.name, name.name))
            copy.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(path, copy)
    for record in (RunLayout(partial).finished, *partial.glob(f"checkpoints/*/{LORA_RECORD}")):
        _rename_files(record, names)
    partial.rename(folder)
    return folder


def _link_or_copy(path: Path, copy: Path) -> None:
    if path.suffix in _LINKED:
        try:
            os.link(path, copy)
        except OSError:
            pass
        else:
            return
    shutil.copy2(path, copy)


def _rename_files(file: Path, names: dict[str, str]) -> None:
    """Replace the names of LoRA files in a record, which has them as keys or as values of `name`."""
    record = read_record(file)
    if not record:
        return
    for each in record.get("files", ()):
        each["name"] = names.get(each["name"], each["name"])
    if isinstance(record.get("sha256"), dict):
        record["sha256"] = {names.get(name, name): value for name, value in record["sha256"].items()}
    write_checked(file, record)
