"""Restrictions on recipes from strangers, for CI that runs the recipes of pull requests.

With `LATENTLINE_UNTRUSTED=1`, a recipe may name no import path, no address and no path outside the project.
SECURITY.md lists the limits of this variable.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipeline.recipe.datasets import side_input_sections
from pipeline.recipe.errors import Mistake
from pipeline.recipe.optimizer_classes import OPTIMIZERS
from pipeline.recipe.settings import one_of
from pipeline.storage.addresses import is_url

if TYPE_CHECKING:
    from pipeline.recipe.yaml_document import KeyPath

UNTRUSTED_VARIABLE = "LATENTLINE_UNTRUSTED"
"""Environment variable; 1 refuses recipes that run code or leave the project, 0 or nothing accepts them."""


_INSIDE = "use a path relative to the project, without links out of it"


def is_untrusted() -> bool:
    """Return True if recipes come from strangers."""
    # Any value other than an empty one and 0 counts, so that a misspelled `true` does not disable the test.
    return os.environ.get(UNTRUSTED_VARIABLE, "").strip() not in ("", "0")


def untrusted_mistakes(data: Mapping[str, Any], root: Path) -> list[Mistake]:
    """Return a mistake for each import path, address and folder outside of the project in a valid recipe."""
    mistakes = [
        _refused(path, f"{_name(path)} must be a folder inside the project, got {problem}", _INSIDE)
        for path, value in _places(data)
        if (problem := _outside(value, root)) is not None
    ]

    # Importing a module runs its code.
    optimizer = _section(data, "training").get("optimizer")
    if optimizer is not None and optimizer not in OPTIMIZERS:
        what = f"training.optimizer must be {one_of(OPTIMIZERS)}, got the import path {optimizer}"
        mistakes.append(_refused(("training", "optimizer"), what, f"use {one_of(OPTIMIZERS)}"))
    return mistakes


def link_mistake(file: Path, folder: Path) -> Mistake | None:
    """Return a mistake if a recipe is a link out of `folder`."""
    # Messages could show the text of its target.
    real = Path(os.path.realpath(file))
    if real.is_relative_to(os.path.realpath(folder)):
        return None
    return _refused((), "the recipe must be a file in its folder, got a link out of it", "copy the file")


def _places(data: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    # "." stands for an absent key: the project root is always accepted.
    for index, dataset in enumerate(data["datasets"]):
        for key in ("path", "images"):
            yield ("datasets", index, key), dataset.get(key) or "."
        for key, section in side_input_sections(dataset):
            yield ("datasets", index, *key, "path"), section.get("path") or "."
    for key in ("cache_dir", "output_dir"):
        yield (key,), data.get(key) or "."
    for index, prompt in enumerate(_section(data, "training").get("sample_prompts") or []):
        for number, path in enumerate(_references(prompt)):
            yield ("training", "sample_prompts", index, "references", number), path
    yield ("training", "lora", "start_from"), _section(data, "training", "lora").get("start_from") or "."

    # A Hub id has the form of a relative path.
    yield ("model", "base"), _section(data, "model")["base"]
    yield ("model", "training_adapter"), _section(data, "model").get("training_adapter") or "."
    for role, source in _section(data, "model", "components").items():
        yield ("model", "components", role), source or "."


def _references(prompt: str | Mapping[str, Any]) -> Sequence[str]:
    return () if isinstance(prompt, str) else prompt.get("references") or ()


def _outside(text: str, root: Path) -> str | None:
    if is_url(text):
        return "an address"

    # The real path, because a repository can hold a link that leads out of it.
    real = Path(os.path.realpath(root / Path(text).expanduser()))
    return None if real.is_relative_to(os.path.realpath(root)) else text


def _section(data: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    section: Any = data
    for name in names:
        section = section.get(name) or {}
    return cast("Mapping[str, Any]", section)


def _name(path: KeyPath) -> str:
    return str(path[-1])


def _refused(path: KeyPath, what: str, fix: str) -> Mistake:
    return Mistake(path, f"{what}, because {UNTRUSTED_VARIABLE} is set", fix)
