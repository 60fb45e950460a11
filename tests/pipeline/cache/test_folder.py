"""Files of a cache by name, on a local disk and at an address."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pipeline.cache.backends import cache_folder
from pipeline.cache.folder import CacheFile, CacheFolder, FileStat
from pipeline.cache.fsspec_folder import FsspecFolder
from pipeline.cache.local_folder import LocalFolder
from pipeline.storage.addresses import Url
from pipeline.storage.remote_folder import RemoteFolder
from tests.pipeline.disk_calls import DiskCalls

FILES = {
    "b.json": b"12",
    "outputs/z.keys": b"345",
    "outputs/a.json": b"6",
    "outputs/deep/x.json": b"",
    "a/b": b"7",
}


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CacheFolder]:
    if request.param == "local":
        yield cache_folder(tmp_path / "cache")
        return
    name = uuid.uuid4().hex
    yield cache_folder(Url(f"memory://{name}"))
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{name}"):
        memory.rm(f"/{name}", recursive=True)


@pytest.fixture
def filled(folder: CacheFolder) -> CacheFolder:
    for name, data in FILES.items():
        folder.replace(name, data)
    return folder


def test_a_cache_that_does_not_exist_has_no_files(folder: CacheFolder) -> None:
    assert (folder.stats("outputs"), list(folder.files())) == ({}, [])


def test_files_are_listed_by_folder_and_name_with_their_sizes(filled: CacheFolder) -> None:
    files = list(filled.files())
    assert {file.name: file.num_bytes for file in files} == {name: len(data) for name, data in FILES.items()}
    assert all(file.modified_s is not None and 1.6e9 < file.modified_s < 1e10 for file in files)


def test_files_of_a_local_cache_are_sorted_by_folder(tmp_path: Path) -> None:
    for number in (5, 3, 9, 1, 7, 2):
        for name in ("b", "a", "c"):
            LocalFolder(tmp_path).replace(f"{number}/{name}", b"")
    (tmp_path / "9" / "pipe").mkdir()
    (tmp_path / "9" / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "9" / "fifo")
    names = [file.name for file in LocalFolder(tmp_path).files()]
    assert names == [f"{number}/{name}" for number in (1, 2, 3, 5, 7, 9) for name in "abc"]


def test_only_the_files_directly_in_a_folder_have_stats(filled: CacheFolder) -> None:
    assert {name: stat[0] for name, stat in filled.stats("outputs").items()} == {"a.json": 1, "z.keys": 3}


def test_the_stat_of_a_local_file_is_its_size_times_and_inode(tmp_path: Path) -> None:
    LocalFolder(tmp_path).replace("outputs/a.json", b"1234")
    (tmp_path / "outputs" / "dangling").symlink_to("nowhere")
    stat = (tmp_path / "outputs" / "a.json").stat()
    expected = {"a.json": (4, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)}
    assert LocalFolder(tmp_path).stats("outputs") == expected


def test_a_replaced_file_has_another_stat(filled: CacheFolder) -> None:
    before = filled.stats("outputs")
    filled.replace("outputs/z.keys", b"789")
    after = filled.stats("outputs")
    assert after["a.json"] == before["a.json"]
    assert after["z.keys"] != before["z.keys"]


@pytest.mark.parametrize(
    ("start", "end", "data"),
    [(0, 10, b"0123456789"), (2, 5, b"234"), (8, 10, b"89"), (7, 30, b"789"), (3, 3, b"")],
)
def test_a_range_of_a_file_is_read(folder: CacheFolder, start: int, end: int, data: bytes) -> None:
    folder.replace("packs/x", b"0123456789")
    assert folder.read_range("packs/x", start, end) == data
    assert folder.read("packs/x") == b"0123456789"


def test_a_range_is_complete_if_the_system_returns_a_few_bytes_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LocalFolder(tmp_path).replace("x", bytes(range(100)))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, number, start: pread(file, min(number, 7), start))
    assert LocalFolder(tmp_path).read_range("x", 20, 60) == bytes(range(20, 60))
    assert LocalFolder(tmp_path).read_range("x", 90, 120) == bytes(range(90, 100))


def test_reading_ranges_leaves_no_file_open(tmp_path: Path) -> None:
    LocalFolder(tmp_path).replace("x", b"0123")
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(10):
        LocalFolder(tmp_path).read_range("x", 0, 4)
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_deleted_file_is_missing(filled: CacheFolder) -> None:
    filled.delete("outputs/z.keys")
    with pytest.raises(FileNotFoundError):
        filled.read("outputs/z.keys")
    assert filled.read("outputs/a.json") == b"6"


def test_a_replaced_file_and_its_name_are_on_the_disk(tmp_path: Path, disk_calls: DiskCalls) -> None:
    LocalFolder(tmp_path).replace("outputs/a.json", b"1")
    assert disk_calls.is_synced(tmp_path / "outputs" / "a.json")
    assert disk_calls.is_synced(tmp_path / "outputs")


def test_tidying_a_local_cache_deletes_empty_folders_only(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    folder.replace("full/file", b"")
    (tmp_path / "empty" / "nested").mkdir(parents=True)
    folder.tidy(["missing", "full", "empty/nested", "empty"])
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert (tmp_path / "full" / "file").exists()


def test_a_location_is_the_address_and_the_name_without_secrets(tmp_path: Path) -> None:
    assert cache_folder(tmp_path).where("a/b") == f"{tmp_path}/a/b"
    assert cache_folder(Url("memory://cache/")).where("a/b") == "memory://cache/a/b"


class StatedFolder(RemoteFolder):
    """A remote folder that states the same about each file."""

    def __init__(self, **stated: Any) -> None:
        super().__init__(Url("memory://stated"))
        self.stated = {"type": "file", "size": 5, **stated}

    def info(self, name: str) -> dict[str, Any]:
        del name
        return self.stated


def stat_of(**stated: Any) -> FileStat:
    return FsspecFolder(Url("memory://stated"), StatedFolder(**stated)).stat("file")


def test_the_stat_of_a_remote_file_is_its_version_or_its_time_or_never_equal() -> None:
    """The entry's file counts as unchanged only while its stat stays equal."""
    assert stat_of(mtime=1_700_000_000.5) == (5, 1_700_000_000_500_000_000, 0, 0)

    num_bytes, time_ns, unique, version = stat_of(ETag='"abc"', mtime=1_700_000_000.5)
    assert (num_bytes, time_ns, unique) == (5, 0, 0)
    assert version != 0
    assert stat_of(ETag='"abc"', mtime=1.0) == (5, 0, 0, version)

    assert stat_of()[:2] == (5, 0)
    assert stat_of() != stat_of()


class ListedFolder(RemoteFolder):
    """A remote folder that states the size of each file and, for one of them, when it was written."""

    def list_files(self, folder: str = "", *, prefix: str = "") -> dict[str, dict[str, Any]]:
        del folder, prefix
        return {"b": {"size": 2}, "a": {"size": 1, "mtime": 1_700_000_000.5}}


def test_the_age_of_a_remote_file_is_unknown_if_the_service_does_not_state_it() -> None:
    url = Url("memory://listed")
    files = list(FsspecFolder(url, ListedFolder(url)).files())
    assert files == [CacheFile("a", 1, 1_700_000_000.5), CacheFile("b", 2, None)]


@pytest.fixture
def s3_folder(s3: str) -> RemoteFolder:
    """Return an S3 folder with entries, packs, and files of other programs."""
    bucket = uuid.uuid4().hex
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    folder = RemoteFolder(Url(f"s3://{bucket}/of/mine"))
    for kind in ("latents", "text"):
        for digits in ("00", "01", "a0", "ff"):
            for number in range(3):
                folder.put(f"{kind}/{digits}/{number}.safetensors", b"123")
    for name in ("a.json", "latents-2.txt", "latents/00.txt", "latents/zz/deep/er/x.txt", "latents/x.npz"):
        folder.put(name, b"12345")
    for name in ("outputs/a.keys", "packs/latents/1.pack", "packs/changed", "z/00/file", "z.txt"):
        folder.put(name, b"")
    return folder


@pytest.mark.parametrize("listed_at_once", [0, 1_000])
def test_files_of_a_large_remote_cache_are_those_of_one_listing_in_its_order(
    s3_folder: RemoteFolder, monkeypatch: pytest.MonkeyPatch, listed_at_once: int
) -> None:
    monkeypatch.setattr("pipeline.cache.fsspec_folder._LISTED_AT_ONCE", listed_at_once)
    files = list(FsspecFolder(s3_folder.url, s3_folder).files())
    complete = s3_folder.list_files()
    assert len(complete) == 34
    assert [file.name for file in files] == sorted(complete)
    assert {file.name: file.num_bytes for file in files} == {
        name: info["size"] for name, info in complete.items()
    }
    assert all(file.modified_s is not None for file in files)


class CountedFolder(RemoteFolder):
    """Records the number of files in each listing."""

    def __init__(self, url: Url) -> None:
        super().__init__(url)
        self.num_listed: list[int] = []

    def list_files(self, folder: str = "", *, prefix: str = "") -> dict[str, dict[str, Any]]:
        infos = super().list_files(folder, prefix=prefix)
        self.num_listed.append(len(infos))
        return infos


def test_entries_of_a_large_remote_cache_are_listed_folder_by_folder_when_they_are_needed(
    s3_folder: RemoteFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing of 10 million entries would take 10 GB of memory."""
    monkeypatch.setattr("pipeline.cache.fsspec_folder._LISTED_AT_ONCE", 3 * 256 - 1)
    counted = CountedFolder(s3_folder.url)
    files = FsspecFolder(counted.url, counted).files()
    assert next(file for file in files if file.name.endswith(".safetensors")).name.startswith("latents/00/")
    num_listings = len(counted.num_listed)
    assert sum(1 for _ in files) > 20
    assert len(counted.num_listed) > num_listings
    assert max(counted.num_listed) == 3


def test_entries_of_a_small_remote_cache_are_listed_together(
    s3_folder: RemoteFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.cache.fsspec_folder._LISTED_AT_ONCE", 3 * 256)
    counted = CountedFolder(s3_folder.url)
    assert len(list(FsspecFolder(counted.url, counted).files())) == 34
    # latents, outputs, packs, text, z; a folder of latents and one of text are listed before for an estimate.
    assert counted.num_listed == [3, 15, 1, 2, 3, 12, 1]


@pytest.mark.parametrize("listed_at_once", [0, 1_000])
def test_empty_objects_in_place_of_folders_do_not_hide_files(
    s3_folder: RemoteFolder, monkeypatch: pytest.MonkeyPatch, listed_at_once: int
) -> None:
    """Web consoles create an object with a slash at the end of its name for a new folder."""
    monkeypatch.setattr("pipeline.cache.fsspec_folder._LISTED_AT_ONCE", listed_at_once)
    before = [file.name for file in FsspecFolder(s3_folder.url, s3_folder).files()]
    for name in ("", "latents/", "latents/00/", "empty/"):
        s3_folder.files.call_s3("put_object", Bucket=s3_folder.base.split("/")[0], Key=f"of/mine/{name}")
    after = [file.name for file in FsspecFolder(s3_folder.url, s3_folder).files()]
    assert [name for name in after if name in before] == before
