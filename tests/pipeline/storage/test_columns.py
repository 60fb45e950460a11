from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.storage.columns import (
    beside,
    distinct,
    first_of_each,
    is_first,
    joined,
    num_beyond,
    num_distinct,
    places_in,
    put_beside,
    repeated,
    strings,
    with_constant,
    with_one_of,
)

SOME = st.lists(st.sampled_from(["", "a", "b", "é", "long enough to lie apart", "\U0001f600", "\uffff"]))


def column(values: list[str]) -> pl.Series:
    return pl.Series("key", values, dtype=pl.String)


def numbered(values: list[str]) -> pl.DataFrame:
    """Rows of one value are the same."""
    known = list(dict.fromkeys(values))
    return pl.DataFrame({"key": column(values), "number": [known.index(value) for value in values]}).cast(
        {"number": pl.Int64}
    )


@given(SOME, SOME)
def test_each_value_is_found_in_the_first_row_that_has_it(values: list[str], others: list[str]) -> None:
    expected = [others.index(value) if value in others else None for value in values]
    assert places_in(column(others), column(values)).to_list() == expected


@given(SOME, SOME)
def test_values_of_one_hash_are_told_apart(values: list[str], others: list[str]) -> None:
    expected = [others.index(value) if value in others else None for value in values]
    found = places_in(column(others), column(values), hashed=lambda each: each.hash() % 2)
    assert found.to_list() == expected
    again = repeated(column(values), hashed=lambda each: each.hash() % 2)
    assert again.to_list() == [values.count(value) > 1 for value in values]


def test_more_values_than_are_looked_for_at_a_time_are_found() -> None:
    values = column([f"{number:05}" for number in range(20_000)])
    assert places_in(values.reverse(), values).to_list() == list(range(20_000))[::-1]


@given(SOME, SOME)
def test_joins_are_those_of_polars_in_the_order_of_the_rows(values: list[str], others: list[str]) -> None:
    table, known = column(values).to_frame().with_row_index(), numbered(others)
    once = known.unique("key", keep="first", maintain_order=True)
    assert beside(table, known, on="key").equals(table.join(once, "key", "left", maintain_order="left"))
    assert joined(table, known, on="key").equals(table.join(once, "key", "inner", maintain_order="left"))


@given(SOME, SOME)
def test_values_are_counted_and_chosen_as_sets_are(values: list[str], others: list[str]) -> None:
    assert num_distinct(column(values)) == len(set(values))
    assert num_beyond(column(values), column(others)) == len(set(values) - set(others))
    assert distinct(column(values)).to_list() == sorted(set(values))
    assert repeated(column(values)).to_list() == [values.count(value) > 1 for value in values]
    assert is_first(column(values)).to_list() == [value not in values[:at] for at, value in enumerate(values)]
    table = column(values).to_frame().with_row_index()
    assert first_of_each(table, on="key")["key"].to_list() == list(dict.fromkeys(values))
    chosen = with_one_of(table, set(others), on="key")["key"].to_list()
    assert chosen == [value for value in values if value in others]
    assert list(strings(column(values))) == values


@pytest.mark.parametrize("lengths", [[3], [1, 2], [2, 1, 4, 1]])
def test_L12_columns_put_beside_a_table_are_cut_into_chunks_as_it_is(lengths: list[int]) -> None:
    table = pl.concat([pl.DataFrame({"key": [str(each)] * each}) for each in lengths])
    more = pl.DataFrame({"number": range(len(table))})
    both = with_constant(put_beside(table, more), "dtype", "float16", pl.String)
    assert [both[name].chunk_lengths() for name in both.columns] == [lengths] * 3
    assert both["number"].to_list() == list(range(len(table)))
    assert set(both["dtype"]) == {"float16"}
    assert both.select(pl.col("number") + 1)["number"].chunk_lengths() == lengths  # nothing was copied


def test_a_table_without_rows_gets_columns_too() -> None:
    table = column([]).to_frame()
    assert with_constant(table, "dtype", "float16", pl.String).schema == {
        "key": pl.String,
        "dtype": pl.String,
    }
    assert joined(table, numbered([]), on="key").schema == {"key": pl.String, "number": pl.Int64}
    assert beside(table, numbered(["a"]), on="key").is_empty()
