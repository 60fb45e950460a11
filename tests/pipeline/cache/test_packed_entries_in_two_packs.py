"""Entries that two packs hold, because two processes sealed them at the same time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pipeline.cache.entry_format import DATA_START
from pipeline.cache.pack_index import announce_change, read_index
from pipeline.cache.sealing import seal
from pipeline.cache.store import EntrySpec, Store
from pipeline.errors import StoreError
from pipeline.reporting.reports import discard
from tests.pipeline.packs_case import (
    any_store,
    delete,
    flip_bit,
    own_copies,
    pack_names,
    reopened,
    values_of,
    write_entries,
)

__all__ = ["any_store", "own_copies"]


def pack_twice(store: Store) -> list[EntrySpec]:
    """Return two entries that are in two packs each, as after two concurrent `latentline pack`."""
    specs = write_entries(store, 2)
    seal(store, specs, log=discard)
    folder = store.packed.folder
    (first,) = pack_names(folder, ".pack")
    hidden = {name: folder.read(name) for name in (first, first.replace(".pack", ".parquet"))}
    for name in hidden:
        folder.delete(name)
    announce_change(folder, "latents")

    seal(reopened(store), [*specs, *write_entries(store, 1, start=2)], log=discard)
    for name, raw in hidden.items():
        folder.replace(name, raw)
    announce_change(folder, "latents")
    assert len(pack_names(folder, ".pack")) == 2
    for spec in specs:
        delete(store, spec)
    return specs


def test_an_entry_that_is_damaged_in_one_of_two_packs_is_read_from_the_other(any_store: Store) -> None:
    specs = pack_twice(any_store)
    numbers = {spec.key: number for number, spec in enumerate(specs)}
    folder = any_store.packed.folder
    first = min(specs, key=lambda spec: spec.key)
    packs = pack_names(folder, ".pack")
    for damaged, sound in (packs, packs[::-1]):
        before = folder.read(damaged)
        index = read_index(folder, "latents", Path(damaged).stem, len(before))
        offset = index.row(by_predicate=pl.col("key") == first.key, named=True)["offset"]
        flip_bit(folder, damaged, offset + DATA_START + 3)

        store = reopened(any_store)
        state = store.check(first)
        assert state.valid
        assert sound in state.place_in_pack
        assert np.array_equal(store.read(first)["latent"], values_of(numbers[first.key])["latent"])
        assert np.array_equal(store.read(first)["latent"], values_of(numbers[first.key])["latent"])
        folder.replace(damaged, before)


def test_an_entry_that_is_damaged_in_both_packs_is_reported_in_the_first(any_store: Store) -> None:
    specs = pack_twice(any_store)
    folder = any_store.packed.folder
    packs = pack_names(folder, ".pack")
    for name in packs:
        folder.replace(name, bytes(len(folder.read(name))))
    store = reopened(any_store)
    state = store.check(specs[0])
    assert state.status == "wrong"
    assert packs[0] in state.place_in_pack
    with pytest.raises(StoreError, match="damaged") as failure:
        store.read(specs[0])
    assert packs[0] in failure.value.where


def test_an_entry_in_two_packs_is_removed_from_both(any_store: Store) -> None:
    specs = pack_twice(any_store)
    reopened(any_store).remove_packed([specs[0]])
    store = reopened(any_store)
    assert [store.check(spec).status for spec in specs] == ["missing", "valid"]


def test_an_entry_in_two_packs_is_found_after_one_of_them_is_removed(any_store: Store) -> None:
    specs = pack_twice(any_store)
    folder = any_store.packed.folder
    stores = [reopened(any_store), reopened(any_store)]
    assert all(store.check(specs[0]).valid for store in stores)
    for removed, store in zip(pack_names(folder, ".pack"), stores, strict=True):
        kept = {name: folder.read(name) for name in (removed, removed.replace(".pack", ".parquet"))}
        folder.delete(removed.replace(".pack", ".parquet"))
        announce_change(folder, "latents")
        folder.delete(removed)
        assert np.array_equal(store.read(specs[0])["latent"], values_of(0)["latent"])
        for name, raw in kept.items():
            folder.replace(name, raw)
        announce_change(folder, "latents")
