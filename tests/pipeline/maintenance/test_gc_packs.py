"""`latentline gc` deletes single entries with a verified copy in a pack, and packs that nothing needs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pipeline.cache.entry_format import DATA_START
from pipeline.cache.pack_index import announce_change
from pipeline.cache.sealing import seal
from pipeline.cache.store import EntrySpec, Store
from pipeline.cache.users import register_user
from pipeline.errors import StoreError
from pipeline.maintenance.gc import delete, survey
from pipeline.maintenance.gc_packs import delete_old
from pipeline.reporting.reports import discard
from pipeline.storage.addresses import address
from pipeline.storage.atomic import temp_name
from tests.pipeline.packs_case import (
    any_store,
    flip_bit,
    own_copies,
    pack_names,
    reopened,
    single_files,
    spec_of,
    values_of,
    write_entries,
)

__all__ = ["any_store", "own_copies"]

OLD_S = 1_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def register(store: Store, specs: list[EntrySpec]) -> None:
    register_user(
        store.address, address("memory://out"), recipe="r", kind="latents", keys=[spec.key for spec in specs]
    )


def make_all_files_old(store: Store) -> None:
    for path in store.root.rglob("*"):
        os.utime(path, (OLD_S, OLD_S))


def test_single_entries_are_deleted_after_sealing_and_stay_readable(any_store: Store) -> None:
    specs = write_entries(any_store, 3)
    alone = write_entries(any_store, 2, start=3)
    register(any_store, [*specs, *alone])
    sealed = seal(any_store, specs, log=discard)
    surveyed = survey(any_store.address)
    assert len(surveyed.packs.all) == 1
    assert surveyed.packs.num_entries == 3
    assert len(surveyed.packs.single) == 3
    assert (surveyed.entries, surveyed.orphans, surveyed.foreign, surveyed.young) == (5, {}, [], 0)

    assert delete(any_store.address, surveyed) == (3, sealed.num_bytes)
    assert {name.rpartition("/")[2] for name in single_files(any_store)} == {
        f"{spec.key}.safetensors" for spec in alone
    }
    assert all(reopened(any_store).check(spec).valid for spec in [*specs, *alone])
    assert delete(any_store.address, survey(any_store.address)) == (0, 0)


def test_an_open_store_finds_the_entries_of_a_pack_whose_writer_was_killed_before_announcing_it(
    any_store: Store,
) -> None:
    first, second = write_entries(any_store, 2), write_entries(any_store, 2, start=2)
    register(any_store, [*first, *second])
    seal(any_store, first, log=discard)
    opened = reopened(any_store)
    assert opened.check(spec_of(99)).status == "missing", "it has listed the packs"
    token = any_store.packed.folder.read("packs/latents/changed")
    seal(any_store, second, log=discard)
    any_store.packed.folder.replace("packs/latents/changed", token)

    assert delete(any_store.address, survey(any_store.address))[0] == 4
    assert all(opened.check(spec).valid for spec in [*first, *second])


def test_a_single_entry_stays_if_its_packed_copy_is_damaged(any_store: Store) -> None:
    specs = write_entries(any_store, 3)
    register(any_store, specs)
    seal(any_store, specs, log=discard)
    (pack,) = pack_names(any_store.packed.folder, ".pack")
    flip_bit(any_store.packed.folder, pack, DATA_START + 3)
    first = min(specs, key=lambda spec: spec.key)

    log: list[str] = []
    assert delete(any_store.address, survey(any_store.address), log=log.append)[0] == 2
    assert any_store.packed.folder.where(pack) in log[0]
    assert "a pack has 1 damaged entry, which now count as missing in it" in log[0]
    assert "1 of them also in a file of its own, which stays. Start the cache jobs" in log[0]
    assert len(single_files(any_store)) == 1
    assert all(reopened(any_store).check(spec).valid for spec in specs)

    assert seal(reopened(any_store), specs, log=discard).num_entries == 1
    assert delete(any_store.address, survey(any_store.address))[0] == 1
    assert reopened(any_store).check(first).valid


def test_a_pack_is_deleted_when_nothing_needs_any_of_its_entries(store: Store) -> None:
    specs = write_entries(store, 3)
    register(store, specs[:1])
    seal(store, specs, log=discard)
    delete(store.address, survey(store.address))
    make_all_files_old(store)
    surveyed = survey(store.address)
    assert (surveyed.packs.old, surveyed.packs.young) == ([], []), "one entry is needed"

    register(store, [])
    assert len(survey(store.address, grace_s=1e12).packs.young) == 1
    surveyed = survey(store.address)
    num_bytes = sum((store.root / name).stat().st_size for name in surveyed.packs.old[0].files)
    assert delete(store.address, surveyed) == (2, num_bytes)
    assert [path.name for path in (store.root / "packs").rglob("*") if path.is_file()] == ["changed"]
    assert reopened(store).check(specs[0]).status == "missing"


def test_a_pack_needed_since_the_survey_is_kept(store: Store) -> None:
    specs = write_entries(store, 2)
    register(store, [])
    seal(store, specs, log=discard)
    make_all_files_old(store)
    surveyed = survey(store.address)
    assert len(surveyed.packs.old) == 1
    register(store, specs)
    delete(store.address, surveyed)
    assert len(pack_names(store.packed.folder, ".pack")) == 1


def test_a_store_that_was_open_notices_that_a_pack_was_deleted(store: Store) -> None:
    specs = write_entries(store, 2)
    register(store, specs)
    seal(store, specs, log=discard)
    delete(store.address, survey(store.address))
    opened = reopened(store)
    assert opened.check(specs[0]).valid
    register(store, [])
    make_all_files_old(store)
    delete(store.address, survey(store.address))
    assert opened.check(specs[0]).status == "missing"
    assert opened.write(specs[0], values_of(0), {"number": 0})
    assert opened.check(specs[0]).valid


def seal_twice(store: Store, specs: list[EntrySpec], alone: list[EntrySpec]) -> tuple[str, str]:
    """Seal entries in two packs, as two concurrent jobs do, and return the packs in the order of readers."""
    seal(store, specs, log=discard)
    folder, hidden = store.packed.folder, {}
    for name in (*pack_names(folder, ".parquet"), *pack_names(folder, ".pack")):
        hidden[name] = folder.read(name)
        folder.delete(name)
    announce_change(folder, "latents")
    seal(reopened(store), [*specs, *alone], log=discard)
    for name, content in hidden.items():
        folder.replace(name, content)
    announce_change(folder, "latents")
    first, second = pack_names(folder, ".pack")
    return first, second


@pytest.mark.parametrize(("number", "num_in_first"), [(4, 2), (5, 1)], ids=["larger first", "smaller first"])
def test_gc_verifies_the_copy_that_readers_use_if_two_packs_hold_an_entry(
    store: Store, number: int, num_in_first: int
) -> None:
    """The packs' names are hashes, so the number decides which pack comes first."""
    (spec,) = write_entries(store, 1)
    alone = write_entries(store, 1, start=number)
    register(store, [spec, *alone])
    first, _ = seal_twice(store, [spec], alone)
    assert len(survey(store.address).packs.all[0].keys) == num_in_first
    flip_bit(store.packed.folder, first, place_of(store, first, spec) + DATA_START + 3)

    delete(store.address, survey(store.address))
    remaining = reopened(store)
    assert np.array_equal(remaining.read(spec)["latent"], values_of(0)["latent"])
    assert remaining.check(spec).valid
    assert remaining.check(alone[0]).valid


def place_of(store: Store, pack: str, spec: EntrySpec) -> int:
    """Return the first byte of an entry in a pack."""
    index = pl.read_parquet(store.root / pack.replace(".pack", ".parquet"))
    return index.row(by_predicate=pl.col("key") == spec.key, named=True)["offset"]


def test_a_pack_that_was_completed_since_the_survey_is_not_a_leftover(any_store: Store) -> None:
    """Its writer was killed before the index. While gc works, another job seals the same entries again."""
    specs = write_entries(any_store, 2)
    register(any_store, specs)
    seal(any_store, specs, log=discard)
    folder = any_store.packed.folder
    (index,) = pack_names(folder, ".parquet")
    folder.delete(index)
    announce_change(folder, "latents")
    first = survey(any_store.address, grace_s=-60)
    assert list(first.leftovers) == pack_names(folder, ".pack")

    assert seal(reopened(any_store), specs, log=discard).num_packs == 1
    delete(any_store.address, survey(any_store.address))
    assert single_files(any_store) == {}
    delete(any_store.address, first)
    assert all(reopened(any_store).check(spec).valid for spec in specs)


def test_a_pack_that_is_being_sealed_again_is_not_a_leftover(store: Store) -> None:
    """The pack was written again since the survey, and its index will follow."""
    specs = write_entries(store, 2)
    register(store, specs)
    seal(store, specs, log=discard)
    folder = store.packed.folder
    (index,), (pack,) = pack_names(folder, ".parquet"), pack_names(folder, ".pack")
    folder.delete(index)
    make_all_files_old(store)
    surveyed = survey(store.address)
    assert list(surveyed.leftovers) == [pack]
    folder.replace(pack, folder.read(pack))
    assert delete(store.address, surveyed) == (0, 0)
    assert pack_names(folder, ".pack") == [pack]


def test_an_open_store_uses_another_pack_when_a_leftover_pack_is_deleted(store: Store) -> None:
    """A process has loaded the index of a pack. A gc was killed after it had deleted that index."""
    (spec,) = write_entries(store, 1)
    alone = write_entries(store, 1, start=1)
    register(store, [spec, *alone])
    first, _ = seal_twice(store, [spec], alone)
    for each in (spec, *alone):
        store.path(each).unlink()
    opened = reopened(store)
    assert opened.check(spec).valid
    store.packed.folder.delete(first.replace(".pack", ".parquet"))
    make_all_files_old(store)
    register(store, [spec])

    surveyed = survey(store.address)
    if spec.key not in {key.hex() for pack in surveyed.packs.all for key in pack.keys}:
        pytest.fail("the other pack holds the entry")
    assert list(surveyed.leftovers) == [first]
    delete(store.address, surveyed)
    assert opened.check(spec).valid


def test_a_pack_whose_entries_were_all_removed_is_deleted_when_it_is_old(store: Store) -> None:
    specs = write_entries(store, 3)
    register(store, specs)
    seal(store, specs, log=discard)
    delete(store.address, survey(store.address))
    store.remove_packed(specs)
    assert [store.check(spec).status for spec in specs] == ["missing"] * 3
    assert len(pack_names(store.packed.folder, ".pack")) == 1, "an empty index stays"

    write_entries(store, 3)
    assert delete(store.address, survey(store.address)) == (0, 0)
    assert seal(reopened(store), specs, log=discard).num_entries == 3
    assert len(survey(store.address).packs.all) == 1, "the same entries are sealed in the same pack"
    assert all(reopened(store).check(spec).valid for spec in specs)

    for spec in specs:
        reopened(store).remove(spec)
    reopened(store).remove_packed(specs)
    make_all_files_old(store)
    surveyed = survey(store.address)
    assert len(surveyed.packs.old) == 1
    delete(store.address, surveyed)
    assert pack_names(store.packed.folder, ".pack") == []


@pytest.mark.parametrize("young_suffix", [".pack", ".parquet"])
def test_a_pack_with_one_young_file_is_young(store: Store, young_suffix: str) -> None:
    specs = write_entries(store, 2)
    register(store, [])
    seal(store, specs, log=discard)
    make_all_files_old(store)
    (young,) = pack_names(store.packed.folder, young_suffix)
    os.utime(store.root / young)
    packs = survey(store.address).packs
    assert (len(packs.young), len(packs.old)) == (1, 0)


def test_a_pack_that_is_needed_while_it_is_deleted_gets_its_index_back(store: Store) -> None:
    """A job registers and checks an entry between the first look at the users and the deletion."""
    specs, others = write_entries(store, 2), write_entries(store, 2, start=2)
    register(store, [])
    seal(store, specs, log=discard)
    seal(store, others, log=discard)
    for spec in (*specs, *others):
        store.path(spec).unlink()
    make_all_files_old(store)
    packs = survey(store.address).packs
    assert len(packs.old) == 2
    answers = iter([set[str](), {specs[0].key}])
    deleted = delete_old(store.packed.folder, packs, lambda: next(answers))
    assert len(deleted) == 2
    assert [reopened(store).check(spec).status for spec in (*specs, *others)] == [
        "valid",
        "valid",
        "missing",
        "missing",
    ]


def test_an_error_while_packs_are_deleted_leaves_all_indexes(store: Store) -> None:
    specs = write_entries(store, 2)
    register(store, [])
    seal(store, specs, log=discard)
    make_all_files_old(store)
    packs = survey(store.address).packs
    calls: list[int] = []

    def needed() -> set[str]:
        calls.append(len(calls))
        if len(calls) == 2:
            raise StoreError("a registration cannot be read", where="here", fix="none")
        return set()

    with pytest.raises(StoreError, match="registration"):
        delete_old(store.packed.folder, packs, needed)
    for spec in specs:
        store.path(spec).unlink()
    assert all(reopened(store).check(spec).valid for spec in specs)


def test_an_error_of_a_deletion_names_the_file(store: Store) -> None:
    specs = write_entries(store, 2)
    register(store, [])
    blocked = store.path(specs[0])
    blocked.unlink()
    blocked.mkdir()
    (blocked / "mine").write_text("a folder in place of the entry")
    surveyed = survey(store.address, grace_s=-60)
    surveyed.orphans[blocked.relative_to(store.root).as_posix()] = 5
    with pytest.raises(StoreError, match="a file of the cache cannot be deleted: ") as excinfo:
        delete(store.address, surveyed)
    assert excinfo.value.where == str(blocked)
    assert excinfo.value.fix


def test_packs_without_an_index_and_temporary_files_are_left_over_after_the_grace_period(
    store: Store,
) -> None:
    specs = write_entries(store, 2)
    register(store, specs)
    seal(store, specs, log=discard)
    (index,) = pack_names(store.packed.folder, ".parquet")
    temp = store.root / "packs" / "latents" / temp_name()
    temp.write_bytes(b"unfinished")
    assert survey(store.address).leftovers == {}

    store.packed.folder.delete(index)
    assert survey(store.address).leftovers == {}
    make_all_files_old(store)
    surveyed = survey(store.address)
    names = {temp.relative_to(store.root).as_posix(), *pack_names(store.packed.folder, ".pack")}
    assert set(surveyed.leftovers) == names
    delete(store.address, surveyed)
    assert all(reopened(store).check(spec).valid for spec in specs)


def test_a_pack_with_a_damaged_index_is_reported_and_never_deleted(store: Store) -> None:
    specs = write_entries(store, 2)
    register(store, [])
    seal(store, specs, log=discard)
    (index,) = pack_names(store.packed.folder, ".parquet")
    store.packed.folder.replace(index, b"damaged")
    make_all_files_old(store)
    surveyed = survey(store.address)
    assert surveyed.packs.damaged == [index]
    assert surveyed.packs.single == {}
    delete(store.address, surveyed)
    assert len(pack_names(store.packed.folder, ".pack")) == 1
