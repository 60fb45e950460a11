"""The store contract, tested on a local disk and on several fsspec file systems."""

from __future__ import annotations

import errno
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from pipeline.cache.entry_format import DATA_START, serialise
from pipeline.cache.remote_store import FsspecStore, store_at
from pipeline.cache.store import EntrySpec, Store, TensorSpec
from pipeline.errors import StoreError
from pipeline.storage.addresses import Url, absolute
from pipeline.storage.remote_folder import RemoteFolder

SPEC = EntrySpec("latents", "ab" * 32, {"latent": TensorSpec("float16", (4, 8, 6))})
OTHER = EntrySpec("latents", "cd" * 32, SPEC.tensors)
VALUES = {"latent": np.arange(192, dtype="<f2").reshape(4, 8, 6)}
FACTS = {"inputs": {"content_hash": "12"}, "original_size": [512, 384]}


class Backend:
    """A store with direct access to its file system, to inspect and damage stored files."""

    def __init__(self, store: Store) -> None:
        self.store = store
        is_remote = isinstance(store, FsspecStore)
        self.files: Any = store.folder.files if is_remote else fsspec.filesystem("file")
        self.base = store.folder.base if is_remote else store.root.as_posix()

    def name_of(self, spec: EntrySpec = SPEC) -> str:
        path = self.store.path(spec).as_posix()
        return f"{self.base}/{path}" if isinstance(self.store, FsspecStore) else path

    def bytes_of(self, spec: EntrySpec = SPEC) -> bytes:
        return self.files.cat_file(self.name_of(spec))

    def put(self, raw: bytes) -> None:
        self.files.pipe_file(self.name_of(), raw)

    def names(self) -> list[str]:
        return sorted(name.rsplit("/", 1)[1] for name in self.files.find(self.base))

    def write_entry(self) -> bytes:
        assert self.store.write(SPEC, VALUES, FACTS)
        return self.bytes_of()


@pytest.fixture(params=["folder", "memory", "local via fsspec", "folder in memory", "s3"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    name = uuid.uuid4().hex
    if request.param == "folder":
        yield Backend(Store(tmp_path / "cache"))
    elif request.param == "local via fsspec":
        yield Backend(FsspecStore(Url((tmp_path / "cache").as_uri())))
    elif request.param == "s3":
        request.getfixturevalue("s3")
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
        yield Backend(store_at(Url(f"s3://{name}/cache")))
    else:
        address = f"memory://{name}" if request.param == "memory" else f"dir://cache::memory://{name}"
        yield Backend(store_at(Url(address)))
        memory = fsspec.filesystem("memory")
        if memory.exists(f"/{name}"):
            memory.rm(f"/{name}", recursive=True)


def test_an_entry_has_the_same_bytes_on_every_backend_and_reads_back(backend: Backend) -> None:
    assert backend.write_entry() == serialise(SPEC, VALUES, FACTS)
    assert np.array_equal(backend.store.read(SPEC)["latent"], VALUES["latent"])
    assert backend.store.read_tensor_specs(SPEC) == SPEC.tensors
    facts = backend.store.read_metadata("latents", SPEC.key)
    assert facts is not None
    assert facts["original_size"] == [512, 384]
    assert backend.names() == [f"{SPEC.key}.safetensors"]


def test_reading_a_missing_entry_raises_an_error_with_a_fix(backend: Backend) -> None:
    assert backend.store.check(SPEC).status == "missing"
    assert backend.store.read_tensor_specs(SPEC) is None
    assert backend.store.read_metadata("latents", SPEC.key) is None
    with pytest.raises(StoreError, match="start the cache job again"):
        backend.store.read(SPEC)


def test_a_valid_entry_is_never_replaced(backend: Backend) -> None:
    before = backend.write_entry()
    assert not backend.store.write(SPEC, {"latent": VALUES["latent"] + 1}, FACTS)
    assert backend.bytes_of() == before
    assert backend.names() == [f"{SPEC.key}.safetensors"]


def _flipped(raw: bytes) -> bytes:
    return raw[: DATA_START + 7] + bytes([raw[DATA_START + 7] ^ 1]) + raw[DATA_START + 8 :]


DAMAGES = {
    "cut": lambda raw: raw[:-1],
    "emptied": lambda raw: b"",
    "grown": lambda raw: raw + b"\0",
    "a flipped bit": _flipped,
    "another entry": lambda raw: serialise(OTHER, VALUES, FACTS),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_L06_L07_damage_is_detected_and_the_next_write_repairs_it(backend: Backend, damage: str) -> None:
    sound = backend.write_entry()
    trusted = backend.store.check(SPEC).stat
    backend.put(DAMAGES[damage](sound))
    assert backend.store.check(SPEC, trusted).status == "wrong"
    assert backend.store.write(SPEC, VALUES, FACTS)
    assert backend.bytes_of() == sound
    assert backend.names() == [f"{SPEC.key}.safetensors"]


def test_an_entry_is_read_again_only_if_its_stat_differs_from_the_recorded_one(backend: Backend) -> None:
    sound = backend.write_entry()
    trusted = backend.store.check(SPEC).stat
    assert trusted is not None
    assert backend.store.check(SPEC, trusted).metadata is None
    (row,) = backend.store.stats("latents", [SPEC.key]).tolist()
    assert row == [trusted.num_bytes, trusted.mtime_ns, trusted.ctime_ns, trusted.inode]
    assert backend.store.stats("latents", [OTHER.key]).tolist() == [[0, 0, 0, 0]]
    time.sleep(0.01)
    backend.put(sound)
    # An S3 ETag depends on the content alone, so rewritten identical bytes look unchanged.
    by_content = "s3" in backend.files.protocol
    assert (backend.store.check(SPEC, trusted).metadata is None) == by_content


def test_a_folder_at_an_entrys_path_is_moved_aside_with_its_contents(backend: Backend) -> None:
    entry_name = backend.name_of()
    backend.files.makedirs(entry_name)
    backend.files.pipe_file(f"{entry_name}/kept.txt", b"x")
    assert "folder" in backend.store.check(SPEC).reason
    backend.write_entry()
    kept = [name for name in backend.files.find(backend.base) if name.endswith("/kept.txt")]
    assert len(kept) == 1
    assert ".displaced/" in kept[0] or "s3" in backend.files.protocol  # S3 can hold both names
    assert backend.files.cat_file(kept[0]) == b"x"


def test_L10_concurrent_writers_leave_one_valid_entry(backend: Backend) -> None:
    start = threading.Barrier(6)
    errors: list[BaseException] = []

    def write(value: float) -> None:
        start.wait(60)
        try:
            backend.store.write(SPEC, {"latent": np.full((4, 8, 6), value, "<f2")}, FACTS)
        except BaseException as err:
            errors.append(err)

    threads = [threading.Thread(target=write, args=(float(number),)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert backend.store.check(SPEC).valid
    assert backend.names() == [f"{SPEC.key}.safetensors"]


def test_L06_a_failed_write_leaves_neither_an_entry_nor_a_temporary_file(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if isinstance(backend.store, FsspecStore):
        moved = "mv" if "file" in backend.files.protocol or "dir" in backend.files.protocol else "pipe_file"
        monkeypatch.setattr(backend.files, moved, full)
    else:
        monkeypatch.setattr("os.link", full)
    with pytest.raises(StoreError, match=f"an entry of {SPEC.file_bytes} bytes"):
        backend.store.write(SPEC, VALUES, FACTS)
    assert backend.names() == []


def test_stats_from_a_listing_equal_stats_of_single_entries(backend: Backend) -> None:
    backend.write_entry()
    many = [SPEC.key, *(f"{number:064x}" for number in range(100))]
    (few,), listed = (backend.store.stats("latents", keys).tolist() for keys in ([SPEC.key], many))
    assert listed == [few, *([0, 0, 0, 0] for _ in many[1:])]
    assert backend.store.stats("text", many).tolist() == [[0, 0, 0, 0]] * len(many)
    state = backend.store.check(SPEC)
    assert state.stat is not None
    assert few == list(astuple(state.stat))


def test_remove_deletes_an_entry_but_not_a_folder_at_its_path(backend: Backend) -> None:
    backend.store.remove(SPEC)
    backend.write_entry()
    backend.store.remove(SPEC)
    assert backend.store.check(SPEC).status == "missing"
    backend.files.makedirs(backend.name_of())
    backend.files.pipe_file(f"{backend.name_of()}/kept.txt", b"x")
    backend.store.remove(SPEC)
    assert backend.names() == ["kept.txt"]


def test_the_first_of_two_writers_to_an_object_store_wins(s3: str) -> None:
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("two-writers")
    folder = RemoteFolder(Url("s3://two-writers/cache"))
    assert folder.put_if_absent("a/b", b"first") is True
    assert folder.put_if_absent("a/b", b"second") is False
    assert folder.read("a/b") == b"first"


def test_paths_and_file_urls_give_a_local_store_and_other_urls_a_remote_one(tmp_path: Path) -> None:
    for text in (tmp_path.as_uri(), str(tmp_path)):
        store = store_at(absolute(text, Path("/project")))
        assert type(store) is Store
        assert store.root == tmp_path
    assert type(store_at(Url("memory://cache"))) is FsspecStore


def test_a_missing_package_and_a_missing_bucket_raise_errors_with_a_fix(s3: str) -> None:
    with pytest.raises(StoreError, match="needs a package that is not installed") as excinfo:
        store_at(Url("gs://bucket/cache"))
    assert excinfo.value.fix == "pip install gcsfs"
    store = store_at(Url("s3://no-such-bucket/cache"))
    assert store.check(SPEC).status == "missing"
    with pytest.raises(StoreError, match="cannot be written") as excinfo:
        store.write(SPEC, VALUES, FACTS)
    assert excinfo.value.where.startswith("s3://no-such-bucket/cache/latents/ab/")
    assert "credentials" in excinfo.value.fix
