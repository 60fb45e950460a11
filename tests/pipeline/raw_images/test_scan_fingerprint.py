"""The fingerprint of a dataset's listing, O04."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pipeline.errors import DatasetError
from pipeline.raw_images.scan_fingerprint import listing_fingerprint
from pipeline.storage.addresses import Url
from tests.elsewhere import in_bucket


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data" / "inner").mkdir(parents=True)
    for name in ("a.jpg", "a.txt", "inner/b.jpg"):
        (tmp_path / "data" / name).write_bytes(b"0123")
    return tmp_path / "data"


def state(path: Path) -> str:
    return listing_fingerprint([path])


def test_the_same_listing_has_the_same_fingerprint(folder: Path) -> None:
    assert state(folder) == state(folder)


def test_O04_an_old_file_moved_in_is_a_change(folder: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.jpg"
    old.write_bytes(b"x")
    os.utime(old, (1, 1))
    before = state(folder)
    old.rename(folder / "old.jpg")
    assert state(folder) != before


def test_O04_an_edit_of_equal_size_with_its_old_time_restored_is_a_change(folder: Path) -> None:
    before, about = state(folder), (folder / "a.jpg").stat()
    (folder / "a.jpg").write_bytes(b"3210")
    os.utime(folder / "a.jpg", ns=(about.st_atime_ns, about.st_mtime_ns))
    assert state(folder) != before


@pytest.mark.parametrize("name", ["a.txt", "inner/b.jpg"])
def test_captions_and_files_in_subfolders_count_and_so_does_their_loss(folder: Path, name: str) -> None:
    before = state(folder)
    (folder / name).unlink()
    assert state(folder) != before


def test_names_that_begin_with_a_dot_do_not_count(folder: Path) -> None:
    before = state(folder)
    (folder / ".DS_Store").write_bytes(b"x")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "c.jpg").write_bytes(b"x")
    assert state(folder) == before


def test_I19_a_link_that_leads_back_ends_and_a_dangling_one_counts(folder: Path) -> None:
    before = state(folder)
    (folder / "loop").symlink_to(folder)
    assert state(folder) == before
    (folder / "nowhere.jpg").symlink_to(folder / "missing")
    assert state(folder) != before


def test_a_file_that_moves_from_one_dataset_to_the_next_is_a_change(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    (one / "a.jpg").write_bytes(b"x")
    before = listing_fingerprint([one, two])
    (one / "a.jpg").rename(two / "a.jpg")
    assert listing_fingerprint([one, two]) != before


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        state(tmp_path / "missing")


def test_O04_I21_a_folder_below_that_cannot_be_listed_is_a_state_and_hides_no_change_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readable, scandir = state(folder), os.scandir

    def refuse(path: Path) -> object:
        if Path(path) == folder / "inner":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    refused = state(folder)
    assert refused != readable
    assert refused == state(folder)
    (folder / "new.jpg").write_bytes(b"x")
    assert state(folder) != refused
    with pytest.raises(PermissionError):
        listing_fingerprint([folder / "inner"])


def test_O04_a_change_in_a_bucket_is_a_change(folder: Path, s3: str) -> None:
    del s3
    (folder / "list.csv").write_text("path\na.jpg\n")
    bucket = in_bucket(folder)
    url, listing = Url(bucket.address), Url(f"{bucket.address}/list.csv")
    before = listing_fingerprint([url]), listing_fingerprint([listing])
    assert (listing_fingerprint([url]), listing_fingerprint([listing])) == before
    (folder / "inner" / "b.jpg").write_bytes(b"3210")
    bucket.publish()
    assert listing_fingerprint([url]) != before[0]
    assert listing_fingerprint([listing]) == before[1]
    (folder / "list.csv").write_text("path\nb.jpg\n")
    bucket.publish()
    assert listing_fingerprint([listing]) != before[1]
    with pytest.raises(DatasetError):
        listing_fingerprint([Url("s3://no-such-bucket")])
