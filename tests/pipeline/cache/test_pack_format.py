"""The bytes of packs and indexes."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable

import polars as pl
import pytest
import safetensors

from pipeline.cache.entry_format import serialise
from pipeline.cache.pack_format import (
    INDEX_COLUMNS,
    WrongPackError,
    bad_entries,
    build_pack,
    index_bytes,
    parse_index,
)
from tests.pipeline.packs_case import spec_of, values_of

ENTRIES = {spec_of(number).key: serialise(spec_of(number), values_of(number), {}) for number in range(5)}


def test_a_pack_is_named_by_its_hash_and_holds_the_bytes_of_each_entry() -> None:
    pack, content, index = build_pack(ENTRIES)
    assert pack == hashlib.sha256(content).hexdigest()
    rows = pl.read_parquet(io.BytesIO(index))
    assert tuple(rows.columns) == INDEX_COLUMNS
    assert set(rows["pack"]) == {pack}

    for key, offset, length, checksum in rows.select("key", "offset", "length", "checksum").iter_rows():
        raw = content[offset : offset + length]
        assert raw == ENTRIES[key]
        assert hashlib.sha256(raw).hexdigest() == checksum
        assert dict(safetensors.deserialize(raw)).keys() == {"latent"}
    assert int(rows["length"].sum()) == len(content)


def test_the_order_of_the_entries_changes_neither_pack_nor_index() -> None:
    assert build_pack(dict(reversed(ENTRIES.items()))) == build_pack(ENTRIES)


def test_an_index_reads_back() -> None:
    pack, content, raw = build_pack(ENTRIES)
    index = parse_index(raw, pack, len(content))
    assert index["key"].to_list() == sorted(ENTRIES)
    assert bad_entries("latents", index, content) == {}


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.with_columns(offset=pl.col("offset") + 1),
        lambda index: index.with_columns(offset=-pl.col("offset")),
        lambda index: index.with_columns(length=pl.lit(7, pl.Int64)),
        lambda index: index.with_columns(pack=pl.lit("ab" * 32)),
        lambda index: index.with_columns(key=pl.lit("../../etc/passwd")),
        lambda index: index.with_columns(key=pl.lit(None, pl.String)),
    ],
)
def test_an_index_that_describes_anything_but_entries_in_its_pack_is_rejected(
    change: Callable[[pl.DataFrame], pl.DataFrame],
) -> None:
    pack, content, raw = build_pack(ENTRIES)
    wrong = index_bytes(change(parse_index(raw, pack, len(content))))
    with pytest.raises(WrongPackError, match="a row describes"):
        parse_index(wrong, pack, len(content))


def test_an_index_that_is_no_table_or_lacks_a_column_is_rejected() -> None:
    pack, content, raw = build_pack(ENTRIES)
    with pytest.raises(WrongPackError, match="not a Parquet file"):
        parse_index(raw[:-9], pack, len(content))
    file = io.BytesIO()
    pl.read_parquet(io.BytesIO(raw)).drop("checksum").write_parquet(file)
    with pytest.raises(WrongPackError, match=r"columns must be key String, .* checksum String, got"):
        parse_index(file.getvalue(), pack, len(content))


def test_a_pack_that_is_shorter_than_its_index_states_is_rejected() -> None:
    pack, content, raw = build_pack(ENTRIES)
    with pytest.raises(WrongPackError):
        parse_index(raw, pack, len(content) - 1)


def test_each_damaged_entry_of_a_pack_is_named() -> None:
    pack, content, raw = build_pack(ENTRIES)
    index = parse_index(raw, pack, len(content))
    damaged = bytearray(content)
    key, offset = index.row(2)[0], index.row(2)[2]
    damaged[offset + 2050] ^= 1
    assert bad_entries("latents", index, bytes(damaged)) == {
        key: "the checksum in the index does not match the content"
    }
    swapped = index.with_columns(key=pl.col("key").reverse())
    problems = bad_entries("latents", swapped, content)
    assert len(problems) == 4
    assert all("expected the entry latents" in text for text in problems.values())
