"""Captions: where each image's text comes from, how its bytes are decoded, and its one canonical form.

Encodings are always given, never the locale's. A byte order mark wins over what the recipe says.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.images.formats import SUFFIXES, ImageError
from pipeline.raw_images.sidecars import last_suffix, sidecar_path
from pipeline.recipe.validators import MANIFEST_SUFFIXES

if TYPE_CHECKING:
    from pipeline.recipe import CaptionSettings
    from pipeline.storage.source import Source

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
"""Byte order marks; UTF-32's little endian one begins with UTF-16's."""

_LINE_ENDS = re.compile("\r\n|[\r\n\v\f\x85\u2028\u2029]")

_INVISIBLE = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ufeff]")
"""Control characters but for white space, and byte order marks in the middle of a text."""

JSON_SUFFIX = ".json"
"""Of sidecar files that hold a JSON object with the caption in it."""

MAX_CAPTION_BYTES = 1_000_000
"""A larger file is no caption; reading it would fill the memory and the table."""


class Caption(NamedTuple):
    """The text of one image.

    Attributes:
        texts: In canonical form, none empty, at least one.
        source: "sidecar:<path>", "filename", "fixed" or "column", for the column `caption_from`.
    """

    texts: tuple[str, ...]
    source: str


def caption_of(
    settings: CaptionSettings,
    source: Source,
    path: str,
    listed: Sequence[str] | None = None,
    *,
    sidecar_bytes: int = 0,
) -> Caption:
    """The caption of one image, or its captions where it has several.

    Args:
        settings: The dataset's `captions` section.
        source: The dataset's files.
        path: The image's path relative to it.
        listed: What the listing's caption columns say of it; None where there is no listing.
        sidecar_bytes: As far as known, the size of the caption's file.

    Raises:
        ImageError: There is none (`caption_missing`), it holds no text (`caption_empty`), its bytes do not
            decode (`caption_undecodable`), or its file cannot be read (`caption_unreadable`).
    """
    where = source.where(path)
    if settings.from_ == "sidecar":
        sidecar = sidecar_path(path, settings.suffix)
        where, of = source.where(sidecar), f"sidecar:{sidecar}"
        texts = [_decoded(_read(source, path, sidecar, sidecar_bytes), settings, where)]
        if settings.suffix.lower() == JSON_SUFFIX:
            texts = _in_json(texts[0], settings.json_key, where)
    elif settings.from_ == "filename":
        name = path.rpartition("/")[2]
        texts, of = [name.removesuffix(last_suffix(name)).replace("_", " ")], "filename"
    elif settings.from_ == "column":
        texts, of = list(listed or ()), "column"
        where = f"the listing's row of {path}"
    else:
        texts, of = [settings.text or ""], "fixed"
    canonicals = [canonical(text) for text in texts]
    if settings.lines == "each":
        canonicals = [line for text in canonicals for line in text.split("\n")]
    found = tuple(text for text in canonicals if text)
    if not found:
        fix = "write a caption into it, or remove the image"
        raise ImageError("caption_empty", f"the caption in {where} holds no text", where=where, fix=fix)
    _require_text(found, where)
    return Caption(found, of)


def canonical(text: str) -> str:
    """The one form in which a caption is stored, hashed and tokenized.

    Unicode form NFC; lines end in a single newline and are stripped, empty ones are left out; runs of spaces
    and tabs are one space; control characters are left out. `canonical` of it is itself.
    """
    lines = _LINE_ENDS.split(unicodedata.normalize("NFC", _INVISIBLE.sub("", text)))
    stripped = [" ".join(line.split()) for line in lines]
    return "\n".join(line for line in stripped if line)


def _read(source: Source, path: str, sidecar: str, num_bytes: int) -> bytes:
    file = source.where(sidecar)
    try:
        with source.open(sidecar, num_bytes) as opened:
            data = opened.read(MAX_CAPTION_BYTES + 1)
    except FileNotFoundError as err:
        raise _missing(source, path, sidecar) from err
    except OSError as err:
        detail = f"its caption {sidecar} cannot be read: {err.strerror or err}"
        raise ImageError("caption_unreadable", detail, where=file, fix="make it readable") from err
    if len(data) > MAX_CAPTION_BYTES:
        detail = f"its caption {sidecar} has more than {MAX_CAPTION_BYTES:,} bytes"
        raise ImageError("caption_unreadable", detail, where=file, fix="write a shorter caption")
    return data


def _missing(source: Source, path: str, sidecar: str) -> ImageError:
    """Says what does lie beside the image under its name."""
    folder = path.rpartition("/")[0]
    beside = _suffixes_in(source, folder).get(PurePosixPath(path).stem, ())
    found = f"beside it lie {', '.join(beside)}" if beside else "nothing else has its name"
    fix = f"write {sidecar}, or set captions.suffix" + (f" to {beside[0]}" if beside else "")
    listings = [
        suffix for suffix in _suffixes_in(source, folder).get("metadata", ()) if suffix in MANIFEST_SUFFIXES
    ]
    if listings:
        name = f"metadata{listings[0]}"
        fix += f"; or let datasets[].path name {name}, with path_column and captions: {{from: column}}"
    return ImageError("caption_missing", f"there is no {sidecar}; {found}", where=source.where(path), fix=fix)


@lru_cache(maxsize=4)
def _suffixes_in(source: Source, folder: str) -> Mapping[str, tuple[str, ...]]:
    """Of what lies in a folder and is no image: name before a dot to what follows it, with the dot, sorted.

    A folder is listed once: thousands of its images may have no caption.
    """
    found: dict[str, set[str]] = {}
    for name in source.sibling_names(f"{folder}/" if folder else ""):
        if name.rpartition(".")[2].lower() in SUFFIXES:
            continue
        for place, letter in enumerate(name):
            if letter == "." and place:
                found.setdefault(name[:place], set()).add(name[place:])
    return {stem: tuple(sorted(suffixes)) for stem, suffixes in found.items()}


def _decoded(data: bytes, settings: CaptionSettings, where: str) -> str:
    encoding = _marked(data) or _unmarked_utf16(data)
    if encoding is not None:
        return _strictly(data, encoding, where, "save the file as UTF-8")
    try:
        return data.decode(settings.encoding)
    except UnicodeDecodeError:
        pass
    if settings.fallback_encoding is not None:
        return _strictly(data, settings.fallback_encoding, where, "save the file as UTF-8")
    fix = "save the file as UTF-8, or set captions.fallback_encoding, to cp1252 for files from Windows"
    return _strictly(data, settings.encoding, where, fix)


def _in_json(text: str, key: str, where: str) -> list[str]:
    """The text at one key of a JSON object, or the texts of the list there."""
    said: Any = None
    try:
        said = json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as err:  # the latter of [[[[...
        detail, fix = (
            f"its caption file is no JSON: {err} ({where})",
            "write it anew, or as a plain text file",
        )
        raise ImageError("caption_undecodable", detail, where=where, fix=fix) from err
    if not isinstance(said, dict) or key not in said:
        keys = ", ".join(map(repr, list(said)[:10])) if isinstance(said, dict) else "no object"  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        detail = f"there is no {key!r} in its caption file {where}; it has {keys}"
        fix = "set captions.json_key to the key that holds the caption"
        raise ImageError("caption_missing", detail, where=where, fix=fix)
    texts: Any = said[key] if isinstance(said[key], list) else [said[key]]
    if not all(isinstance(each, str) for each in texts):
        detail = f"{key!r} in its caption file {where} is neither a text nor a list of texts"
        fix = "set captions.json_key to the key that holds the caption"
        raise ImageError("caption_undecodable", detail, where=where, fix=fix)
    return texts


def _require_text(captions: Sequence[str], where: str) -> None:
    """Nothing, where captions can be stored: JSON's escapes, and some encodings, can say half a character."""
    try:
        for caption in captions:
            caption.encode("utf-8")
    except UnicodeEncodeError as err:
        half = f"\\u{ord(err.object[err.start]):04x}"
        detail = f"its caption has {half}, which is half a character and no text ({where})"
        fix = "write the whole character; in JSON one beyond \\uffff is two escapes, such as \\ud83d\\ude00"
        raise ImageError("caption_undecodable", detail, where=where, fix=fix) from err


def _strictly(data: bytes, encoding: str, where: str, fix: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as err:
        line = data.count(b"\n", 0, err.start) + 1
        detail = f"byte {err.start} of its caption, 0x{data[err.start]:02x} in line {line}, is no {encoding}"
        raise ImageError("caption_undecodable", f"{detail} ({where})", where=where, fix=fix) from err


def _marked(data: bytes) -> str | None:
    """The encoding that the file's byte order mark names."""
    return next((encoding for mark, encoding in _MARKS if data.startswith(mark)), None)


def _unmarked_utf16(data: bytes) -> str | None:
    """UTF-16 without a mark, as some Windows programs write: of Western text every other byte is zero."""
    if len(data) < 2 or len(data) % 2 or b"\0" not in data:
        return None
    even, odd = data[0::2].count(0), data[1::2].count(0)
    if max(even, odd) * 4 < len(data) or min(even, odd) * 4 > max(even, odd):
        return None
    return "utf-16-le" if odd > even else "utf-16-be"
