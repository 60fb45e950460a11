"""`filters.where` is an expression over columns: no query, no file, no function that is not listed."""

from __future__ import annotations

import pytest

from pipeline.errors import RecipeError
from pipeline.recipe import project_root, recipe_from_mapping
from pipeline.recipe.where_expression import FUNCTIONS, check_where, expression_over

REFUSED = [
    "path in (select path from read_csv('/etc/hostname'))",
    "path in (SELECT path FROM read_parquet('http://127.0.0.1/a.parquet'))",
    "score > (select max(n) from read_ndjson('x.jsonl'))",
    "path in (from read_ipc('x.arrow'))",
    "path in (select path from \"read_csv\"('x.csv'))",
    "path in (select path from read_csv/**/('x.csv'))",
    "path in (select path from read_csv -- a comment\n('x.csv'))",
    "path = E'\\'' or path in (select 'x",
    "path = $$a$$",
    "rpad(caption, 20000000000, 'y') = ''",
    "lpad(caption, 20000000000) = ''",
    "repeat(caption, 1000000000) = ''",
    "array_length(generate_series(1, 100000000000)) > 1",
    "score in unnest (path)",
    "columns('.*') is null",
    "count(*) over (order by score) > 1; drop table x",
    "exists (values (1))",
]


def recipe_with(where: str) -> None:
    filters = {"filters": {"where": where}}
    dataset = {"name": "d", "path": "data/list.csv", "captions": {"from": "column"}, **filters}
    recipe_from_mapping("r", {"datasets": [dataset], "output_dir": "outputs/r", "model": {"base": "a/b"}})


@pytest.mark.parametrize("where", REFUSED)
def test_queries_and_other_functions_never_reach_polars(where: str) -> None:
    with pytest.raises(ValueError, match=r"filters\.where must|there is no column"):
        expression_over(check_where(where), {"path", "score", "caption"})


@pytest.mark.parametrize("where", ["read_csv('x.csv') = 1", "a > 1 /* x */", "rpad(a, 9) = ''", "a = {b}"])
def test_the_error_has_key_and_fix(where: str) -> None:
    with pytest.raises(RecipeError, match=r"filters\.where must") as caught:
        recipe_with(where)
    assert caught.value.where.endswith("datasets[0].filters.where")
    assert "docs/recipe_guide.md" in caught.value.fix


@pytest.mark.parametrize(
    "name", ["select", "from", "values", "table", "with", "read_csv", "unnest", "exists"]
)
def test_a_column_named_like_a_query_is_only_a_column(name: str) -> None:
    assert expression_over(f"{name} > 1 AND x = 'a'", {name, "x"}) == (
        f'"{name}" > 1 AND "x" = \'a\'',
        {name, "x"},
    )
    with pytest.raises(ValueError, match=f"there is no column '{name}'"):
        expression_over(f"x in ({name} x)", {"x"})
    for call in (f"{name}('x') = 1", f'"{name}" (1) = 1', f"`{name}`\n(1) = 1"):
        with pytest.raises(ValueError, match=r"must not use .* which is not a function"):
            check_where(call)


def test_the_guide_lists_every_function() -> None:
    guide = (project_root() / "docs/recipe_guide.md").read_text(encoding="utf-8")
    missing = [name for name in " ".join(FUNCTIONS.values()).split() if f"`{name}`" not in guide]
    assert missing == []


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("größe >= 5", '"größe" >= 5'),
        ("meta.score > .5e3", '"meta"."score" > .5e3'),
        ("text::int = 1 and date < DATE '2026-01-01'", "text::int = 1 and date < DATE '2026-01-01'"),
        ("\"a b\" = 'it''s'", "\"a b\" = 'it''s'"),
        ("left(x, 1) = left", 'left("x", 1) = "left"'),
    ],
)
def test_names_are_put_in_quotes_and_everything_else_stays(where: str, expected: str) -> None:
    names = {"größe", "meta", "score", "text", "date", "a b", "x", "left"}
    assert expression_over(check_where(where), names)[0] == expected
