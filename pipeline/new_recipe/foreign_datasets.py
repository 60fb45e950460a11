"""Take over the datasets of another trainer's configuration file; foreign_datasets.toml maps the settings."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import DatasetError, counted
from pipeline.new_recipe.draft import DatasetDraft, RecipeDraft
from pipeline.new_recipe.foreign_configs import ForeignDataset, candidate_paths, read_config
from pipeline.new_recipe.foreign_values import CONVERSIONS
from pipeline.new_recipe.image_folders import SUBFOLDERS, scan_folder, several_lines_remark
from pipeline.recipe import path_in_recipe
from pipeline.recipe.other_trainers import terms_by_trainer

_DATASET = "datasets."

_RESOLUTION = "buckets.resolution"

_OF_DATASETS = {_RESOLUTION: "resolution", "latents.flip": "flip", "text.caption_dropout": "caption_dropout"}
"""Recipe keys for all datasets, with the key of a dataset that replaces each."""

_OTHER_IMAGES = ("mask_path", "control_path", "inpaint_path", "unconditional_path", "clip_image_path")
"""Settings that name folders of images which belong to the training images."""

_CONTROL = ("control_path", "control_path_1", "control_path_2", "control_path_3")
"""Settings that name folders of control images. The files in them are named like the training images."""

_NOT_SET = (None, "", False, 0, [], {})
"""Values of settings that have no effect."""


@dataclass
class _Converted:
    """One dataset's settings as recipe keys, such as `datasets.repeats`.

    Attributes:
        sources: The trainer's setting and value that became each key, as text.
        lost: Texts about other settings, with the reason.
    """

    keys: dict[str, Any] = field(default_factory=dict[str, Any])
    sources: dict[str, str] = field(default_factory=dict[str, str])
    lost: list[str] = field(default_factory=list[str])

    def move(self, key: str, new_key: str | None) -> None:
        """Give the value of a key to another one, or remove the key; nothing without a value."""
        for values in (self.keys, self.sources):
            value = values.pop(key, None)
            if value is not None and new_key is not None:
                values[new_key] = value


@dataclass
class _Part:
    """A dataset of the recipe.

    Attributes:
        labels: Names of the datasets in the trainer's file: several if they differ only in resolution.
        common: Recipe keys of all datasets, each with the trainer's setting as text and the value.
    """

    labels: list[str]
    dataset: DatasetDraft
    taken: list[str]
    common: dict[str, tuple[str, Any]]

    def differs_only_in_resolution(self, other: _Part) -> bool:
        mine, theirs = ({**part.common, _RESOLUTION: None} for part in (self, other))
        return (
            self.dataset.images == other.dataset.images
            and self.dataset.keys == other.dataset.keys
            and mine == theirs
            and _RESOLUTION in self.common.keys() & other.common.keys()
            and self.common[_RESOLUTION] != other.common[_RESOLUTION]
        )


class _Lost:
    """Lines about settings that are not taken over; datasets with the same line share it."""

    def __init__(self) -> None:
        self._labels: dict[str, list[str]] = {}

    def add(self, label: str, text: str) -> None:
        # The text starts with its separator from the label.
        self._labels.setdefault(text, []).append(label)

    def lines(self, num_datasets: int) -> list[str]:
        return [
            f"{'all datasets' if 1 < num_datasets == len(labels) else ', '.join(labels)}{text}"
            for text, labels in self._labels.items()
        ]


def draft_from_config(file: Path, *, max_references: int | None = None) -> RecipeDraft:
    """Return the datasets of another trainer's configuration file, and a report of what is taken over.

    `max_references` is the number of references that the base model accepts, or None if it is unknown.
    Control images of datasets with more folders of them are not taken over.
    """
    config = read_config(file)
    draft = RecipeDraft(f"{config.trainer} configuration {file}")
    lost = _Lost()
    all_parts: list[_Part] = []
    for number, entry in enumerate(config.entries, 1):
        label = str(entry.settings.get("id") or entry.settings.get("name") or f"dataset {number}")
        references = _reference_folders(entry.settings, file)
        if max_references is not None and len(references) > max_references:
            references = []
        part = _part(config.trainer, entry, references, label=label, file=file, lost=lost)
        all_parts += [part] if part else []

    draft.not_taken = lost.lines(len(all_parts))
    if not all_parts:
        raise DatasetError(
            "none of the datasets in the file can be used:\n" + "\n".join(draft.not_taken),
            where=str(file.absolute()),
            fix="correct the paths in the file, or pass the folder of the images with --images",
        )
    parts = _merged(all_parts)
    draft.taken = [f"{', '.join(part.labels)}: {', '.join(part.taken)}" for part in parts]
    _add_common_values(draft, parts)
    draft.datasets = [part.dataset for part in parts]

    for name, value in config.others.items():
        if value not in _NOT_SET:
            draft.not_taken.append(f"{name} {_shown(value)}: {_reason(config.trainer, name)}")
    if config.has_training:
        draft.not_taken.append(
            "other settings of the model and the training: many have the same name in a recipe, and "
            "docs/coming_from.md lists the rest"
        )
    return draft


def _part(
    trainer: str, entry: ForeignDataset, references: list[Path], *, label: str, file: Path, lost: _Lost
) -> _Part | None:
    # The reason for a dataset without a result is in `lost`.
    converted = _convert(trainer, entry, references)
    keys = converted.keys
    path = keys.pop("datasets.path", None)
    folder = None if path is None else _existing_folder(path, file)
    skip = entry.skip
    if not skip and folder is None:
        skip = f"the folder {path} does not exist on this machine" if path else "it has no folder of images"
    if skip or folder is None:
        lost.add(label, f": {skip}")
        return None

    suffix = keys.get("datasets.captions.suffix", ".txt")
    exclude = [SUBFOLDERS]
    if entry.folder_rules.subfolders:
        exclude = _inner_folders(entry.settings, folder, file)
    exclude += entry.folder_rules.exclude
    images = scan_folder(folder, suffixes=[suffix], exclude=exclude, count_lines=True)
    if images.num_images == 0:
        lost.add(
            label, f": the folder {folder} contains no images" + (" in it" if images.num_excluded else "")
        )
        return None

    name = str(keys.pop("datasets.name", "")) or folder.name
    own = {key.removeprefix(_DATASET): value for key, value in keys.items() if key.startswith(_DATASET)}
    common = {key: (converted.sources[key], keys[key]) for key in keys if not key.startswith(_DATASET)}
    remarks = [*entry.remarks]
    if (
        images.num_with_lines
        and entry.folder_rules.lines == "each"
        and own.get("captions.from") != "filename"
    ):
        own["captions.lines"] = "each"
    elif images.num_with_lines and entry.folder_rules.lines == "first" and "captions.lines" not in own:
        remarks.append(several_lines_remark(images.num_with_lines))

    dataset = DatasetDraft(name, images, own)
    remarks += _caption_remarks(dataset, trainer, suffix)
    for text in converted.lost:
        lost.add(label, f", {text}")
    for text in remarks:
        lost.add(label, f": {text}")
    taken = [counted(images.num_images, "image"), dataset.captions_text()]
    taken += [text for key, text in converted.sources.items() if key not in common]
    if "captions.lines" in own and "datasets.captions.lines" not in keys:
        taken.append(f"lines: each, because {trainer} uses every line of a caption file as a caption")
    if images.exclude:
        ignored = counted(images.num_excluded, "image")
        taken.append(f"exclude: {', '.join(images.exclude)} ({ignored} that {trainer} does not train on)")
    return _Part([label], dataset, taken, common)


def _caption_remarks(dataset: DatasetDraft, trainer: str, suffix: str) -> list[str]:
    missing = dataset.missing_captions_text()
    remarks = [missing] if missing else []
    others = [each for each in dataset.images.suffixes if each != suffix]
    if others and dataset.captions()["from"] == "sidecar":
        files = f"{' and '.join(others)} files"
        remarks.append(
            f"{files} are captions too, though {trainer} reads only {suffix}; captions.suffix lists them"
        )
    return remarks


def _reference_folders(settings: Mapping[str, Any], file: Path) -> list[Path]:
    # All or none, because the order of references has a meaning for the model.
    values = [settings.get(key) for key in _CONTROL]
    texts = [each for value in values for each in (value if isinstance(value, list) else [value]) if each]
    folders = [_existing_folder(text, file) if isinstance(text, str) else None for text in texts]
    existing = [folder for folder in folders if folder is not None]
    return existing if len(existing) == len(folders) else []


def _inner_folders(settings: Mapping[str, Any], folder: Path, file: Path) -> list[str]:
    # Without these patterns, masks and control images inside the folder would become training images.
    patterns: list[str] = []
    for key in _OTHER_IMAGES:
        values = settings.get(key)
        for value in values if isinstance(values, list) else [values]:
            inner = _existing_folder(value, file) if isinstance(value, str) and value else None
            if (
                inner
                and inner.resolve() != folder.resolve()
                and inner.resolve().is_relative_to(folder.resolve())
            ):
                patterns.append(f"/{inner.resolve().relative_to(folder.resolve()).as_posix()}")
    return patterns


def _merged(parts: list[_Part]) -> list[_Part]:
    # Several trainers define the same images once per resolution; a recipe has `resolutions` for that.
    merged: list[_Part] = []
    for part in parts:
        first = next((each for each in merged if each.differs_only_in_resolution(part)), None)
        if first is None:
            merged.append(part)
            continue
        texts, values = zip(first.common[_RESOLUTION], part.common[_RESOLUTION], strict=True)
        first.common[_RESOLUTION] = (" and ".join(texts), sorted({*values[0], *values[1]}))
        first.labels += part.labels
        first.dataset = replace(first.dataset, name=first.dataset.images.folder.name)
    return merged


def _convert(trainer: str, entry: ForeignDataset, references: list[Path]) -> _Converted:
    converted = _Converted()
    if references:
        converted.keys["datasets.references"] = [{"path": path_in_recipe(each)} for each in references]
        number = counted(len(references), "folder")
        converted.sources["datasets.references"] = f"{number} of control images as references"

    for theirs, value in entry.settings.items():
        if references and theirs in _CONTROL:
            continue
        rule = _rule(trainer, theirs)
        shown = f"{theirs} {_shown(value)}"
        if isinstance(rule, list):
            try:
                ours = None if value in (None, "") else CONVERSIONS[rule[1]](value)
            except (TypeError, ValueError) as err:
                converted.lost.append(f"{shown}: {err}")
                continue
            if ours is not None:
                converted.keys[rule[0]] = ours
                converted.sources[rule[0]] = shown
                converted.lost += [f"{shown}: {each}" for each in rule[2:]]
        elif isinstance(rule, dict):
            if value != rule["unless"] and value not in (None, ""):
                converted.lost.append(f"{shown}: {rule['why']}")
        elif rule and value not in _NOT_SET:
            converted.lost.append(f"{shown}: {rule}")

    _settle_tags(converted, entry)
    return converted


def _settle_tags(converted: _Converted, entry: ForeignDataset) -> None:
    """Leave the details of tags in the section that counts: `shuffle`, `drop_tags`, or none."""
    shuffle, drop = "datasets.captions.shuffle.", "datasets.captions.drop_tags."
    if not entry.settings.get("text.tag_dropout_enable", True):
        converted.move(f"{drop}rate", None)
    elif (mode := entry.settings.get("text.tag_dropout_mode", "RANDOM")) != "RANDOM":
        converted.lost.append(f"tag_dropout_mode {mode}: each tag is dropped with the same probability")

    # The details enable neither, and the default of tags that stay is the trainer's.
    if f"{shuffle}variants" in converted.keys:
        converted.keys.setdefault(f"{shuffle}keep", entry.folder_rules.keep_tags)
        if f"{drop}rate" in converted.keys and converted.keys.get(f"{drop}keep"):
            text = converted.sources[f"{drop}keep"]
            converted.lost.append(f"{text}: captions.shuffle.keep counts for dropped tags too")
        converted.move(f"{drop}keep", None)
        return
    is_dropped = f"{drop}rate" in converted.keys
    for name in ("keep", "separator"):
        converted.move(f"{shuffle}{name}", f"{drop}{name}" if is_dropped else None)
    if is_dropped:
        converted.keys.setdefault(f"{drop}keep", entry.folder_rules.keep_tags)
    else:
        converted.move(f"{drop}keep", None)


def _add_common_values(draft: RecipeDraft, parts: list[_Part]) -> None:
    # A setting that the datasets agree on is one for all of them. Some settings may differ between datasets.
    for key in dict.fromkeys(key for part in parts for key in part.common):
        given = [part.common[key] for part in parts if key in part.common]
        value = given[0][1]
        if len(given) == len(parts) and all(each == value for _, each in given):
            draft.keys[key] = value
            draft.taken.append(f"all datasets: {given[0][0]} ({key}: {_shown(value)})")
            continue
        if (own := _OF_DATASETS.get(key)) is not None:
            for part in (part for part in parts if key in part.common):
                text, value = part.common[key]
                part.dataset = replace(part.dataset, keys={**part.dataset.keys, own: value})
                draft.taken.append(f"{', '.join(part.labels)}: {text} (datasets[].{own})")
            continue
        shown = ", ".join(dict.fromkeys(_shown(each) for _, each in given))
        shown += "" if len(given) == len(parts) else " in some datasets"
        draft.not_taken.append(f"{key} {shown}: a recipe has one value for all datasets; set it by hand")


def _existing_folder(text: str, file: Path) -> Path | None:
    return next((path for path in candidate_paths(text, file) if path.is_dir()), None)


@cache
def rules() -> dict[str, dict[str, Any]]:
    """Return the content of foreign_datasets.toml: the rule of each setting, by trainer and setting."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _rule(trainer: str, theirs: str) -> list[str] | dict[str, Any] | str:
    """Return the rule of foreign_datasets.toml: [recipe key, conversion, remark...], or why there is none."""
    settings = rules()[trainer]
    rule = settings.get(theirs, settings.get(f"{theirs.partition('.')[0]}.*"))
    return _reason(trainer, theirs) if rule is None else rule


def _reason(trainer: str, theirs: str) -> str:
    name = theirs.rpartition(".")[2]
    term = next((each for each in terms_by_trainer()[trainer] if each.theirs == name), None)
    if term is None:
        return "this setting is not recognised; docs/coming_from.md lists those with an equivalent"
    if not term.shown:
        return term.note
    return f"set {term.shown} ({term.note})" if term.note else f"set {term.shown}"


def _shown(value: Any) -> str:
    is_plain = isinstance(value, str) and value == value.strip(" ,")
    text = value if is_plain else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
