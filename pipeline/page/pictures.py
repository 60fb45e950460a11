"""Pictures of the page: reduced once, kept in `reports/thumbnails/`, and embedded or linked."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.reporting.pictures import jpeg
from pipeline.storage.atomic import write_bytes

if TYPE_CHECKING:
    from PIL import Image

Picture = Callable[[Path, int], str]
"""Function that returns the address of a picture whose longer edge has at most so many pixels.

The address is empty for a file that is missing or cannot be read.
"""

FOLDER = "thumbnails"
"""Folder in reports/ with the reduced pictures."""

_KINDS = {".png": "image/png", ".jpg": "image/jpeg"}

_SMALL_BYTES = 24_000
"""Size up to which a picture is shown as it is."""

_MAX_BYTES = {256: 24_000, 1600: 240_000}
"""Maximum size of a reduced picture, by its edge."""


class Embedded:
    """Addresses that contain the pictures, for a page without a server."""

    def __init__(self, output_dir: Path) -> None:
        self._reduced = Reduced(output_dir)

    def __call__(self, path: Path, edge_px: int) -> str:
        """Return a `data:` address of the picture."""
        file = self._reduced.file(path, edge_px)
        if file is None:
            return ""
        data = base64.b64encode(file.read_bytes()).decode("ascii")
        return f"data:{_KINDS[file.suffix]};base64,{data}"

    def remove_unused(self) -> None:
        """Delete reduced pictures that this page does not show."""
        self._reduced.remove_unused()


class Reduced:
    """The reduced pictures of an output folder."""

    def __init__(self, output_dir: Path) -> None:
        self._folder = output_dir / "reports" / FOLDER
        self._used: set[str] = set()

    def file(self, path: Path, edge_px: int) -> Path | None:
        """Return a small PNG or JPEG file itself, or else a JPEG of it; None if it cannot be read."""
        try:
            stat = path.stat()
        except OSError:
            return None
        # Most thumbnails and charts are small, and need no other file.
        if stat.st_size <= _SMALL_BYTES:
            return path
        # By content of the name and stat, so that a picture that was drawn again is reduced again.
        identity = f"{path.parent.parent.name}/{path.name} {stat.st_size} {stat.st_mtime_ns} {edge_px}"
        name = f"{hashlib.sha256(identity.encode('utf-8', 'surrogateescape')).hexdigest()[:24]}.jpg"
        self._used.add(name)
        if not (self._folder / name).is_file():
            picture = _opened(path)
            if picture is None:
                return None
            picture.thumbnail((edge_px, edge_px))
            write_bytes(self._folder / name, jpeg(picture, _MAX_BYTES[edge_px]))
        return self._folder / name

    def remove_unused(self) -> None:
        """Delete the pictures that nobody has requested."""
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if path.name not in self._used:
                    path.unlink(missing_ok=True)


def _opened(path: Path) -> Image.Image | None:
    from PIL import Image

    # A killed process may have left a part of a file, which must not keep the page from being written.
    try:
        with Image.open(path, formats=("PNG", "JPEG")) as picture:
            return picture.convert("RGB")
    except (OSError, ValueError, SyntaxError):
        return None
