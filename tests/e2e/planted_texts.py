"""Searching all files below a folder for texts that must not be in them."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import polars as pl
from PIL import Image


def stored_bytes(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file and, for formats that compress texts, the texts in it."""
    yield path.read_bytes()
    if path.suffix == ".parquet":
        yield str(pl.read_parquet(path).rows()).encode()
    elif path.suffix in (".png", ".jpg"):
        with Image.open(path) as image:
            yield str(image.info).encode()
    elif path.suffix == ".db":
        with closing(sqlite3.connect(path)) as database:
            tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            rows = [row for (name,) in tables for row in database.execute(f'SELECT * FROM "{name}"')]
        for value in (value for row in rows for value in row):
            with suppress(zlib.error, TypeError):
                yield zlib.decompress(value)


def files_with(folder: Path, texts: Sequence[str]) -> Iterator[str]:
    """Yield each of the texts below a folder with the file that contains it."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        content = b"".join([str(path.relative_to(folder)).encode(), *stored_bytes(path)])
        yield from (f"{path}: {text}" for text in texts if text.encode() in content)
