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
from fsspec.implementations.memory import MemoryFile

from pipeline.cache import fsspec_folder
from pipeline.cache.entry_format import DATA_START, serialise
from pipeline.cache.folder import entry_name
from pipeline.cache.fsspec_folder import FsspecFolder
from pipeline.cache.local_folder import LocalFolder
from pipeline.cache.store import EntrySpec, Store, TensorSpec
from pipeline.errors import StoreError
from pipeline.storage.addresses import Url, absolute
from pipeline.storage.remote_folder import RemoteFolder
from tests.machines.counting_proxy import CountingProxy

SPEC = EntrySpec("latents", "ab" * 32, {"latent": TensorSpec("float16", (4, 8, 6))})
OTHER = EntrySpec("latents", "cd" * 32, SPEC.tensors)
VALUES = {"latent": np.arange(192, dtype="<f2").reshape(4, 8, 6)}
FACTS = {"inputs": {"content_hash": "12"}, "original_size": [512, 384]}


class RecordedRequests:
    """Counts the requests to a remote folder, which still answers them."""

    def __init__(self, folder: RemoteFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listed: list[str] = []
        self.sizes: list[int] = []
        self.num_infos = 0
        list_files, info = folder.list_files, folder.info

        def record_listing(name: str = "", *, prefix: str = "") -> dict[str, dict[str, Any]]:
            self.listed.append(name)
            listed = list_files(name, prefix=prefix)
            self.sizes.append(len(listed))
            return listed

        def record_info(name: str) -> dict[str, Any]:
            self.num_infos += 1
            return info(name)

        monkeypatch.setattr(folder, "list_files", record_listing)
        monkeypatch.setattr(folder, "info", record_info)

    def clear(self) -> None:
        self.listed, self.sizes, self.num_infos = [], [], 0


def remote_of(store: Store) -> RemoteFolder:
    assert isinstance(store.folder, FsspecFolder)
    return store.folder.remote


class Backend:
    """A store with direct access to its file system, to inspect and damage stored files."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.is_remote = isinstance(store.folder, FsspecFolder)
        self.files: Any = remote_of(store).files if self.is_remote else fsspec.filesystem("file")
        self.base = remote_of(store).base if self.is_remote else str(store.address)

    def name_of(self, spec: EntrySpec = SPEC) -> str:
        return f"{self.base}/{entry_name(spec.kind, spec.key)}"

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
        yield Backend(Store(Url((tmp_path / "cache").as_uri())))
    elif request.param == "s3":
        request.getfixturevalue("s3")
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
        yield Backend(Store(Url(f"s3://{name}/cache")))
    else:
        address = f"memory://{name}" if request.param == "memory" else f"dir://cache::memory://{name}"
        yield Backend(Store(Url(address)))
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
    backend.put(DAMAGES[damage](sound))
    assert backend.store.check(SPEC).status == "wrong"
    assert backend.store.write(SPEC, VALUES, FACTS)
    assert backend.bytes_of() == sound
    assert backend.names() == [f"{SPEC.key}.safetensors"]


def test_L07_a_bit_that_flips_on_the_way_from_a_service_is_an_error(backend: Backend) -> None:
    sound = backend.write_entry()
    assert backend.store.check(SPEC).status == "valid"
    backend.put(_flipped(sound))

    # On a local disk, reading trusts the stat that was verified; `latentline verify` finds bit rot.
    if not backend.is_remote:
        return
    with pytest.raises(StoreError, match="the checksum does not match"):
        backend.store.read(SPEC)


def test_the_stat_of_an_entry_changes_only_with_its_file(backend: Backend) -> None:
    sound = backend.write_entry()
    stat = backend.store.check(SPEC).stat
    assert stat is not None
    (row,) = backend.store.stats("latents", [SPEC.key]).tolist()
    assert row == [stat.num_bytes, stat.mtime_ns, stat.ctime_ns, stat.inode]
    assert backend.store.stats("latents", [OTHER.key]).tolist() == [[0, 0, 0, 0]]
    time.sleep(0.01)
    backend.put(sound)
    # An S3 ETag depends on the content alone, so rewritten identical bytes look unchanged.
    by_content = "s3" in backend.files.protocol
    assert (backend.store.check(SPEC).stat == stat) == by_content


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

    if backend.is_remote:
        moved = "mv" if "file" in backend.files.protocol or "dir" in backend.files.protocol else "pipe_file"
        monkeypatch.setattr(backend.files, moved, full)
    else:
        monkeypatch.setattr("os.link", full)
    with pytest.raises(StoreError, match=f"an entry of {SPEC.file_bytes} bytes"):
        backend.store.write(SPEC, VALUES, FACTS)
    assert backend.names() == []


@pytest.mark.parametrize("asked", [1, 101], ids=["single requests", "many keys"])
@pytest.mark.parametrize(
    ("listed_together", "entries_per_request"),
    [(2_500, 32), (200, 32), (0, 32), (0, 0)],
    ids=[
        "the whole cache listed",
        "first digits listed",
        "groups in folders",
        "a small part of a large cache",
    ],
)
def test_stats_are_equal_whether_entries_are_listed_or_asked_for(
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    asked: int,
    listed_together: int,
    entries_per_request: int,
) -> None:
    monkeypatch.setattr(fsspec_folder, "_LISTED_TOGETHER", listed_together)
    monkeypatch.setattr(fsspec_folder, "_ENTRIES_PER_REQUEST", entries_per_request)
    backend.write_entry()
    keys = [SPEC.key, *("ab" + f"{number:062x}" for number in range(50)), *(f"{n:064x}" for n in range(50))]
    state = backend.store.check(SPEC)
    assert state.stat is not None
    expected = [list(astuple(state.stat)), *([0, 0, 0, 0] for _ in range(100))]
    assert backend.store.stats("latents", keys[:asked]).tolist() == expected[:asked]
    assert backend.store.stats("text", keys[:asked]).tolist() == [[0, 0, 0, 0]] * asked


def test_H02_a_small_part_of_a_large_cache_takes_one_listing_of_a_folder_and_single_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cache with four entries in each folder is asked for 64 keys, and then for all of them."""
    monkeypatch.setattr(fsspec_folder, "_LISTED_TOGETHER", 4)
    monkeypatch.setattr(fsspec_folder, "_ENTRIES_PER_REQUEST", 2)
    address = f"memory://{uuid.uuid4().hex}"
    store = Store(Url(address))
    files: Any = remote_of(store).files
    keys = [f"{folder:02x}{number:062x}" for folder in range(256) for number in range(4)]
    for key in keys:
        files.store[f"{remote_of(store).base}/{entry_name('latents', key)}"] = MemoryFile(
            files, key, b"entry"
        )
    requests = RecordedRequests(remote_of(store), monkeypatch)

    assert store.stats("latents", keys[::16])[:, 0].tolist() == [5] * 64
    assert (len(requests.listed), requests.num_infos) == (1, 64)
    requests.clear()
    assert store.stats("latents", keys)[:, 0].tolist() == [5] * len(keys)
    assert sorted(set(requests.listed)) == [f"latents/{folder:02x}" for folder in range(256)]
    assert requests.num_infos == 0
    files.rm(remote_of(store).base, recursive=True)


def test_H02_the_size_of_a_bucket_is_estimated_from_few_listed_entries(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache with 32 entries in each of four groups of keys counts as one of 32 x 16^4 entries."""
    del s3
    monkeypatch.setattr(fsspec_folder, "_LISTED_TOGETHER", 100)
    monkeypatch.setattr(fsspec_folder, "_ENTRIES_PER_REQUEST", 0.5)
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("estimated")
    store = Store(Url("s3://estimated/cache"))
    keys = [f"{start}{number:060x}" for start in ("abcd", "abc0", "ab00", "0000") for number in range(32)]
    for key in keys:
        remote_of(store).put(f"latents/{key[:2]}/{key}.safetensors", b"entry")
    requests = RecordedRequests(remote_of(store), monkeypatch)

    assert store.stats("latents", keys)[:, 0].tolist() == [5] * len(keys)
    assert (requests.listed, requests.sizes) == (["latents/ab"], [32]), "only keys that begin with abcd"
    assert requests.num_infos == len(keys)
    listed = remote_of(store).list_files("latents/ab", prefix="abc")
    assert sorted(listed) == sorted(f"latents/ab/{key}.safetensors" for key in keys[:64])


@pytest.mark.parametrize(
    ("start", "num_listed"),
    [("abcd", [20, 20]), ("abc", [2, 20, 20]), ("ab", [1, 2, 20, 20])],
    ids=["four digits", "three digits", "two digits"],
)
def test_H02_the_prefix_of_the_estimate_is_shortened_until_it_selects_enough_entries(
    s3: str, monkeypatch: pytest.MonkeyPatch, start: str, num_listed: list[int]
) -> None:
    """20 entries count as 20 x 16^digits, so that 20 of them begin with the same digits, which are listed."""
    del s3
    monkeypatch.setattr(fsspec_folder, "_LISTED_TOGETHER", 100)
    monkeypatch.setattr(fsspec_folder, "_ENTRIES_PER_REQUEST", 1)
    monkeypatch.setattr(fsspec_folder, "_MAX_SINGLE_REQUESTS", 10)
    bucket = f"estimated-{start}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    store = Store(Url(f"s3://{bucket}/cache"))

    # Each digit behind `start` occurs once or twice.
    keys = [f"{start}{number % 16:x}{number:x}".ljust(64, "0") for number in range(20)]
    for key in keys:
        remote_of(store).put(f"latents/{key[:2]}/{key}.safetensors", b"entry")
    requests = RecordedRequests(remote_of(store), monkeypatch)

    assert store.stats("latents", keys)[:, 0].tolist() == [5] * 20
    assert requests.sizes == num_listed
    assert requests.num_infos == 0


@pytest.mark.slow
def test_H02_a_large_cache_is_listed_in_parts_so_that_memory_does_not_grow_with_it(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two entries in each folder; a listing shall return at most 40 entries."""
    del s3
    monkeypatch.setattr(fsspec_folder, "_LISTED_TOGETHER", 40)
    monkeypatch.setattr(fsspec_folder, "_MIN_SAMPLED", 2)
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("in-parts")
    store = Store(Url("s3://in-parts/cache"))
    keys = [f"{folder:02x}{number:062x}" for folder in range(256) for number in (0, 8 * 16**61)]
    for key in keys:
        remote_of(store).put(f"latents/{key[:2]}/{key}.safetensors", b"entry")
    requests = RecordedRequests(remote_of(store), monkeypatch)

    assert store.stats("latents", keys)[:, 0].tolist() == [5] * len(keys)
    estimated = requests.sizes[:-16]
    assert requests.sizes[-16:] == [32] * 16
    assert sum(estimated) <= 4
    assert requests.num_infos == 0


def test_reading_an_entry_of_a_bucket_takes_one_request(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("one-request")
    proxy = CountingProxy("127.0.0.1", s3)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    store = Store(Url("s3://one-request/cache"))
    store.write(SPEC, VALUES, FACTS)
    proxy.requests.clear()
    assert np.array_equal(store.read(SPEC)["latent"], VALUES["latent"])
    proxy.close()
    assert [request.method for request in proxy.requests] == ["GET"]


def test_an_entry_is_discarded_but_not_a_folder_at_its_path(backend: Backend) -> None:
    backend.store.discard(SPEC)
    backend.write_entry()
    backend.store.discard(SPEC)
    assert backend.store.check(SPEC).status == "missing"
    backend.files.makedirs(backend.name_of())
    backend.files.pipe_file(f"{backend.name_of()}/kept.txt", b"x")
    backend.store.discard(SPEC)
    assert backend.names() == ["kept.txt"]


def test_paths_and_file_urls_give_a_local_folder_and_other_urls_a_remote_one(tmp_path: Path) -> None:
    for text in (tmp_path.as_uri(), str(tmp_path)):
        store = Store(absolute(text, Path("/project")))
        assert type(store.folder) is LocalFolder
        assert store.address == tmp_path
    assert type(Store(Url("memory://cache")).folder) is FsspecFolder


def test_a_missing_package_and_a_missing_bucket_raise_errors_with_a_fix(s3: str) -> None:
    with pytest.raises(StoreError, match="needs a package that is not installed") as excinfo:
        Store(Url("gs://bucket/cache"))
    assert excinfo.value.fix == "pip install gcsfs"
    store = Store(Url("s3://no-such-bucket/cache"))
    assert store.check(SPEC).status == "missing"
    with pytest.raises(StoreError, match="cannot be written") as excinfo:
        store.write(SPEC, VALUES, FACTS)
    assert excinfo.value.where.startswith("s3://no-such-bucket/cache/latents/ab/")
    assert "credentials" in excinfo.value.fix
