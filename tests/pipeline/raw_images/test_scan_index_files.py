"""The files of the index: their columns, what replaces them, and which files count as unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

from pipeline.log import discard
from pipeline.raw_images import scan_index
from pipeline.raw_images.scan_index import (
    ScanIndex,
    read_rejected_files,
    read_stats,
    sidecar_stats,
    unchanged_sidecars,
    write_rejected_files,
)
from pipeline.storage.addresses import Url
from pipeline.storage.remote_source import RemoteSource
from pipeline.storage.source import LocalSource
from pipeline.storage.tables import Tables
from tests.damage import DAMAGES

STAT = dict.fromkeys(("file_bytes", "mtime_ns", "ctime_ns", "inode"), pl.Int64)
PAIRED = {
    **dict.fromkeys(("root", "source", "path"), pl.String),
    **STAT,
    "read_ns": pl.Int64,
    "hash": pl.String,
    **dict.fromkeys(("height", "width"), pl.Int32),
}

COLUMNS: dict[str, dict[str, Any]] = {
    "pixels": {
        **dict.fromkeys(("content_hash", "decoder", "reason", "detail", "fix", "decoding"), pl.String),
        "perceptual_hash": pl.UInt64,
        **dict.fromkeys(("detail_px", "brightest", "contrast", "white", "bars"), pl.Float64),
        "colours": pl.String,
        "corners": pl.String,
        "jpeg_quality": pl.Int32,
    },
    "captions": {
        **dict.fromkeys(("sample_id", "rule", "caption", "more_captions", "caption_from"), pl.String),
        "differing_captions": pl.List(pl.String),
        "caption_read_ns": pl.Int64,
        **{
            f"caption_{name}": pl.List(pl.Int64)
            for name in ("bytes", *(each for each in STAT if each != "file_bytes"))
        },
    },
    "masks": {**PAIRED, "mean": pl.Float64, "decoding": pl.String},
    "references": {**PAIRED, "decoding": pl.String},
}
"""Columns of each file. An index with other columns counts as missing, so that every image is read again."""

REFUSED = {
    **dict.fromkeys(
        ("sample_id", "dataset", "path", "content_hash", "stage", "reason", "detail", "fix"), pl.String
    ),
    **STAT,
    "scanned_ns": pl.Int64,
    "decoder": pl.String,
    "max_px": pl.Int64,
}

VALUES = {pl.String: "a", pl.Float64: 0.5, pl.List(pl.String): ["b"], pl.List(pl.Int64): [1, 2]}


def one_row(columns: dict[str, Any], **values: object) -> pl.DataFrame:
    return pl.DataFrame([{name: VALUES.get(kind, 7) for name, kind in columns.items()} | values], columns)


def test_each_index_reads_back_and_is_replaced_only_if_it_has_changed(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    index = ScanIndex(tables)
    empty = [
        index.decoded,
        index.captions,
        *(index.side_input(name, COLUMNS[name]) for name in ("masks", "references")),
    ]
    assert [dict(table.schema) for table in empty] == list(COLUMNS.values())

    def write(
        to: ScanIndex, pixels: pl.DataFrame, captions: pl.DataFrame, *side_inputs: pl.DataFrame
    ) -> None:
        to.write(pixels, captions, dict(zip(("masks", "references"), side_inputs, strict=True)))

    rows = [one_row(columns) for columns in COLUMNS.values()]
    write(index, *rows)
    paths = [tables.folder / "known" / f"{name}.parquet" for name in COLUMNS]
    inodes = [path.stat().st_ino for path in paths]
    stored = ScanIndex(tables)
    read_back = [
        stored.decoded,
        stored.captions,
        *(stored.side_input(name, COLUMNS[name]) for name in ("masks", "references")),
    ]
    assert [table.equals(row) for table, row in zip(read_back, rows, strict=True)] == [True] * 4

    for number, path in enumerate(paths):
        changed = [pl.concat([row, row]) if at == number else row for at, row in enumerate(rows)]
        write(stored, *changed)
        replaced = [each.stat().st_ino != inode for each, inode in zip(paths, inodes, strict=True)]
        assert replaced == [at == number for at in range(4)], f"only {path.name} has changed"
        write(stored, *rows)  # equals the index as it was read, so that nothing is written
        assert len(pl.read_parquet(path)) == 2
        inodes[number] = path.stat().st_ino


def test_rejected_files_read_back_sorted_and_are_replaced_only_if_they_have_changed(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    assert dict(read_rejected_files(tables).schema) == REFUSED
    path = tables.folder / "known" / "refused.parquet"
    write_rejected_files(tables, read_rejected_files(tables))
    assert not path.exists()

    rows = pl.concat([one_row(REFUSED, sample_id=f"d/{name}.png") for name in "ba"])
    write_rejected_files(tables, rows)
    inode = path.stat().st_ino
    assert read_rejected_files(tables).equals(rows.reverse())
    write_rejected_files(tables, rows.reverse())
    assert path.stat().st_ino == inode
    write_rejected_files(tables, rows.head(1))
    assert read_rejected_files(tables)["sample_id"].to_list() == ["d/b.png"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_named_and_a_missing_one_is_not(tmp_path: Path, damage: str) -> None:
    def read(tables: Tables) -> list[int]:
        index = ScanIndex(tables)
        masks = index.side_input("masks", COLUMNS["masks"])
        return [len(each) for each in (index.decoded, index.captions, masks, read_rejected_files(tables))]

    lines: list[str] = []
    tables = Tables(tmp_path, log=lines.append)
    assert read(tables) == [0, 0, 0, 0]
    rows = {name: one_row(COLUMNS[name]) for name in ("pixels", "captions", "masks")}
    ScanIndex(tables).write(rows["pixels"], rows["captions"], {"masks": rows["masks"]})
    write_rejected_files(tables, one_row(REFUSED, sample_id="d/a.png"))
    assert read(tables) == [1, 1, 1, 1]
    assert lines == []

    paths = [tables.folder / "known" / f"{name}.parquet" for name in (*rows, "refused")]
    for path in paths:
        DAMAGES[damage](path)
    assert read(tables) == [0, 0, 0, 0]
    for line, path in zip(lines, paths, strict=True):
        assert line.endswith(f" ({path}); the file counts as missing, and jobs compute its rows again")


class CountedFolder(LocalSource):
    """A folder that records how many paths each call compares."""

    def __init__(self, address: Path) -> None:
        super().__init__(address)
        self.calls: list[int] = []

    def stats(self, paths: Sequence[str]) -> npt.NDArray[np.int64]:
        self.calls.append(len(paths))
        return super().stats(paths)


class CountedBucket(RemoteSource):
    """A remote folder that records how many paths each call compares."""

    def __init__(self, url: Url) -> None:
        super().__init__(url)
        self.calls: list[int] = []

    def stats(self, paths: Sequence[str]) -> npt.NDArray[np.int64]:
        self.calls.append(len(paths))
        return super().stats(paths)


def test_a_remote_folder_gets_all_paths_at_once_and_a_local_one_gets_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remote folder is listed once per call, however many of its files are compared."""
    monkeypatch.setattr(scan_index, "BATCH_FILES", 2)
    fsspec.filesystem("memory").pipe_file("/parts/4.png", b"pixels")
    (tmp_path / "4.png").write_bytes(b"pixels")
    local, remote = CountedFolder(tmp_path), CountedBucket(Url("memory://parts"))
    rows = [(f"{dataset}/{number}", dataset, f"{number}.png") for dataset in "lr" for number in range(5)]
    names = ("sample_id", "dataset", "path")
    files = pl.DataFrame([*rows, ("l/none", "l", None)], dict.fromkeys(names, pl.String), orient="row")

    stats = read_stats({"l": local, "r": remote}, files, log=discard, doing="files compared")
    assert (local.calls, remote.calls) == ([2, 2, 1], [5])
    for dataset, table in stats.items():
        assert table.columns == ["sample_id", *STAT]
        sizes = [(f"{dataset}/{number}", -1) for number in range(4)]
        assert table.select("sample_id", "file_bytes").rows() == [*sizes, (f"{dataset}/4", 6)]


def test_a_caption_read_later_than_the_clocks_granularity_after_its_change_is_trusted(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("a caption")
    sources = {"d": LocalSource(tmp_path)}
    rows = pl.DataFrame(
        [("d/a.png", "d", ["a.txt", "gone.txt", "b.txt"]), ("d/b.png", "d", None)],
        {"sample_id": pl.String, "dataset": pl.String, "sidecars": pl.List(pl.String)},
        orient="row",
    )
    stats = sidecar_stats(sources, rows, log=discard, doing="captions compared")
    assert stats.select("sample_id", "caption_bytes").rows() == [("d/a.png", [9, -1, 9])]

    stored = rows.join(stats, on="sample_id", how="left")
    changed_ns = max(stats["caption_ctime_ns"].item())
    for read_ns, trusted in ((changed_ns + 100, []), (changed_ns + 101, ["d/a.png"])):
        known = stored.with_columns(caption_read_ns=pl.lit(read_ns))
        unchanged = unchanged_sidecars(sources, known, 100, log=discard)
        assert unchanged["sample_id"].to_list() == [*trusted, "d/b.png"], "captions without files are trusted"

    (tmp_path / "gone.txt").write_text("it appears")
    known = stored.with_columns(caption_read_ns=pl.lit(changed_ns + 101))
    assert unchanged_sidecars(sources, known, 100, log=discard)["sample_id"].to_list() == ["d/b.png"]
