"""The store reads, checks and removes packed entries as it does single ones."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest

from pipeline.cache.entry_format import DATA_START
from pipeline.cache.entry_state import NO_STAT
from pipeline.cache.folder import LocalCacheFolder, cache_folder
from pipeline.cache.pack_index import PackIndex, announce_change
from pipeline.cache.packed_entries import PackedEntries
from pipeline.cache.remote_store import FsspecStore
from pipeline.cache.sealing import seal
from pipeline.cache.store import EntrySpec, Store
from pipeline.errors import StoreError
from pipeline.reporting.reports import discard
from pipeline.storage.addresses import Url
from tests.pipeline.packs_case import (
    any_store,
    flip_bit,
    own_copies,
    pack_names,
    reopened,
    seal_and_remove,
    spec_of,
    values_of,
    write_entries,
)

__all__ = ["any_store", "own_copies"]


def test_a_packed_entry_is_read_and_checked_like_a_single_one(any_store: Store) -> None:
    specs = write_entries(any_store, 5)
    single = [any_store.check(spec) for spec in specs]
    seal_and_remove(any_store, specs)

    store = reopened(any_store)
    for number, spec in enumerate(specs):
        assert np.array_equal(store.read(spec)["latent"], values_of(number)["latent"])
        state = store.check(spec)
        assert state.valid
        assert (state.metadata, state.shapes) == (single[number].metadata, single[number].shapes)
        assert state.place_in_pack.startswith(store.packed.folder.where("packs/latents/"))
        assert store.read_tensor_specs(spec) == spec.tensors
        assert (store.read_metadata("latents", spec.key) or {})["number"] == number


def test_stats_of_packed_single_and_missing_entries_are_those_of_check(any_store: Store) -> None:
    packed, single = write_entries(any_store, 3), write_entries(any_store, 2, start=3)
    seal_and_remove(any_store, packed)
    store = reopened(any_store)
    specs = [*single, *packed, spec_of(99)]
    stats = [tuple(row) for row in store.stats("latents", [spec.key for spec in specs]).tolist()]
    if "memory" not in str(store.address):  # a file in memory has a time but no version
        expected = [store.check(spec).stat for spec in specs[:-1]]
        assert stats[:-1] == [astuple(stat) for stat in expected if stat is not None]
    assert [stat[0] for stat in stats[:-1]] == [spec.file_bytes for spec in specs[:-1]]
    assert stats[-1] == NO_STAT


def test_a_packed_entry_with_a_trusted_stat_is_not_read(any_store: Store) -> None:
    specs = write_entries(any_store, 2)
    seal_and_remove(any_store, specs)
    stat = reopened(any_store).check(specs[0]).stat
    store = reopened(any_store)
    if "memory" in str(store.address):
        pytest.skip("a file in memory has a time but no version")
    state = store.check(specs[0], trusted=stat)
    assert (state.valid, state.metadata) == (True, None)


def test_a_single_entry_precedes_a_packed_one(any_store: Store) -> None:
    (spec,) = write_entries(any_store, 1)
    single_stat = any_store.check(spec).stat
    seal(any_store, [spec], log=discard)
    store = reopened(any_store)
    assert store.check(spec).place_in_pack == ""
    assert store.check(spec).stat == single_stat
    assert tuple(store.stats("latents", [spec.key])[0].tolist()) == astuple(single_stat)  # type: ignore[arg-type]


def test_an_entry_that_is_sealed_later_is_found_by_a_store_that_was_open(
    any_store: Store,
) -> None:
    specs = write_entries(any_store, 4)
    store = reopened(any_store)
    seal_and_remove(any_store, specs[:2])
    assert store.check(specs[0]).valid
    seal_and_remove(any_store, specs[2:])
    assert store.check(specs[3]).valid
    assert np.array_equal(store.read(specs[2])["latent"], values_of(2)["latent"])


def test_damage_in_a_pack_is_found_by_reading_and_by_checking(any_store: Store) -> None:
    specs = write_entries(any_store, 3)
    seal_and_remove(any_store, specs)
    (pack,) = pack_names(any_store.packed.folder, ".pack")
    first = min(specs, key=lambda spec: spec.key)
    flip_bit(any_store.packed.folder, pack, DATA_START + 3)

    store = reopened(any_store)
    assert store.check(first).status == "wrong"
    assert "checksum" in store.check(first).reason
    with pytest.raises(StoreError, match="damaged: the checksum does not match") as failure:
        store.read(first)
    assert pack in failure.value.where
    assert "verify <recipe> --repair" in failure.value.fix, "a job would trust the unchanged stat of a pack"
    assert all(store.check(spec).valid for spec in specs if spec != first)


def test_an_entry_written_after_its_packed_copy_was_damaged_is_used(any_store: Store) -> None:
    specs = write_entries(any_store, 2)
    seal_and_remove(any_store, specs)
    first = min(specs, key=lambda spec: spec.key)
    flip_bit(any_store.packed.folder, pack_names(any_store.packed.folder, ".pack")[0], DATA_START + 3)
    store = reopened(any_store)
    assert store.check(first).status == "wrong"
    number = specs.index(first)
    assert store.write(first, values_of(number), {"number": number})
    assert store.check(first).valid
    assert np.array_equal(store.read(first)["latent"], values_of(number)["latent"])


def test_a_damaged_or_lost_index_or_pack_makes_its_entries_missing(any_store: Store) -> None:
    specs = write_entries(any_store, 2)
    seal_and_remove(any_store, specs)
    folder = any_store.packed.folder
    (index,), (pack,) = pack_names(folder, ".parquet"), pack_names(folder, ".pack")
    index_raw, pack_raw = folder.read(index), folder.read(pack)

    for name, damaged in ((index, index_raw[:-5]), (pack, pack_raw[:-5])):
        sound = folder.read(name)
        folder.replace(name, damaged)
        assert reopened(any_store).check(specs[0]).status == "missing"
        folder.delete(name)
        assert reopened(any_store).check(specs[0]).status == "missing"
        assert tuple(reopened(any_store).stats("latents", [specs[0].key])[0].tolist()) == NO_STAT
        with pytest.raises(StoreError, match="start the cache job again"):
            reopened(any_store).read(specs[0])
        folder.replace(name, sound)
    assert reopened(any_store).check(specs[0]).valid


def test_a_removed_entry_is_missing_and_the_others_of_its_pack_are_not(any_store: Store) -> None:
    specs = write_entries(any_store, 3)
    seal_and_remove(any_store, specs)
    other_store = reopened(any_store)
    assert other_store.check(specs[1]).valid
    any_store.remove_packed([specs[1]])
    for store in (any_store, reopened(any_store), other_store):
        if store is other_store:
            announce_change(any_store.packed.folder, "latents")
            store.check(spec_of(99))
        assert [store.check(spec).status for spec in specs] == ["valid", "missing", "valid"]


@pytest.mark.parametrize("suffix", [".pack", ".parquet"])
def test_an_entry_of_a_pack_that_was_lost_can_be_removed(any_store: Store, suffix: str) -> None:
    specs = write_entries(any_store, 2)
    seal_and_remove(any_store, specs)
    store = reopened(any_store)
    assert store.check(specs[0]).valid
    any_store.packed.folder.delete(pack_names(any_store.packed.folder, suffix)[0])
    store.remove_packed([specs[0]])
    assert store.check(specs[0]).status == "missing"


def test_L10_an_index_that_gc_deletes_and_restores_while_it_is_read_is_read_again(
    any_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a service with ETags, the restored index has the stat of the deleted one."""
    specs = write_entries(any_store, 2)
    seal_and_remove(any_store, specs)
    gc = any_store.packed.folder
    (name,) = pack_names(gc, ".parquet")
    content = gc.read(name)

    folder = cache_folder(any_store.address)
    index, read = PackIndex(folder, "latents"), folder.read
    is_deleted = False

    def read_after_deletion(path: str) -> bytes:
        nonlocal is_deleted
        if path == name and not is_deleted:
            is_deleted = True
            gc.delete(name)
            announce_change(gc, "latents")
        return read(path)

    monkeypatch.setattr(folder, "read", read_after_deletion)
    index.refresh()
    assert is_deleted
    assert index.find(specs[0].key) is None
    gc.replace(name, content)
    announce_change(gc, "latents")
    index.refresh()
    assert all(index.find(spec.key) is not None for spec in specs)


def test_a_folder_at_the_path_of_a_packed_entry_hides_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    specs = write_entries(store, 3)
    seal_and_remove(store, specs)
    store.path(specs[1]).mkdir()
    assert [store.check(spec).status for spec in specs] == ["valid", "wrong", "valid"]
    stats = store.stats("latents", [spec.key for spec in specs])
    assert [tuple(row) == NO_STAT for row in stats.tolist()] == [False, True, False]


def test_a_pack_whose_entries_were_all_removed_is_sealed_again(any_store: Store) -> None:
    specs = write_entries(any_store, 3)
    seal_and_remove(any_store, specs)
    any_store.remove_packed(specs)
    store = reopened(any_store)
    assert {store.check(spec).status for spec in specs} == {"missing"}
    seal_and_remove(store, write_entries(store, 3))
    assert all(reopened(store).check(spec).valid for spec in specs)
    assert len(pack_names(store.packed.folder, ".pack")) == 1


class CountingFolder(LocalCacheFolder):
    """Counts reads of the file that announces changes, and listings, and records replaced files."""

    num_tokens = num_listings = 0

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.replaced: list[str] = []

    def replace(self, name: str, data: bytes) -> None:
        self.replaced.append(Path(name).suffix)
        super().replace(name, data)

    def read(self, name: str) -> bytes:
        self.num_tokens += name.endswith("changed")
        return super().read(name)

    def stats(self, folder: str) -> dict[str, tuple[int, int, int, int]]:
        self.num_listings += 1
        return super().stats(folder)


def test_a_remote_cache_without_packs_has_one_more_read_only_where_entries_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = FsspecStore(Url(f"memory://{uuid.uuid4().hex}"))
    specs = write_entries(store, 40)
    read, names = store.folder.read, list[str]()

    def record(name: str, num_bytes: int | None = None, *, start: int = 0) -> bytes:
        names.append(name)
        return read(name, num_bytes, start=start)

    monkeypatch.setattr(store.folder, "read", record)
    keys = [spec.key for spec in specs]
    store.stats("latents", keys)
    assert names == []
    store.read(specs[0])
    assert names == [store.path(specs[0]).as_posix()]
    names.clear()
    store.stats("latents", [*keys, spec_of(98).key, spec_of(99).key])
    assert names == ["packs/latents/changed"]


def test_a_cache_without_packs_is_never_listed_for_them(tmp_path: Path) -> None:
    folder = CountingFolder(tmp_path / "cache")
    index = PackIndex(folder, "latents")
    for _ in range(10):
        index.refresh()
    assert (folder.num_listings, folder.num_tokens) == (0, 10)
    assert index.find("ab" * 32) is None


class SlowFolder(CountingFolder):
    """The first read of the file that announces changes takes as long as the test wants."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_reading, self.may_continue = threading.Event(), threading.Event()

    def read(self, name: str) -> bytes:
        data = super().read(name)
        self.is_reading.set()
        self.may_continue.wait(10)
        return data


def test_threads_that_miss_entries_at_the_same_time_share_one_refresh(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    seal(store, write_entries(store, 3), log=discard)
    folder = SlowFolder(tmp_path / "cache")
    index = PackIndex(folder, "latents")
    threads = [threading.Thread(target=index.refresh) for _ in range(16)]
    threads[0].start()
    assert folder.is_reading.wait(10)
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.5)  # until all of them wait
    folder.may_continue.set()
    for thread in threads:
        thread.join()
    assert folder.num_tokens == 2, "the first refresh began before the other threads called"


def test_removing_many_entries_of_a_pack_replaces_its_index_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    specs = write_entries(store, 20)
    seal_and_remove(store, specs)
    folder = CountingFolder(tmp_path / "cache")
    PackedEntries(folder).remove(specs[:15])
    assert folder.replaced == [".parquet", ""]
    assert folder.num_listings == 3
    assert [reopened(store).check(spec).valid for spec in specs] == 15 * [False] + 5 * [True]


def test_packs_are_listed_once_while_none_changes(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    seal(store, write_entries(store, 3), log=discard)
    folder = CountingFolder(tmp_path / "cache")
    index = PackIndex(folder, "latents")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: index.refresh(), range(200)))
    assert folder.num_listings == 1
    seal(store, write_entries(store, 3, start=3), log=discard)
    index.refresh()
    assert folder.num_listings == 2
    assert all(index.find(spec_of(number).key) is not None for number in range(6))


def test_packs_that_cannot_be_read_or_changed_are_an_error_with_their_folder(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "packs").write_text("a file in place of the folder")
    spec = spec_of(0)
    actions: dict[str, Callable[[], object]] = {
        "check": lambda: store.check(spec),
        "read": lambda: store.read(spec),
        "stats": lambda: store.stats("latents", [spec.key]),
        "remove": lambda: store.remove_packed([spec]),
    }
    for name, action in actions.items():
        with pytest.raises(StoreError) as failure:
            action()
        done = "changed" if name == "remove" else "read"
        assert failure.value.what == f"the packs of the cache cannot be {done}: Not a directory"
        assert failure.value.where == f"{tmp_path}/cache/packs/latents"
        assert failure.value.fix == Store.fix


def test_keys_with_the_same_beginning_are_told_apart_by_the_entry(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    (spec,) = write_entries(store, 1)
    seal_and_remove(store, [spec])
    twin = EntrySpec("latents", spec.key[:32] + "0" * 32, spec.tensors)
    state = store.check(twin)
    assert state.status == "wrong"
    assert "expected the entry latents" in state.reason
    with pytest.raises(StoreError, match="damaged"):
        store.read(twin)
