"""Local copies of packs: bounded, verified, and shared by the processes of a machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipeline.cache.entry_format import DATA_START
from pipeline.cache.fsspec_folder import FsspecFolder
from pipeline.cache.pack_copies import IDLE_S, CopySettings, PackCopies
from pipeline.cache.packs import build_pack
from pipeline.cache.store import Store
from pipeline.errors import StoreError
from pipeline.storage.addresses import Url
from pipeline.storage.atomic import temp_name
from pipeline.storage.remote_folder import RemoteFolder
from tests.pipeline.disk_calls import DiskCalls
from tests.pipeline.packs_case import (
    flip_bit,
    offset_of,
    pack_names,
    seal_and_remove,
    values_of,
    write_entries,
)

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
    copies = PackCopies(CopySettings(tmp_path / "copies", 10 * SIZE), remote.download)
    assert copies.read(name, 0, 5) is None
    for _ in range(3):
        copies.want(name, SIZE)
    copies.wait()
    assert copies.read(name, 10, 20) == remote.packs[name][10:20]
    assert remote.downloaded == [name]

    other_process = PackCopies(CopySettings(tmp_path / "copies", 10 * SIZE), remote.download)
    other_process.want(name, SIZE)
    other_process.wait()
    assert remote.downloaded == [name]


def test_reading_does_not_wait_for_a_copy(remote: Remote, tmp_path: Path) -> None:
    name = remote.add()
    remote.may_download.clear()
    copies = PackCopies(CopySettings(tmp_path / "copies", 10 * SIZE), remote.download)
    copies.want(name, SIZE)
    assert copies.read(name, 0, 5) is None
    remote.may_download.set()
    copies.wait()
    assert copies.read(name, 0, 5) == remote.packs[name][:5]


def test_copies_never_exceed_their_bound(remote: Remote, tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    copies = PackCopies(CopySettings(folder, 3 * SIZE), remote.download)
    names = [remote.add() for _ in range(5)]
    for name in names:
        copies.want(name, SIZE)
    copies.wait()
    assert copies_in(folder) == set(names[:3]), "packs in use do not displace each other"


@pytest.mark.parametrize("num_idle", [1, 2])
def test_idle_copies_make_room_the_oldest_first(remote: Remote, tmp_path: Path, num_idle: int) -> None:
    folder = tmp_path / "copies"
    names = [remote.add() for _ in range(3)]
    first = PackCopies(CopySettings(folder, 3 * SIZE), remote.download)
    for name in names:
        first.want(name, SIZE)
    first.wait()
    for name in names[:num_idle]:
        make_idle(folder, name)

    new = remote.add()
    second = PackCopies(CopySettings(folder, 3 * SIZE), remote.download)
    second.want(new, SIZE)
    second.wait()
    assert copies_in(folder) == {*names[1:], new}


def test_a_copy_that_is_read_is_not_idle(remote: Remote, tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    name = remote.add()
    copies = PackCopies(CopySettings(folder, SIZE), remote.download)
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
    copies = PackCopies(CopySettings(tmp_path / "copies", 10 * SIZE), remote.download)
    copies.want(name, SIZE)
    copies.wait()
    assert copies.read(name, 0, 5) is None
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["lock"]


def test_a_copy_is_synced_before_it_gets_its_name(
    remote: Remote, tmp_path: Path, disk_calls: DiskCalls
) -> None:
    name = remote.add()
    copies = PackCopies(CopySettings(tmp_path / "copies", 10 * SIZE), remote.download)
    copies.want(name, SIZE)
    copies.wait()
    assert disk_calls.names == [Path(name).name]
    assert disk_calls.unsynced == [], "the copy would be empty after a power failure"


def test_a_discarded_copy_is_replaced_once(remote: Remote, tmp_path: Path) -> None:
    name = remote.add()
    copies = PackCopies(CopySettings(tmp_path / "copies", 10 * SIZE), remote.download)
    for num_copies in (1, 2, 2):
        copies.want(name, SIZE)
        copies.wait()
        assert len(remote.downloaded) == num_copies, "a disk that damages every copy is not used for ever"
        copies.discard(name)
        assert copies.read(name, 0, 5) is None


def test_two_processes_that_want_a_pack_at_once_download_it_once(remote: Remote, tmp_path: Path) -> None:
    name = remote.add()
    remote.may_download.clear()
    processes = [PackCopies(CopySettings(tmp_path / "copies", 10 * SIZE), remote.download) for _ in range(2)]
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

    copies = PackCopies(CopySettings(tmp_path / "copies", 10 * SIZE), download)
    copies.want(lost, SIZE)
    copies.want(present, SIZE)
    copies.wait()
    assert copies_in(tmp_path / "copies") == {present}
    assert len(list((tmp_path / "copies").iterdir())) == 2


def test_the_unfinished_copy_of_a_killed_process_is_deleted(remote: Remote, tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    (folder / temp_name()).write_bytes(b"x" * 3 * SIZE)
    copies = PackCopies(CopySettings(folder, 3 * SIZE), remote.download)
    name = remote.add()
    copies.want(name, SIZE)
    copies.wait()
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".pack"]


def test_copying_can_be_disabled_and_leaves_a_part_of_the_disk_free(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = remote.add()
    disabled = PackCopies(CopySettings(tmp_path / "none", 0), remote.download)
    disabled.want(name, SIZE)
    disabled.wait()
    assert not (tmp_path / "none").exists()

    usage = shutil.disk_usage(tmp_path)
    almost_full = usage._replace(total=1000, free=100 + SIZE - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: almost_full)
    copies = PackCopies(CopySettings(tmp_path / "copies", 10 * SIZE), remote.download)
    copies.want(name, SIZE)
    copies.wait()
    assert copies_in(tmp_path / "copies") == set()


def test_a_copy_that_cannot_be_read_counts_as_missing(remote: Remote, tmp_path: Path) -> None:
    name = remote.add()
    (tmp_path / "copies" / Path(name).name).mkdir(parents=True)  # reading it fails, opening it does not
    copies = PackCopies(CopySettings(tmp_path / "copies", 10 * SIZE), remote.download)
    assert copies.read(name, 0, 5) is None


def test_copies_are_not_read_if_copying_is_disabled(remote: Remote, tmp_path: Path) -> None:
    name = remote.add()
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / Path(name).name).write_bytes(remote.packs[name])
    assert (
        PackCopies(CopySettings(tmp_path / "copies", 10 * SIZE), remote.download).read(name, 0, 5) is not None
    )
    assert PackCopies(CopySettings(tmp_path / "copies", 0), remote.download).read(name, 0, 5) is None


class OneRequestAtATime(MemoryFileSystem):
    """A file system in memory that, like SFTP, sends one request per connection at a time."""

    protocol = "one-at-a-time"
    store: ClassVar[dict[str, Any]] = {}
    may_download = threading.Event()

    def get_file(self, *arguments: Any, **options: Any) -> None:
        self.may_download.wait(10)
        super().get_file(*arguments, **options)


class RecordingRemote(RemoteFolder):
    """Records the names of the files that are read."""

    def __init__(self, url: Url) -> None:
        super().__init__(url)
        self.names: list[str] = []

    def read(self, name: str, num_bytes: int | None = None, *, start: int = 0) -> bytes:
        self.names.append(name)
        return super().read(name, num_bytes, start=start)


class PackedCache:
    """A remote cache with eight packed entries, and a store that has read nothing yet."""

    def __init__(self, url: Url, copies: Path) -> None:
        writer = Store(url)
        self.specs = write_entries(writer, 8)
        seal_and_remove(writer, self.specs)
        (self.pack,) = pack_names(writer.folder)

        self.store = Store(url, copies=CopySettings(copies, 10**6))
        self.copy = copies / Path(self.pack).name
        self.remote = RecordingRemote(url)
        assert isinstance(self.store.folder, FsspecFolder)
        self.store.folder.remote = self.remote

    def read(self, numbers: Iterable[int] = range(8)) -> None:
        for number in numbers:
            assert np.array_equal(self.store.read(self.specs[number])["latent"], values_of(number)["latent"])

    def wait(self) -> None:
        assert self.store.copies is not None
        self.store.copies.wait()

    def damage(self, number: int) -> None:
        offset = offset_of(self.store.folder, self.pack, self.specs[number])
        flip_bit(self.store.folder, self.pack, offset + DATA_START + 3)


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    return PackedCache(Url(f"memory://{uuid.uuid4().hex}"), tmp_path / "copies")


def test_reads_do_not_wait_for_a_copy_on_a_service_with_one_request_at_a_time(tmp_path: Path) -> None:
    fsspec.register_implementation("one-at-a-time", OneRequestAtATime, clobber=True)
    cache = PackedCache(Url(f"one-at-a-time://{uuid.uuid4().hex}"), tmp_path / "copies")
    reader = threading.Thread(target=cache.read)
    reader.start()
    reader.join(60)
    is_done = not reader.is_alive()
    OneRequestAtATime.may_download.set()
    reader.join()
    cache.wait()
    assert is_done


def test_packed_entries_are_read_by_one_range_each_and_then_from_the_copy(
    cache: PackedCache,
) -> None:
    cache.read(range(3))
    assert [Path(name).suffix for name in cache.remote.names[:2]] == [".safetensors", ".pack"]
    assert set(cache.remote.names[1:]) == {cache.pack}, "later reads try no single entry"

    cache.wait()
    cache.remote.names.clear()
    cache.read()
    assert cache.remote.names == []
    assert cache.copy.is_file()


def test_without_settings_nothing_is_copied(cache: PackedCache) -> None:
    store = Store(cache.store.address)
    assert store.copies is None
    assert store.read(cache.specs[0])


@pytest.mark.parametrize("num_bytes", [0, 100, 30_000])
def test_a_damaged_copy_is_replaced_and_later_reads_are_local(cache: PackedCache, num_bytes: int) -> None:
    cache.read(range(2))
    cache.wait()
    sound = cache.copy.read_bytes()
    cache.copy.write_bytes(bytes(num_bytes))
    cache.remote.names.clear()
    cache.read()
    assert cache.remote.names

    cache.wait()
    assert cache.copy.read_bytes() == sound
    cache.remote.names.clear()
    cache.read()
    assert cache.remote.names == []


def test_a_pack_with_a_damaged_entry_is_copied_for_the_others(cache: PackedCache) -> None:
    cache.damage(0)
    for _ in range(2):
        cache.read([1])
        cache.wait()
        with pytest.raises(StoreError, match="damaged"):
            cache.store.read(cache.specs[0])

    cache.remote.names.clear()
    cache.read(range(1, 8))
    assert cache.remote.names == []


def test_an_entry_that_is_damaged_in_the_first_of_two_packs_is_read_from_a_copy_of_the_second(
    cache: PackedCache,
) -> None:
    folder, spec = Store(cache.store.address).folder, cache.specs[0]
    offset = offset_of(folder, cache.pack, spec)
    raw = folder.read_range(cache.pack, offset, offset + spec.file_bytes)
    folder.replace(*build_pack("latents", {spec.key: raw}))
    first, second = pack_names(folder)
    flip_bit(folder, first, offset_of(folder, first, spec) + DATA_START + 3)

    cache.read([0, 0])
    cache.wait()
    assert copies_in(cache.copy.parent) == {second}
    cache.remote.names.clear()
    cache.read([0])
    assert second not in cache.remote.names


def test_a_damaged_packed_entry_gives_way_to_a_single_one(cache: PackedCache) -> None:
    cache.read([1, 2])
    cache.wait()
    cache.damage(0)
    cache.copy.unlink()
    with pytest.raises(StoreError, match="damaged"):
        cache.store.read(cache.specs[0])
    write_entries(cache.store, 1)
    cache.read()
