"""Shards of small pictures with captions, as WebDataset and the Hub store them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from tests.pipeline.dataset_folder import picture


def tar_bytes(members: Mapping[str, bytes] | Sequence[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """Return a tar archive of the members, in order."""
    if isinstance(members, Mapping):
        members = [(tarfile.TarInfo(name), content) for name, content in members.items()]
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for info, content in members:
            if info.isreg():
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def samples(*keys: str) -> dict[str, bytes]:
    """Return the members of a WebDataset shard; the seed of a picture is the sum of its key."""
    members: dict[str, bytes] = {}
    for key in keys:
        members[f"{key}.png"] = picture(sum(key.encode()))
        members[f"{key}.txt"] = f"caption of {key}".encode()
    return members


def parquet_bytes(rows: Sequence[Mapping[str, Any]], schema: Mapping[str, Any] | None = None) -> bytes:
    """Return a Parquet file of the rows."""
    file = io.BytesIO()
    pl.DataFrame(list(rows), schema=schema).write_parquet(file)
    return file.getvalue()


def hub_row(key: str, **columns: Any) -> dict[str, Any]:
    """Return a row as the library datasets writes it: a struct with bytes and a file name."""
    image = {"bytes": picture(sum(key.encode())), "path": f"../../{key}.png"}
    return {"image": image, "text": f"caption of {key}", **columns}


def put(folder: Path, name: str, content: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name
