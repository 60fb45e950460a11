"""Small entries for tests of packs, in stores on a disk, in memory and on an S3 server."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, cast

import fsspec
import numpy as np
import pytest

from pipeline.cache.entry_format import EntrySpec, Kind, TensorSpec
from pipeline.cache.folder import CacheFolder
from pipeline.cache.packs import read_members
from pipeline.cache.sealing import seal
from pipeline.cache.store import Store
from pipeline.log import discard
from pipeline.storage.addresses import Address, Url

TENSORS = {"latent": TensorSpec("float16", (2, 3, 4))}


def spec_of(number: int) -> EntrySpec:
    return EntrySpec("latents", hashlib.sha256(str(number).encode()).hexdigest(), TENSORS)


def values_of(number: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"latent": np.full((2, 3, 4), number, "<f2")}


def write_entries(store: Store, count: int, *, start: int = 0) -> list[EntrySpec]:
    """Write entries whose values are their numbers."""
    for number in range(start, start + count):
        store.write(spec_of(number), values_of(number), {"number": number})
    return [spec_of(number) for number in range(start, start + count)]


def reopened(store: Store) -> Store:
    """Return a store of the same entries that has read nothing yet."""
    return Store(store.address)


def seal_and_remove(store: Store, specs: list[EntrySpec]) -> None:
    """Seal entries, and delete their files as gc does."""
    sealed = seal(store, specs, log=discard)
    assert sealed.unusable == {}
    for spec in specs:
        delete(store, spec)


def pack_everything(cache_dir: Address) -> None:
    """Seal all entries of a cache, and delete their files."""
    store = Store(cache_dir)
    paths = [PurePosixPath(name) for name in single_files(store)]
    named = [EntrySpec(cast("Kind", path.parts[0]), path.stem, {}) for path in paths]
    specs = [spec.holding(store.read_tensor_specs(spec) or {}) for spec in named]
    assert seal(store, specs, log=discard).num_entries == len(paths) > 0
    for path in paths:
        store.folder.delete(path.as_posix())


def delete(store: Store, spec: EntrySpec) -> None:
    store.folder.delete(f"latents/{spec.key[:2]}/{spec.key}.safetensors")


def single_files(store: Store) -> dict[str, bytes]:
    folder = store.folder
    names = [file.name for file in folder.files() if file.name.endswith(".safetensors")]
    return {name: folder.read(name) for name in names}


def pack_names(folder: CacheFolder) -> list[str]:
    return [f"packs/latents/{name}" for name in sorted(folder.stats("packs/latents"))]


def offset_of(folder: CacheFolder, pack: str, spec: EntrySpec) -> int:
    """Return the first byte of an entry in a pack."""
    members = read_members(folder, pack, len(folder.read(pack)))
    return int(members.offsets[members.keys.index(spec.key)])


def flip_bit(folder: CacheFolder, name: str, at: int) -> None:
    raw = bytearray(folder.read(name))
    raw[at] ^= 1
    folder.replace(name, bytes(raw))


@pytest.fixture(params=["folder", "memory"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "folder":
        yield Store(tmp_path / "cache")
        return
    name = uuid.uuid4().hex
    yield Store(Url(f"memory://{name}"))
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{name}"):
        memory.rm(f"/{name}", recursive=True)
