"""The sensor's fingerprint changes exactly when a dataset's files change (O04)."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pipeline.errors import DatasetError
from pipeline.raw_images.scan_fingerprint import scan_fingerprint
from pipeline.storage.addresses import Url
from tests.remote_folders import published_in_bucket


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data" / "inner").mkdir(parents=True)
    for name in ("a.jpg", "a.txt", "inner/b.jpg"):
        (tmp_path / "data" / name).write_bytes(b"0123")
    return tmp_path / "data"


def state(path: Path) -> str:
    return scan_fingerprint([path])


def test_unchanged_files_have_the_same_fingerprint(folder: Path) -> None:
    assert state(folder) == state(folder)


def test_O04_moving_an_old_file_into_the_dataset_is_a_change(folder: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.jpg"
    old.write_bytes(b"x")
    os.utime(old, (1, 1))
    before = state(folder)
    old.rename(folder / "old.jpg")
    assert state(folder) != before


def test_O04_an_edit_that_keeps_size_and_modification_time_is_a_change(folder: Path) -> None:
    before, about = state(folder), (folder / "a.jpg").stat()
    (folder / "a.jpg").write_bytes(b"3210")
    os.utime(folder / "a.jpg", ns=(about.st_atime_ns, about.st_mtime_ns))
    assert state(folder) != before


@pytest.mark.parametrize("name", ["a.txt", "inner/b.jpg"])
def test_deleting_a_caption_or_a_file_in_a_subfolder_is_a_change(folder: Path, name: str) -> None:
    before = state(folder)
    (folder / name).unlink()
    assert state(folder) != before


def test_dot_files_and_dot_folders_do_not_count(folder: Path) -> None:
    before = state(folder)
    (folder / ".DS_Store").write_bytes(b"x")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "c.jpg").write_bytes(b"x")
    assert state(folder) == before


def test_I19_link_loops_end_and_a_broken_link_counts(folder: Path) -> None:
    before = state(folder)
    (folder / "loop").symlink_to(folder)
    assert state(folder) == before
    (folder / "nowhere.jpg").symlink_to(folder / "missing")
    assert state(folder) != before


def test_moving_a_file_to_another_dataset_is_a_change(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    (one / "a.jpg").write_bytes(b"x")
    before = scan_fingerprint([one, two])
    (one / "a.jpg").rename(two / "a.jpg")
    assert scan_fingerprint([one, two]) != before


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        state(tmp_path / "missing")


def test_O04_I21_an_unreadable_subfolder_counts_and_hides_no_other_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readable, scandir = state(folder), os.scandir

    def deny(path: Path) -> object:
        if Path(path) == folder / "inner":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deny)
    unreadable = state(folder)
    assert unreadable != readable
    assert unreadable == state(folder)
    (folder / "new.jpg").write_bytes(b"x")
    assert state(folder) != unreadable
    with pytest.raises(PermissionError):
        scan_fingerprint([folder / "inner"])


def test_O04_a_change_in_an_object_store_is_a_change(folder: Path, s3: str) -> None:
    del s3
    (folder / "list.csv").write_text("path\na.jpg\n")
    bucket = published_in_bucket(folder)
    url, listing = Url(bucket.address), Url(f"{bucket.address}/list.csv")
    before = scan_fingerprint([url]), scan_fingerprint([listing])
    assert (scan_fingerprint([url]), scan_fingerprint([listing])) == before
    (folder / "inner" / "b.jpg").write_bytes(b"3210")
    bucket.publish()
    assert scan_fingerprint([url]) != before[0]
    assert scan_fingerprint([listing]) == before[1]
    (folder / "list.csv").write_text("path\nb.jpg\n")
    bucket.publish()
    assert scan_fingerprint([listing]) != before[1]
    with pytest.raises(DatasetError):
        scan_fingerprint([Url("s3://no-such-bucket")])
