"""Take over the datasets of another trainer's configuration file; foreign_datasets.toml maps the settings."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import DatasetError, counted
from pipeline.maintenance.foreign_configs import candidate_paths, read_config
from pipeline.maintenance.image_folders import scan_folder
from pipeline.maintenance.recipe_draft import DatasetDraft, RecipeDraft
from pipeline.recipe.other_trainers import terms_by_trainer

_DATASET = "datasets."

_NOT_SET = (None, "", False, 0, [], {})
"""Values of settings that have no effect."""


@dataclass
class _Converted:
    """One dataset's settings.

    Attributes:
        keys: Recipe keys, such as `datasets.repeats`, with their values.
        taken: The trainer's settings that became these keys.
        lost: Lines about other settings, with the reason.
    """

    keys: dict[str, Any] = field(default_factory=dict[str, Any])
    taken: dict[str, Any] = field(default_factory=dict[str, Any])
    lost: list[str] = field(default_factory=list[str])


def draft_from_config(file: Path) -> RecipeDraft:
    """Return the datasets of another trainer's configuration file, and a report of what is taken over.

    Raises:
        DatasetError: The file cannot be read, has an unknown form, or none of its datasets can be used.
    """
    config = read_config(file)
    draft = RecipeDraft(f"{config.trainer} configuration {file}")
    common: dict[str, list[Any]] = {}
    for number, entry in enumerate(config.entries, 1):
        label = str(entry.settings.get("id") or entry.settings.get("name") or f"dataset {number}")
        converted = _convert(config.trainer, entry.settings)
        skip = entry.skip or _add_dataset(draft, converted, label=label, file=file, common=common)
        draft.not_taken += [f"{label}: {skip}"] if skip else []

    if not draft.datasets:
        raise DatasetError(
            "none of the datasets in the file can be used:\n" + "\n".join(draft.not_taken),
            where=str(file.absolute()),
            fix="correct the paths in the file, or pass the folder of the images with --images",
        )
    _add_common_values(draft, common)
    for name, value in config.others.items():
        if value not in _NOT_SET:
            draft.not_taken.append(f"{name} {_shown(value)}: {_reason(config.trainer, name)}")
    return draft


def _add_dataset(
    draft: RecipeDraft, converted: _Converted, *, label: str, file: Path, common: dict[str, list[Any]]
) -> str:
    """Add one dataset to the draft, and its recipe-wide settings to `common`; return why it is skipped."""
    keys = converted.keys
    path = keys.pop("datasets.path", None)
    folder = None if path is None else _existing_folder(path, file)
    if folder is None:
        return f"the folder {path} does not exist on this machine" if path else "it has no folder of images"
    images = scan_folder(folder, suffixes=[keys.get("datasets.captions.suffix", ".txt")])
    if images.num_images == 0:
        return f"the folder {folder} contains no images"

    own = {key.removeprefix(_DATASET): value for key, value in keys.items() if key.startswith(_DATASET)}
    for key in [key for key in keys if not key.startswith(_DATASET)]:
        common.setdefault(key, []).append(keys[key])
    draft.datasets.append(DatasetDraft(str(own.pop("name", "")) or folder.name, images, own))

    settings = ", ".join(f"{theirs} {_shown(value)}" for theirs, value in converted.taken.items())
    draft.taken.append(f"{label}: {counted(images.num_images, 'image')}, {settings}")
    draft.not_taken += [f"{label}, {line}" for line in converted.lost]
    return ""


def _convert(trainer: str, settings: Mapping[str, Any]) -> _Converted:
    """Convert one dataset's settings by the rules of foreign_datasets.toml."""
    converted = _Converted()
    for theirs, value in settings.items():
        rule = _rule(trainer, theirs)
        if isinstance(rule, list):
            try:
                ours = None if value in (None, "") else CONVERSIONS[rule[1]](value)
            except (TypeError, ValueError) as err:
                converted.lost.append(f"{theirs} {_shown(value)}: {err}")
                continue
            if ours is not None:
                converted.keys[rule[0]] = ours
                converted.taken[theirs] = value
        elif isinstance(rule, dict):
            if value != rule["unless"] and value not in _NOT_SET:
                converted.lost.append(f"{theirs} {_shown(value)}: {rule['why']}")
        elif rule and value not in _NOT_SET:
            converted.lost.append(f"{theirs} {_shown(value)}: {rule}")
    return converted


def _add_common_values(draft: RecipeDraft, values: Mapping[str, list[Any]]) -> None:
    """Take over settings that a recipe has once for all datasets, if the datasets agree on them."""
    for key, given in values.items():
        if all(value == given[0] for value in given) and len(given) == len(draft.datasets):
            draft.keys[key] = given[0]
            continue
        shown = ", ".join(dict.fromkeys(_shown(value) for value in given))
        draft.not_taken.append(f"{key} {shown}: a recipe has one value for all datasets; set it by hand")


def _existing_folder(text: str, file: Path) -> Path | None:
    """Return the folder of a path that may be relative to the trainer's folder, or None."""
    return next((path for path in candidate_paths(text, file) if path.is_dir()), None)


@cache
def rules() -> dict[str, dict[str, Any]]:
    """Return the content of foreign_datasets.toml: the rule of each setting, by trainer and setting."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _rule(trainer: str, theirs: str) -> list[str] | dict[str, Any] | str:
    """Return [recipe key, conversion], or the reason why a setting is not taken over; see the TOML file."""
    settings = rules()[trainer]
    rule = settings.get(theirs, settings.get(f"{theirs.partition('.')[0]}.*"))
    return _reason(trainer, theirs) if rule is None else rule


def _reason(trainer: str, theirs: str) -> str:
    """Return the note about a setting without a rule, from the table of equivalent settings."""
    name = theirs.rpartition(".")[2]
    term = next((each for each in terms_by_trainer()[trainer] if each.theirs == name), None)
    if term is None:
        return "not a setting of datasets; docs/coming_from.md lists equivalents"
    return f"set {term.shown}" if term.shown else term.note


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _choice(choices: Mapping[str, str]) -> Callable[[Any], str]:
    """Return a conversion of one of several words."""

    def convert(value: Any) -> str:
        if value not in choices:
            raise ValueError("the captions are detected in the folder instead")
        return choices[value]

    return convert


def _repeats(value: Any) -> int:
    number = float(value)
    if number < 1 or number != int(number):
        raise ValueError("repeats must be an integer of at least 1; datasets[].weight sets fractions")
    return int(number)


def _fraction(value: Any) -> float:
    if not 0 <= float(value) < 1:
        raise ValueError("it must be at least 0 and below 1")
    return float(value)


def _resolutions(value: Any) -> list[int]:
    """Return each resolution as the edge of a square; a pair inside a list is height and width."""
    values: list[Any] = value if isinstance(value, list) else [value]
    return [_square(each) for each in values]


def _square(value: Any) -> int:
    """Return the edge of the square with as many pixels, from an edge, a pair, or text such as 512,768."""
    edges = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    edge = round(math.sqrt(float(edges[0]) * float(edges[-1])))
    if edge < 64:
        raise ValueError("it must be a number of pixels")
    return edge


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "text": str,
    "text_and_space": lambda value: f"{value} ",
    "space_and_text": lambda value: f" {value}",
    "suffix": lambda value: f".{str(value).lstrip('.')}",
    "repeats": _repeats,
    "extra_repeats": lambda value: _repeats(float(value) + 1),
    "count": int,
    "fraction": _fraction,
    "variants": lambda value: 4 if value else None,
    "flag": lambda value: True if value else None,
    "each_line": lambda value: "each" if value else None,
    "never": lambda value: "never" if value else None,
    "random": lambda value: "random" if value else None,
    "resolution": _resolutions,
    "square": lambda value: [_square(value)],
    "prompt_source": _choice({"sample": "sidecar", "filename": "filename", "concept": "fixed"}),
    "caption_strategy": _choice({"textfile": "sidecar", "filename": "filename", "instanceprompt": "fixed"}),
}
"""Conversions of a setting's value by their name in foreign_datasets.toml; None means a setting that is off.
A TypeError or ValueError means that the value cannot be taken over."""
