"""Copies of the demo in a folder of their own, with changed settings; tests and generated pages use them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from demo.concept_pictures import write_pictures
from demo.learned import Learned, load_pipeline, measure
from pipeline.recipe import Recipe, in_project, load_recipe
from pipeline.recipe.project import project_root

PLACES = {"data/demo": "pictures", ".cache/latentline": "cache", "outputs/demo": "out"}
"""Folder below the copy, by the folder in the demo's recipe."""


def copy_demo(folder: Path) -> Path:
    """Write the demo's pictures and `configs/demo.yaml` below `folder`, and return the recipe's file.

    Args:
        folder: An existing folder. The base model stays in the project.
    """
    text = (project_root() / "configs" / "demo.yaml").read_text("utf-8")
    for place, name in PLACES.items():
        assert f" {place}" in text
        text = text.replace(f" {place}", f" {folder / name}")

    file = folder / "configs" / "demo.yaml"
    file.parent.mkdir()
    file.write_text(text, encoding="utf-8")
    write_pictures(folder / "pictures")
    return file


def changed_demo(folder: Path, **sections: Any) -> Recipe:
    """Copy the demo and change its recipe.

    Args:
        folder: An existing folder.
        sections: Values by top-level key of the recipe. A mapping changes only the keys that it contains.
    """
    file = copy_demo(folder)
    values = yaml.safe_load(file.read_text("utf-8"))
    file.write_text(json.dumps(_merged(values, sections)), encoding="utf-8")
    return load_recipe(file)


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in changes.items():
        section = merged.get(name, {})
        is_section = isinstance(value, Mapping) and isinstance(section, Mapping)
        merged[name] = _merged(section, value) if is_section else value
    return merged


def shuffle_captions(pictures: Path) -> None:
    """Exchange the captions of all pictures below a folder at random."""
    files = sorted(pictures.rglob("*.txt"))
    captions = [file.read_text("utf-8") for file in files]
    random.Random(0).shuffle(captions)
    for file, caption in zip(files, captions, strict=True):
        file.write_text(caption, encoding="utf-8")


def teach(recipe: Recipe) -> Learned:
    """Run the recipe's job in this process, and return the scores before and after.

    The scores and the pictures are also written into the recipe's output folder.
    """
    from assets.definitions import build_definitions

    job = build_definitions([recipe]).resolve_job_def(f"{recipe.name}_train")
    job.execute_in_process()
    pipeline = load_pipeline(in_project(recipe.model.base))
    return measure(pipeline, recipe.output_dir / "lora", recipe.output_dir)
