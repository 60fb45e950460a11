"""Path isolation of a recipe: its datasets, side inputs, LoRA files, cache_dir and output_dir."""

from __future__ import annotations

import dataclasses
import json
import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.recipe.check_specs import ALL_SPECS
from pipeline.recipe.datasets import SIDE_INPUT_KEYS
from pipeline.recipe.packed import unpacked_folder
from pipeline.storage import isolation
from pipeline.storage.addresses import Url
from pipeline.storage.isolation import NamedPath, PathConflict

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

START_KEY = "training.lora.start_from"

CONTEXT_KEY = "model.context_lora.path"

# Without `runs`, because no run replaces the folder of another one.
REPLACED_FOLDERS = ("lora", "tables", "reports")
"""Folders in output_dir with files that runs replace."""


def check_isolation(recipe: Recipe) -> list[PathConflict]:
    """Return every conflict among the recipe's datasets, LoRA files, cache_dir and output_dir.

    LoRA files are `start_from` and `context_lora`. Two datasets may contain one another, and a LoRA file may
    be in a dataset. The folders need not exist.
    """
    conflicts = isolation.check_isolation(_inputs(recipe), _outputs(recipe))
    context = recipe.model.context_lora
    files = ((START_KEY, recipe.training.lora.start_from), (CONTEXT_KEY, context and context.path))
    lora_conflicts = [_lora_conflicts(recipe, key, file) for key, file in files if file is not None]
    return [*conflicts, *chain.from_iterable(lora_conflicts)]


def require_isolation(recipe: Recipe) -> None:
    """Raise PathIsolationError if two paths of the recipe overlap, or a run would replace its own input."""
    isolation.raise_conflicts(check_isolation(recipe), where=str(recipe.source))


def require_separate_folder(recipe: Recipe, key: str, folder: Path) -> None:
    """Raise PathIsolationError if `folder` overlaps the recipe's datasets, its cache or a folder of its runs.

    Other folders in output_dir are accepted. `key` is the option that sets the folder.
    """
    reports = [f"reports/{asset}" for asset in ALL_SPECS]
    used = [
        NamedPath(f"{name}/ of output_dir", f"output_dir, {name}/", recipe.output_dir / name)
        for name in ("lora", "tables", "runs", "reports/dataset", *reports)
    ]
    cache = NamedPath("cache_dir", "cache_dir", recipe.cache_dir)
    conflicts = isolation.check_isolation(
        [*_inputs(recipe), cache, *used], [NamedPath("the folder of the pictures", key, folder)]
    )
    isolation.raise_conflicts(conflicts, where=str(recipe.source))


def _inputs(recipe: Recipe) -> list[NamedPath]:
    # The shards themselves and not their folder, because nothing else in it is read.
    datasets = [
        NamedPath(f"dataset {dataset.name}", f"datasets[{index}].path", recipe.packed[dataset.name])
        if dataset.name in recipe.packed
        else NamedPath(f"dataset {dataset.name}", f"datasets[{index}].{dataset.root_key}", dataset.root)
        for index, dataset in enumerate(recipe.datasets)
    ]

    # Side inputs without a path are named in a column of a manifest, or are the images themselves.
    side_inputs = [
        NamedPath(
            f"{SIDE_INPUT_KEYS[kind]} of {dataset.name}", f"datasets[{index}].{key}.path", settings.path
        )
        for index, dataset in enumerate(recipe.datasets)
        for kind, key, settings in dataset.side_inputs
        if settings.path is not None
    ]

    previews = [
        NamedPath("a reference of a preview", f"training.sample_prompts[{index}].references[{number}]", path)
        for index, prompt in enumerate(recipe.training.sample_prompts)
        for number, path in enumerate(prompt.references)
    ]
    return datasets + side_inputs + previews


def _outputs(recipe: Recipe) -> list[NamedPath]:
    outputs = [
        NamedPath("cache_dir", "cache_dir", recipe.cache_dir),
        NamedPath("output_dir", "output_dir", recipe.registered_output),
    ]
    if isinstance(recipe.output_address, Url):
        outputs.append(NamedPath("the working copy of output_dir", "scratch", recipe.output_dir))

    # Datasets with the same shards share the folder.
    folders = {str(unpacked_folder(each)): each for each in recipe.datasets if each.name in recipe.packed}
    outputs += [
        NamedPath(f"the folder of unpacked images of {each.name}", "scratch", Path(folder))
        for folder, each in folders.items()
    ]
    return outputs


def _lora_conflicts(recipe: Recipe, key: str, file: Path) -> list[PathConflict]:
    named_file = NamedPath(key, key, file)
    with_cache = isolation.compare_paths(named_file, NamedPath("cache_dir", "cache_dir", recipe.cache_dir))
    conflicts = [] if with_cache is None else [with_cache]

    advice = f"set {key} to {_lasting_file(recipe, file)}, which no later run replaces"

    # Other files in output_dir are accepted, so that a recipe can continue from one of its own runs.
    for name in REPLACED_FOLDERS:
        label = f"{name}/ of output_dir, which runs replace"
        replaced = NamedPath(label, "output_dir", recipe.output_dir / name)
        if conflict := isolation.compare_paths(named_file, replaced):
            conflicts.append(dataclasses.replace(conflict, advice=advice))
    return conflicts


def _lasting_file(recipe: Recipe, start: Path) -> str:
    # A file in lora/ is a copy of the published run's file, which stays.
    runs, name = recipe.output_dir / "runs", Path(os.path.realpath(start)).name
    try:
        provenance = json.loads((recipe.output_dir / "lora" / "provenance.json").read_text(encoding="utf-8"))
        published = runs / str(provenance["run"]) / "lora" / name
    except (OSError, ValueError, KeyError, TypeError):
        published = None
    if published is not None and published.is_file():
        return str(published)
    return f"a file of a finished run, such as {runs}/<run>/lora/{name}"
