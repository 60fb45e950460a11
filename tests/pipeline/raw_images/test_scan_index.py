"""Results of an earlier validation are reused as long as their inputs are unchanged."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

from pipeline.raw_images import scan_index
from pipeline.raw_images.scan_index import CAPTIONS_VERSION, caption_rule
from pipeline.raw_images.stage import CLOCK_GRANULARITY_NS
from pipeline.storage.addresses import Url
from pipeline.storage.remote_source import RemoteSource
from pipeline.storage.source import LocalSource
from pipeline.validated_dataset import stage
from tests.pipeline.dataset_folder import Folder

ALL = ["a.png", "c.png", "sub/b.png"]
"""Images of `filled`, in the order in which their captions are read."""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths whose captions were read, in order."""
    paths: list[str] = []
    caption_of = stage.caption_of

    def recorded(settings: Any, source: Any, path: str, texts: Any, **values: Any) -> Any:
        paths.append(path)
        return caption_of(settings, source, path, texts, **values)

    monkeypatch.setattr(stage, "caption_of", recorded)
    return paths


@pytest.fixture
def settled(settled: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    settled()
    monkeypatch.setattr(stage, "CLOCK_GRANULARITY_NS", -(10**18))


@pytest.fixture
def filled(folder: Folder) -> Folder:
    for name in ("a.png", "sub/b.png", "c.png"):
        folder.add(name, caption=f"of {name}")
    return folder


def captions(folder: Folder) -> dict[str, str]:
    return dict(folder.ingest().table.select("path", "caption").rows())


@pytest.mark.usefixtures("settled")
def test_an_unchanged_caption_is_not_read_again(filled: Folder, read: list[str]) -> None:
    first = filled.ingest()
    assert read == ALL
    second = filled.ingest()
    assert read == ALL
    assert second.table.equals(first.table)
    assert {**second.report, "seconds": 0} == {**first.report, "seconds": 0, "decoded": 0, "known": 3}


@pytest.mark.usefixtures("settled")
def test_L01_a_caption_edited_to_the_same_size_and_time_is_read_again(
    filled: Folder, read: list[str]
) -> None:
    filled.ingest()
    caption = filled.root / "a.txt"
    stat = caption.stat()
    caption.write_text("of A.PNG")
    os.utime(caption, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert captions(filled)["a.png"] == "of A.PNG"
    assert read[3:] == ["a.png"]


def test_a_caption_within_the_clocks_granularity_is_read_again(
    filled: Folder, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CLOCK_GRANULARITY_NS > 0
    hour_ns = 3600 * 10**9  # the real granularity may pass between two ingests on a busy machine
    monkeypatch.setattr(stage, "CLOCK_GRANULARITY_NS", hour_ns)
    filled.ingest()
    filled.ingest()
    assert read == ALL * 2


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    "change",
    [
        {"prefix": "new "},
        {"from": "filename"},
        {"suffix": ".cap"},
        {"replace": [{"find": "of", "with": "new"}]},
    ],
    ids=str,
)
def test_changed_settings_read_every_caption_again(
    filled: Folder, read: list[str], change: dict[str, Any]
) -> None:
    for name in ("a", "sub/b", "c"):
        (filled.root / f"{name}.cap").write_text(f"other {name}")
    before = captions(filled)
    filled.captions = change
    after = captions(filled)
    assert read == ALL * 2
    assert {path: text for path, text in before.items() if after[path] == text} == {}, (
        "captions not read again"
    )
    assert captions(filled) == after
    assert read == ALL * 2


@pytest.mark.usefixtures("settled")
def test_a_deleted_caption_is_missing_and_a_renamed_one_belongs_to_its_new_image(filled: Folder) -> None:
    filled.ingest()
    (filled.root / "a.txt").unlink()
    result = filled.ingest()
    assert dict(result.rejected.select("path", "reason").rows()) == {"a.png": "caption_missing"}
    (filled.root / "c.txt").rename(filled.root / "a.txt")
    result = filled.ingest()
    assert dict(result.rejected.select("path", "reason").rows()) == {"c.png": "caption_missing"}
    assert dict(result.table.select("path", "caption").rows())["a.png"] == "of c.png"


@pytest.mark.usefixtures("settled")
def test_the_captions_of_a_moved_dataset_are_read_again(filled: Folder, read: list[str]) -> None:
    before = captions(filled)
    moved = filled.root.rename(filled.root.with_name("moved"))
    filled.root = moved
    assert captions(filled) == before
    assert read == ALL * 2


@pytest.mark.usefixtures("settled")
def test_decode_results_are_stored_even_if_no_image_is_valid(folder: Folder) -> None:
    folder.add("bad.png", folder.picture()[:-30])
    first, second = folder.ingest(), folder.ingest()
    assert (first.report["decoded"], second.report["decoded"]) == (1, 0)
    assert second.rejected.equals(first.rejected)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("damage", [b"", b"PAR1 no table", None])
def test_damaged_indexes_count_as_missing(filled: Folder, read: list[str], damage: bytes | None) -> None:
    first = filled.ingest()
    for file in sorted((filled.tables.folder / "known").iterdir()):
        if damage is None:
            pl.DataFrame({"other": [1]}).write_parquet(file)
        else:
            file.write_bytes(damage)
    second = filled.ingest()
    assert second.table.equals(first.table)
    assert second.report["decoded"] == 3
    assert read == ALL * 2


@pytest.mark.usefixtures("settled")
def test_an_image_changed_after_the_scan_is_detected_even_if_its_caption_is_unchanged(filled: Folder) -> None:
    filled.ingest()
    filled.scan()
    (filled.root / "a.png").write_bytes(b"changed")
    assert dict(filled.validate().rejected.select("path", "reason").rows()) == {"a.png": "changed"}


class SlowSource(LocalSource):
    """A folder on a slow disk."""

    def stats(self, paths: Sequence[str]) -> npt.NDArray[np.int64]:
        time.sleep(0.1)
        return super().stats(paths)


def test_comparing_files_reports_progress(filled: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.reporting.progress.FIRST_LINE_S", 0.02)
    monkeypatch.setattr(scan_index, "BATCH_FILES", 1)
    raw = filled.scan().table
    (filled.root / "c.png").unlink()
    lines: list[str] = []
    unchanged = scan_index.unchanged_files({"d": SlowSource(filled.root)}, raw, log=lines.append)
    assert sorted(unchanged["sample_id"]) == ["d/a.png", "d/sub/b.png"]
    assert lines
    assert [line for line in lines if not re.match(r"files compared: \d of 3, ", line)] == []


@pytest.mark.usefixtures("settled")
def test_L01_a_change_in_a_file_of_any_listed_suffix_is_noticed(filled: Folder, read: list[str]) -> None:
    filled.captions = {"suffix": [".txt", ".caption"]}
    (filled.root / "b.png").write_bytes(filled.picture(7))
    (filled.root / "b.caption").write_text("of b")
    assert captions(filled)["b.png"] == "of b"
    num_read = len(read)

    (filled.root / "a.caption").write_text("another text of a")
    (filled.root / "b.txt").write_text("a better text of b")
    result = filled.ingest()
    assert sorted(read[num_read:]) == ["a.png", "b.png"]
    texts = dict(result.table.select("path", "caption").rows())
    assert (texts["a.png"], texts["b.png"]) == ("of a.png", "a better text of b")
    assert result.report["caption_conflicts"] == 2

    (filled.root / "a.caption").unlink()
    assert filled.ingest().report["caption_conflicts"] == 1


@pytest.mark.usefixtures("settled")
def test_a_conflict_of_unchanged_files_is_reported_again_without_reading_them(
    filled: Folder, read: list[str]
) -> None:
    filled.captions = {"suffix": [".txt", ".caption"]}
    (filled.root / "a.caption").write_text("another text of a")
    first = filled.ingest().report
    second = filled.ingest().report
    assert read == ALL
    assert second["named"] == first["named"]
    assert second["named"]["caption_conflicts"] == [
        {"sample_id": "d/a.png", "used": "a.txt", "not_used": "a.caption"}
    ]


@pytest.mark.usefixtures("settled")
def test_a_new_caption_file_replaces_the_fallback(filled: Folder, read: list[str]) -> None:
    filled.captions = {"fallback": "a photo"}
    (filled.root / "a.txt").unlink()
    assert captions(filled)["a.png"] == "a photo"
    assert captions(filled)["a.png"] == "a photo"
    assert read == ALL
    (filled.root / "a.txt").write_text("a cat")
    assert captions(filled)["a.png"] == "a cat"
    assert read[3:] == ["a.png"]


def test_captions_that_an_earlier_version_read_stay_valid(folder: Folder) -> None:
    """The rule of settings without newer keys is the one that was stored before they existed."""
    [settings] = folder.recipe.datasets
    captions = settings.captions.model_dump_json(exclude={"replace", "class_words", "drop_tags"})
    rule = f"{CAPTIONS_VERSION}\0links inside\0{settings.root}\0{captions}"
    assert caption_rule(settings) == hashlib.sha256(rule.encode()).hexdigest()[:16]


def test_captions_are_read_again_after_a_change_of_the_rules_of_replacements(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.captions = {"replace": [{"find": "a", "with": "b"}]}
    [settings] = folder.recipe.datasets
    before = caption_rule(settings)
    monkeypatch.setattr("pipeline.raw_images.scan_index.REPLACE_VERSION", "another version")
    assert caption_rule(settings) != before


def test_files_of_a_dataset_at_an_address_are_compared_even_if_it_has_none() -> None:
    fsspec.filesystem("memory").pipe_file("/compared/a.png", b"pixels")
    source = RemoteSource(Url("memory://compared"))
    names = {"sample_id": "d/a.png", "dataset": "d", "path": "a.png"}
    files = pl.DataFrame([names], schema=dict.fromkeys(names, pl.String))
    for rows in (files, files.clear()):
        stats = scan_index.read_stats({"d": source}, rows, log=str, doing="files compared")
        assert stats["d"].select("sample_id", "file_bytes").rows() == [("d/a.png", 6)][: len(rows)]
