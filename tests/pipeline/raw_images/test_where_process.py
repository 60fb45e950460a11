"""`filters.where` selects the rows that Polars' SQL selects, in a process with limits."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.errors import LatentlineError
from pipeline.raw_images.where_process import rows_where
from pipeline.recipe.where_expression import FUNCTIONS

TABLE = pl.DataFrame(
    {
        "path": ["a.png", "b.png", "c.png"],
        "aesthetic": [7.5, 3.0, None],
        "language": ["en", "de", "en"],
        "tags": [["cat", "red"], ["dog"], []],
        "meta": [{"score": 1}, {"score": 2}, {"score": 3}],
        "date": ["2026-01-01", "2026-02-01", "2026-03-01"],
        "select": [True, False, True],
    }
).with_columns(day=pl.col("date").str.to_date())

EXPRESSIONS = [
    "aesthetic > 5 AND language = 'en'",
    "aesthetic IS NULL OR NOT language IN ('en', 'fr')",
    "path LIKE 'a%' OR path ~ '^b'",
    "aesthetic BETWEEN 3 AND 5",
    "CASE WHEN language = 'en' THEN aesthetic > 5 ELSE true END",
    "CAST(aesthetic AS int) = 7 OR aesthetic::text = '3.0'",
    "day >= DATE '2026-02-01' AND date_part('month', day) < 3",
    "array_contains(tags, 'cat') OR 'dog' = ANY(tags)",
    "meta.score % 2 = 1",
    "aesthetic > avg(aesthetic)",
    "lower(concat(path, '-', language)) = 'a.png-en'",
    "replace(path, '.png', '') || 'x' = 'bx'",
    "coalesce(aesthetic, -1.5e0) < 0",
    "true",
    "aesthetic / 0 > 1",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_the_rows_are_those_that_polars_selects(expression: str) -> None:
    expected = TABLE.filter(pl.sql_expr(expression))
    rows = rows_where(expression, TABLE, path_column="path")
    assert TABLE.filter(rows)["path"].to_list() == expected["path"].to_list()


def test_a_column_named_select_is_a_column() -> None:
    rows = rows_where("select AND NOT language = 'de'", TABLE, path_column="path")
    assert rows.to_list() == [True, False, True]


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("replace(" * 40 + "path" + ", '', 'aaaaaaaaaaaaaaaa')" * 40 + " = ''", "bytes of memory"),
        ("(" * 100_000 + "true" + ")" * 100_000, "unable to parse"),
        ("aesthetic > 1" + " OR aesthetic > 1" * 20_000, "nested too deeply"),
        ("regexp_like(path, '" + "(a{500}){500}" * 3 + "')", "size limit"),
        ("aesthetic", "must be of type `Boolean`"),
        ("scores > 1", "there is no column 'scores'"),
        ("aesthetic >", "unable to parse"),
    ],
)
def test_what_cannot_be_evaluated_is_an_error_and_the_job_goes_on(expression: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        rows_where(expression, TABLE, path_column="path")


def test_a_filter_reads_no_file_and_contacts_no_server(folder: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("s3cr3t-1,s3cr3t-2\n")
    manifest = folder.root / "list.csv"
    manifest.write_text("path,caption\na.png,a rose\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        for source in (f"read_csv('{secret}')", f"read_csv('http://127.0.0.1:{port}/x.csv')"):
            for where in (f"path in (select path from {source})", f"exists (from {source})"):
                folder.dataset = {"path": str(manifest), "filters": {"where": where}}
                with pytest.raises(LatentlineError) as caught:
                    folder.validate()
                assert "s3cr3t" not in str(caught.value)
        with pytest.raises(TimeoutError):
            server.accept()


def test_every_listed_function_is_one_of_polars() -> None:
    for name in " ".join(FUNCTIONS.values()).split():
        calls = [f"{name}({', '.join(arguments)})" for arguments in ARGUMENTS]
        assert any(_is_valid(call) for call in calls), name


ARGUMENTS: list[tuple[str, ...]] = [
    ("aesthetic",),
    ("path",),
    ("day",),
    ("tags",),
    ("aesthetic", "2"),
    ("path", "'a'"),
    ("path", "1"),
    ("tags", "'a'"),
    ("'year'", "day"),
    ("day", "'%Y'"),
    ("path", "1", "1"),
    ("path", "'a'", "'b'"),
    ("path", "'a'", "1"),
    ("true", "1", "2"),
    ("date",),
    ("aesthetic", "0.5"),
]


def _is_valid(call: str) -> bool:
    try:
        TABLE.select(pl.sql_expr(call))
    except pl.exceptions.PolarsError:
        return False
    return True
