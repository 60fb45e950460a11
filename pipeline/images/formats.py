"""Recognise image files by their first bytes, whatever their suffix, and explain why others are not."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from typing import NamedTuple

from PIL import Image

from pipeline.errors import LatentlineError
from pipeline.escaping import without_secrets

SUFFIXES = frozenset(
    [
        *("jpg", "jpeg", "jpe", "jfif", "mpo", "png", "apng", "webp", "avif", "gif"),
        *("bmp", "dib", "tif", "tiff", "jp2", "j2k", "jxl", "heic", "heif", "hif"),
    ]
)
"""Lower-case suffixes, without the dot, of files that may be images."""


class _Plugin(NamedTuple):
    """A package that lets Pillow open one more format."""

    package: str
    module: str
    register: str | None  # function of the module; None if importing it is enough


PLUGINS = {
    "HEIF": _Plugin("pillow-heif", "pillow_heif", "register_heif_opener"),
    "JXL": _Plugin("pillow-jxl-plugin", "pillow_jxl", None),
}
"""Plug-ins by Pillow's name of their format."""

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
"""First bytes of each format, and Pillow's name of it."""


class ImageError(LatentlineError):
    """An image that cannot be used. It is rejected, and no other image is affected.

    Attributes:
        reason: Snake-case code for the column `reason`, such as `truncated`.
        detail: Explanation for the column `detail`.
    """

    def __init__(self, reason: str, detail: str, *, fix: str, where: str = "an image in memory") -> None:
        self.reason = reason
        self.detail = without_secrets(detail)
        super().__init__(f"{reason}: {detail}", where=where, fix=fix)

    def __reduce__(self) -> tuple[object, ...]:
        # Images are decoded in child processes too. Pickle would call the constructor with the message alone.
        return (_rebuild, (self.reason, self.detail, self.fix, self.where))


def _rebuild(reason: str, detail: str, fix: str, where: str) -> ImageError:
    return ImageError(reason, detail, fix=fix, where=where)


def require_image(start: bytes) -> None:
    """Raise ImageError unless a file begins like an image that can be opened."""
    if not start:
        raise ImageError("empty_file", "the file is empty", fix="copy or download it again, or remove it")
    if not start.strip(b"\0"):
        detail = "it starts with only zero bytes, as after an interrupted copy"
        raise ImageError("not_an_image", detail, fix="copy or download it again, or remove it")

    image_format = sniff(start)
    if image_format in PLUGINS and not formats_of(start):
        package = PLUGINS[image_format].package
        detail = f"it is {image_format}, which Pillow can only open with {package}"
        fix = f"install the plug-in with pip install {package}, or convert it to PNG or JPEG"
        raise ImageError("plugin_missing", detail, fix=fix)
    if image_format is None:
        text = start.lstrip()[:14].lower()
        is_web_page = text.startswith((b"<!doctype html", b"<html"))
        first_bytes = f"its first bytes ({start[:8].hex(' ')})"
        if is_web_page:
            detail = f"{first_bytes} belong to a web page, as after a failed download"
            raise ImageError("not_an_image", detail, fix="download the image again, or remove the file")
        detail = f"{first_bytes} belong to no supported image format"
        raise ImageError("not_an_image", detail, fix="convert it to PNG or JPEG, or remove it")


def sniff(start: bytes) -> str | None:
    """Return Pillow's name of a file's format from its first 64 bytes; None for an unsupported format."""
    # AVIF and HEIF share a container, and a file of a general brand names its codec among compatible brands.
    brand = start[8:12] if start[4:8] == b"ftyp" else b""
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "WEBP"
    if brand in {b"avif", b"avis"} or (brand in {b"mif1", b"msf1", b"miaf"} and b"avi" in start[12:]):
        return "AVIF"
    if brand in {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}:
        return "HEIF"
    return next((name for magic, name in _MAGIC if start.startswith(magic)), None)


def formats_of(start: bytes) -> list[str]:
    """Return the Pillow formats to try for these first bytes; none if the plug-in is missing."""
    image_format = sniff(start)
    if image_format is None or (image_format in PLUGINS and not has_plugin(image_format)):
        return []

    # Pillow tries no other format, because some of its plug-ins start external programs.
    return [image_format]


@cache
def plugin_version(image_format: str | None) -> str | None:
    """Return the plug-in that opens a format with its version, such as "pillow-heif-1.8.1".

    None if Pillow opens the format itself, or if the plug-in is not installed.
    """
    if image_format not in PLUGINS:
        return None
    package = PLUGINS[image_format].package
    try:
        return f"{package}-{metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return None


def plugin_versions() -> Iterator[str]:
    """Yield `plugin_version` of every installed plug-in."""
    yield from (version for name in PLUGINS if (version := plugin_version(name)) is not None)


@cache
def has_plugin(image_format: str) -> bool:
    """Return True after importing and registering the format's plug-in, which Pillow does not find itself."""
    plugin = PLUGINS[image_format]
    try:
        module = importlib.import_module(plugin.module)
    except ImportError:
        return False
    if plugin.register is not None:
        getattr(module, plugin.register)()
    return image_format in Image.OPEN
