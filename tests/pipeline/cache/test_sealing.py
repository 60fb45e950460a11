"""Sealing copies valid single entries into packs, and never changes an entry."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pipeline.cache import sealing
from pipeline.cache.local_folder import LocalFolder
from pipeline.cache.sealing import MIN_NEW, seal, seal_new
from pipeline.cache.store import Store
from pipeline.errors import StoreError
from pipeline.log import discard
from tests.pipeline.disk_calls import DiskCalls
from tests.pipeline.packs_case import (
    any_store,
    pack_names,
    reopened,
    single_files,
    spec_of,
    write_entries,
)

__all__ = ["any_store"]


def test_entries_are_divided_into_packs_and_their_files_stay(
    any_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "MAX_ENTRIES", 4)
    specs = write_entries(any_store, 10)
    before = single_files(any_store)
    sealed = seal(any_store, specs, log=discard)
    assert (sealed.num_packs, sealed.num_entries, sealed.num_packed_before) == (3, 10, 0)
    names = pack_names(any_store.folder)
    assert sealed.num_bytes == sum(len(any_store.folder.read(name)) for name in names)
    assert single_files(any_store) == before
    assert len(names) == 3


def test_a_pack_is_at_most_as_large_as_allowed_unless_one_entry_is_larger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "cache")
    specs = write_entries(store, 5)
    monkeypatch.setattr(sealing, "MAX_BYTES", 2 * specs[0].file_bytes)
    assert seal(store, specs, log=discard).num_packs == 3
    monkeypatch.setattr(sealing, "MAX_BYTES", 1)
    assert seal(store, write_entries(store, 2, start=5), log=discard).num_packs == 2


def test_entries_in_packs_are_not_sealed_again(any_store: Store) -> None:
    specs = write_entries(any_store, 3)
    seal(any_store, specs, log=discard)
    more = write_entries(any_store, 2, start=3)
    sealed = seal(reopened(any_store), [*specs, *more, *more], log=discard)
    assert (sealed.num_packs, sealed.num_entries, sealed.num_packed_before) == (1, 2, 3)
    assert seal(reopened(any_store), [*specs, *more], log=discard).num_packs == 0


def test_missing_and_damaged_entries_are_omitted_and_reported(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    specs = write_entries(store, 3)
    path = store.path(specs[0])
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    sealed = seal(store, [*specs, spec_of(99)], log=discard)
    assert sealed.num_entries == 2
    assert set(sealed.unusable) == {specs[0].key, spec_of(99).key}
    assert sealed.unusable[spec_of(99).key] == "the entry is missing"
    assert "checksum" in sealed.unusable[specs[0].key]


def test_L06_a_pack_is_synced_before_it_gets_its_name(tmp_path: Path, disk_calls: DiskCalls) -> None:
    store = Store(tmp_path / "cache")
    specs = write_entries(store, 2)
    disk_calls.names.clear()
    seal(store, specs, log=discard)
    assert [Path(name).suffix for name in disk_calls.names] == [".pack"]
    assert disk_calls.unsynced == [], "the pack would be empty after a power failure"
    assert disk_calls.is_synced(tmp_path / "cache" / "packs" / "latents")


def test_the_same_entries_give_the_same_pack_in_any_cache(tmp_path: Path) -> None:
    names = set()
    for root in ("a", "b"):
        store = Store(tmp_path / root)
        specs = write_entries(store, 5)
        seal(store, specs if root == "a" else reversed(specs), log=discard)
        names.add(tuple(pack_names(store.folder)))
    assert len(names) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_an_error_with_a_fix(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    specs = write_entries(store, 2)
    (tmp_path / "cache" / "packs").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="the packs of the cache cannot be written: Permission denied"):
        seal(store, specs, log=discard)


class FullDisk(LocalFolder):
    """A folder on a disk without space for a pack."""

    def replace(self, name: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_an_error_that_names_the_pack_and_the_space_that_packs_take(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    specs = write_entries(store, 2)
    store.folder = FullDisk(tmp_path / "cache")
    with pytest.raises(StoreError) as failure:
        seal(store, specs, log=discard)
    assert failure.value.what.startswith("the disk is full: a pack of 4,")
    assert failure.value.where.startswith(f"{tmp_path}/cache/packs/latents/")
    assert failure.value.where.endswith(".pack")
    assert "free some space" in failure.value.fix
    assert "latentline gc --delete" in failure.value.fix
    assert all(Store(tmp_path / "cache").check(spec).valid for spec in specs)


def test_new_entries_that_cannot_be_packed_stay_single_files_with_a_warning(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    specs = write_entries(store, MIN_NEW)
    (tmp_path / "cache" / "packs").write_text("a file in place of the folder")
    log: list[str] = []
    seal_new(store, specs, log=log.append)
    (line,) = log
    assert line.startswith("warning: new entries stay single files: the packs of the cache cannot be read: ")
    assert f"{tmp_path}/cache/packs/latents" in line
    assert "then run latentline pack <recipe>" in line


def test_entries_that_workers_have_packed_are_not_reported_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    specs = write_entries(store, MIN_NEW)
    log: list[str] = []
    for _ in range(2):
        seal_new(store, specs, log=log.append)
    assert log == [f"{MIN_NEW} new entries sealed in 1 pack"]
