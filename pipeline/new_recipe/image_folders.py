"""Find images and captions in folders, and recognise sd-scripts' folders with repeats in their names."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.errors import counted
from pipeline.images.formats import SUFFIXES
from pipeline.raw_images.folder import holds_copies, is_hidden
from pipeline.raw_images.walk import excluded_by
from pipeline.storage.regular_files import InsideFolder

SUBFOLDERS = "*/*"
"""Pattern of the files in sub-folders, which several trainers do not read."""

TEXT_SUFFIXES = (".txt", ".caption", ".captions", ".cap")
"""Ends of the names of caption files; `.caption.txt` ends in one of them."""

_REPEATS_FOLDER = re.compile(r"(\d{1,4})_(.+)")
"""Sub-folder in the layout of sd-scripts: the repeats of its images and their caption."""

_YEARS = range(1900, 2100)

_MAX_DEPTH = 3
"""Depth of folders with repeats; kohya's GUI writes them to img/ and reg/."""

MAX_PROMPT = 200
"""Maximum number of characters of a caption that becomes a prompt of previews."""

_MAX_CAPTION_BYTES = 100_000
"""Number of bytes of a caption file that are searched for lines."""


@dataclass(frozen=True)
class ImageFolder:
    """Images below one folder, and their caption files.

    Attributes:
        suffixes: Suffixes of the caption files, the most frequent first. Each adds captions for images that
            have none of the suffixes before it.
        num_captions: Number of images with a caption file of one of these suffixes.
        prompt: First line of one caption; empty if there is none.
        repeats: Repeats in the name of an sd-scripts folder; None for another folder.
        text: Caption in the name of such a folder; otherwise empty.
        exclude: Patterns that exclude images; patterns without an effect are omitted.
        num_with_lines: Number of images with several lines in their caption file; 0 if it was not counted.
    """

    folder: Path
    num_images: int
    suffixes: tuple[str, ...] = ()
    num_captions: int = 0
    prompt: str = ""
    repeats: int | None = None
    text: str = ""
    exclude: tuple[str, ...] = ()
    num_excluded: int = 0
    num_with_lines: int = 0


@dataclass
class _CaptionFiles:
    """Images with a caption file, and one of these files, by suffix."""

    images: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    first: dict[str, Path] = field(default_factory=dict[str, Path])


def scan_folder(
    folder: Path, *, suffixes: Iterable[str] = (), exclude: Iterable[str] = (), count_lines: bool = False
) -> ImageFolder:
    """Return the images and captions below `folder`, without files that the scan of a dataset ignores.

    Args:
        folder: An existing folder.
        suffixes: Suffixes of caption files that come first, whatever their number.
        exclude: Patterns of images to exclude, see `excluded_by`.
        count_lines: Read the caption files to count files with several lines.
    """
    num_images, excluded, captions = 0, Counter[str](), _CaptionFiles()
    preferred, tests = tuple(suffixes), [(pattern, excluded_by([pattern])) for pattern in exclude]
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if not _is_ignored(each, parent))
        visible = sorted(name for name in names if not is_hidden(name))
        images: list[str] = []
        inside = Path(parent).relative_to(folder).as_posix()
        for name in visible:
            if name.rpartition(".")[2].lower() in SUFFIXES:
                path = name if inside == "." else f"{inside}/{name}"
                pattern = next((pattern for pattern, matches in tests if matches(path)), None)
                excluded.update([pattern] if pattern else [])
                images += [] if pattern else [name]

        num_images += len(images)

        # Images with the same stem, such as a.jpg and a.png, share a caption file, and each counts.
        stems = Counter(name.rpartition(".")[0] for name in images)
        for suffix, name in _caption_files(visible, stems, (*TEXT_SUFFIXES, *preferred)):
            stem = name.removesuffix(suffix)
            captions.images[suffix] |= {f"{parent}/{stem}/{index}" for index in range(stems[stem])}
            captions.first.setdefault(suffix, Path(parent) / name)

    used, covered = _covering(captions.images, preferred)
    opener = InsideFolder(folder)

    def start_of(file: Path) -> bytes:
        return _start(opener, file.relative_to(folder).as_posix())

    texts = (file for file in covered.values() if count_lines and file.suffix.lower() != ".json")
    return ImageFolder(
        folder,
        num_images,
        suffixes=used,
        num_captions=len(covered),
        prompt=_first_line(start_of(captions.first[used[0]])) if used else "",
        exclude=tuple(pattern for pattern, _ in tests if excluded[pattern]),
        num_excluded=excluded.total(),
        num_with_lines=sum(_has_several_lines(start_of(file)) for file in texts),
    )


def image_paths(folder: Path) -> list[str]:
    """Return the paths of the images below `folder`, without files that the scan of a dataset ignores."""
    paths: list[str] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if not _is_ignored(each, parent))
        images = (each for each in names if each.rpartition(".")[2].lower() in SUFFIXES)
        inside = Path(parent).relative_to(folder)
        paths += [(inside / each).as_posix() for each in sorted(images) if not is_hidden(each)]
    return paths


def sub_folders(folder: Path) -> list[Path]:
    """Return the folders in `folder`, sorted, without those that the scan of a dataset ignores."""
    return [each for each in _visible(folder) if each.is_dir()]


def find_repeats_folders(folder: Path) -> tuple[list[ImageFolder], list[str]]:
    """Return one part per sub-folder if a name such as `10_sks dog` sets repeats, at any of three levels.

    Plain sub-folders with images become parts without repeats. There are no parts if the layout is another
    one. The second value has remarks about images that are in no part.
    """
    parts: list[ImageFolder] = []
    remarks: list[str] = []
    _add_parts(folder, 1, parts, remarks)
    if all(part.repeats is None for part in parts):
        return [], []
    return parts, remarks


def _add_parts(folder: Path, depth: int, parts: list[ImageFolder], remarks: list[str]) -> None:
    inner = sub_folders(folder)
    is_next_to_repeats = any(_match_repeats(each.name) for each in inner)
    for each in inner:
        match = _match_repeats(each.name)
        if match:
            _add_repeats_part(each, match, parts, remarks)
        elif depth < _MAX_DEPTH and _has_repeats_folder(each, depth + 1):
            _add_parts(each, depth + 1, parts, remarks)
        elif (part := scan_folder(each)).num_images:
            # A project's folders for models and samples are not next to the folders with repeats.
            if is_next_to_repeats:
                parts.append(part)
            else:
                images = counted(part.num_images, "image")
                remarks.append(f"{each}: {images}; to use this folder too, add a dataset with its path")

    loose = sum(each.suffix.lower().removeprefix(".") in SUFFIXES for each in _visible(folder))
    if loose:
        images = counted(loose, "image")
        remarks.append(f"{folder}: {images} next to the sub-folders; move them into a sub-folder")


def _add_repeats_part(
    folder: Path, match: re.Match[str], parts: list[ImageFolder], remarks: list[str]
) -> None:
    # sd-scripts does not read the sub-folders of such a folder.
    repeats = int(match[1])
    scanned = scan_folder(folder, exclude=[SUBFOLDERS], count_lines=True)
    if scanned.num_images == 0:
        if scanned.num_excluded:
            images = counted(scanned.num_excluded, "image")
            remarks.append(f"{folder}: {images} in its sub-folders, which sd-scripts does not read")
        return

    parts.append(replace(scanned, repeats=max(repeats, 1), text=match[2]))
    if repeats == 0:
        remarks.append(f"{folder}: 0 repeats, which sd-scripts skips; it is shown once")
    if scanned.num_excluded:
        images = counted(scanned.num_excluded, "image")
        remarks.append(f"{folder}: {images} in its sub-folders, which sd-scripts does not read either")
    if scanned.num_with_lines:
        remarks.append(f"{folder}: {several_lines_remark(scanned.num_with_lines)}")
    if folder.parent.name.casefold().startswith("reg"):
        remarks.append(
            f"{folder}: its images are ordinary training images now, not regularisation images; "
            "datasets[].weight sets their share"
        )


def several_lines_remark(num_files: int) -> str:
    """Return what sd-scripts and a recipe do with caption files that have several lines."""
    return (
        f"{counted(num_files, 'caption')} with several lines: sd-scripts reads the first one, and the recipe "
        "all of them as one caption; captions.lines: each makes every line a caption"
    )


def _has_repeats_folder(folder: Path, depth: int) -> bool:
    folders = sub_folders(folder)
    if any(_match_repeats(each.name) for each in folders):
        return True
    return depth < _MAX_DEPTH and any(_has_repeats_folder(each, depth + 1) for each in folders)


def _match_repeats(name: str) -> re.Match[str] | None:
    # A year such as in `2024_summer` is not a number of repeats.
    match = _REPEATS_FOLDER.fullmatch(name)
    return None if match is None or int(match[1]) in _YEARS else match


def _visible(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if not _is_ignored(each.name, str(folder)))


def _is_ignored(name: str, parent: str) -> bool:
    # As the scan of a dataset, so that the counts agree.
    return is_hidden(name) or holds_copies(name, parent)


def _covering(
    images: dict[str, set[str]], preferred: tuple[str, ...]
) -> tuple[tuple[str, ...], dict[str, Path]]:
    """Return the suffixes that are needed to cover all captioned images, and the file of each image."""

    def rank(suffix: str) -> tuple[bool, int, bool, str]:
        return suffix not in preferred, -len(images[suffix]), suffix != ".txt", suffix

    used: list[str] = []
    files: dict[str, Path] = {}
    for suffix in sorted(images, key=rank):
        new_images = images[suffix] - files.keys()
        if new_images:
            used.append(suffix)
            files |= {image: Path(image.rpartition("/")[0] + suffix) for image in new_images}
    return tuple(used), files


def _caption_files(
    names: Iterable[str], image_stems: Iterable[str], endings: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Yield (suffix, name) of each text file that has the stem of an image."""
    # A suffix may have two parts, as in .caption.txt, so every dot may be its beginning.
    stems = set(image_stems)
    for name in names:
        if not name.lower().endswith(endings):
            continue
        dots = [index for index, letter in enumerate(name) if letter == "." and index]
        suffix = next((name[dot:] for dot in dots if name[:dot] in stems), None)
        if suffix is not None:
            yield suffix, name


def _first_line(start: bytes) -> str:
    # The line becomes a prompt of previews, so an unreadable or very long one is not used.
    lines = start.splitlines()
    try:
        line = lines[0].decode("utf-8-sig").strip() if lines else ""
    except UnicodeDecodeError:
        return ""
    return line if len(line) <= MAX_PROMPT and line.isprintable() else ""


def _has_several_lines(start: bytes) -> bool:
    return sum(bool(line.strip()) for line in start.splitlines()) > 1


def _start(opener: InsideFolder, path: str) -> bytes:
    """Return the start of a caption file; no bytes if a job would not read the file either."""
    try:
        # As in a job, a link does not lead out of the dataset: the text would be published with the LoRA.
        with opener.open(path) as opened:
            return opened.read(_MAX_CAPTION_BYTES)
    except OSError:
        return b""
