"""A base model with the parts that need torch; the entry point for worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.models.families import Family as WorkerFamily
from pipeline.models.families import detect

__all__ = ["WorkerFamily", "load_family"]


def load_family(folder: Path, elsewhere: Mapping[str, Path] | None = None) -> WorkerFamily:
    """Return the family of a diffusers folder with its torch side; no weights are loaded yet.

    Args:
        folder: Folder that holds `model_index.json`.
        elsewhere: Folders of the components that are not taken from there.

    Raises:
        FamilyError: See `pipeline.models.families.detect`.
        ModelError: See `pipeline.models.families.detect`.
    """
    return detect(folder, elsewhere)
