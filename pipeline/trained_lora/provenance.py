"""Where a LoRA comes from: a record in each of its files that names everything it was made of.

It is known before the first step, holds nothing volatile and no path that says where somebody's files lie.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from pipeline.models.families import Use
from pipeline.recipe import project_root
from pipeline.storage.tables import ASSETS, Tables

if TYPE_CHECKING:
    import polars as pl

    from pipeline.cache.requests import Entries
    from pipeline.recipe import Recipe
    from pipeline.trained_lora.fingerprint import Facts

PACKAGES = ("latentline", "accelerate", "diffusers", "numpy", "peft", "safetensors", "torch", "transformers")

MAX_LISTED = 5_000
"""Samples whose hashes stand in the files themselves; of more, the digest does, and the table beside them."""

_USES: tuple[Use, ...] = ("latents", "text", "denoiser")


def provenance(recipe: Recipe, entries: Entries, facts: Facts, table: pl.DataFrame) -> dict[str, Any]:
    """The record of a run, JSON-serialisable.

    Names the facts that the run's id is made of, the recipe, the sha256 of each table that led to it, the
    base model's fingerprints, package versions, and the sha256 of every image and caption trained on.

    Args:
        recipe: The run's.
        entries: Knows the fingerprints.
        facts: Of the run.
        table: Of trained_lora.
    """
    tables = Tables(recipe.output_dir)
    digests = {asset: _sha256(tables.path(asset)) for asset in ASSETS if asset != "trained_lora"}
    return {
        "recipe": shareable(recipe),
        "facts": facts,
        "samples": _samples(table),
        "tables_sha256": digests,
        "model": {
            "base": _shown(recipe.model.base),
            "revision": recipe.model.revision,
            "components": {role: _shown(named) for role, named in recipe.model.components.given().items()},
            "fingerprints": {use: entries.fingerprint(use) for use in _USES},
        },
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
    }


def shareable(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON, its absolute paths cut to what lies in the project, or to their last part."""
    values = recipe.model_dump(mode="json")
    for key in ("cache_dir", "output_dir", "source"):
        values[key] = _shown(values[key])
    for dataset in values["datasets"]:
        dataset["path"] = _shown(dataset["path"])
    model = values["model"]
    model["base"] = _shown(model["base"])
    model["components"] = {role: _shown(named) for role, named in model["components"].items()}
    return values


def _shown(path: str) -> str:
    if not PurePath(path).is_absolute():
        return path
    root = project_root()
    return (
        PurePath(path).relative_to(root).as_posix()
        if PurePath(path).is_relative_to(root)
        else PurePath(path).name
    )


def _samples(table: pl.DataFrame) -> dict[str, Any]:
    """How many there are, a digest over all, and the hashes of images and captions where they are few."""
    rows = table.filter(table["split"] == "train").select("content_hash", "caption_hashes").rows()
    lines = sorted(f"{image} {captions}" for image, captions in rows)
    samples: dict[str, Any] = {
        "number": len(rows),
        "sha256": hashlib.sha256("\n".join(lines).encode("ascii")).hexdigest(),
    }
    if len(rows) <= MAX_LISTED:
        samples["images"] = _distinct(image for image, _ in rows)
        samples["captions"] = _distinct(each for _, captions in rows for each in captions.split())
    return samples


def _distinct(hashes: Iterable[str]) -> list[str]:
    return sorted(set(hashes))


def _sha256(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
