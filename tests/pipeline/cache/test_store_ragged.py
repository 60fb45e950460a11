"""Ragged entries: the first dimension varies up to the maximum in the spec's shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.cache.store import DATA_START, EntrySpec, Store, TensorSpec
from pipeline.errors import StoreError

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
    assert store.check(RAGGED, state.stat).valid
    assert store.check(exact).valid
    for spec in (RAGGED, exact):
        assert np.array_equal(store.read(spec)["text_embedding"], values)
    longer = RAGGED.holding({"text_embedding": TensorSpec("float16", (length + 1, 6))})
    assert store.check(longer).status == "wrong"


@pytest.mark.parametrize("shape", [(0, 6), (10, 6), (5, 7), (5, 6, 1), (30,)])
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
