"""Rows one by one, as columns and back."""

from __future__ import annotations

import polars as pl
import pytest

from pipeline.raw_images import gathered
from pipeline.raw_images.gathered import Gathered, Rows

SCHEMA = {"name": pl.String, "count": pl.Int64}


@pytest.mark.parametrize("number", [0, 1, 4, 5, 6, 11])
def test_rows_are_a_table_in_the_order_in_which_they_came(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "_ROWS_OF_A_PART", 5)
    rows = Gathered(SCHEMA)
    for index in range(number):
        rows.add({"count": index, "more": "left out"} | ({"name": str(index)} if index % 2 else {}))
    table = rows.frame()
    assert dict(table.schema) == SCHEMA
    assert table.rows() == [(str(index) if index % 2 else None, index) for index in range(number)]
    lazily = Rows(table)
    assert list(lazily) == table.rows()
    assert (len(lazily), lazily[2:5]) == (number, table.rows()[2:5])
    assert number < 2 or lazily[1] == ("1", 1)


def test_a_value_of_another_type_is_refused() -> None:
    rows = Gathered(SCHEMA)
    rows.add({"name": "a", "count": "many"})
    with pytest.raises(pl.exceptions.PolarsError):
        rows.frame()
