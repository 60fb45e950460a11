"""The recipe of `make demo`, with all its folders below one folder."""

from __future__ import annotations

from pathlib import Path

from demo import photographs
from pipeline.recipe.load import project_root

PLACES = {"data/demo": "photos", ".cache/latentline": "cache", "outputs/demo": "out"}
"""Folder below the copy, by the folder in the demo's recipe."""


def copy_demo(folder: Path, model: Path) -> Path:
    """Write the demo's photographs and `configs/demo.yaml` below `folder`, and return the recipe's file.

    Args:
        folder: An existing folder.
        model: Folder of the tiny base model.
    """
    text = (project_root() / "configs" / "demo.yaml").read_text("utf-8")
    replacements = {place: folder / name for place, name in PLACES.items()} | {"models/tiny-sd": model}
    for place, target in replacements.items():
        assert f" {place}" in text
        text = text.replace(f" {place}", f" {target}")

    file = folder / "configs" / "demo.yaml"
    file.parent.mkdir()
    file.write_text(text, encoding="utf-8")
    photographs.write_photographs(folder / "photos")
    return file
