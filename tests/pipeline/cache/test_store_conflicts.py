"""Entries that other processes change meanwhile, other files at an entry's path, and refused access."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.cache.entry_format import DATA_START, WrongEntryError, serialise
from pipeline.cache.local_folder import LocalFolder
from pipeline.cache.store import EntrySpec, Store, TensorSpec
from pipeline.errors import StoreError

SPEC = EntrySpec("latents", "ab" * 32, {"latent": TensorSpec("float16", (4, 8, 6))})
VALUES = {"latent": np.arange(192, dtype="<f2").reshape(4, 8, 6)}
SOUND = serialise(SPEC, VALUES, {})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def put(store: Store, raw: bytes) -> Path:
    path = store.path(SPEC)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


def replace_while_another_process_changes(path: Path, change: Callable[[Path], object]) -> bool:
    """Create the entry over a wrong file, which changes once after it was found to be wrong."""
    changes = [change]

    def is_valid(raw: bytes) -> bool:
        if raw != SOUND and changes:
            changes.pop()(path)
        return raw == SOUND

    path.write_bytes(SOUND[:-1])
    return LocalFolder(path.parent).create(path.name, SOUND, is_valid)


def test_a_valid_entry_that_another_process_writes_between_check_and_repair_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "entry"

    def repair(path: Path) -> None:
        path.unlink()
        path.write_bytes(SOUND)
        os.utime(path, ns=(1, 1))

    assert not replace_while_another_process_changes(path, repair)
    assert path.read_bytes() == SOUND
    assert path.stat().st_mtime_ns == 1, "the other process's file"
    assert list(path.parent.iterdir()) == [path]


def test_an_entry_that_another_process_deletes_between_check_and_repair_is_written(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    assert replace_while_another_process_changes(path, Path.unlink)
    assert path.read_bytes() == SOUND
    assert list(path.parent.iterdir()) == [path]


def test_a_wrong_file_is_deleted_and_only_a_folder_is_displaced(store: Store, tmp_path: Path) -> None:
    path = put(store, SOUND[:-1])
    assert store.write(SPEC, VALUES, {})
    assert list(path.parent.iterdir()) == [path]

    path.unlink()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "kept.txt").write_text("x")
    path.symlink_to(tmp_path / "target")
    assert store.write(SPEC, VALUES, {})
    assert list(path.parent.iterdir()) == [path], "the link is deleted, and its target is not"
    assert not path.is_symlink()
    assert (tmp_path / "target" / "kept.txt").exists()


def test_a_verified_read_returns_the_bytes_of_a_sound_entry_only(store: Store) -> None:
    with pytest.raises(WrongEntryError, match="missing"):
        store.read_verified(SPEC)
    put(store, SOUND)
    assert store.read_verified(SPEC) == SOUND
    put(store, SOUND[:-1] + bytes([SOUND[-1] ^ 1]))
    with pytest.raises(WrongEntryError, match="checksum"):
        store.read_verified(SPEC)


def test_a_cache_that_cannot_be_accessed_is_not_a_missing_entry(store: Store) -> None:
    """A file in place of the folder of an entry makes the system refuse all access to the entry."""
    Path(str(store.address)).mkdir()
    (Path(str(store.address)) / "latents").write_text("not a folder")
    actions: dict[str, Callable[[], object]] = {
        "read": lambda: store.read(SPEC),
        "read completely": lambda: store.read_verified(SPEC),
        "check": lambda: store.check(SPEC),
        "delete": lambda: store.discard(SPEC),
        "write": lambda: store.write(SPEC, VALUES, {}),
    }
    for name, action in actions.items():
        with pytest.raises(StoreError, match="a cache entry cannot be") as excinfo:
            action()
        assert excinfo.value.where == str(store.path(SPEC)), name
        assert excinfo.value.fix == store.folder.fix, name
    assert store.read_metadata("latents", SPEC.key) is None
    assert store.read_tensor_specs(SPEC) is None


def test_several_writers_and_readers_are_at_least_one(store: Store) -> None:
    assert min(store.threads, store.readers) >= 1


def test_the_state_of_a_special_file_has_no_stat_and_that_of_a_damaged_one_has(store: Store) -> None:
    path = put(store, SOUND[:DATA_START])
    stat = store.check(SPEC).stat
    assert stat is not None
    assert (stat.num_bytes, stat.inode) == (DATA_START, path.stat().st_ino)
    path.unlink()
    path.mkdir()
    assert store.check(SPEC).stat is None
