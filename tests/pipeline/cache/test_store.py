from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest

from pipeline.cache.entry_format import DATA_START, serialise
from pipeline.cache.store import NO_STAT, EntrySpec, Store, TensorSpec
from pipeline.errors import StoreError
from tests.pipeline.disk_calls import DiskCalls

SPEC = EntrySpec("latents", "ab" * 32, {"latent": TensorSpec("float16", (4, 8, 6))})
OTHER = EntrySpec("latents", "cd" * 32, SPEC.tensors)
VALUES = {"latent": np.arange(192, dtype="<f2").reshape(4, 8, 6)}
FACTS = {"inputs": {"content_hash": "12"}, "original_size": [512, 384]}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def write_entry(store: Store, spec: EntrySpec = SPEC) -> Path:
    assert store.write(spec, VALUES, FACTS)
    return store.path(spec)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _flip_data(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[DATA_START + 7] ^= 1
    path.write_bytes(raw)


def _replace_with_another_entry(path: Path) -> None:
    path.write_bytes(serialise(OTHER, VALUES, FACTS))


def _replace_with_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "kept.txt").write_text("x")


def _replace_with_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _replace_with_broken_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


DAMAGES = [
    _cut,
    _empty,
    _grow,
    _flip_data,
    _replace_with_another_entry,
    _replace_with_folder,
    _replace_with_fifo,
    _replace_with_broken_link,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_L06_L07_each_kind_of_damage_is_detected_and_the_next_write_repairs_it(store: Store, damage) -> None:
    path = write_entry(store)
    sound = path.read_bytes()
    damage(path)
    state = store.check(SPEC)
    assert not state.valid
    assert state.status == ("missing" if damage is _replace_with_broken_link else "wrong")
    assert store.write(SPEC, VALUES, FACTS)
    assert path.read_bytes() == sound
    assert store.check(SPEC).valid
    names = [file.name for file in path.parent.iterdir()]
    assert [name for name in names if name.endswith(".safetensors")] == [path.name]
    assert not [name for name in names if name.endswith(".tmp")]


def test_L07_a_full_read_detects_any_single_flipped_bit(store: Store) -> None:
    path = write_entry(store)
    sound = path.read_bytes()
    text_end = len(sound[:DATA_START].rstrip(b' "}{')) + 8
    offsets = [*range(text_end), *range(text_end, len(sound), 97)]
    for offset in offsets:
        raw = bytearray(sound)
        raw[offset] ^= 1 << (offset % 8)
        path.write_bytes(raw)
        assert store.check(SPEC).status == "wrong", offset


def test_a_check_computes_the_checksum_of_an_entry_and_a_read_does_not(store: Store) -> None:
    path = write_entry(store)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert store.read(SPEC).keys() == VALUES.keys()
    assert store.check(SPEC).status == "wrong"


@pytest.mark.timeout(20)
def test_a_fifo_at_an_entrys_path_does_not_block_reads(store: Store) -> None:
    path = store.path(SPEC)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with pytest.raises(StoreError, match="its path must be a regular file, got a special file"):
        store.read(SPEC)
    assert store.check(SPEC).status == "wrong"
    assert store.read_metadata("latents", SPEC.key) is None
    assert store.read_tensor_specs(SPEC) is None


def test_L02_reading_a_file_of_the_wrong_size_or_entry_raises_an_error_with_its_name(store: Store) -> None:
    path = write_entry(store)
    for damage in (_cut, _grow, _replace_with_another_entry):
        damage(path)
        with pytest.raises(StoreError, match=path.name):
            store.read(SPEC)
        with pytest.raises(StoreError, match="damaged"):
            store.read(SPEC)
        path.unlink()
        write_entry(store)


def test_a_different_shape_or_dtype_is_wrong_even_if_the_size_matches(store: Store) -> None:
    write_entry(store)
    transposed = EntrySpec("latents", SPEC.key, {"latent": TensorSpec("float16", (4, 6, 8))})
    retyped = EntrySpec("latents", SPEC.key, {"latent": TensorSpec("bfloat16", (4, 8, 6))})
    assert "expected latent float16 (4, 6, 8)" in store.check(transposed).reason
    assert "bfloat16" in store.check(retyped).reason


def test_a_valid_entry_is_never_replaced(store: Store) -> None:
    path = write_entry(store)
    before, content = path.stat(), path.read_bytes()
    assert not store.write(SPEC, {"latent": VALUES["latent"] + 1}, FACTS)
    after = path.stat()
    # Reading the entry to compare it may change its access time.
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert path.read_bytes() == content
    assert np.array_equal(store.read(SPEC)["latent"], VALUES["latent"])


def test_L10_exactly_one_of_many_concurrent_writers_writes_the_entry(store: Store) -> None:
    start = threading.Barrier(8)
    wins: list[bool] = []

    def write(value: float) -> None:
        start.wait()
        wins.append(store.write(SPEC, {"latent": np.full((4, 8, 6), value, "<f2")}, FACTS))

    threads = [threading.Thread(target=write, args=(float(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(wins) == [False] * 7 + [True]
    assert store.check(SPEC).valid
    assert len(list(store.path(SPEC).parent.iterdir())) == 1


def test_L10_concurrent_repairs_of_a_damaged_entry_leave_a_valid_one(store: Store) -> None:
    path = write_entry(store)
    for _ in range(20):
        _cut(path)
        threads = [threading.Thread(target=store.write, args=(SPEC, VALUES, FACTS)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.check(SPEC).valid
        assert len(list(path.parent.iterdir())) == 1


@pytest.mark.parametrize("number", ["EPERM", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EMLINK", "EXDEV"])
def test_on_a_file_system_without_hard_links_the_first_writer_still_wins(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(getattr(errno, number), "hard links are not supported")

    monkeypatch.setattr(os, "link", refuse)
    path = write_entry(store)
    assert not store.write(SPEC, {"latent": VALUES["latent"] + 1}, FACTS)
    _cut(path)
    assert store.write(SPEC, VALUES, FACTS)
    assert store.check(SPEC).valid


def test_an_entry_that_cannot_be_linked_because_of_an_error_is_not_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(StoreError, match="cannot be written"):
        store.write(SPEC, VALUES, FACTS)
    assert list(store.path(SPEC).parent.iterdir()) == []


def test_an_entry_is_read_completely_if_the_system_returns_a_few_bytes_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_entry(store)
    read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, number: read(descriptor, min(number, 1000)))
    assert store.check(SPEC).valid
    assert np.array_equal(store.read(SPEC)["latent"], VALUES["latent"])


@pytest.mark.timeout(20)
@pytest.mark.parametrize("change", [_cut, _grow, _empty], ids=lambda change: change.__name__.strip("_"))
def test_L07_a_file_of_the_right_size_that_changes_before_it_is_read_is_wrong(
    store: Store, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    path = write_entry(store)
    read = os.read

    def read_changed(descriptor: int, number: int) -> bytes:
        if path.stat().st_size == SPEC.file_bytes:
            change(path)
        return read(descriptor, number)

    monkeypatch.setattr(os, "read", read_changed)
    assert store.check(SPEC).status == "wrong"


def test_L14_a_full_disk_error_names_the_path_and_size_and_other_entries_stay_valid(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_entry(store, OTHER)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=f"{SPEC.file_bytes} bytes") as excinfo:
        store.write(SPEC, VALUES, FACTS)
    assert str(store.path(SPEC)) in str(excinfo.value)
    assert list(store.path(SPEC).parent.iterdir()) == []
    assert store.check(OTHER).valid


def test_L06_a_writer_killed_during_a_write_leaves_no_partial_entry(store: Store) -> None:
    """The temporary file may remain, because its suffix is not that of an entry."""
    code = (
        "import sys, os; sys.path.insert(0, sys.argv[1]); from test_store import *\n"
        "store = Store(Path(sys.argv[2])); os.fsync = lambda _: os.kill(os.getpid(), 9)\n"
        "store.write(SPEC, VALUES, FACTS)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), str(store.address)], check=False
    )
    assert process.returncode == -9
    assert store.check(SPEC).status == "missing"
    assert list(store.address.rglob("*.safetensors")) == []
    assert store.write(SPEC, VALUES, FACTS)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"latent": np.zeros((4, 8, 7), "<f2")}, "must be float16"),
        ({"latent": np.zeros((4, 8, 6), "<f4")}, "must be float16"),
        ({"latent": np.full((4, 8, 6), np.nan, "<f2")}, "NaN or infinite"),
        ({"latent": np.full((4, 8, 6), np.inf, "<f2")}, "NaN or infinite"),
        ({"mean": np.zeros((4, 8, 6), "<f2")}, "tensors must be"),
    ],
    ids=["another shape", "another dtype", "NaN", "infinite", "another name"],
)
def test_L02_L05_tensors_that_violate_the_spec_or_are_not_finite_are_never_written(
    store: Store, tensors: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        store.write(SPEC, tensors, FACTS)
    assert not store.address.exists()


def test_L15_entries_stay_valid_when_the_store_moves(store: Store, tmp_path: Path) -> None:
    write_entry(store)
    store.address.rename(tmp_path / "moved")
    assert Store(tmp_path / "moved").check(SPEC).valid


def test_L06_an_entry_is_synced_before_it_gets_its_name(store: Store, disk_calls: DiskCalls) -> None:
    path = write_entry(store)
    assert disk_calls.names == [path.name]
    assert disk_calls.unsynced == [], "the entry would be empty after a power failure"


def test_stats_are_the_size_times_and_inode_of_each_file(store: Store) -> None:
    stat = write_entry(store).stat()
    expected = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    folder = EntrySpec("latents", "ef" * 32, SPEC.tensors)
    store.path(folder).mkdir(parents=True)
    rows = store.stats("latents", [SPEC.key, OTHER.key, folder.key])
    assert [tuple(row) for row in rows.tolist()] == [expected, NO_STAT, NO_STAT]
    assert store.stats("latents", []).shape == (0, 4)
    checked = store.check(SPEC).stat
    assert checked is not None
    assert astuple(checked) == expected
