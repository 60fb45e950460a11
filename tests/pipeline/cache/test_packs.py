"""The bytes of packs, their headers as an index, and damage."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch

from pipeline.cache.entry_format import DATA_START, EntrySpec, TensorSpec, WrongEntryError, parse, serialise
from pipeline.cache.folder import NO_STAT, FileStat
from pipeline.cache.local_folder import LocalFolder
from pipeline.cache.packs import (
    LIST_AGE_S,
    Members,
    PackedEntry,
    PackIndex,
    WrongPackError,
    build_pack,
    digests_of,
    list_packs,
    read_members,
    wrong_members,
)
from tests.pipeline.packs_case import spec_of, values_of

SPECS = [spec_of(number) for number in range(5)]
NUMBERS = {spec.key: number for number, spec in enumerate(SPECS)}
ENTRIES = {spec.key: serialise(spec, values_of(number), {}) for number, spec in enumerate(SPECS)}
NAME, CONTENT = build_pack("latents", ENTRIES)


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    """Return a cache with one pack."""
    cache = LocalFolder(tmp_path / "cache")
    cache.replace(NAME, CONTENT)
    return cache


def members_of(folder: LocalFolder, content: bytes) -> Members:
    folder.replace(NAME, content)
    return read_members(folder, NAME, len(content))


def with_header(change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return the pack with another header and the same data."""
    data_start = 8 + int.from_bytes(CONTENT[:8], "little")
    header = json.loads(CONTENT[8:data_start])
    text = json.dumps(change(header) or header).encode()
    return len(text).to_bytes(8, "little") + text + CONTENT[data_start:]


def test_a_pack_is_named_by_its_hash_and_holds_the_bytes_of_each_entry(folder: LocalFolder) -> None:
    assert f"packs/latents/{hashlib.sha256(CONTENT).hexdigest()}.pack" == NAME
    members = members_of(folder, CONTENT)
    assert members.keys == tuple(sorted(ENTRIES))
    for key, offset, length in zip(members.keys, members.offsets, members.lengths, strict=True):
        assert CONTENT[offset : offset + length] == ENTRIES[key]


def test_the_order_of_the_entries_does_not_change_a_pack() -> None:
    assert build_pack("latents", dict(reversed(ENTRIES.items()))) == (NAME, CONTENT)


NUMPY_TYPES = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4"}


def test_the_safetensors_library_opens_a_pack_and_finds_every_tensor(tmp_path: Path) -> None:
    """The shapes have odd numbers of elements, so that the entries after them would not be aligned."""
    entries, stored = dict[str, bytes](), dict[str, np.ndarray[Any, Any]]()
    for number, dtype in enumerate([*NUMPY_TYPES] * 3):
        key = hashlib.sha256(str(number).encode()).hexdigest()
        tensors = {
            "a": TensorSpec(dtype, (number + 1, 3)),
            "b": TensorSpec(dtype, ()),
            "c": TensorSpec("float32", (5,)),
        }
        values = {
            name: np.full(each.shape, number, NUMPY_TYPES[each.dtype]) for name, each in tensors.items()
        }
        entries[key] = serialise(EntrySpec("text", key, tensors), values, {"number": number})
        stored |= {f"{key}/{name}": value for name, value in values.items()}

    path = tmp_path / "a.pack"
    path.write_bytes(build_pack("text", entries)[1])
    with safetensors.safe_open(path, "pt") as pack:
        own = {name for name in pack.keys() if not name.endswith(("/header", "/padding"))}  # noqa: SIM118
        assert own == stored.keys()
        for name, values in stored.items():
            tensor = pack.get_tensor(name)
            as_numpy = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
            assert np.array_equal(as_numpy, values)
        for key, raw in entries.items():
            assert bytes(pack.get_tensor(f"{key}/header").numpy()) == raw[:DATA_START]


def _moved(header: dict[str, Any], by: int) -> None:
    for tensor in header.values():
        if "data_offsets" in tensor:
            tensor["data_offsets"] = [at + by for at in tensor["data_offsets"]]


def _changed(tensor: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[f"{SPECS[0].key}/{tensor}"].update(values)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: _moved(header, -1),
        lambda header: _moved(header, 2**62),
        lambda header: _moved(header, 10**30),
        _changed("latent", data_offsets=[0, 10]),
        _changed("latent", data_offsets=[0, 10**9]),
        _changed("header", data_offsets=[[0, 1], 2]),
        _changed("header", data_offsets="12"),
        _changed("header", data_offsets=[None, None]),
        lambda header: header.pop(f"{SPECS[0].key}/header"),
        lambda header: {f"../../etc/{name}": tensor for name, tensor in header.items()},
        lambda header: [header],
        lambda header: {"latent": header},
    ],
)
def test_a_header_that_describes_anything_but_entries_in_its_pack_is_rejected(
    folder: LocalFolder, change: Callable[[dict[str, Any]], object]
) -> None:
    with pytest.raises(WrongPackError, match="its header"):
        members_of(folder, with_header(change))


@pytest.mark.parametrize("num_bytes", [0, 4, 8, 100, 1_000])
def test_a_pack_that_was_cut_off_is_rejected(folder: LocalFolder, num_bytes: int) -> None:
    with pytest.raises(WrongPackError):
        members_of(folder, CONTENT[:num_bytes])


def test_a_header_is_not_read_if_its_length_cannot_be_right(folder: LocalFolder) -> None:
    """A damaged length of petabytes must not be allocated."""
    content = (2**60).to_bytes(8, "little") + CONTENT[8:]
    tracemalloc.start()
    with pytest.raises(WrongPackError, match=r"a header of 1,152,.* bytes does not fit"):
        members_of(folder, content)
    assert tracemalloc.get_traced_memory()[1] < 10 * len(CONTENT) + 2**20
    tracemalloc.stop()


def test_a_header_that_is_longer_than_the_first_read_is_read_completely(folder: LocalFolder) -> None:
    long = with_header(lambda header: header["__metadata__"].update(note="x" * 2**20))
    assert members_of(folder, long).keys == tuple(sorted(ENTRIES))


def damaged(rng: random.Random) -> bytes:
    """Return the pack with a random damage, half of them in the header."""
    content = bytearray(CONTENT)
    header_end = 8 + int.from_bytes(CONTENT[:8], "little")
    at = rng.randrange(header_end if rng.random() < 0.5 else len(content))
    length = rng.choice((1, 1, 1, 2, 8, 100, 3_000))
    match rng.randrange(6):
        case 0:
            content[at] ^= 1 << rng.randrange(8)
        case 1:
            content[at : at + length] = rng.randbytes(length)
        case 2:
            content[at : at + length] = bytes(length)
        case 3:
            del content[at : at + length]
        case 4:
            content[at:at] = content[:length]
        case _:
            other = rng.randrange(len(content))
            content[at : at + length], content[other : other + length] = (
                content[other : other + length],
                content[at : at + length],
            )
    return bytes(content)


def test_no_damage_raises_another_error_or_returns_a_wrong_tensor(folder: LocalFolder) -> None:
    rng, num_valid, num_wrong, num_missing = random.Random(0), 0, 0, 0
    path = Path(folder.where(NAME))
    for _ in range(1_500):
        path.write_bytes(damaged(rng))
        index = PackIndex(folder, "latents")
        for spec in SPECS:

            def read(packed: PackedEntry, spec: EntrySpec = spec) -> np.ndarray[Any, Any]:
                raw = folder.read_range(packed.pack, packed.offset, packed.offset + packed.length)
                return parse(spec, raw, verify=True)[0]["latent"]

            try:
                values = index.first(spec.key, read)
            except WrongEntryError:
                num_wrong += 1
                continue
            if values is None:
                num_missing += 1
                continue
            num_valid += 1
            assert np.array_equal(values, values_of(NUMBERS[spec.key])["latent"])
    assert min(num_valid, num_wrong, num_missing) > 250, "the damages reach all three outcomes"


def test_packs_are_listed_with_their_keys_and_problems(folder: LocalFolder) -> None:
    other, content = build_pack("latents", {spec_of(9).key: serialise(spec_of(9), values_of(9), {})})
    folder.replace(other, b"\0" * 20 + content[20:])
    folder.replace("packs/latents/changed", b"not the name of a pack")
    packs = {pack.name: pack for pack in list_packs(folder, "latents")}
    assert packs.keys() == {NAME, other}
    assert (packs[NAME].keys, packs[NAME].problem) == (tuple(sorted(ENTRIES)), "")
    assert packs[NAME].stat[0] == len(CONTENT)
    assert packs[other].keys == ()
    assert "its header" in packs[other].problem
    assert list(list_packs(folder, "text")) == []


def test_a_pack_of_an_unreleased_version_is_not_misread(folder: LocalFolder) -> None:
    """Its entries followed each other without a header of the pack."""
    folder.replace(NAME, b"".join(ENTRIES[key] for key in sorted(ENTRIES)))
    (pack,) = list_packs(folder, "latents")
    assert pack.keys == ()
    assert "its header describes something else than entries" in pack.problem


def test_each_wrong_entry_of_a_pack_is_named(folder: LocalFolder) -> None:
    (pack,) = list_packs(folder, "latents")
    assert wrong_members(folder, "latents", pack) == {}
    members = read_members(folder, NAME, len(CONTENT))
    content = bytearray(CONTENT)
    content[members.offsets[2] + DATA_START] ^= 1
    folder.replace(NAME, bytes(content))
    assert wrong_members(folder, "latents", pack) == {
        members.keys[2]: "the checksum does not match the content"
    }

    folder.replace(NAME, CONTENT[:50])
    assert wrong_members(folder, "latents", pack).keys() == set(members.keys)


class CountingFolder(LocalFolder):
    """Counts listings and reads of headers, and runs `during_listing` before a listing returns."""

    def __init__(self, root: Path, during_listing: Callable[[], object] = lambda: None) -> None:
        super().__init__(root)
        self.num_listings = self.num_headers = 0
        self.during_listing = during_listing

    def stats(self, folder: str) -> dict[str, FileStat]:
        self.num_listings += 1
        stats = super().stats(folder)
        self.during_listing()
        return stats

    def read_range(self, name: str, start: int, end: int) -> bytes:
        self.num_headers += start == 0
        return super().read_range(name, start, end)


def keys_in(index: PackIndex) -> list[bool]:
    return [bool(index.places(spec.key)) for spec in SPECS]


def test_headers_are_read_once_and_deleted_packs_are_forgotten(tmp_path: Path) -> None:
    folder = CountingFolder(tmp_path)
    names: list[str] = []
    for spec in SPECS:
        name, content = build_pack("latents", {spec.key: ENTRIES[spec.key]})
        folder.replace(name, content)
        names.append(name)
    index = PackIndex(folder, "latents")
    for _ in range(3):
        index.refresh()
    assert folder.num_headers == len(SPECS)
    assert keys_in(index) == 5 * [True]

    folder.delete(names[1])
    Path(folder.where(names[3])).write_bytes(b"damaged")
    index.refresh()
    assert folder.num_headers == len(SPECS) + 1
    assert keys_in(index) == [True, False, True, False, True]
    assert index.problems.keys() == {names[3]}
    digests = digests_of(spec.key for spec in SPECS)
    assert [tuple(row) == NO_STAT for row in index.stats(digests).tolist()] == [
        False,
        True,
        False,
        True,
        False,
    ]


def test_a_list_of_packs_is_used_again_up_to_its_age(tmp_path: Path) -> None:
    now_s = 0.0
    folder = CountingFolder(tmp_path)
    index = PackIndex(folder, "latents", clock=lambda: now_s)
    index.refresh(max_age_s=LIST_AGE_S)
    folder.replace(NAME, CONTENT)
    now_s = LIST_AGE_S - 1
    index.refresh(max_age_s=LIST_AGE_S)
    assert (folder.num_listings, keys_in(index)) == (1, 5 * [False])
    now_s = LIST_AGE_S + 1
    index.refresh(max_age_s=LIST_AGE_S)
    assert (folder.num_listings, keys_in(index)) == (2, 5 * [True])
    index.refresh()
    assert folder.num_listings == 3


def test_threads_that_miss_entries_at_the_same_time_share_one_listing(tmp_path: Path) -> None:
    clock: Iterator[int] = itertools.count()
    is_listing, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        is_listing.set()
        may_end.wait(60)

    folder = CountingFolder(tmp_path, wait)
    calls = threading.Semaphore(0)

    def ticking() -> float:
        calls.release()
        return next(clock)

    index = PackIndex(folder, "latents", clock=ticking)
    threads = [threading.Thread(target=index.refresh) for _ in range(16)]
    threads[0].start()
    assert is_listing.wait(60)
    for thread in threads[1:]:
        thread.start()
    for _ in range(2 + 15):  # the first thread has read the clock twice, each of the others once
        assert calls.acquire(timeout=60)
    may_end.set()
    for thread in threads:
        thread.join()
    assert folder.num_listings == 2, "the first listing began before the other threads called"


def test_an_entry_of_a_pack_that_was_deleted_is_found_in_another_one(folder: LocalFolder) -> None:
    index = PackIndex(folder, "latents")
    index.refresh()
    other, content = build_pack(
        "latents", {**ENTRIES, spec_of(9).key: serialise(spec_of(9), values_of(9), {})}
    )
    folder.replace(other, content)
    folder.delete(NAME)

    def read(packed: PackedEntry) -> bytes:
        return folder.read_range(packed.pack, packed.offset, packed.offset + packed.length)

    assert index.first(SPECS[0].key, read) == ENTRIES[SPECS[0].key]
    folder.delete(other)
    assert index.first(SPECS[0].key, read) is None
