"""The bytes of an entry: its header, its size, and ragged entries.

The first dimension of a ragged entry varies up to the maximum in the spec's shape.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from pipeline.cache.entry_format import (
    WrongEntryError,
    read_header,
    serialise,
    stated_metadata,
    stated_tensors,
)
from pipeline.cache.store import DATA_START, EntrySpec, Store, TensorSpec
from pipeline.cache.worker.tensors import read_torch
from pipeline.errors import StoreError
from tests.pipeline.cache.forged_entries import forge, with_header

SPEC = EntrySpec("latents", "ab" * 32, {"latent": TensorSpec("float16", (4, 8, 6))})
VALUES = {"latent": np.arange(192, dtype="<f2").reshape(4, 8, 6)}
FACTS = {"inputs": {"content_hash": "12"}, "original_size": [512, 384]}
RAGGED = EntrySpec("text", "ef" * 32, {"text_embedding": TensorSpec("float16", (9, 6), ragged=True)})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


@pytest.mark.parametrize("length", [1, 5, 9])
def test_T03_a_ragged_entry_is_stored_at_its_actual_length(store: Store, length: int) -> None:
    values = np.arange(length * 6, dtype="<f2").reshape(length, 6)
    assert store.write(RAGGED, {"text_embedding": values}, {})
    exact = RAGGED.holding({"text_embedding": TensorSpec("float16", (length, 6))})
    assert store.path(RAGGED).stat().st_size == exact.file_bytes == DATA_START + 12 * length
    state = store.check(RAGGED)
    assert state.valid
    assert state.shapes == {"text_embedding": (length, 6)}
    assert store.check(exact).valid
    for spec in (RAGGED, exact):
        assert np.array_equal(store.read(spec)["text_embedding"], values)
    longer = RAGGED.holding({"text_embedding": TensorSpec("float16", (length + 1, 6))})
    assert store.check(longer).status == "wrong"


@pytest.mark.parametrize("shape", [(0, 6), (10, 6), (5, 7), (5, 6, 1), (30,)], ids=str)
def test_T02_a_ragged_entry_of_an_invalid_shape_is_neither_written_nor_accepted(
    store: Store, shape: tuple[int, ...]
) -> None:
    values = {"text_embedding": np.ones(shape, dtype="<f2")}
    with pytest.raises(ValueError, match="text_embedding must be"):
        store.write(RAGGED, values, {})
    exact = RAGGED.holding({"text_embedding": TensorSpec("float16", shape)})
    assert store.write(exact, values, {})
    assert store.check(RAGGED).status == "wrong"
    with pytest.raises(StoreError, match="damaged"):
        store.read(RAGGED)


def test_L02_a_ragged_entry_must_have_the_size_its_header_states(
    store: Store,
) -> None:
    assert store.write(RAGGED, {"text_embedding": np.ones((5, 6), dtype="<f2")}, {})
    sound = store.path(RAGGED).read_bytes()
    for damaged in (sound[:-12], sound + bytes(12), sound[:DATA_START], sound + bytes(1000)):
        store.path(RAGGED).write_bytes(damaged)
        assert f"{len(damaged)} bytes" in store.check(RAGGED).reason
        with pytest.raises(StoreError, match=f"{len(damaged)} bytes"):
            store.read(RAGGED)


def test_L02_a_deeply_nested_header_is_damage_and_not_a_crash(store: Store) -> None:
    assert store.write(RAGGED, {"text_embedding": np.ones((5, 6), dtype="<f2")}, {})
    sound = store.path(RAGGED).read_bytes()
    metadata = b'{"__metadata__": {"latentline": "' + b"[" * 1_990 + b'"}}'
    for header in (b"[" * (DATA_START - 8), metadata.ljust(DATA_START - 8)):
        store.path(RAGGED).write_bytes(sound[:8] + header + sound[DATA_START:])
        assert store.check(RAGGED).status == "wrong"
        with pytest.raises(StoreError, match="damaged"):
            store.read(RAGGED)


def test_a_wrong_size_is_reported_with_the_size_or_the_maximum_that_the_entry_must_have(store: Store) -> None:
    for spec, expected in (
        (SPEC, f"expected {SPEC.file_bytes}"),
        (RAGGED, f"expected at most {RAGGED.file_bytes}"),
    ):
        path = store.path(spec)
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(spec.file_bytes + 1))
        assert store.check(spec).reason == f"{expected} bytes, got {spec.file_bytes + 1} bytes"


def test_a_ragged_tensor_has_at_least_one_dimension() -> None:
    ragged = TensorSpec("float16", (9,), ragged=True)
    assert ragged.admits(TensorSpec("float16", (9,)))
    assert not ragged.admits(TensorSpec("float16", ()))


@pytest.mark.parametrize("offset", range(8))
def test_each_byte_of_the_headers_length_must_be_right(offset: int) -> None:
    start = bytearray(with_header({}))
    assert read_header(bytes(start)) == {}
    start[offset] ^= 1
    with pytest.raises(WrongEntryError, match="does not start with the header"):
        read_header(bytes(start))


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ([], "not a JSON object"),
        ({}, "metadata in the header is missing"),
        ({"__metadata__": 1}, "metadata in the header is missing"),
        ({"__metadata__": {}}, "metadata in the header is missing"),
        ({"__metadata__": {"latentline": "{"}}, "metadata in the header is missing"),
        ({"__metadata__": {"latentline": "[]"}}, "metadata in the header is not a JSON object"),
        ({"__metadata__": {"latentline": "{}"}}, "expected format 1, got None"),
        ({"__metadata__": {"latentline": '{"format": 2}'}}, "expected format 1, got 2"),
    ],
    ids=str,
)
def test_a_header_without_the_metadata_of_an_entry_is_wrong(header: object, reason: str) -> None:
    with pytest.raises(WrongEntryError, match=reason):
        stated_metadata(read_header(with_header(header)))


@pytest.mark.parametrize(
    "tensor",
    [
        *(1, {}, {"dtype": "F16"}, {"dtype": "I64", "shape": [1]}, {"dtype": "F16", "shape": 1}),
        *({"dtype": "F16", "shape": [length, 8]} for length in ("4", 4.0, True, None, [4], {})),
        *({"dtype": "F16", "shape": shape} for shape in ("48", {"4": 8}, None)),
        {"dtype": ["F16"], "shape": [4, 8]},
    ],
    ids=str,
)
def test_a_header_that_describes_a_tensor_incompletely_is_wrong(tensor: object) -> None:
    header = read_header(with_header({"__metadata__": {}, "latent": {"dtype": "F16", "shape": [4, 8]}}))
    assert stated_tensors(header) == {"latent": TensorSpec("float16", (4, 8))}
    with pytest.raises(WrongEntryError, match="without a supported dtype and shape"):
        stated_tensors({**header, "latent": tensor})


@pytest.mark.parametrize("length", ["5", 5.0, True, None, [5], {}], ids=str)
def test_an_entry_whose_length_is_no_number_is_damage_and_not_a_crash(store: Store, length: object) -> None:
    """A length is compared with the maximum of a ragged entry."""
    assert store.write(RAGGED, {"text_embedding": np.ones((5, 6), dtype="<f2")}, {})
    raw = store.path(RAGGED).read_bytes()
    header = json.loads(raw[8:DATA_START])
    header["__metadata__"]["latentline"] = header["__metadata__"]["latentline"].rstrip()
    header["text_embedding"]["shape"][0] = length
    store.path(RAGGED).write_bytes(with_header(header) + raw[DATA_START:])
    assert store.check(RAGGED).status == "wrong"
    with pytest.raises(StoreError, match="damaged"):
        store.read(RAGGED)


def test_metadata_nested_as_deeply_as_can_be_read_are_damage_and_not_a_crash(store: Store) -> None:
    """The checksum covers the metadata, which are written again, with more frames on the stack."""
    assert store.write(SPEC, VALUES, {})
    value: list[object] = []
    for _ in range(800):
        value = [value]
    forge(store.path(SPEC), inputs=value)

    def check_below(num_frames: int) -> str:
        return check_below(num_frames - 1) if num_frames else store.check(SPEC).status

    statuses = [check_below(num_frames) for num_frames in range(250)]
    assert set(statuses) == {"valid", "wrong"}


@given(
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=3),
    facts=st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=3),
)
def test_all_tensors_survive_a_round_trip_and_the_file_has_the_expected_size(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: str,
    shapes: list[tuple[int, ...]],
    facts: dict[str, str],
) -> None:
    spec = EntrySpec("text", "0123456789", {f"t{i}": TensorSpec(dtype, s) for i, s in enumerate(shapes)})
    kind = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4"}[dtype]
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.integers(0, 0x3F80, t.shape).astype("<u2")
        if dtype == "bfloat16"
        else rng.normal(size=t.shape).astype(kind)
        for name, t in spec.tensors.items()
    }
    facts = {name: text for name, text in facts.items() if name not in ("format", "kind", "key", "checksum")}
    store = Store(tmp_path_factory.mktemp("store"))
    store.write(spec, tensors, facts)
    assert store.path(spec).stat().st_size == spec.file_bytes == DATA_START + spec.data_bytes
    assert store.check(spec).valid
    for name, array in store.read(spec).items():
        assert np.array_equal(array, tensors[name])


def resealed(raw: bytes, data: bytes) -> bytes:
    """Return an entry's file with other data and their checksum, as the module's docstring defines it."""
    header = json.loads(raw[8:DATA_START])
    facts = json.loads(header["__metadata__"]["latentline"])
    old = facts.pop("checksum")
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    checksum = hashlib.sha256(canonical.encode() + data).hexdigest()
    return raw[:DATA_START].replace(old.encode(), checksum.encode()) + data


BITS = {
    "float16": (2, [0x7BFF, 0xFBFF, 0x0001, 0x8000], [0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF]),
    "bfloat16": (2, [0x7F7F, 0xFF7F, 0x0001, 0x8000], [0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF]),
    "float32": (4, [0x7F7FFFFF, 0xFF7FFFFF, 1, 1 << 31], [0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF]),
}
"""Bytes of a value of each dtype, and bits of finite and of other values, from IEEE 754."""


@pytest.mark.parametrize("dtype", BITS)
def test_L05_all_finite_values_are_stored_and_no_others_are_written_or_accepted(
    store: Store, dtype: str
) -> None:
    num_bytes, finite, not_finite = BITS[dtype]
    kind = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4"}[dtype]
    spec = EntrySpec("latents", "0123456789", {"latent": TensorSpec(dtype, (len(finite),))})
    sound = np.array(finite, dtype=f"<u{num_bytes}")
    assert store.write(spec, {"latent": sound.view(kind)}, FACTS)
    assert store.check(spec).valid

    raw = store.path(spec).read_bytes()
    assert resealed(raw, sound.tobytes()) == raw
    for bits in not_finite:
        damaged = sound.copy()
        damaged[1] = bits
        with pytest.raises(ValueError, match="NaN or infinite"):
            serialise(spec, {"latent": damaged.view(kind)}, FACTS)
        store.path(spec).write_bytes(resealed(raw, damaged.tobytes()))
        state = store.check(spec)
        assert (state.status, state.reason) == ("wrong", "it contains NaN or infinite values"), hex(bits)


def test_an_array_of_any_memory_layout_is_stored_in_the_order_of_its_shape(store: Store) -> None:
    values = {"latent": np.asfortranarray(VALUES["latent"])}
    assert serialise(SPEC, values, FACTS) == serialise(SPEC, VALUES, FACTS)


def test_the_header_may_fill_its_space_and_is_read_only_if_it_is_complete(store: Store) -> None:
    def entry(num_characters: int) -> bytes:
        return serialise(SPEC, VALUES, {"inputs": "x" * num_characters})

    # The header is ASCII without spaces, so that these are what fills it up.
    longest = 1000 + entry(1000)[:DATA_START].count(b" ")
    assert b" " not in entry(longest)[:DATA_START]
    with pytest.raises(ValueError, match="2040"):
        entry(longest + 1)

    path = store.path(SPEC)
    path.parent.mkdir(parents=True)
    path.write_bytes(entry(longest))
    assert store.check(SPEC).valid
    for num_bytes, is_complete in ((DATA_START, True), (DATA_START - 1, False), (8, False), (0, False)):
        path.write_bytes(entry(10)[:num_bytes])
        assert (store.read_metadata("latents", SPEC.key) is not None) == is_complete
        assert (store.read_tensor_specs(SPEC) == SPEC.tensors) == is_complete


def test_the_safetensors_library_can_read_an_entry(store: Store) -> None:
    assert store.write(SPEC, VALUES, FACTS)
    path = store.path(SPEC)
    assert np.array_equal(load_file(path)["latent"], VALUES["latent"])
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    assert list(metadata) == ["latentline"]
    assert json.loads(metadata["latentline"])["inputs"] == {"content_hash": "12"}


def test_bfloat16_values_reach_torch_unchanged(store: Store) -> None:
    import torch

    spec = EntrySpec("latents", "ef" * 32, {"latent": TensorSpec("bfloat16", (3,))})
    values = torch.tensor([0.5, -1.0, 3.0], dtype=torch.bfloat16)
    store.write(spec, {"latent": values.view(torch.uint16).numpy()}, {})
    read = read_torch(store, spec)["latent"]
    assert read.dtype == torch.bfloat16
    assert torch.equal(read, values)


@pytest.mark.slow
def test_an_entry_has_the_same_bytes_in_every_process_and_for_any_order_of_facts(tmp_path: Path) -> None:
    code = (
        "import sys, hashlib; sys.path.insert(0, sys.argv[1]); from test_entry_format import *\n"
        "facts = dict(reversed(list(FACTS.items())))\n"
        "print(hashlib.sha256(serialise(SPEC, VALUES, facts)).hexdigest())"
    )
    args = [sys.executable, "-c", code, str(Path(__file__).parent)]
    hashes = {
        subprocess.run(
            args, env={**os.environ, "PYTHONHASHSEED": str(seed)}, capture_output=True, text=True, check=True
        ).stdout
        for seed in (1, 2)
    }
    assert len(hashes) == 1
    assert hashes == {hashlib.sha256(serialise(SPEC, VALUES, FACTS)).hexdigest() + "\n"}


def test_a_header_over_the_size_limit_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="2040"):
        store.write(SPEC, VALUES, {"inputs": "x" * 2000})


def test_L02_only_the_bytes_of_a_slice_are_written(store: Store) -> None:
    batch = np.zeros((16, 4, 8, 6), "<f2")
    store.write(SPEC, {"latent": batch[3]}, FACTS)
    assert store.path(SPEC).stat().st_size == DATA_START + 4 * 8 * 6 * 2
