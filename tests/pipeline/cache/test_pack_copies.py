"""Local copies of packs: bounded, verified, and shared by the processes of a machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipeline.cache.entry_format import DATA_START
from pipeline.cache.pack_copies import IDLE_S, PackCopies
from pipeline.cache.remote_store import FsspecStore, store_at
from pipeline.errors import StoreError
from pipeline.storage.addresses import Url
from pipeline.storage.atomic import temp_name
from tests.pipeline.disk_calls import DiskCalls
from tests.pipeline.packs_case import (
    flip_bit,
    own_copies,
    pack_names,
    reopened,
    seal_and_remove,
    spec_of,
    values_of,
    write_entries,
)

__all__ = ["own_copies"]

SIZE = 100


class Remote:
    """Packs of 100 bytes, by name, and the names of those that were downloaded."""

    def __init__(self) -> None:
        self.packs: dict[str, bytes] = {}
        self.downloaded: list[str] = []
        self.may_download = threading.Event()
        self.may_download.set()

    def add(self) -> str:
        content = os.urandom(SIZE)
        name = f"packs/latents/{hashlib.sha256(content).hexdigest()}.pack"
        self.packs[name] = content
        return name

    def download(self, name: str, path: Path) -> None:
        self.may_download.wait(10)
        self.downloaded.append(name)
        path.write_bytes(self.packs[name])


@pytest.fixture
def remote() -> Remote:
    return Remote()


def copies_in(folder: Path) -> set[str]:
    return {f"packs/latents/{path.name}" for path in folder.glob("*.pack")}


def make_idle(folder: Path, name: str) -> None:
    path = folder / Path(name).name
    used_s = path.stat().st_mtime - IDLE_S - 1
    os.utime(path, (used_s, used_s))


def test_a_wanted_pack_is_copied_once_and_read_from_its_copy(remote: Remote, tmp_path: Path) -> None:
    name = remote.add()
    copies = PackCopies(tmp_path / "copies", 10 * SIZE, remote.download)
    assert copies.read(name, 0, 5) is None
    for _ in range(3):
        copies.want(name, SIZE)
    copies.wait()
    assert copies.read(name, 10, 20) == remote.packs[name][10:20]
    assert remote.downloaded == [name]

    other_process = PackCopies(tmp_path / "copies", 10 * SIZE, remote.download)
    other_process.want(name, SIZE)
    other_process.wait()
    assert remote.downloaded == [name]


def test_reading_does_not_wait_for_a_copy(remote: Remote, tmp_path: Path) -> None:
    name = remote.add()
    remote.may_download.clear()
    copies = PackCopies(tmp_path / "copies", 10 * SIZE, remote.download)
    copies.want(name, SIZE)
    assert copies.read(name, 0, 5) is None
    remote.may_download.set()
    copies.wait()
    assert copies.read(name, 0, 5) == remote.packs[name][:5]


def test_copies_never_exceed_their_bound(remote: Remote, tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    copies = PackCopies(folder, 3 * SIZE, remote.download)
    names = [remote.add() for _ in range(5)]
    for name in names:
        copies.want(name, SIZE)
    copies.wait()
    assert copies_in(folder) == set(names[:3]), "packs in use do not displace each other"


@pytest.mark.parametrize("num_idle", [1, 2])
def test_idle_copies_make_room_the_oldest_first(remote: Remote, tmp_path: Path, num_idle: int) -> None:
    folder = tmp_path / "copies"
    names = [remote.add() for _ in range(3)]
    first = PackCopies(folder, 3 * SIZE, remote.download)
    for name in names:
        first.want(name, SIZE)
    first.wait()
    for name in names[:num_idle]:
        make_idle(folder, name)

    new = remote.add()
    second = PackCopies(folder, 3 * SIZE, remote.download)
    second.want(new, SIZE)
    second.wait()
    assert copies_in(folder) == {*names[1:], new}


def test_a_copy_that_is_read_is_not_idle(remote: Remote, tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    name = remote.add()
    copies = PackCopies(folder, SIZE, remote.download)
    copies.want(name, SIZE)
    copies.wait()
    make_idle(folder, name)
    assert copies.read(name, 0, 5) is not None
    copies.want(remote.add(), SIZE)
    copies.wait()
    assert copies_in(folder) == {name}


def test_a_download_of_another_size_is_discarded(remote: Remote, tmp_path: Path) -> None:
    name = remote.add()
    remote.packs[name] = b"x" * (SIZE - 1)
    copies = PackCopies(tmp_path / "copies", 10 * SIZE, remote.download)
    copies.want(name, SIZE)
    copies.wait()
    assert copies.read(name, 0, 5) is None
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["lock"]


def test_a_copy_is_synced_before_it_gets_its_name(
    remote: Remote, tmp_path: Path, disk_calls: DiskCalls
) -> None:
    name = remote.add()
    copies = PackCopies(tmp_path / "copies", 10 * SIZE, remote.download)
    copies.want(name, SIZE)
    copies.wait()
    assert disk_calls.names == [Path(name).name]
    assert disk_calls.unsynced == [], "the copy would be empty after a power failure"


def test_a_discarded_copy_is_replaced_once(remote: Remote, tmp_path: Path) -> None:
    name = remote.add()
    copies = PackCopies(tmp_path / "copies", 10 * SIZE, remote.download)
    for num_copies in (1, 2, 2):
        copies.want(name, SIZE)
        copies.wait()
        assert len(remote.downloaded) == num_copies, "a disk that damages every copy is not used for ever"
        copies.discard(name)
        assert copies.read(name, 0, 5) is None


def test_two_processes_that_want_a_pack_at_once_download_it_once(remote: Remote, tmp_path: Path) -> None:
    name = remote.add()
    remote.may_download.clear()
    processes = [PackCopies(tmp_path / "copies", 10 * SIZE, remote.download) for _ in range(2)]
    for copies in processes:
        copies.want(name, SIZE)
    remote.may_download.set()
    for copies in processes:
        copies.wait()
        assert copies.read(name, 0, SIZE) == remote.packs[name]
    assert remote.downloaded == [name]


def test_a_failed_download_leaves_nothing_and_the_next_pack_is_copied(remote: Remote, tmp_path: Path) -> None:
    lost, present = remote.add(), remote.add()

    def download(name: str, path: Path) -> None:
        path.write_bytes(b"unfinished")
        if name == lost:
            raise ConnectionError("away")
        remote.download(name, path)

    copies = PackCopies(tmp_path / "copies", 10 * SIZE, download)
    copies.want(lost, SIZE)
    copies.want(present, SIZE)
    copies.wait()
    assert copies_in(tmp_path / "copies") == {present}
    assert len(list((tmp_path / "copies").iterdir())) == 2


def test_the_unfinished_copy_of_a_killed_process_is_deleted(remote: Remote, tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    (folder / temp_name()).write_bytes(b"x" * 3 * SIZE)
    copies = PackCopies(folder, 3 * SIZE, remote.download)
    name = remote.add()
    copies.want(name, SIZE)
    copies.wait()
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".pack"]


def test_copying_can_be_disabled_and_leaves_a_part_of_the_disk_free(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = remote.add()
    disabled = PackCopies(tmp_path / "none", 0, remote.download)
    disabled.want(name, SIZE)
    disabled.wait()
    assert not (tmp_path / "none").exists()

    usage = shutil.disk_usage(tmp_path)
    almost_full = usage._replace(total=1000, free=100 + SIZE - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: almost_full)
    copies = PackCopies(tmp_path / "copies", 10 * SIZE, remote.download)
    copies.want(name, SIZE)
    copies.wait()
    assert copies_in(tmp_path / "copies") == set()


def test_a_copy_that_cannot_be_read_counts_as_missing(remote: Remote, tmp_path: Path) -> None:
    name = remote.add()
    (tmp_path / "copies" / Path(name).name).mkdir(parents=True)  # reading it fails, opening it does not
    copies = PackCopies(tmp_path / "copies", 10 * SIZE, remote.download)
    assert copies.read(name, 0, 5) is None


def test_copies_are_not_read_if_copying_is_disabled(remote: Remote, tmp_path: Path) -> None:
    name = remote.add()
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / Path(name).name).write_bytes(remote.packs[name])
    assert PackCopies(tmp_path / "copies", 10 * SIZE, remote.download).read(name, 0, 5) is not None
    assert PackCopies(tmp_path / "copies", 0, remote.download).read(name, 0, 5) is None


class OneRequestAtATime(MemoryFileSystem):
    """A file system in memory that, like SFTP, sends one request per connection at a time."""

    protocol = "one-at-a-time"
    store: ClassVar[dict[str, Any]] = {}
    may_download = threading.Event()

    def get_file(self, *arguments: Any, **options: Any) -> None:
        self.may_download.wait(10)
        super().get_file(*arguments, **options)


def test_reads_do_not_wait_for_a_copy_on_a_service_with_one_request_at_a_time(own_copies: None) -> None:
    fsspec.register_implementation("one-at-a-time", OneRequestAtATime, clobber=True)
    store = store_at(Url(f"one-at-a-time://{uuid.uuid4().hex}"))
    specs = write_entries(store, 8)
    seal_and_remove(store, specs)
    packed = cast("FsspecStore", reopened(store))
    reader = threading.Thread(target=read_all, args=(packed, specs))
    reader.start()
    reader.join(5)
    is_done = not reader.is_alive()
    OneRequestAtATime.may_download.set()
    reader.join()
    packed.copies.wait()
    assert is_done


@pytest.fixture
def packed(own_copies: None) -> Iterator[FsspecStore]:
    """Return a store with eight packed entries, which has read nothing yet; copies are in `tmp_path`."""
    name = uuid.uuid4().hex
    store = store_at(Url(f"memory://{name}"))
    seal_and_remove(store, write_entries(store, 8))
    yield reopened(store)  # type: ignore[misc]
    fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


class Reads:
    """Records the remote reads of a store."""

    def __init__(self, store: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        read = store.folder.read

        def record(name: str, num_bytes: int | None = None, *, start: int = 0) -> bytes:
            self.names.append(name)
            return read(name, num_bytes, start=start)

        monkeypatch.setattr(store.folder, "read", record)


def read_all(store: FsspecStore, specs: list[Any]) -> None:
    for number, spec in enumerate(specs):
        assert np.array_equal(store.read(spec)["latent"], values_of(number)["latent"])


def test_a_remote_store_reads_packed_entries_by_one_range_each_and_then_from_the_copy(
    packed: FsspecStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [spec_of(number) for number in range(8)]
    (pack,) = pack_names(packed.packed.folder, ".pack")
    reads = Reads(packed, monkeypatch)
    read_all(packed, specs[:3])
    assert [Path(name).suffix for name in reads.names[:4]] == [".safetensors", "", ".parquet", ".pack"]
    assert set(reads.names[4:]) <= {pack}, "later reads try no single entry"

    packed.copies.wait()
    reads.names.clear()
    read_all(packed, specs)
    assert reads.names == []
    assert (tmp_path / "scratch" / "packs" / Path(pack).name).is_file()


@pytest.mark.parametrize("num_bytes", [0, 100, 8 * spec_of(0).file_bytes])
def test_a_damaged_copy_is_replaced_and_later_reads_are_local(
    packed: FsspecStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    specs = [spec_of(number) for number in range(8)]
    read_all(packed, specs[:2])
    packed.copies.wait()
    (copy,) = (tmp_path / "scratch" / "packs").glob("*.pack")
    sound = copy.read_bytes()
    copy.write_bytes(bytes(num_bytes))
    reads = Reads(packed, monkeypatch)
    read_all(packed, specs)
    assert reads.names

    packed.copies.wait()
    assert copy.read_bytes() == sound
    reads.names.clear()
    read_all(packed, specs)
    assert reads.names == []


def test_a_pack_with_a_damaged_entry_is_copied_for_the_others(
    packed: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_key = sorted(range(8), key=lambda number: spec_of(number).key)
    folder = packed.packed.folder
    flip_bit(folder, pack_names(folder, ".pack")[0], DATA_START + 3)
    damaged, sound = by_key[0], by_key[1:]
    packed.check(spec_of(sound[0]))
    for _ in range(2):
        assert packed.read(spec_of(sound[0]))
        packed.copies.wait()
        with pytest.raises(StoreError, match="damaged"):
            packed.read(spec_of(damaged))

    reads = Reads(packed, monkeypatch)
    for number in sound:
        assert np.array_equal(packed.read(spec_of(number))["latent"], values_of(number)["latent"])
    assert reads.names == []


def test_a_damaged_packed_entry_gives_way_to_a_single_one(packed: FsspecStore, tmp_path: Path) -> None:
    specs = [spec_of(number) for number in range(8)]
    folder = packed.packed.folder
    (name,) = pack_names(folder, ".pack")
    read_all(packed, specs[:1])
    packed.packed.folder.replace(name, bytes(8 * specs[0].file_bytes))
    for copy in (tmp_path / "scratch" / "packs").glob("*.pack"):
        copy.unlink()
    with pytest.raises(StoreError, match="damaged"):
        packed.read(specs[0])
    write_entries(packed, 8)
    read_all(packed, specs)
