"""Read one caption file next to an image, and decode its bytes into texts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from pipeline.images.formats import SUFFIXES, ImageError
from pipeline.raw_images.folder import FOREIGN_CACHES, last_suffix, sidecar_path
from pipeline.raw_images.manifest_file import unicode_encoding
from pipeline.recipe.captions import JSON_SUFFIX
from pipeline.recipe.validators import MANIFEST_SUFFIXES
from pipeline.storage.regular_files import RefusedFileError
from pipeline.storage.source import MAX_TEXT_BYTES, NO_FILE

if TYPE_CHECKING:
    from pipeline.recipe import CaptionSettings
    from pipeline.storage.source import Source

_FILE_TYPES = {
    b"PK\x03\x04": "a ZIP archive or an office document",
    b"%PDF-": "a PDF document",
    b"GIF87a": "a GIF image",
    b"GIF89a": "a GIF image",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"\xd0\xcf\x11\xe0": "an office document",
    b"\x1f\x8b": "a gzip archive",
    b"7z\xbc\xaf": "a 7-Zip archive",
    b"Rar!\x1a": "a RAR archive",
    b"SQLite format 3\0": "an SQLite database",
    b"bplist00": "a binary property list",
    b"\x93NUMPY": "a NumPy array",
}
"""First bytes of files that are no texts."""

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of the file that Git stores in place of a file in LFS."""

_CONTROL_CHARACTERS = re.compile("[\x01-\x08\x0e-\x1a\x1c-\x1f\x7f]")

_MIN_CONTROL_CHARACTERS = 4
_MIN_CONTROL_SHARE = 0.1

_USUAL_SUFFIXES = (".txt", ".caption", ".captions", ".cap", JSON_SUFFIX)
"""Usual suffixes of caption files, the most frequent first; a message suggests these before others."""


def read_caption_file(
    settings: CaptionSettings, source: Source, *, path: str, suffix: str, num_bytes: int = 0
) -> list[str] | None:
    """Return the texts of one caption file, decoded but not yet canonical, or None if there is no such file.

    Args:
        settings: Encodings, and the key of the caption in a JSON file.
        source: The dataset's files.
        path: Path of the image.
        suffix: Suffix of the caption file, one of `captions.suffix`.
        num_bytes: Size of the file: 0 if unknown, -1 if a listing of the folder does not contain it.

    Raises:
        ImageError: A JSON file has no caption (`caption_missing`), the bytes do not decode or are another
            type of file (`caption_undecodable`), the file cannot be read (`caption_unreadable`), or it is a
            link that leads out of the dataset (`caption_outside_dataset`).
    """
    sidecar = sidecar_path(path, suffix)
    if source.threads is not None and num_bytes == NO_FILE[0]:
        return None  # saves a request for each image
    text = read_caption_text(settings, source, sidecar, num_bytes)
    if text is None or suffix.lower() != JSON_SUFFIX:
        return None if text is None else [text]
    return _texts_in_json(text, settings.json_key, source.where(sidecar))


def read_caption_text(
    settings: CaptionSettings, source: Source, sidecar: str, num_bytes: int = 0
) -> str | None:
    """Return the decoded text of a caption file, or None if it does not exist; see `read_caption_file`."""
    where = source.where(sidecar)
    try:
        with source.open_text(sidecar, num_bytes) as opened:
            # One byte more than allowed shows a file that is too large without reading all of it.
            data = opened.read(MAX_TEXT_BYTES + 1)
    except FileNotFoundError:
        return None
    except RefusedFileError as err:
        reason = "caption_outside_dataset" if err.reason == "outside_dataset" else "caption_unreadable"
        detail = f"its caption {sidecar} is not read: {err.detail}"
        raise ImageError(reason, detail, where=where, fix=err.fix) from err
    except OSError as err:
        detail = f"its caption {sidecar} cannot be read: {err.strerror or err}"
        raise ImageError("caption_unreadable", detail, where=where, fix="make it readable") from err

    if len(data) > MAX_TEXT_BYTES:
        detail = f"its caption {sidecar} has more than {MAX_TEXT_BYTES:,} bytes"
        raise ImageError("caption_unreadable", detail, where=where, fix="write a shorter caption")
    _require_no_other_type(data, sidecar, where)
    text = _decode(data, settings, where)
    controls = len(_CONTROL_CHARACTERS.findall(text))
    if controls >= _MIN_CONTROL_CHARACTERS and controls >= _MIN_CONTROL_SHARE * len(text):
        detail = (
            f"its caption {sidecar} has {controls:,} control characters among {len(text):,}: it is no text"
        )
        raise ImageError("caption_undecodable", detail, where=where, fix="write the caption as plain text")
    return text


def _require_no_other_type(data: bytes, sidecar: str, where: str) -> None:
    """Raise ImageError if the bytes of a caption file are those of another type of file."""
    if data.startswith(_LFS_POINTER):
        detail = f"its caption {sidecar} is a pointer of Git LFS instead of the text"
        fix = "fetch the files with `git lfs pull`"
        raise ImageError("caption_undecodable", detail, where=where, fix=fix)
    file_type = next((name for start, name in _FILE_TYPES.items() if data.startswith(start)), None)
    if file_type is not None:
        detail = f"its caption {sidecar} is {file_type}"
        fix = "write the caption as plain text, or set captions.suffix to the suffix of the captions"
        raise ImageError("caption_undecodable", detail, where=where, fix=fix)


def missing_error(settings: CaptionSettings, source: Source, path: str) -> ImageError:
    """Return the error for an image without a caption file, with the suffixes that exist next to it."""
    folder = path.rpartition("/")[0]
    suffixes = _suffixes_by_stem(source, folder)
    existing = suffixes.get(PurePosixPath(path).stem, ())
    others = f"next to the image: {', '.join(existing)}" if existing else "no other file has its name"

    # The listed suffixes stay in the suggestion, because the captions of other images have them.
    sidecar = sidecar_path(path, settings.suffixes[0])
    suggested = _most_usual(existing)
    wanted = f" to [{', '.join([*settings.suffixes, suggested])}]" if suggested else ""
    fix = f"set captions.suffix{wanted}, or write {sidecar}"
    if not suggested:
        fix = f"write {sidecar}, or set captions.suffix or captions.fallback"

    # Hugging Face's imagefolder layout keeps captions in metadata.jsonl or metadata.csv.
    manifests = [suffix for suffix in suffixes.get("metadata", ()) if suffix in MANIFEST_SUFFIXES]
    if manifests:
        name = f"metadata{manifests[0]}"
        fix += f"; or set datasets[].path to {name}, with path_column and captions: {{from: column}}"
    expected = " or ".join(sidecar_path(path, suffix) for suffix in settings.suffixes)
    detail = f"there is no {expected}; {others}"
    return ImageError("caption_missing", detail, where=source.where(path), fix=fix)


def _most_usual(suffixes: tuple[str, ...]) -> str | None:
    """Return the most likely suffix of a caption, or None without a candidate."""
    candidates = [each for each in suffixes if last_suffix(f"x{each}")[1:].lower() not in FOREIGN_CACHES]

    def rank(suffix: str) -> tuple[int, int, str]:
        last = last_suffix(f"x{suffix}").lower()
        usual = _USUAL_SUFFIXES.index(last) if last in _USUAL_SUFFIXES else len(_USUAL_SUFFIXES)
        return usual, suffix.count("."), suffix

    return min(candidates, key=rank, default=None)


@lru_cache(maxsize=4)  # thousands of images in one folder may have no caption
def _suffixes_by_stem(source: Source, folder: str) -> Mapping[str, tuple[str, ...]]:
    """Map each stem in a folder to its sorted suffixes, except of images; `a.b.txt` has two stems."""
    suffixes: dict[str, set[str]] = {}
    for name in source.sibling_names(f"{folder}/" if folder else ""):
        if name.rpartition(".")[2].lower() in SUFFIXES:
            continue
        for index, letter in enumerate(name):
            if letter == "." and index:
                suffixes.setdefault(name[:index], set()).add(name[index:])
    return {stem: tuple(sorted(each)) for stem, each in suffixes.items()}


def _decode(data: bytes, settings: CaptionSettings, where: str) -> str:
    # A byte order mark is certain, so it wins over the recipe's encoding. The locale decides nothing: it
    # differs between machines.
    encoding = unicode_encoding(data)
    fix = "save the file as UTF-8"
    if encoding is None:
        with suppress(UnicodeDecodeError):
            return data.decode(settings.encoding)
        encoding = settings.fallback_encoding
    if encoding is None:
        encoding = settings.encoding
        fix += ", or set captions.fallback_encoding (cp1252 for files from Windows)"

    try:
        return data.decode(encoding)
    except UnicodeDecodeError as err:
        line = data.count(b"\n", 0, err.start) + 1
        detail = (
            f"byte {err.start} of its caption, 0x{data[err.start]:02x} in line {line}, is not {encoding} "
            f"({where})"
        )
        raise ImageError("caption_undecodable", detail, where=where, fix=fix) from err


def _texts_in_json(text: str, key: str, where: str) -> list[str]:
    """Return the text, or the list of texts, at a key of a JSON object."""
    try:
        content: Any = json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as err:  # RecursionError: deep nesting such as [[[[...
        detail = f"its caption file is not valid JSON: {err} ({where})"
        fix = "correct the file, or write the caption to a plain text file"
        raise ImageError("caption_undecodable", detail, where=where, fix=fix) from err

    fix = "set captions.json_key to the key that holds the caption"
    if not isinstance(content, dict):
        detail = f"its caption file {where} must hold a JSON object with the key {key!r}"
        raise ImageError("caption_missing", detail, where=where, fix=fix)
    values = cast("dict[str, Any]", content)
    if key not in values:
        keys = ", ".join(map(repr, list(values)[:10])) or "(none)"
        detail = f"its caption file {where} has no key {key!r}; its keys are {keys}"
        raise ImageError("caption_missing", detail, where=where, fix=fix)

    texts: Any = values[key] if isinstance(values[key], list) else [values[key]]
    if not all(isinstance(each, str) for each in texts):
        detail = f"{key!r} in its caption file {where} must be a text or a list of texts"
        raise ImageError("caption_undecodable", detail, where=where, fix=fix)
    return texts
