"""What every store promises, on a local disk and on file systems that fsspec knows."""

from __future__ import annotations

import errno
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from pipeline.entry_format import DATA_START, serialise
from pipeline.errors import StoreError
from pipeline.store import EntrySpec, Store, TensorSpec
from pipeline.store_elsewhere import FsspecStore, store_at

SPEC = EntrySpec("latents", "ab" * 32, {"latent": TensorSpec("float16", (4, 8, 6))})
OTHER = EntrySpec("latents", "cd" * 32, SPEC.tensors)
VALUES = {"latent": np.arange(192, dtype="<f2").reshape(4, 8, 6)}
FACTS = {"inputs": {"content_hash": "12"}, "original_size": [512, 384]}


class Backend:
    """A store, and the file system below it seen by somebody else."""

    def __init__(self, store: Store, files: Any) -> None:
        self.store = store
        self.files = files

    def bytes_of(self, spec: EntrySpec = SPEC) -> bytes:
        return self.files.cat_file(self.store.path(spec).as_posix())

    def put(self, raw: bytes) -> None:
        self.files.pipe_file(self.store.path(SPEC).as_posix(), raw)

    def names(self) -> list[str]:
        return sorted(name.rsplit("/", 1)[1] for name in self.files.find(self.store.root.as_posix()))

    def made(self) -> bytes:
        assert self.store.write(SPEC, VALUES, FACTS)
        return self.bytes_of()


@pytest.fixture(params=["folder", "memory", "file system of the disk", "folder of the memory"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    if request.param == "folder":
        yield Backend(Store(tmp_path / "cache"), fsspec.filesystem("file"))
    elif request.param == "file system of the disk":
        files = fsspec.filesystem("file")
        yield Backend(FsspecStore(files, (tmp_path / "cache").as_posix()), files)
    elif request.param == "memory":
        files, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
        yield Backend(store_at(f"memory:/{root}"), files)
        if files.exists(root):
            files.rm(root, recursive=True)
    else:
        root = f"/{uuid.uuid4().hex}"
        files = fsspec.filesystem("dir", path=root, target_protocol="memory")
        yield Backend(FsspecStore(files, "cache"), files)
        if fsspec.filesystem("memory").exists(root):
            fsspec.filesystem("memory").rm(root, recursive=True)


def test_an_entry_is_the_same_bytes_everywhere_and_reads_back(backend: Backend) -> None:
    assert backend.made() == serialise(SPEC, VALUES, FACTS)
    assert np.array_equal(backend.store.read(SPEC)["latent"], VALUES["latent"])
    assert backend.store.stated(SPEC) == SPEC.tensors
    facts = backend.store.facts("latents", SPEC.key)
    assert facts is not None
    assert facts["original_size"] == [512, 384]
    assert backend.names() == [f"{SPEC.key}.safetensors"]


def test_a_missing_entry_is_missing_and_a_read_says_what_to_do(backend: Backend) -> None:
    assert backend.store.check(SPEC).status == "missing"
    assert backend.store.stated(SPEC) is None
    assert backend.store.facts("latents", SPEC.key) is None
    with pytest.raises(StoreError, match="start the cache job again"):
        backend.store.read(SPEC)


def test_a_valid_entry_is_never_replaced(backend: Backend) -> None:
    before = backend.made()
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
    "the neighbour's": lambda raw: serialise(OTHER, VALUES, FACTS),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_L06_L07_damage_is_found_and_the_next_write_mends_it(backend: Backend, damage: str) -> None:
    sound = backend.made()
    trusted = backend.store.check(SPEC).stat
    backend.put(DAMAGES[damage](sound))
    assert backend.store.check(SPEC, trusted).status == "wrong"
    assert backend.store.write(SPEC, VALUES, FACTS)
    assert backend.bytes_of() == sound
    assert backend.names() == [f"{SPEC.key}.safetensors"]


def test_what_is_as_recorded_is_not_read_again_and_what_was_put_anew_is(backend: Backend) -> None:
    sound = backend.made()
    trusted = backend.store.check(SPEC).stat
    assert trusted is not None
    assert backend.store.check(SPEC, trusted).metadata is None
    (row,) = backend.store.stats("latents", [SPEC.key]).tolist()
    assert row == [trusted.num_bytes, trusted.mtime_ns, trusted.ctime_ns, trusted.inode]
    assert backend.store.stats("latents", [OTHER.key]).tolist() == [[0, 0, 0, 0]]
    backend.put(sound)
    assert backend.store.check(SPEC, trusted).metadata is not None


def test_a_folder_in_an_entrys_place_is_moved_aside_with_what_it_holds(backend: Backend) -> None:
    place = backend.store.path(SPEC).as_posix()
    backend.files.makedirs(place)
    backend.files.pipe_file(f"{place}/kept.txt", b"x")
    assert "folder" in backend.store.check(SPEC).reason
    backend.made()
    kept = [name for name in backend.files.find(backend.store.root.as_posix()) if name.endswith("/kept.txt")]
    assert len(kept) == 1
    assert ".displaced/" in kept[0]
    assert backend.files.cat_file(kept[0]) == b"x"


def test_L10_many_writers_at_once_leave_one_valid_entry(backend: Backend) -> None:
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


def test_L06_a_move_that_fails_leaves_neither_an_entry_nor_a_temporary_one(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if isinstance(backend.store, FsspecStore):
        monkeypatch.setattr(backend.files, "mv", full)
    else:
        monkeypatch.setattr("os.link", full)
    with pytest.raises(StoreError, match=f"an entry of {SPEC.file_bytes} bytes"):
        backend.store.write(SPEC, VALUES, FACTS)
    assert backend.names() == []


def test_a_url_of_this_machines_disk_gives_the_local_store(tmp_path: Path) -> None:
    for url in (tmp_path.as_uri(), str(tmp_path)):
        store = store_at(url)
        assert type(store) is Store
        assert store.root == tmp_path
    assert type(store_at("memory://cache")) is FsspecStore
