"""The store reads, checks and repairs packed entries as it does single ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest

from pipeline.cache.entry_format import DATA_START
from pipeline.cache.packs import build_pack
from pipeline.cache.sealing import seal
from pipeline.cache.store import NO_STAT, EntrySpec, Store
from pipeline.errors import StoreError
from pipeline.log import discard
from tests.pipeline.packs_case import (
    any_store,
    delete,
    flip_bit,
    offset_of,
    pack_names,
    reopened,
    seal_and_remove,
    spec_of,
    values_of,
    write_entries,
)

__all__ = ["any_store"]


def damage(store: Store, pack: str, spec: EntrySpec) -> None:
    """Flip a bit in the data of an entry, as a faulty disk does."""
    flip_bit(store.folder, pack, offset_of(store.folder, pack, spec) + DATA_START + 3)


def has_stats(store: Store, specs: list[EntrySpec]) -> bool:
    stats = store.stats("latents", [spec.key for spec in specs])
    return all(tuple(row) != NO_STAT for row in stats.tolist())


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
        assert state.place_in_pack.startswith(store.folder.where("packs/latents/"))
        assert store.read_tensor_specs(spec) == spec.tensors
        assert (store.read_metadata("latents", spec.key) or {})["number"] == number


def test_stats_of_packed_single_and_missing_entries_equal_the_stats_of_check(any_store: Store) -> None:
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


def test_a_single_entry_precedes_a_packed_one(any_store: Store) -> None:
    (spec,) = write_entries(any_store, 1)
    single_stat = any_store.check(spec).stat
    assert single_stat is not None
    seal(any_store, [spec], log=discard)
    store = reopened(any_store)
    assert store.check(spec).place_in_pack == ""
    assert store.check(spec).stat == single_stat
    assert tuple(store.stats("latents", [spec.key])[0].tolist()) == astuple(single_stat)


def test_an_entry_that_is_packed_later_is_found_by_a_store_that_was_open(any_store: Store) -> None:
    specs = write_entries(any_store, 4)
    store = reopened(any_store)
    for part in (specs[:2], specs[2:]):
        seal_and_remove(any_store, part)
        number = specs.index(part[1])
        assert np.array_equal(store.read(part[1])["latent"], values_of(number)["latent"])
        assert store.check(part[0]).valid
        assert (
            (store.stats("latents", [spec.key for spec in specs[: number + 1]]) != NO_STAT).any(axis=1).all()
        )


def test_damage_in_a_pack_is_found_by_reading_and_by_checking(any_store: Store) -> None:
    specs = write_entries(any_store, 3)
    seal_and_remove(any_store, specs)
    (pack,) = pack_names(any_store.folder)
    damage(any_store, pack, specs[0])

    store = reopened(any_store)
    assert store.check(specs[0]).status == "wrong"
    assert "checksum" in store.check(specs[0]).reason
    with pytest.raises(StoreError, match="damaged: the checksum does not match") as failure:
        store.read(specs[0])
    assert pack in failure.value.where
    assert "verify <recipe> --repair" in failure.value.fix, "a job would trust the unchanged stat of a pack"
    assert all(store.check(spec).valid for spec in specs[1:])


def test_a_damaged_packed_entry_is_discarded_and_replaced_by_a_single_one(any_store: Store) -> None:
    specs = write_entries(any_store, 2)
    seal_and_remove(any_store, specs)
    (pack,) = pack_names(any_store.folder)
    damage(any_store, pack, specs[0])
    before = any_store.folder.read(pack)
    recorded = [tuple(row) for row in any_store.stats("latents", [spec.key for spec in specs]).tolist()]

    store = reopened(any_store)
    for spec in specs:
        store.discard(spec)
    now = [tuple(row) for row in reopened(store).stats("latents", [spec.key for spec in specs]).tolist()]
    assert [stat == old for stat, old in zip(now, recorded, strict=True)] == [False, True]
    assert reopened(store).check(specs[0]).status == "wrong"
    assert store.write(specs[0], values_of(0), {"number": 0})
    for opened in (store, reopened(store)):
        assert opened.check(specs[0]).valid
        assert np.array_equal(opened.read(specs[0])["latent"], values_of(0)["latent"])
    assert any_store.folder.read(pack) == before, "a pack never changes"


def test_a_damaged_file_is_discarded_and_its_valid_copy_in_a_pack_is_used(any_store: Store) -> None:
    (spec,) = write_entries(any_store, 1)
    seal(any_store, [spec], log=discard)
    flip_bit(any_store.folder, f"latents/{spec.key[:2]}/{spec.key}.safetensors", DATA_START)
    store = reopened(any_store)
    assert store.check(spec).status == "wrong"
    store.discard(spec)
    assert store.check(spec).place_in_pack
    assert store.check(spec).valid
    store.discard(spec_of(99))
    assert store.check(spec_of(99)).status == "missing"


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"damaged"])
def test_a_damaged_header_makes_all_entries_missing_and_is_reported(any_store: Store, content: bytes) -> None:
    specs = write_entries(any_store, 2)
    seal_and_remove(any_store, specs)
    (pack,) = pack_names(any_store.folder)
    sound = any_store.folder.read(pack)
    any_store.folder.replace(pack, content + sound[len(content) + 50 :] if content else b"")

    store = reopened(any_store)
    assert [store.check(spec).status for spec in specs] == ["missing", "missing"]
    assert store.stats("latents", [specs[0].key]).tolist() == [[*NO_STAT]]
    assert store.damaged_packs().keys() == {store.folder.where(pack)}
    with pytest.raises(StoreError, match="start the cache job again"):
        store.read(specs[0])

    any_store.folder.delete(pack)
    assert [reopened(any_store).check(spec).status for spec in specs] == ["missing", "missing"]
    any_store.folder.replace(pack, sound)
    assert all(reopened(any_store).check(spec).valid for spec in specs)


def test_a_folder_at_the_path_of_an_entry_does_not_hide_it_in_a_pack(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    specs = write_entries(store, 2)
    seal_and_remove(store, specs)
    store.path(specs[1]).mkdir()
    assert [store.check(spec).status for spec in specs] == ["valid", "valid"]
    assert has_stats(store, specs)
    assert np.array_equal(store.read(specs[1])["latent"], values_of(1)["latent"])


def test_packs_that_cannot_be_read_are_an_error_with_their_folder(tmp_path: Path) -> None:
    store, spec = Store(tmp_path / "cache"), spec_of(0)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "packs").write_text("a file in place of the folder")
    actions: dict[str, Callable[[], object]] = {
        "check": lambda: store.check(spec),
        "read": lambda: store.read(spec),
        "stats": lambda: store.stats("latents", [spec.key]),
        "packed": lambda: store.packed("latents", [spec.key]),
        "damaged packs": store.damaged_packs,
    }
    for name, action in actions.items():
        with pytest.raises(StoreError) as failure:
            action()
        assert failure.value.what == "the packs of the cache cannot be read: Not a directory", name
        assert failure.value.where == f"{tmp_path}/cache/packs/latents"
        assert failure.value.fix == store.folder.fix


def test_keys_with_the_same_beginning_are_distinguished_by_the_entry(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    (spec,) = write_entries(store, 1)
    seal_and_remove(store, [spec])
    twin = EntrySpec("latents", spec.key[:32] + "0" * 32, spec.tensors)
    state = store.check(twin)
    assert state.status == "wrong"
    assert "expected the entry latents" in state.reason
    with pytest.raises(StoreError, match="damaged"):
        store.read(twin)


def pack_twice(store: Store) -> list[EntrySpec]:
    """Return two entries that are in two packs each, as after two concurrent `latentline pack`."""
    specs = write_entries(store, 2)
    raw = {spec.key: store.read_verified(spec) for spec in [*specs, *write_entries(store, 1, start=2)]}
    for keys in ([spec.key for spec in specs], raw):
        store.folder.replace(*build_pack("latents", {key: raw[key] for key in keys}))
    for spec in specs:
        delete(store, spec)
    return specs


def test_an_entry_that_is_damaged_in_one_of_two_packs_is_read_from_the_other(any_store: Store) -> None:
    spec, _ = pack_twice(any_store)
    packs = pack_names(any_store.folder)
    for damaged, sound in (packs, packs[::-1]):
        before = any_store.folder.read(damaged)
        damage(any_store, damaged, spec)
        store = reopened(any_store)
        state = store.check(spec)
        assert state.valid
        assert sound in state.place_in_pack
        for _ in range(2):
            assert np.array_equal(store.read(spec)["latent"], values_of(0)["latent"])
        any_store.folder.replace(damaged, before)


def test_an_entry_that_is_damaged_in_both_packs_is_reported_in_the_first(any_store: Store) -> None:
    spec, _ = pack_twice(any_store)
    packs = pack_names(any_store.folder)
    for pack in packs:
        damage(any_store, pack, spec)
    store = reopened(any_store)
    state = store.check(spec)
    assert state.status == "wrong"
    assert packs[0] in state.place_in_pack
    with pytest.raises(StoreError, match="damaged") as failure:
        store.read(spec)
    assert packs[0] in failure.value.where
