"""Format of packs: immutable files that hold about 1,000 cache entries of one kind each.

    <cache_dir>/packs/<kind>/<sha256>.pack       entries in the order of their keys, without gaps; each has
                                                 the bytes of its own safetensors file
    <cache_dir>/packs/<kind>/<sha256>.parquet    index of the pack: the columns in `INDEX_COLUMNS`
    <cache_dir>/packs/<kind>/changed             random text, replaced after packs were added or removed

The name of a pack is the SHA-256 of its bytes. A pack is written before its index, so a pack with an index is
complete. Rows of damaged entries are removed from an index; nothing else ever changes in it.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from pipeline.cache.entry_format import (
    DATA_START,
    KINDS,
    EntrySpec,
    Kind,
    WrongEntryError,
    parse,
    read_header,
    stated_tensors,
)

if TYPE_CHECKING:
    import polars as pl

PACKS = "packs"
"""Name of the folder with the packs of all kinds."""

PACK_SUFFIX, INDEX_SUFFIX = ".pack", ".parquet"

CHANGED = "changed"
"""Name of the file by which readers see that packs were added or removed."""

INDEX_COLUMNS = ("key", "pack", "offset", "length", "checksum")
"""Columns of an index: key in hex, name of the pack without suffix, first byte and number of bytes of the
entry in the pack, and SHA-256 of these bytes in hex."""

_KEY_DIGITS = 64
_PACK_NAME = re.compile(r"[0-9a-f]{64}")


class WrongPackError(Exception):
    """An index does not have the documented format; the text is the reason."""


def pack_folder(kind: Kind) -> str:
    """Return the folder of a kind's packs, relative to the cache."""
    return f"{PACKS}/{kind}"


def pack_path(kind: Kind, pack: str) -> str:
    """Return the path of a pack, relative to the cache."""
    return f"{PACKS}/{kind}/{pack}{PACK_SUFFIX}"


def index_path(kind: Kind, pack: str) -> str:
    """Return the path of a pack's index, relative to the cache."""
    return f"{PACKS}/{kind}/{pack}{INDEX_SUFFIX}"


def is_pack_file(path: PurePosixPath) -> bool:
    """Return whether a path relative to the cache is that of a pack or of an index."""
    in_folder = len(path.parts) == 3 and path.parts[0] == PACKS and path.parts[1] in KINDS
    is_named = path.suffix in {PACK_SUFFIX, INDEX_SUFFIX} and _PACK_NAME.fullmatch(path.stem) is not None
    return in_folder and is_named


def build_pack(entries: Mapping[str, bytes]) -> tuple[str, bytes, bytes]:
    """Return the name and the bytes of a pack, and the bytes of its index.

    The same entries give the same name and bytes, in whatever order they are passed.

    Args:
        entries: Bytes of each entry's file by key, of 64 hex digits.
    """
    import polars as pl  # encoding processes read packs but have no use for Polars until then

    keys = sorted(entries)
    assert all(len(key) == _KEY_DIGITS for key in keys), "keys of packed entries have 64 digits"
    content = b"".join(entries[key] for key in keys)
    pack = hashlib.sha256(content).hexdigest()

    lengths = [len(entries[key]) for key in keys]
    ends = pl.Series(lengths, dtype=pl.Int64).cum_sum()
    index = pl.DataFrame(
        {
            "key": keys,
            "pack": [pack] * len(keys),
            "offset": ends - pl.Series(lengths, dtype=pl.Int64),
            "length": pl.Series(lengths, dtype=pl.Int64),
            "checksum": [hashlib.sha256(entries[key]).hexdigest() for key in keys],
        }
    )
    return pack, content, index_bytes(index)


def index_bytes(index: pl.DataFrame) -> bytes:
    """Return the bytes of an index file."""
    file = io.BytesIO()
    index.select(INDEX_COLUMNS).write_parquet(file)
    return file.getvalue()


def parse_index(raw: bytes, pack: str, pack_bytes: int) -> pl.DataFrame:
    """Return the rows of an index file.

    Args:
        raw: Bytes of the file.
        pack: Name of the pack.
        pack_bytes: Size of the pack.

    Raises:
        WrongPackError: The file is damaged, or describes something else than entries in this pack.
    """
    import polars as pl

    schema: dict[str, Any] = dict(
        zip(INDEX_COLUMNS, (pl.String, pl.String, pl.Int64, pl.Int64, pl.String), strict=True)
    )
    try:
        index = pl.read_parquet(io.BytesIO(raw))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as err:
        raise WrongPackError(f"it is not a Parquet file: {err}") from err
    if not schema.items() <= index.schema.items():
        raise WrongPackError(f"its columns must be {_described(schema)}, got {_described(index.schema)}")

    index = index.select(INDEX_COLUMNS)
    is_inside = (
        (pl.col("pack") == pack)
        & (pl.col("offset") >= 0)
        & (pl.col("length") >= DATA_START)
        & (pl.col("offset") + pl.col("length") <= pack_bytes)
        & pl.col("key").str.contains(r"^[0-9a-f]{64}$")
    )
    if index.null_count().sum_horizontal().sum() or not index.select(is_inside.all()).item():
        raise WrongPackError("a row describes something else than an entry in the pack")
    return index


def bad_entries(kind: Kind, index: pl.DataFrame, content: bytes) -> dict[str, str]:
    """Return what is wrong with entries in the content of a pack, by key; nothing if all are valid.

    Each entry is verified completely: checksums of index and entry, key, shapes and finite values.
    """
    view = memoryview(content)
    problems: dict[str, str] = {}
    for key, offset, length, checksum in index.select("key", "offset", "length", "checksum").iter_rows():
        raw = bytes(view[offset : offset + length])
        if hashlib.sha256(raw).hexdigest() != checksum:
            problems[key] = "the checksum in the index does not match the content"
            continue
        try:
            stated = stated_tensors(read_header(raw[:DATA_START]))
            parse(EntrySpec(kind, key, stated), raw, verify=True)
        except WrongEntryError as err:
            problems[key] = str(err)
    return problems


def _described(schema: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {dtype}" for name, dtype in schema.items())
