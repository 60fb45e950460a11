"""Measure the peak memory of planning a cold cache of many samples, up to the start of the encoder.

    python -m tests.pipeline.encoding.planning_memory <base model> <folder> <kind> <count>...

prints the peak memory of each planning in bytes, beyond the process with the stage's input table loaded.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import sys
from pathlib import Path
from typing import Any

import polars as pl

from pipeline.processes.launch import Meanwhile
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.storage.tables import SCHEMAS, Tables
from pipeline.text_embeddings.stage import cache_text
from pipeline.vae_latents.stage import cache_latents

VALUES: dict[Any, Any] = {pl.String: "x", pl.Int32: 64, pl.Int64: 1, pl.Float64: 0.5, pl.Boolean: False}


class PlannedError(Exception):
    """Raised where the encoder would start."""


def main(base: str, folder: Path, kind: str, count: int) -> None:
    """Plan one stage and print the peak memory."""
    recipe = recipe_of(base, folder / str(count))
    table = table_of("aspect_buckets" if kind == "latents" else "validated_dataset", count)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
    before = memory("VmRSS")
    stage = cache_latents if kind == "latents" else cache_text
    try:
        stage(recipe, table, Tables(recipe.output_dir), launch=launch, log=lambda _: None)
    except PlannedError:
        sys.stdout.write(f"{memory('VmHWM') - before}\n")


def launch(module: str, encoding: Path, meanwhile: Meanwhile) -> None:
    """Stop the stage once planning has finished; see `Launch`."""
    meanwhile()
    raise PlannedError


def memory(field: str) -> int:
    """Return a memory field of /proc/self/status in bytes."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


def recipe_of(base: str, folder: Path) -> Recipe:
    """Return a recipe with an empty cache."""
    fields = {
        "datasets": [{"name": "photos", "path": str(folder / "photos")}],
        "cache_dir": str(folder / "cache"),
        "output_dir": str(folder / "out"),
        "model": {"base": base},
        "buckets": {"resolution": 64, "step": 16},
    }
    return recipe_from_mapping("sample", fields)


def table_of(asset: str, count: int) -> pl.DataFrame:
    """Return a table of `count` samples with distinct images and captions."""
    constant = {name: VALUES[kind] for name, kind in SCHEMAS[asset].items()}
    constant |= {"dataset": "photos", "bucket": "64x64", "more_captions": "[]", "crop_top": 0, "crop_left": 0}
    names = [f"picture-{number:07}.jpg" for number in range(count)]
    distinct = {"sample_id": [f"photos/{name}" for name in names], "path": names}
    distinct["content_hash"] = [hashlib.sha256(name.encode()).hexdigest() for name in names]
    distinct["caption"] = [f"picture {number}: {'several words more, ' * 4}" for number in range(count)]
    columns = {name: distinct.get(name, [constant[name]] * count) for name in SCHEMAS[asset]}
    return pl.DataFrame(columns, schema=SCHEMAS[asset])


if __name__ == "__main__":
    model, folder, kind, *counts = sys.argv[1:]
    for count in counts:
        main(model, Path(folder), kind, int(count))
