"""The sensor's fingerprint changes exactly when a dataset's files change (O04)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import fsspec
import pytest

from pipeline.errors import DatasetError
from pipeline.raw_images import scan_fingerprint as module
from pipeline.raw_images.scan_fingerprint import ScanPosition, scan_fingerprint, scan_slice
from pipeline.storage.addresses import Address, Url
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


IGNORED = (
    "#recycle/a.jpg",
    "inner/@Recycle/b/c.jpg",
    "RECYCLER/d.jpg",
    "e.lrdata/f.jpg",
    "Thumbs.db",
    "a.txt~",
)
"""Files that the scan does not read: in folders of deleted pictures and previews, or left by a program."""


def test_files_that_the_scan_ignores_do_not_count(folder: Path) -> None:
    before = state(folder)
    for name in (*IGNORED, "My.photoslibrary/Thumbnails/g.jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    assert state(folder) == before
    (folder / "My.photoslibrary" / "h.jpg").write_bytes(b"x")
    (folder / "Thumbnails").mkdir()
    counted = state(folder)
    assert counted != before
    (folder / "Thumbnails" / "i.jpg").write_bytes(b"x")
    assert state(folder) != counted


def test_a_link_into_a_folder_that_the_scan_ignores_counts(folder: Path) -> None:
    (folder / "#recycle" / "deep").mkdir(parents=True)
    before = state(folder)
    (folder / "restored").symlink_to(folder / "#recycle" / "deep")
    (folder / "#recycle" / "deep" / "j.jpg").write_bytes(b"x")
    assert state(folder) != before


def test_files_in_a_bucket_that_the_scan_ignores_do_not_count(folder: Path, s3: str) -> None:
    del s3
    bucket = published_in_bucket(folder)
    before = scan_fingerprint([Url(bucket.address)])
    for name in IGNORED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    bucket.publish()
    assert scan_fingerprint([Url(bucket.address)]) == before


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


def write_tree(top: Path) -> None:
    """Write files in folders of several depths, with names that sort differently from their paths."""
    for name in (
        "a",
        "a.txt",
        "b/c.jpg",
        "b/c/d.jpg",
        "b/c/e/f.jpg",
        "b-1.jpg",
        "ü/\udcff.jpg",
        "z/1",
        "z/2",
    ):
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, encoding="utf-8", errors="surrogateescape")
    (top / "empty").mkdir()
    (top / "link").symlink_to(top / "z")
    (top / "z" / "loop").symlink_to(top)


def slices(addresses: Sequence[Address], *, largest: int = 10**6) -> tuple[str, list[ScanPosition]]:
    """List one entry per slice; return the fingerprint and the positions, which pass through JSON."""
    positions: list[ScanPosition] = []
    while True:
        listed = scan_slice(addresses, positions[-1] if positions else None, seconds=0)
        if isinstance(listed, str):
            return listed, positions
        text = json.dumps(asdict(listed))
        assert len(text) < largest
        fields = json.loads(text)
        positions.append(ScanPosition(**{**fields, "after": tuple(fields["after"])}))


@pytest.mark.parametrize("in_memory", [1, 2, 500_000])
def test_slices_of_one_entry_give_the_same_fingerprint_as_one_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: int
) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES_IN_MEMORY", in_memory)
    write_tree(tmp_path / "one")
    write_tree(tmp_path / "two")
    outside = tmp_path / "outside"
    write_tree(outside)
    (tmp_path / "one" / "linked").symlink_to(outside)
    addresses = [tmp_path / "one", tmp_path / "one" / "a.txt", tmp_path / "two"]

    fingerprint, positions = slices(addresses)
    assert fingerprint == scan_fingerprint(addresses)
    assert len(positions) == 9 + 9 + 1 + 9, "no file counts twice"
    assert positions[-1].num_files == len(positions)


def test_slices_of_a_bucket_give_the_same_fingerprint_as_one_listing(folder: Path, s3: str) -> None:
    del s3
    (folder / "inner.jpg").write_bytes(b"x")
    url = Url(published_in_bucket(folder).address)
    fingerprint, positions = slices([url])
    assert fingerprint == scan_fingerprint([url])
    assert len(positions) == 4


def test_O04_a_change_behind_the_position_is_found_by_the_next_listing(folder: Path) -> None:
    before = state(folder)
    first = scan_slice([folder], None, seconds=0)
    assert isinstance(first, ScanPosition)
    assert first.after == ("a.jpg",)
    (folder / "a.jpg").write_bytes(b"changed")
    assert scan_slice([folder], first, seconds=60) == before, "this listing has passed the file"
    assert scan_slice([folder], None, seconds=60) != before


def test_O04_files_that_appear_and_disappear_around_the_position_count_once(folder: Path) -> None:
    first = scan_slice([folder], None, seconds=0)
    assert isinstance(first, ScanPosition)
    (folder / "a.jpg").unlink()
    (folder / "Z.jpg").write_bytes(b"before the position")
    (folder / "b.jpg").write_bytes(b"after the position")
    rest = scan_slice([folder], first, seconds=0)
    num_files = 2
    while isinstance(rest, ScanPosition):
        assert rest.num_files == num_files
        num_files += 1
        rest = scan_slice([folder], rest, seconds=0)
    assert num_files == 5, "a.jpg, a.txt, b.jpg and inner/b.jpg are counted"


def test_a_folder_that_replaces_the_file_at_the_position_and_the_reverse_do_not_stop_the_listing(
    folder: Path,
) -> None:
    position = scan_slice([folder], None, seconds=0)
    assert isinstance(position, ScanPosition)
    (folder / "a.jpg").unlink()
    (folder / "a.jpg").mkdir()
    assert isinstance(scan_slice([folder], position, seconds=60), str)

    inside = ScanPosition(position.addresses, after=("inner", "a.jpg"))
    (folder / "inner" / "b.jpg").unlink()
    (folder / "inner").rmdir()
    (folder / "inner").write_bytes(b"a file")
    assert isinstance(scan_slice([folder], inside, seconds=60), str)


def test_a_position_of_other_addresses_starts_again(folder: Path, tmp_path: Path) -> None:
    position = scan_slice([tmp_path, folder], None, seconds=0)
    assert isinstance(position, ScanPosition)
    assert scan_slice([folder], position, seconds=60) == state(folder)


def test_the_size_of_a_position_does_not_depend_on_the_number_of_files(tmp_path: Path) -> None:
    sizes: set[int] = set()
    for number in (10, 1_000):
        top = tmp_path / f"{number:04}"
        top.mkdir()
        for index in range(number):
            (top / f"{index:06}.jpg").touch()
        _, positions = slices([top], largest=256)
        sizes.add(max(len(position.after) for position in positions))
    assert sizes == {1}


def fingerprint_of(*lines: bytes) -> str:
    """Return the fingerprint of a listing with these lines, as earlier versions computed it."""
    total = sum(int.from_bytes(hashlib.blake2b(line, digest_size=16).digest(), "big") for line in lines) % (
        2**128
    )
    return hashlib.sha256(total.to_bytes(16, "big")).hexdigest()[:16]


def test_O04_the_fingerprint_is_that_of_earlier_versions_whose_sensors_have_stored_it(folder: Path) -> None:
    """Another value would request a run for every dataset after an update."""
    (folder / "nowhere.jpg").symlink_to(folder / "missing")
    (folder / "itself").symlink_to(folder / "itself")

    def line(path: Path) -> bytes:
        stat = path.stat()
        state = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
        return f"{path}\0{state}\n".encode()

    files = [line(folder / name) for name in ("a.jpg", "a.txt", "inner/b.jpg")]
    broken = f"{folder}/nowhere.jpg\0unreadable {errno.ENOENT}\n{folder}/itself\0unreadable {errno.ELOOP}\n"
    assert state(folder) == fingerprint_of(*files, *broken.encode().splitlines(keepends=True))
    assert state(folder / "a.jpg") == fingerprint_of(files[0])
    assert scan_fingerprint([]) == fingerprint_of()


@pytest.mark.parametrize("total", [5, 2**127 + 5, 2**128 - 1])
def test_a_stored_sum_continues_modulo_2_to_the_128(folder: Path, total: int) -> None:
    """The sum of another file's hash and `total` is the sum of both lines."""
    addresses = [folder / "a.jpg"]
    first = scan_slice([*addresses, folder / "a.txt"], None, seconds=0)
    assert isinstance(first, ScanPosition)
    assert first == ScanPosition(first.addresses, 0, ("",), first.total, 1)
    position = ScanPosition(first.addresses, 1, (), total, 1)
    stat = (folder / "a.txt").stat()
    line = f"{folder}/a.txt\0{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}\n".encode()
    added = int.from_bytes(hashlib.blake2b(line, digest_size=16).digest(), "big")
    expected = hashlib.sha256(((total + added) % 2**128).to_bytes(16, "big")).hexdigest()[:16]
    assert scan_slice([*addresses, folder / "a.txt"], position, seconds=60) == expected


def test_I21_slices_continue_after_subfolders_that_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top, scandir = tmp_path / "top", os.scandir
    for name in ("b/c/e/f.jpg", "b/c/g/h.jpg", "b/c/i.jpg", "b/j.jpg", "k.jpg"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(b"0123")

    def fingerprint_without(*denied: str) -> str:
        def deny(path: str) -> object:
            if Path(path).relative_to(top).as_posix() in denied:
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return scandir(path)

        monkeypatch.setattr(os, "scandir", deny)
        fingerprint, positions = slices([top])
        assert fingerprint == state(top)
        assert [position.after for position in positions if position.after[-1] in "ecgb"] == [
            tuple(name.split("/")) for name in denied
        ]
        return fingerprint

    results = {fingerprint_without(*denied) for denied in ((), ("b/c/e",), ("b/c/g",), ("b/c",), ("b",))}
    results.add(fingerprint_without("b/c/e", "b/c/g"))
    assert len(results) == 6, "each unreadable folder counts with its path"


def test_a_large_folder_is_read_in_parts_of_bounded_size_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        (tmp_path / f"{number * 7919 % 1000:03}.jpg").touch()
    whole = state(tmp_path)
    for in_memory in (1, 7, 50, 299, 300):
        monkeypatch.setattr(module, "MAX_ENTRIES_IN_MEMORY", in_memory)
        assert state(tmp_path) == whole, f"parts of {in_memory} entries"


def test_in_a_bucket_a_folder_is_listed_before_a_file_of_its_name(folder: Path, s3: str) -> None:
    del s3
    bucket = published_in_bucket(folder)
    fsspec.filesystem("s3", skip_instance_cache=True).pipe_file(f"{bucket.address}/inner", b"x")
    fingerprint, (first, second, third, *_) = slices([Url(bucket.address)])
    assert (first.after, second.after) == (("a.jpg",), ("a.txt",))
    assert third.after == ("inner", "b.jpg")
    assert fingerprint == scan_fingerprint([Url(bucket.address)]), (
        "a slice may end before the file of that name"
    )
