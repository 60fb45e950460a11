"""Find a file with the captions of many images: metadata.jsonl, captions.json, sd-scripts' meta_cap.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, cast

from pipeline.errors import DatasetError
from pipeline.images.formats import SUFFIXES
from pipeline.new_recipe.image_folders import image_paths, sub_folders
from pipeline.raw_images.manifest import composed
from pipeline.raw_images.manifest_file import read_table
from pipeline.recipe import DatasetSettings
from pipeline.recipe.validators import MANIFEST_SUFFIXES
from pipeline.storage.regular_files import MAX_FILE_BYTES, InsideFolder, RefusedFileError

TABLE_SUFFIXES = (*MANIFEST_SUFFIXES, ".json")
"""Suffixes of files that may hold the captions of many images."""

CAPTION_COLUMNS = ("caption", "text", "captions", "prompt", "description", "tags", "label")
"""Usual names of the captions, the first that a file has is used."""

_LINK_FIX = "replace the link with the file itself"

_MAX_FILES = 50
"""Number of files of a folder that are tried. A folder may hold one JSON file for each image."""

_TRIED_ROWS = 200
"""Number of rows that decide which column holds the paths."""


@dataclass(frozen=True)
class CaptionTable:
    """A file with captions, for images below the file's folder.

    Attributes:
        path_column: Column of the paths; empty if a recipe cannot read the file as a manifest.
        caption_column: Column or key of the captions.
        captions: One caption of each image that exists, by its path.
        num_missing: Number of entries whose image does not exist.
    """

    file: Path
    path_column: str
    caption_column: str
    captions: Mapping[str, str] = field(default_factory=dict[str, str])
    num_missing: int = 0

    @property
    def is_manifest(self) -> bool:
        """True if a recipe can use the file itself."""
        return bool(self.path_column)

    def manifest_text(self) -> str:
        """Return the captions as a manifest in JSON lines, with the columns path and caption."""
        rows = ({"path": path, "caption": caption} for path, caption in self.captions.items())
        return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def find_caption_tables(folder: Path) -> tuple[list[CaptionTable], list[str]]:
    """Return the file with the most captions in `folder`, or else that of each sub-folder.

    The second value has remarks about files that could not be read.
    """
    remarks: list[str] = []
    tables = [_best_table(folder, remarks)]
    if tables == [None]:
        tables = [_best_table(each, remarks) for each in sub_folders(folder)]
    return [each for each in tables if each is not None], remarks


def _best_table(folder: Path, remarks: list[str]) -> CaptionTable | None:
    files = sorted(each for each in folder.iterdir() if each.suffix.lower() in TABLE_SUFFIXES)
    files = [each for each in files if each.is_file() and not each.name.startswith(".")]
    if not files:
        return None
    images = _Images(image_paths(folder))

    # A JSON file with the name of an image belongs to that image.
    files = [each for each in files if images.find(each.stem) is None or each.suffix.lower() != ".json"]
    tables: list[CaptionTable] = []
    for file in files[:_MAX_FILES]:
        try:
            table = _table(file, _rows(file), images)
        except DatasetError as err:
            remarks.append(f"{file}: {err.what}; {err.fix}")
            continue
        tables += [table] if table else []
    return max(tables, key=lambda each: len(each.captions), default=None)


def read_caption_table(file: Path) -> CaptionTable | None:
    """Return the captions in a file, or None if it names no existing image next to it or below.

    Raises:
        DatasetError: The file cannot be read.
    """
    rows = _rows(file)

    # A configuration may be in a folder of many other files, which need not be listed for it.
    texts = (each for row in rows[:_TRIED_ROWS] for each in row.values() if isinstance(each, str))
    has_images = any(_is_image(each.name) for each in file.parent.iterdir())
    if not has_images and not any(_is_image(text) for text in texts):
        return None
    return _table(file, rows, _Images(image_paths(file.parent)))


def _is_image(name: str) -> bool:
    return name.rpartition(".")[2].lower() in SUFFIXES


class _Images:
    """Images by the ways in which files of captions name them."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = {composed(path): path for path in paths}

        # sd-scripts omits suffixes. Absolute paths of another machine end in the name, which must be unique.
        keys = [(key, path) for key_of, path in self._paths.items() for key in set(_keys(key_of)) - {key_of}]
        counts = Counter(key for key, _ in keys)
        self._others = {key: path for key, path in keys if counts[key] == 1}

    def at(self, written: Any) -> str | None:
        """Return the image whose path is written like this, or None."""
        return self._paths.get(composed(written)) if isinstance(written, str) else None

    def find(self, written: Any) -> str | None:
        """Return the path of the image that a file of captions means, or None."""
        if not isinstance(written, str) or not written:
            return None
        path = PurePosixPath(composed(written).replace("\\", "/"))
        keys = (str(path), path.name, *([path.stem] if path.suffix else []))
        others = (self._others.get(key) for key in keys)
        return self.at(str(path)) or next(filter(None, others), None)


def _keys(path: str) -> Iterator[str]:
    posix = PurePosixPath(path)
    yield from (path, str(posix.with_suffix("")), posix.name, posix.stem)


def _rows(file: Path) -> list[dict[str, Any]]:
    if file.suffix.lower() in MANIFEST_SUFFIXES:
        captions_section = {"from": "column", "columns": CAPTION_COLUMNS}
        dataset = {"name": "new", "path": file.absolute(), "captions": captions_section}
        return read_table(DatasetSettings.model_validate(dataset)).to_dicts()
    return _json_rows(file)


def _table(file: Path, rows: list[dict[str, Any]], images: _Images) -> CaptionTable | None:
    columns = list(dict.fromkeys(name for row in rows[:_TRIED_ROWS] for name in row))

    # The values decide, because every program names this column in its own way.
    def hits(name: str) -> tuple[int, int]:
        values = [row.get(name) for row in rows[:_TRIED_ROWS]]
        return sum(bool(images.at(each)) for each in values), sum(bool(images.find(each)) for each in values)

    path_column = max(columns, key=hits, default="")
    names = (name for name in CAPTION_COLUMNS if name in columns and name != path_column)
    texts = ((name, _captions(rows, path_column, name, images)) for name in names)
    caption_column, captions = next((each for each in texts if each[1]), ("", dict[str, str]()))
    if not captions:
        return None

    written = [row.get(path_column) for row in rows if row.get(path_column)]
    found = [each for each in written if images.find(each)]
    is_manifest = file.suffix.lower() in MANIFEST_SUFFIXES and all(images.at(each) for each in found)
    num_missing = len(written) - len(found)
    return CaptionTable(file, path_column if is_manifest else "", caption_column, captions, num_missing)


def _captions(
    rows: Iterable[Mapping[str, Any]], path_column: str, caption_column: str, images: _Images
) -> dict[str, str]:
    captions: dict[str, str] = {}
    for row in rows:
        value, path = row.get(caption_column), images.find(row.get(path_column))
        texts = cast("list[Any]", value if isinstance(value, list) else [value])
        text = next((each for each in texts if isinstance(each, str) and each.strip()), None)
        if path is not None and text is not None:
            captions.setdefault(path, text)
    return captions


def _json_rows(file: Path) -> list[dict[str, Any]]:
    """Return a row for each image in a JSON file; none if it has another form."""
    try:
        # As a manifest, because its texts are published with the LoRA too.
        folder = InsideFolder(file.parent)
        with folder.open(file.name, max_bytes=MAX_FILE_BYTES, fix=_LINK_FIX) as opened:
            content: Any = json.loads(opened.read().decode("utf-8-sig"))
    except RefusedFileError as err:
        raise DatasetError(f"the file is not read: {err.detail}", where=str(file), fix=err.fix) from err
    except (OSError, ValueError, RecursionError) as err:
        what = f"the file cannot be read: {getattr(err, 'strerror', None) or err}"
        raise DatasetError(what, where=str(file), fix="correct it, or move it away") from err

    entries = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    annotations = _dicts(entries.get("annotations"))
    if annotations:  # COCO
        names = {str(each.get("id")): each.get("file_name") for each in _dicts(entries.get("images"))}
        return [{**each, "path": names.get(str(each.get("image_id")))} for each in annotations]
    rows = [{"path": path, "caption": _caption_in(value)} for path, value in entries.items()]
    return rows or _dicts(content)


def _dicts(value: Any) -> list[dict[str, Any]]:
    items = cast("list[Any]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", each) for each in items if isinstance(each, dict)]


def _caption_in(value: Any) -> Any:
    if not isinstance(value, dict):
        return cast("str | list[Any]", value) if isinstance(value, str | list) else None
    texts = cast("dict[str, Any]", value)
    caption, tags = texts.get("caption"), texts.get("tags")

    # sd-scripts trains the caption and the tags as one text.
    if isinstance(caption, str) and isinstance(tags, str) and tags:
        return f"{caption}, {tags}"
    return next((texts[name] for name in CAPTION_COLUMNS if texts.get(name)), None)
