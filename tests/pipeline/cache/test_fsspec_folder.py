"""Stats of many remote entries: which files are listed, and what a service that does not answer causes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import fsspec
import pytest

from pipeline.cache import fsspec_folder
from pipeline.cache.folder import entry_name
from pipeline.cache.fsspec_folder import FsspecFolder
from pipeline.cache.store import NO_STAT, Store
from pipeline.errors import StoreError
from pipeline.storage.addresses import Url

KEYS = [f"{folder}{number:062x}" for folder in ("ab", "cd") for number in range(20)]


@pytest.fixture
def store() -> Iterator[Store]:
    name = uuid.uuid4().hex
    yield Store(Url(f"memory://{name}"))
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{name}"):
        memory.rm(f"/{name}", recursive=True)


def test_a_folder_in_place_of_an_entry_has_no_stat(store: Store) -> None:
    store.folder.replace(f"{entry_name('latents', KEYS[0])}/kept.txt", b"x")
    assert [tuple(row) for row in store.stats("latents", KEYS[:1]).tolist()] == [NO_STAT]


def test_a_cache_of_more_entries_than_fit_into_any_listing_is_listed_folder_by_folder(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec_folder, "_LISTED_TOGETHER", 0)
    monkeypatch.setattr(fsspec_folder, "_ENTRIES_PER_REQUEST", 1_000_000)
    for key in KEYS:
        store.folder.replace(entry_name("latents", key), b"entry")
    assert isinstance(store.folder, FsspecFolder)
    listed = list[str]()
    list_files = store.folder.remote.list_files

    def record(name: str = "", *, prefix: str = "") -> dict[str, dict[str, object]]:
        listed.append(name)
        return list_files(name, prefix=prefix)

    monkeypatch.setattr(store.folder.remote, "list_files", record)
    assert store.stats("latents", KEYS)[:, 0].tolist() == [5] * len(KEYS)
    assert set(listed) == {"latents/ab", "latents/cd"}


@pytest.mark.parametrize("num_keys", [1, len(KEYS)], ids=["one key", "many keys"])
def test_a_service_that_does_not_answer_is_an_error_and_not_a_missing_entry(
    store: Store, monkeypatch: pytest.MonkeyPatch, num_keys: int
) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise OSError("connection refused")

    assert isinstance(store.folder, FsspecFolder)
    monkeypatch.setattr(store.folder.remote, "info", refuse)
    monkeypatch.setattr(store.folder.remote, "list_files", refuse)
    with pytest.raises(StoreError, match="a cache entry cannot be listed: connection refused") as excinfo:
        store.stats("latents", KEYS[:num_keys])
    assert excinfo.value.where == f"{store.address}/latents"
    assert excinfo.value.fix == store.folder.fix
