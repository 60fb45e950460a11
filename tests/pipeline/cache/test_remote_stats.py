"""Stats of many remote entries: which files are listed, and what a service that does not answer causes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import fsspec
import pytest

from pipeline.cache import remote_store
from pipeline.cache.entry_state import NO_STAT
from pipeline.cache.remote_store import FsspecStore
from pipeline.cache.store import EntrySpec
from pipeline.errors import StoreError
from pipeline.storage.addresses import Url

KEYS = [f"{folder}{number:062x}" for folder in ("ab", "cd") for number in range(20)]


@pytest.fixture
def store() -> Iterator[FsspecStore]:
    name = uuid.uuid4().hex
    yield FsspecStore(Url(f"memory://{name}"))
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{name}"):
        memory.rm(f"/{name}", recursive=True)


def test_a_folder_in_place_of_an_entry_has_no_stat(store: FsspecStore) -> None:
    name = store.path(EntrySpec("latents", KEYS[0], {})).as_posix()
    store.folder.put(f"{name}/kept.txt", b"x")
    assert [tuple(row) for row in store.stats("latents", KEYS[:1]).tolist()] == [NO_STAT]


def test_a_cache_of_more_entries_than_fit_into_any_listing_is_listed_folder_by_folder(
    store: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "_LISTED_TOGETHER", 0)
    monkeypatch.setattr(remote_store, "_ENTRIES_PER_REQUEST", 1_000_000)
    for key in KEYS:
        store.folder.put(store.path(EntrySpec("latents", key, {})).as_posix(), b"entry")
    listed = list[str]()
    list_files = store.folder.list_files

    def record(name: str = "", *, prefix: str = "") -> dict[str, dict[str, object]]:
        listed.append(name)
        return list_files(name, prefix=prefix)

    monkeypatch.setattr(store.folder, "list_files", record)
    assert store.stats("latents", KEYS)[:, 0].tolist() == [5] * len(KEYS)
    assert set(listed) == {"latents/ab", "latents/cd"}


@pytest.mark.parametrize(
    ("num_keys", "action"), [(1, "read"), (len(KEYS), "listed")], ids=["one key", "many keys"]
)
def test_a_service_that_does_not_answer_is_an_error_and_not_a_missing_entry(
    store: FsspecStore, monkeypatch: pytest.MonkeyPatch, num_keys: int, action: str
) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise OSError("connection refused")

    monkeypatch.setattr(store.folder, "info", refuse)
    monkeypatch.setattr(store.folder, "list_files", refuse)
    with pytest.raises(StoreError, match=f"a cache entry cannot be {action}: connection refused") as excinfo:
        store.stats("latents", KEYS[:num_keys])
    assert excinfo.value.where.startswith(f"{store.address}/latents/ab")
    assert excinfo.value.fix == store.fix
