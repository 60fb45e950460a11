"""`latentline gc` deletes single entries with a verified copy in a pack, and packs that no job uses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.cache.entry_format import DATA_START
from pipeline.cache.folder import entry_name
from pipeline.cache.packs import build_pack
from pipeline.cache.sealing import seal
from pipeline.cache.store import EntrySpec, Store
from pipeline.errors import StoreError
from pipeline.log import discard
from pipeline.maintenance.gc import delete, survey
from pipeline.storage.atomic import temp_name
from tests.pipeline import used_case
from tests.pipeline.packs_case import (
    any_store,
    flip_bit,
    offset_of,
    pack_names,
    reopened,
    single_files,
    values_of,
    write_entries,
)

__all__ = ["any_store"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def use(store: Store, specs: list[EntrySpec]) -> None:
    used_case.use(store.address, [spec.key for spec in specs])


def forget_use(store: Store) -> None:
    used_case.forget_use(Path(str(store.address)))


def make_old(store: Store) -> None:
    """Make all files old, and record the use of another entry long ago, so that use is known."""
    used_case.use(store.address, ["0" * 64])
    used_case.make_old(Path(str(store.address)))


def test_single_entries_are_deleted_after_sealing_and_stay_readable(any_store: Store) -> None:
    specs = write_entries(any_store, 3)
    alone = write_entries(any_store, 2, start=3)
    use(any_store, [*specs, *alone])
    seal(any_store, specs, log=discard)
    surveyed = survey(any_store.address)
    assert len(surveyed.packs.all) == 1
    assert surveyed.packs.num_entries == 3
    assert len(surveyed.packs.single) == 3
    assert (surveyed.entries, surveyed.orphans, surveyed.foreign, surveyed.young) == (5, {}, [], 0)

    assert delete(any_store.address, surveyed) == (3, sum(spec.file_bytes for spec in specs))
    assert {name.rpartition("/")[2] for name in single_files(any_store)} == {
        f"{spec.key}.safetensors" for spec in alone
    }
    assert all(reopened(any_store).check(spec).valid for spec in [*specs, *alone])
    assert delete(any_store.address, survey(any_store.address)) == (0, 0)


def test_a_single_entry_stays_if_its_packed_copy_is_damaged(any_store: Store) -> None:
    specs = write_entries(any_store, 3)
    use(any_store, specs)
    seal(any_store, specs, log=discard)
    (pack,) = pack_names(any_store.folder)
    flip_bit(any_store.folder, pack, offset_of(any_store.folder, pack, specs[0]) + DATA_START + 3)

    log: list[str] = []
    assert delete(any_store.address, survey(any_store.address), log=log.append)[0] == 2
    assert any_store.folder.where(pack) in log[0]
    assert "a pack has 1 damaged entry: " in log[0]
    assert "1 of them also in single files, which stay" in log[0]
    assert len(single_files(any_store)) == 1
    assert all(reopened(any_store).check(spec).valid for spec in specs)


def test_a_pack_is_deleted_when_no_job_uses_any_of_its_entries(store: Store) -> None:
    specs = write_entries(store, 3)
    use(store, specs[:1])
    seal(store, specs, log=discard)
    delete(store.address, survey(store.address))
    make_old(store)
    surveyed = survey(store.address)
    assert (surveyed.packs.old, surveyed.packs.young) == ([], []), "one entry is needed"

    forget_use(store)
    surveyed = survey(store.address)
    (pack,) = pack_names(store.folder)
    num_bytes = len(store.folder.read(pack)) + sum(surveyed.expired_lists.values())
    assert delete(store.address, surveyed) == (1 + len(surveyed.expired_lists), num_bytes)
    assert pack_names(store.folder) == []
    assert reopened(store).check(specs[0]).status == "missing"


def test_a_pack_used_since_the_survey_is_kept(store: Store) -> None:
    specs = write_entries(store, 2)
    seal(store, specs, log=discard)
    make_old(store)
    surveyed = survey(store.address)
    assert len(surveyed.packs.old) == 1
    use(store, specs)
    delete(store.address, surveyed)
    assert len(pack_names(store.folder)) == 1


def test_a_store_that_was_open_notices_that_a_pack_was_deleted(store: Store) -> None:
    specs = write_entries(store, 2)
    use(store, specs)
    seal(store, specs, log=discard)
    delete(store.address, survey(store.address))
    opened = reopened(store)
    assert opened.check(specs[0]).valid
    forget_use(store)
    make_old(store)
    delete(store.address, survey(store.address))
    with pytest.raises(StoreError, match="start the cache job again"):
        opened.read(specs[0])
    assert opened.write(specs[0], values_of(0), {"number": 0})
    assert opened.check(specs[0]).valid


def seal_twice(store: Store, specs: list[EntrySpec], alone: list[EntrySpec]) -> str:
    """Seal entries in two packs, as two concurrent jobs do, and return the pack that readers use first."""
    raw = {spec.key: store.read_verified(spec) for spec in [*specs, *alone]}
    for keys in ([spec.key for spec in specs], raw):
        store.folder.replace(*build_pack("latents", {key: raw[key] for key in keys}))
    return pack_names(store.folder)[0]


@pytest.mark.parametrize(("number", "num_in_first"), [(1, 2), (3, 1)])
def test_gc_verifies_the_copy_that_readers_use_if_two_packs_hold_an_entry(
    store: Store, number: int, num_in_first: int
) -> None:
    """The packs' names are hashes, so the number decides which pack comes first."""
    (spec,) = write_entries(store, 1)
    alone = write_entries(store, 1, start=number)
    use(store, [spec, *alone])
    first = seal_twice(store, [spec], alone)
    assert len(survey(store.address).packs.all[0].keys) == num_in_first
    flip_bit(store.folder, first, offset_of(store.folder, first, spec) + DATA_START + 3)

    delete(store.address, survey(store.address))
    remaining = reopened(store)
    assert np.array_equal(remaining.read(spec)["latent"], values_of(0)["latent"])
    assert remaining.check(spec).valid
    assert remaining.check(alone[0]).valid


def test_an_error_of_a_deletion_names_the_file(store: Store) -> None:
    specs = write_entries(store, 2)
    blocked = store.path(specs[0])
    blocked.unlink()
    blocked.mkdir()
    (blocked / "mine").write_text("a folder in place of the entry")
    surveyed = survey(store.address)
    surveyed.orphans[entry_name(specs[0].kind, specs[0].key)] = 5
    with pytest.raises(StoreError, match="a file of the cache cannot be deleted: ") as excinfo:
        delete(store.address, surveyed)
    assert excinfo.value.where == str(blocked)
    assert excinfo.value.fix


def test_packs_that_cannot_be_listed_are_an_error_with_the_cache(store: Store) -> None:
    write_entries(store, 1)
    Path(store.folder.where("packs")).write_text("a file in place of the folder")
    with pytest.raises(StoreError, match=r"the cache cannot be listed: .*Not a directory") as excinfo:
        survey(store.address)
    assert excinfo.value.where == store.folder.where("")
    assert excinfo.value.fix


def test_a_temporary_file_is_left_over_after_the_grace_period(store: Store) -> None:
    specs = write_entries(store, 2)
    use(store, specs)
    seal(store, specs, log=discard)
    temp = Path(store.folder.where(f"packs/latents/{temp_name()}"))
    temp.write_bytes(b"unfinished")
    assert survey(store.address).leftovers == {}
    make_old(store)
    assert set(survey(store.address).leftovers) == {f"packs/latents/{temp.name}"}


def test_a_pack_with_a_damaged_header_is_reported_and_never_deleted(store: Store) -> None:
    specs = write_entries(store, 2)
    seal(store, specs, log=discard)
    (pack,) = pack_names(store.folder)
    store.folder.replace(pack, b"damaged")
    make_old(store)
    surveyed = survey(store.address)
    assert surveyed.packs.damaged == [pack]
    assert surveyed.packs.single == {}
    delete(store.address, surveyed)
    assert pack_names(store.folder) == [pack]
