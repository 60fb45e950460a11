"""A quick look at a folder of images: how many there are, and where their captions are. Names only."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import DatasetError
from pipeline.images.formats import SUFFIXES

_TEXT_SUFFIXES = (".txt", ".caption", ".captions", ".cap")
"""Of files that hold a caption; the last part of what may also be `.caption.txt`."""

_REPEATED = re.compile(r"(\d{1,4})_(.+)")
"""A sub-folder of sd-scripts: how often its images are repeated, and their caption."""

_MAX_CAPTION = 200


@dataclass(frozen=True)
class Group:
    """Images that become one dataset.

    Attributes:
        folder: Searched with its sub-folders.
        num_images: Files that are images by their names.
        suffix: Of the caption files beside them; None where next to no image has one.
        num_captions: Images that have a file of that suffix.
        sample: The beginning of one caption; empty where there is none.
        repeats: As a sub-folder of sd-scripts says it; 1 otherwise.
        text: The caption that such a folder's name is; empty otherwise.
    """

    folder: Path
    num_images: int
    suffix: str | None
    num_captions: int
    sample: str
    repeats: int = 1
    text: str = ""


def look_at(folder: Path) -> list[Group]:
    """The folder as one dataset, or each sub-folder where they are laid out for sd-scripts.

    Raises:
        DatasetError: It is no folder, or there is no image in it.
    """
    if not folder.is_dir():
        raise DatasetError(
            f"{folder} is no folder" if folder.exists() else f"there is no folder {folder}",
            where=f"--images, looked for {folder.absolute()}",
            fix="name the folder that holds the images; for a listing (.parquet, .jsonl, .csv) copy a recipe "
            "of configs/examples and name it in datasets[].path",
        )
    inside = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    whole = _group(folder)
    if whole.num_images == 0:
        raise DatasetError(
            "there is no image in the folder",
            where=str(folder.absolute()),
            fix="name another; images are known by suffixes such as jpg, png, webp, tiff or heic",
        )
    named = [(each, found) for each in inside if (found := _REPEATED.fullmatch(each.name))]
    groups = [_group(each, int(found[1]), found[2]) for each, found in named]
    groups = [group for group in groups if group.num_images]
    return groups if sum(group.num_images for group in groups) == whole.num_images else [whole]


def _group(folder: Path, repeats: int = 1, text: str = "") -> Group:
    number, suffixes, first = 0, Counter[str](), dict[str, Path]()
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        images, texts = _sorted_out(names)
        number += len(images)
        for suffix, name in _captions_of(images, texts):
            suffixes[suffix] += 1
            first.setdefault(suffix, Path(place) / name)
    suffix, has = max(suffixes.items(), key=lambda each: (each[1], each[0] == ".txt"), default=(None, 0))
    sample = _beginning(first[suffix]) if suffix else ""
    return Group(folder, number, suffix, has, sample, max(repeats, 1), text.replace("_", " "))


def _sorted_out(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """(stems of images, names of texts), each sorted; hidden files are neither."""
    seen = sorted(name for name in names if not name.startswith("."))
    images = [name.rpartition(".")[0] for name in seen if name.rpartition(".")[2].lower() in SUFFIXES]
    return images, [name for name in seen if name.lower().endswith(_TEXT_SUFFIXES)]


def _captions_of(images: list[str], texts: list[str]) -> Iterable[tuple[str, str]]:
    """(suffix, name) of each text that is beside the image of its name."""
    stems = set(images)
    for name in texts:
        for dot in [at for at, letter in enumerate(name) if letter == "." and at]:
            if name[:dot] in stems:
                yield name[dot:], name
                break


def _beginning(file: Path) -> str:
    """The first line, if it is short enough for a prompt; empty where the file cannot be read."""
    try:
        with file.open(encoding="utf-8-sig", errors="strict") as opened:
            line = opened.readline(_MAX_CAPTION + 1).strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return line if len(line) <= _MAX_CAPTION and line.isprintable() else ""
