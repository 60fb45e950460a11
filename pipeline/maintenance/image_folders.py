"""Find images and captions in folders, and recognise sd-scripts' folders with repeats in their names."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import counted
from pipeline.images.formats import SUFFIXES

TEXT_SUFFIXES = (".txt", ".caption", ".captions", ".cap")
"""Ends of the names of caption files; `.caption.txt` ends in one of them."""

_REPEATS_FOLDER = re.compile(r"(\d{1,4})_(.+)")
"""Sub-folder in the layout of sd-scripts: the repeats of its images and their caption."""

_YEARS = range(1900, 2100)

_MAX_DEPTH = 3
"""Depth of folders with repeats; kohya's GUI writes them to img/ and reg/."""

_MAX_PROMPT = 200


@dataclass(frozen=True)
class ImageFolder:
    """Images below one folder, and their caption files.

    Attributes:
        folder: Folder that is searched recursively.
        num_images: Number of files with an image suffix.
        suffixes: Suffixes of the caption files, the most frequent first. Each adds captions for images that
            have none of the suffixes before it. Empty if no image has a caption file.
        num_captions: Number of images with a caption file of one of these suffixes.
        prompt: First line of one caption; empty if there is none.
        repeats: Repeats in the name of an sd-scripts folder; None for another folder.
        text: Caption in the name of such a folder; otherwise empty.
    """

    folder: Path
    num_images: int
    suffixes: tuple[str, ...] = ()
    num_captions: int = 0
    prompt: str = ""
    repeats: int | None = None
    text: str = ""


@dataclass
class _CaptionFiles:
    """Images with a caption file, and one of these files, by suffix."""

    images: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    first: dict[str, Path] = field(default_factory=dict[str, Path])


def scan_folder(
    folder: Path, *, suffixes: Iterable[str] = (), repeats: int | None = None, text: str = ""
) -> ImageFolder:
    """Return the images and captions below `folder`, without hidden files.

    Args:
        folder: An existing folder.
        suffixes: Suffixes of caption files that come first, whatever their number.
        repeats: See `ImageFolder`.
        text: See `ImageFolder`.
    """
    num_images, captions, preferred = 0, _CaptionFiles(), tuple(suffixes)
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        visible = sorted(name for name in names if not name.startswith("."))
        images = [name for name in visible if name.rpartition(".")[2].lower() in SUFFIXES]
        num_images += len(images)
        stems = Counter(name.rpartition(".")[0] for name in images)
        for suffix, name in _caption_files(visible, stems, (*TEXT_SUFFIXES, *preferred)):
            stem = name.removesuffix(suffix)
            captions.images[suffix] |= {f"{parent}/{stem}/{index}" for index in range(stems[stem])}
            captions.first.setdefault(suffix, Path(parent) / name)

    used, covered = _covering(captions.images, preferred)
    prompt = _first_line(captions.first[used[0]]) if used else ""
    return ImageFolder(folder, num_images, used, covered, prompt, repeats, text.replace("_", " "))


def find_repeats_folders(folder: Path) -> tuple[list[ImageFolder], list[str]]:
    """Return one part per sub-folder if a name such as `10_sks dog` sets repeats, at any of three levels.

    Plain sub-folders with images become parts without repeats.

    Returns:
        The parts, none for a folder in another layout; and remarks about images that are in no part.
    """
    parts: list[ImageFolder] = []
    remarks: list[str] = []
    _add_parts(folder, 1, parts, remarks)
    if all(part.repeats is None for part in parts):
        return [], []
    return parts, remarks


def _add_parts(folder: Path, depth: int, parts: list[ImageFolder], remarks: list[str]) -> None:
    """Append the parts of one folder and of its sub-folders that contain such folders."""
    for each in _sub_folders(folder):
        match = _match_repeats(each.name)
        if match:
            part = scan_folder(each, repeats=max(int(match[1]), 1), text=match[2])
            if int(match[1]) == 0:
                remarks.append(f"{each}: 0 repeats, which sd-scripts skips; it is shown once")
            parts += [part] if part.num_images else []
        elif depth < _MAX_DEPTH and _has_repeats_folder(each, depth + 1):
            _add_parts(each, depth + 1, parts, remarks)
        elif (part := scan_folder(each)).num_images:
            parts.append(part)

    loose = sum(each.suffix.lower().removeprefix(".") in SUFFIXES for each in _visible(folder))
    if loose:
        images = counted(loose, "image")
        remarks.append(f"{folder}: {images} next to the sub-folders; move them into a sub-folder")


def _has_repeats_folder(folder: Path, depth: int) -> bool:
    folders = _sub_folders(folder)
    if any(_match_repeats(each.name) for each in folders):
        return True
    return depth < _MAX_DEPTH and any(_has_repeats_folder(each, depth + 1) for each in folders)


def _match_repeats(name: str) -> re.Match[str] | None:
    """Match the name of a folder with repeats; a year such as in `2024_summer` is not a number of repeats."""
    match = _REPEATS_FOLDER.fullmatch(name)
    return None if match is None or int(match[1]) in _YEARS else match


def _visible(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if not each.name.startswith("."))


def _sub_folders(folder: Path) -> list[Path]:
    return [each for each in _visible(folder) if each.is_dir()]


def _covering(images: dict[str, set[str]], preferred: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    """Return the suffixes that are needed to cover all captioned images, and the number of these images."""

    def rank(suffix: str) -> tuple[bool, int, bool, str]:
        return suffix not in preferred, -len(images[suffix]), suffix != ".txt", suffix

    used: list[str] = []
    covered: set[str] = set()
    for suffix in sorted(images, key=rank):
        if not images[suffix] <= covered:
            used.append(suffix)
            covered |= images[suffix]
    return tuple(used), len(covered)


def _caption_files(
    names: Iterable[str], image_stems: Iterable[str], endings: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Yield (suffix, name) of each text file that has the stem of an image; the suffix may have two parts."""
    stems = set(image_stems)
    for name in names:
        if not name.lower().endswith(endings):
            continue
        dots = [index for index, letter in enumerate(name) if letter == "." and index]
        suffix = next((name[dot:] for dot in dots if name[:dot] in stems), None)
        if suffix is not None:
            yield suffix, name


def _first_line(file: Path) -> str:
    """Return the file's first line if it can be read and is short enough for a prompt, else no text."""
    try:
        with file.open(encoding="utf-8-sig", errors="strict") as opened:
            line = opened.readline(_MAX_PROMPT + 1).strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return line if len(line) <= _MAX_PROMPT and line.isprintable() else ""
