"""Read the caption of an image, decode it, and bring it into one canonical form.

The encoding comes from a byte order mark or the recipe, never from the locale.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pipeline.images.formats import SUFFIXES, ImageError
from pipeline.raw_images.folder import last_suffix, sidecar_path
from pipeline.raw_images.scan_index import SIDECAR
from pipeline.recipe.validators import MANIFEST_SUFFIXES

if TYPE_CHECKING:
    from pipeline.recipe import CaptionSettings
    from pipeline.storage.source import Source

JSON_SUFFIX = ".json"
"""Suffix of sidecar files that hold a JSON object with the caption."""

MAX_CAPTION_BYTES = 1_000_000
"""Maximum size of a caption file. A larger one is not a caption and would fill memory and table."""

_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
"""Byte order marks and their encodings. UTF-32 comes first: its little-endian mark starts with that of
UTF-16."""

_LINE_ENDS = re.compile("\r\n|[\r\n\v\f\x85\u2028\u2029]")

_INVISIBLE = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ufeff]")
"""Control characters except white space, and byte order marks inside a text."""


class Caption(NamedTuple):
    """The captions of one image.

    Attributes:
        texts: At least one text in canonical form; none is empty.
        source: "sidecar:<path>", "filename", "fixed" or "column", for the column `caption_from`.
    """

    texts: tuple[str, ...]
    source: str


def caption_of(
    settings: CaptionSettings,
    source: Source,
    path: str,
    manifest_texts: Sequence[str] | None = None,
    *,
    sidecar_bytes: int = 0,
) -> Caption:
    """Return the caption of one image, or its captions if it has several.

    `manifest_texts` are those of the manifest's caption columns, or None without a manifest. `sidecar_bytes`
    is the size of the caption file if known, otherwise 0 or -1.

    Raises:
        ImageError: There is no caption (`caption_missing`), it is empty (`caption_empty`), its bytes do
            not decode (`caption_undecodable`), or its file cannot be read (`caption_unreadable`).
    """
    where = source.where(path)
    if settings.from_ == "sidecar":
        sidecar = sidecar_path(path, settings.suffix)
        where, caption_from = source.where(sidecar), f"{SIDECAR}{sidecar}"
        texts = [_decode(_read_sidecar(source, path, sidecar, sidecar_bytes), settings, where)]
        if settings.suffix.lower() == JSON_SUFFIX:
            texts = _texts_in_json(texts[0], settings.json_key, where)
    elif settings.from_ == "filename":
        name = path.rpartition("/")[2]
        texts, caption_from = [name.removesuffix(last_suffix(name)).replace("_", " ")], "filename"
    elif settings.from_ == "column":
        texts, caption_from = list(manifest_texts or ()), "column"
        where = f"the manifest's row of {path}"
    else:
        texts, caption_from = [settings.text or ""], "fixed"

    texts = [canonical(text) for text in texts]
    if settings.lines == "each":
        texts = [line for text in texts for line in text.split("\n")]
    texts = [text for text in texts if text]
    if not texts:
        fix = "write a caption, or remove the image"
        raise ImageError("caption_empty", f"the caption in {where} is empty", where=where, fix=fix)
    _require_valid_unicode(texts, where)
    return Caption(tuple(texts), caption_from)


def canonical(text: str) -> str:
    """Return the form in which a caption is stored, hashed and tokenized.

    It is in Unicode form NFC. Lines end in a single newline and are stripped; empty lines are removed. Runs
    of spaces and tabs become one space; control characters are removed. The function is idempotent.
    """
    lines = _LINE_ENDS.split(unicodedata.normalize("NFC", _INVISIBLE.sub("", text)))
    stripped = [" ".join(line.split()) for line in lines]
    return "\n".join(line for line in stripped if line)


def _read_sidecar(source: Source, path: str, sidecar: str, num_bytes: int) -> bytes:
    where = source.where(sidecar)
    try:
        with source.open(sidecar, num_bytes) as opened:
            data = opened.read(MAX_CAPTION_BYTES + 1)
    except FileNotFoundError as err:
        raise _missing_error(source, path, sidecar) from err
    except OSError as err:
        detail = f"its caption {sidecar} cannot be read: {err.strerror or err}"
        raise ImageError("caption_unreadable", detail, where=where, fix="make it readable") from err

    if len(data) > MAX_CAPTION_BYTES:
        detail = f"its caption {sidecar} has more than {MAX_CAPTION_BYTES:,} bytes"
        raise ImageError("caption_unreadable", detail, where=where, fix="write a shorter caption")
    return data


def _missing_error(source: Source, path: str, sidecar: str) -> ImageError:
    """Return the error for a missing caption file, with the suffixes that exist next to the image."""
    folder = path.rpartition("/")[0]
    suffixes = _suffixes_by_stem(source, folder)
    existing = suffixes.get(PurePosixPath(path).stem, ())
    others = f"next to the image: {', '.join(existing)}" if existing else "no other file has its name"
    fix = f"write {sidecar}, or set captions.suffix" + (f" to {existing[0]}" if existing else "")

    # Hugging Face's imagefolder layout keeps captions in metadata.jsonl or metadata.csv.
    manifests = [suffix for suffix in suffixes.get("metadata", ()) if suffix in MANIFEST_SUFFIXES]
    if manifests:
        name = f"metadata{manifests[0]}"
        fix += f"; or set datasets[].path to {name}, with path_column and captions: {{from: column}}"
    detail = f"there is no {sidecar}; {others}"
    return ImageError("caption_missing", detail, where=source.where(path), fix=fix)


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
    marked = next((encoding for mark, encoding in _BYTE_ORDER_MARKS if data.startswith(mark)), None)
    encoding = marked or _unmarked_utf16(data)
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


def _unmarked_utf16(data: bytes) -> str | None:
    """Recognise UTF-16 without a byte order mark, as some Windows programs write it.

    In Western text, every second byte is zero.
    """
    if len(data) < 2 or len(data) % 2 or b"\0" not in data:
        return None
    even, odd = data[0::2].count(0), data[1::2].count(0)
    if max(even, odd) * 4 < len(data) or min(even, odd) * 4 > max(even, odd):
        return None
    return "utf-16-le" if odd > even else "utf-16-be"


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


def _require_valid_unicode(texts: Sequence[str], where: str) -> None:
    """Reject captions with lone surrogates, which JSON escapes and some encodings can produce."""
    try:
        for text in texts:
            text.encode("utf-8")
    except UnicodeEncodeError as err:
        surrogate = f"\\u{ord(err.object[err.start]):04x}"
        detail = f"its caption contains {surrogate}, half of a surrogate pair ({where})"
        fix = (
            "write the complete character; in JSON a character above \\uffff needs two escapes, such as "
            "\\ud83d\\ude00"
        )
        raise ImageError("caption_undecodable", detail, where=where, fix=fix) from err
