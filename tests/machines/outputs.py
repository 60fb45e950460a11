"""The outputs of a recipe, as the test sees them: copied from an address, and compared with others."""

from __future__ import annotations

from pathlib import Path

import fsspec
import polars as pl
from safetensors.torch import load_file
from torch import Tensor

from assets.metadata import VOLATILE_COLUMNS
from pipeline.recipe.check_specs import SPECS

TABLES = (*SPECS, "rejected")


def downloaded(address: str, folder: Path) -> Path:
    """Copy all files at an address to a new folder, and return it."""
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.get(address, str(folder), recursive=True)
    return folder


def names_at(address: str) -> list[str]:
    """Return the sorted names of all files at an address, relative to it."""
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    top = address.removeprefix("s3://")
    files.invalidate_cache()
    return sorted(name.removeprefix(f"{top}/") for name in files.find(top))


def table(outputs: Path, asset: str) -> pl.DataFrame:
    """Return a table without the columns that hold stats of files."""
    frame = pl.read_parquet(outputs / "tables" / f"{asset}.parquet")
    stats = [name for name in frame.columns if name.removeprefix("entry_") in VOLATILE_COLUMNS]
    return frame.drop(stats)


def lora(outputs: Path) -> dict[str, Tensor]:
    """Return the tensors of all exported files, by file and key."""
    files = sorted((outputs / "lora").glob("*.safetensors"))
    assert len(files) == 3, "one file of each layout"
    return {f"{file.name}: {key}": value for file in files for key, value in load_file(file).items()}
