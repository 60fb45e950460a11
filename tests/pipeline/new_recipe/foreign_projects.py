"""Datasets of other trainers, and the recipes which `latentline new` makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import CliRunner
from PIL import Image

from pipeline.cli.new import command as new
from pipeline.cli.validate import command as validate
from pipeline.recipe import Recipe, load_recipe


def images(folder: Path, number: int, *suffixes: str) -> Path:
    """Write images, and for each suffix the caption file of one of them; the last suffix has the others."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(number):
        Image.new("RGB", (8, 8), (index, 0, 0)).save(folder / f"{index}.png")
        if suffixes:
            suffix = suffixes[min(index, len(suffixes) - 1)]
            (folder / f"{index}{suffix}").write_text("a red rose", encoding="utf-8")
    return folder


def taken_over(configs: Path, source: Path, *options: str) -> tuple[Recipe, str]:
    """Return the validated recipe for `source`, and the output of the command."""
    arguments = ["roses", "--images", str(source), *options]
    output = CliRunner().invoke(new, arguments, catch_exceptions=False).output
    file = configs / "roses.yaml"
    assert CliRunner().invoke(validate, [str(file)], catch_exceptions=False).exit_code == 0
    return load_recipe(file), output


def as_dict(recipe: Recipe, index: int = 0) -> dict[str, Any]:
    """Return the keys of a dataset that the recipe sets; those of `captions` in a nested dictionary."""
    return recipe.datasets[index].model_dump(mode="json", exclude_unset=True)


def directories(*names: str, **settings: str) -> str:
    """Return the TOML text of diffusion-pipe's directories; each setting has one value per directory."""
    text = ""
    for index, name in enumerate(names):
        text += f"[[directory]]\npath = '{name}'\n"
        text += "".join(f"{key} = {values.split(';')[index]}\n" for key, values in settings.items())
    return text
