"""Where a LoRA comes from: a record beside it that names everything it was made of."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.families import Use
from pipeline.tables import ASSETS, Tables

if TYPE_CHECKING:
    from pipeline.entries import Entries
    from pipeline.recipe import Recipe
    from pipeline.training.facts import Facts

PACKAGES = ("latentline", "accelerate", "diffusers", "numpy", "peft", "safetensors", "torch", "transformers")

_USES: tuple[Use, ...] = ("latents", "text", "denoiser")


def provenance(recipe: Recipe, entries: Entries, facts: Facts, result: dict[str, Any]) -> dict[str, Any]:
    """The record of a finished run, JSON-serialisable.

    Names the run and its facts, the recipe, the sha256 of each table that led to it, the base model's
    fingerprints, package versions, and the files. The images and captions, with their hashes, are the rows of
    the table that lies beside it.
    """
    tables = Tables(recipe.output_dir)
    digests = {asset: _sha256(tables.path(asset)) for asset in ASSETS if asset != "trained_lora"}
    return {
        "run": result["run"],
        "steps": result["steps"],
        "facts": facts,
        "recipe": recipe.model_dump(mode="json"),
        "tables_sha256": digests,
        "model": {
            "base": recipe.model.base,
            "revision": recipe.model.revision,
            "fingerprints": {use: entries.fingerprint(use) for use in _USES},
        },
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "device": result["device"],
        "files": result["files"],
    }


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
