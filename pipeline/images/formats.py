"""Which files are images: by their first bytes, whatever their suffix; and the error of one that is none."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from typing import NamedTuple

from PIL import Image

from pipeline.errors import LatentlineError

SUFFIXES = frozenset(
    [
        *("jpg", "jpeg", "jpe", "jfif", "mpo", "png", "apng", "webp", "avif", "gif"),
        *("bmp", "dib", "tif", "tiff", "jp2", "j2k", "jxl", "heic", "heif", "hif"),
    ]
)
"""Lower-case file name suffixes, without the dot, of what may be an image."""


class _Plugin(NamedTuple):
    """What makes Pillow open one more format.

    Attributes:
        package: To install.
        module: To import.
        register: The module's function to call then; None where importing is enough.
    """

    package: str
    module: str
    register: str | None


_PLUGINS = {
    "HEIF": _Plugin("pillow-heif", "pillow_heif", "register_heif_opener"),
    "JXL": _Plugin("pillow-jxl-plugin", "pillow_jxl", None),
}
"""By Pillow's name of the format."""

_MAGIC = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG2000"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
    (b"\xff\x0a", "JXL"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "JXL"),
)


class ImageError(LatentlineError):
    """One image that cannot be used; it is rejected, and the others go on.

    Attributes:
        reason: Snake-case code for the column `reason`, such as `truncated`.
        detail: What was met, for the column `detail`.
    """

    def __init__(self, reason: str, detail: str, *, fix: str, where: str = "an image in memory") -> None:
        """Keep the code beside the three parts of the text."""
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}", where=where, fix=fix)

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from the parts, so that the error survives a process boundary."""
        return (_rebuild, (self.reason, self.detail, self.fix, self.where))


def require_image(start: bytes) -> None:
    """Nothing, where the first bytes may be an image's; otherwise what they are instead."""
    if not start:
        raise ImageError("empty_file", "it has no bytes", fix="copy or download it again, or remove it")
    if not start.strip(b"\0"):
        detail = "it begins with nothing but zeros, as after an interrupted copy"
        raise ImageError("not_an_image", detail, fix="copy or download it again, or remove it")
    kind = sniff(start)
    if kind in _PLUGINS and not formats_of(start):
        package = _PLUGINS[kind].package
        fix = f"install the plug-in, .venv/bin/pip install {package}, or convert it to PNG or JPEG"
        raise ImageError("plugin_missing", f"it is {kind}, which Pillow opens with {package} only", fix=fix)
    if kind is None:
        words = start.lstrip()[:14].lower()
        found = (
            "a web page" if words.startswith((b"<!doctype html", b"<html")) else "none of the known formats"
        )
        fix = "convert it to PNG or JPEG, or remove it"
        raise ImageError("not_an_image", f"its first bytes ({start[:8].hex(' ')}) are {found}", fix=fix)


def sniff(start: bytes) -> str | None:
    """Pillow's name of the format that a file's first 64 bytes are of; None for none that is opened."""
    brand = start[8:12] if start[4:8] == b"ftyp" else b""
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "WEBP"
    if brand in {b"avif", b"avis"} or (brand in {b"mif1", b"msf1", b"miaf"} and b"avi" in start[12:]):
        return "AVIF"
    if brand in {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}:
        return "HEIF"
    return next((name for magic, name in _MAGIC if start.startswith(magic)), None)


def formats_of(start: bytes) -> list[str]:
    """The Pillow formats to try for these first bytes; empty where they need a plug-in that is not there.

    Only the format that was recognised is ever tried: Pillow knows others that start programs.
    """
    kind = sniff(start)
    return [] if kind is None or (kind in _PLUGINS and not _plugged_in(kind)) else [kind]


@cache
def plugin_of(kind: str | None) -> str | None:
    """The package, with its version, that opens a format for Pillow, such as "pillow-heif-1.8.1".

    None for a format that Pillow opens by itself, and where the package is not there.
    """
    if kind not in _PLUGINS:
        return None
    package = _PLUGINS[kind].package
    try:
        return f"{package}-{metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return None


def plugins() -> Iterator[str]:
    """Of all formats, what `plugin_of` has; it takes milliseconds."""
    yield from (plugin for kind in _PLUGINS if (plugin := plugin_of(kind)) is not None)


@cache
def _plugged_in(kind: str) -> bool:
    """Whether the format's plug-in is there; Pillow looks for none by itself."""
    plugin = _PLUGINS[kind]
    try:
        module = importlib.import_module(plugin.module)
    except ImportError:
        return False
    if plugin.register is not None:
        getattr(module, plugin.register)()
    return kind in Image.OPEN


def _rebuild(reason: str, detail: str, fix: str, where: str) -> ImageError:
    return ImageError(reason, detail, fix=fix, where=where)
