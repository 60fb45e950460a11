"""A remote dataset gives the same samples as the same files in a local folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl
import pytest

from pipeline.errors import DatasetError
from pipeline.raw_images import checks as raw_images
from pipeline.reporting.findings import CheckContext
from pipeline.validated_dataset import checks as validated_dataset
from pipeline.validated_dataset.report import write_dataset_report
from tests.pipeline.dataset_folder import Folder
from tests.remote_folders import PublishedFolder, published_in_archive, published_in_bucket, web_server

BACKENDS = ("zip", "tar", "memory", "web", "s3")
COMBINED = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("tar.gz", "dir", "zip on s3")]


@pytest.fixture
def filled(folder: Folder) -> Folder:
    folder.add("a b.png", caption="one")
    folder.add("sub/üc.png", caption="two")
    folder.add("sub/deep/d.jpg", folder.picture(5, kind="JPEG"), caption="three")
    folder.add("plain", folder.picture(6), caption=None).with_name("plain.txt").write_text("four")
    folder.add(".hidden.png", caption=None)
    folder.add("__MACOSX/a.png", caption=None)
    folder.add("broken.jpg", b"\xff\xd8\xff and no more")
    folder.add("empty.png", b"")
    folder.add("lonely.npz", b"cache", caption=None)
    return folder


@pytest.fixture(params=[*BACKENDS, *COMBINED])
def remote(request: pytest.FixtureRequest, filled: Folder, tmp_path: Path) -> Iterator[PublishedFolder]:
    kind = request.param
    if "s3" in kind:
        request.getfixturevalue("s3")
    if kind == "web":
        with web_server(filled.root.parent) as url:
            yield PublishedFolder(f"{url}/data/", lambda: None, quote)
    elif kind == "dir":
        yield PublishedFolder(f"simplecache::{tmp_path}/data", lambda: None)
    elif kind in ("s3", "memory"):
        yield published_in_bucket(filled.root, kind)
    elif kind == "zip on s3":
        archive = tmp_path / "archive" / "a.zip"
        archive.parent.mkdir()
        local = published_in_archive(filled.root, archive)
        bucket = published_in_bucket(archive.parent)

        def publish() -> None:
            local.publish()
            bucket.publish()

        yield PublishedFolder(f"zip://photos::{bucket.address}/a.zip", publish)
    else:
        yield published_in_archive(filled.root, tmp_path / f"a.{kind}")


@pytest.fixture
def moved(filled: Folder, remote: PublishedFolder, tmp_path: Path) -> Folder:
    """Return the same dataset, read from a remote address."""
    return Folder(remote.address, tmp_path / "moved")


def outcome(folder: Folder, quoted: Callable[[str], str] = str) -> dict[str, Any]:
    """Return everything that a run reports about the dataset, except its address and the time."""
    report, result = folder.scan().report, folder.validate()
    kept = result.table.select("sample_id", "content_hash", "height", "width", "caption", "caption_from")
    rejected = folder.tables.read_rejected().select("sample_id", "stage", "reason", "content_hash")
    return {
        "kept": sorted((quoted(row[0]), *row[1:-1], quoted(row[-1])) for row in kept.rows()),
        "rejected": sorted((quoted(row[0]), *row[1:]) for row in rejected.rows()),
        "passed_over": report["passed_over"],
        "checks": {
            finding.name: (finding.passed, finding.numbers)
            for stage in (raw_images, validated_dataset)
            for finding in stage.run(CheckContext(folder.recipe, folder.tables))
        },
    }


def test_a_remote_dataset_gives_the_same_samples_as_a_local_one(
    filled: Folder, moved: Folder, remote: PublishedFolder
) -> None:
    expected = outcome(filled, lambda name: remote.quote(name).replace("sidecar%3A", "sidecar:"))
    assert len(expected["kept"]) == 4
    assert outcome(moved) == expected
    pictures = [
        write_dataset_report(
            each.recipe,
            each.tables.read("validated_dataset"),
            each.tables.read_rejected(),
            log=each.log.append,
        )
        for each in (filled, moved)
    ]
    for name in ("kept.jpg", "rejected.jpg"):
        one, other = ((folder / name).read_bytes() for folder in pictures)
        assert one == other or remote.quote is quote  # the remote names sort differently


@pytest.mark.usefixtures("settled_everywhere")
def test_only_changed_remote_files_are_read_again(
    filled: Folder, moved: Folder, remote: PublishedFolder
) -> None:
    moved.ingest()
    report = moved.scan().report
    assert (report["read"], report["unchanged"], report["rejected_unchanged"]) == (0, 4, 2)
    assert moved.validate().report["decoded"] == 0
    filled.add("a b.png", filled.picture(99, 30, 50), caption="other words")
    (filled.root / "sub/deep/d.jpg").unlink()
    remote.publish()
    changed = moved.scan()
    # Tar stores no checksum of a member, so members of a replaced archive are read to be compared.
    assert changed.report["unchanged"] == (0 if remote.address.startswith("tar") else 2)
    kept = moved.validate()
    assert kept.report["decoded"] == 1
    assert dict(kept.table.select("path", "caption").rows()) == {
        remote.quote("a b.png"): "other words",
        remote.quote("sub/üc.png"): "two",
        "plain": "four",
    }
    assert kept.table.filter(pl.col("caption") == "other words")["height"].item() == 30
    # Of another size: a web server states the time in whole seconds.
    filled.add("sub/üc.png", filled.picture(98, 30, 60))
    remote.publish()
    (rejected_row,) = moved.validate().rejected.rows(named=True)
    assert (rejected_row["path"], rejected_row["reason"]) == (remote.quote("sub/üc.png"), "changed")


@pytest.mark.usefixtures("settled_everywhere")
def test_files_at_a_new_address_are_read_even_if_names_sizes_and_times_are_equal(
    folder: Folder, tmp_path: Path
) -> None:
    """This happens if the recipe's path changes between two folders of a server without file versions."""
    for seed, name in enumerate(("one", "two")):
        folder.root = tmp_path / name
        path = folder.add("a.bmp", folder.picture(seed, kind="BMP"), caption=f"of {seed}")
        for file in (path, path.with_suffix(".txt")):
            os.utime(file, ns=(10**18, 10**18))
    moved = Folder(f"simplecache::{tmp_path}/one", tmp_path / "moved")
    before = moved.ingest().table
    assert moved.scan().report["read"] == 0
    moved.root = f"simplecache::{tmp_path}/two"
    after = moved.ingest().table
    assert moved.tables.read("raw_images")["content_hash"].item() != before["content_hash"].item()
    assert after["caption"].to_list() == ["of 1"]


@pytest.fixture
def settled_everywhere(settled: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    settled()
    monkeypatch.setattr("pipeline.validated_dataset.stage.CLOCK_GRANULARITY_NS", -(10**18))


def scan_error(address: object, tmp_path: Path) -> DatasetError:
    with pytest.raises(DatasetError) as excinfo:
        Folder(address, tmp_path / "out").scan()
    assert str(address).split("::")[0].rstrip("/") in excinfo.value.where
    return excinfo.value


def test_an_error_names_the_missing_package(tmp_path: Path) -> None:
    for address, package in (("gs://bucket/x", "gcsfs"), ("zip://x::abfs://c/a.zip", "adlfs")):
        error = scan_error(address, tmp_path)
        assert "package that is not installed" in error.what
        assert error.fix == f"pip install {package}"


@pytest.mark.usefixtures("s3")
def test_an_empty_address_is_an_error(tmp_path: Path) -> None:
    archive = published_in_archive(tmp_path, tmp_path / "a.zip").address.partition("::")[2]
    bucket = published_in_bucket(tmp_path).address
    for address in (
        "s3://no-such-bucket-1/photos",
        f"{bucket}/nothing",
        "memory://nothing/there",
        f"zip://nothing::{archive}",
        f"zip://x::{tmp_path}/none.zip",
        f"simplecache::{tmp_path}/nothing",
    ):
        assert "the dataset address does not exist" in scan_error(address, tmp_path).what
    assert "it is a file" in scan_error(f"{bucket}/a.zip", tmp_path).what
    assert "BadZipFile" in scan_error(f"zip://x::{__file__}", tmp_path).what


def test_an_error_names_the_server_that_does_not_answer(tmp_path: Path) -> None:
    with web_server(tmp_path) as url:
        pass
    error = scan_error(f"{url}/photos", tmp_path)
    assert "Cannot connect to host 127.0.0.1" in error.what
    assert "the service responds" in error.fix
