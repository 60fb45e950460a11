"""Filters and limits exclude the same images every time and name the reason."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.errors import DatasetError
from pipeline.raw_images.manifest import selected_rows
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.recipe.datasets import FilterSettings
from pipeline.storage.tables import SCHEMAS
from pipeline.validated_dataset.filters import select

SIZES = [(100, 100), (50, 200), (200, 50), (400, 300), (30, 30)]
"""Heights and widths; the first is that of sample d/0.png."""


def recipe(*datasets: dict[str, Any]) -> Recipe:
    filled = [{"name": "d", "path": "photos", **each} for each in datasets]
    return recipe_from_mapping("r", {"datasets": filled, "output_dir": "out", "model": {"base": "a/b"}})


def raw(sizes: list[tuple[int, int]] = SIZES, dataset: str = "d") -> pl.DataFrame:
    rows = []
    for index, (height, width) in enumerate(sizes):
        blank = {name: "" if kind == pl.String else 1 for name, kind in SCHEMAS["raw_images"].items()}
        content_hash = hashlib.sha256(f"{dataset}{index}".encode()).hexdigest()
        known = {"sample_id": f"{dataset}/{index}.png", "dataset": dataset, "path": f"{index}.png"}
        rows.append({**blank, **known, "height": height, "width": width, "content_hash": content_hash})
    return pl.DataFrame(rows, schema=SCHEMAS["raw_images"])


def chosen(
    table: pl.DataFrame, *datasets: dict[str, Any], **manifests: pl.DataFrame
) -> tuple[list[str], dict[str, str]]:
    made = recipe(*datasets)
    selected = {
        each.name: selected_rows(each, manifests[each.name])
        for each in made.datasets
        if each.name in manifests
    }
    kept, rejected = select(made, table, selected, stage="validated_dataset")
    assert sorted([*kept["sample_id"], *rejected["sample_id"]]) == sorted(table["sample_id"])
    return kept["path"].to_list(), dict(rejected.select("path", "reason").iter_rows())


@pytest.mark.parametrize(
    ("filters", "excluded"),
    [
        ({}, {}),
        ({"min_width": 100}, {"2.png": "filter_min_width", "4.png": "filter_min_width"}),
        ({"max_height": 200}, {"3.png": "filter_max_height"}),
        ({"min_pixels": 10_000}, {"4.png": "filter_min_pixels"}),
        ({"max_pixels": 10_000}, {"3.png": "filter_max_pixels"}),
        ({"min_aspect_ratio": 0.5}, {"2.png": "filter_min_aspect_ratio"}),
        ({"max_aspect_ratio": 2.0}, {"1.png": "filter_max_aspect_ratio"}),
        (
            {"min_width": 40, "min_height": 40, "max_aspect_ratio": 2.0},
            {"4.png": "filter_min_width", "1.png": "filter_max_aspect_ratio"},
        ),
    ],
    ids=str,
)
def test_each_filter_rejects_images_under_its_name(filters: dict[str, Any], excluded: dict[str, str]) -> None:
    kept, reasons = chosen(raw(), {"filters": filters})
    assert reasons == excluded
    assert kept == [f"{index}.png" for index in range(5) if f"{index}.png" not in excluded]


MEASURES = {"width": 100, "height": 50, "pixels": 5_000, "aspect_ratio": 2.0}
"""Measures of an image of 50 x 100 pixels, (height, width)."""

SIZE_FILTERS = sorted(name for name in FilterSettings.model_fields if name.startswith(("min_", "max_")))


@pytest.mark.parametrize("name", SIZE_FILTERS)
def test_each_filter_keeps_an_image_exactly_at_its_limit(name: str) -> None:
    value = MEASURES[name[4:]]
    step = 0.001 if name.endswith("aspect_ratio") else 1
    stricter = value + step if name.startswith("min_") else value - step
    assert chosen(raw([(50, 100)]), {"filters": {name: value}}) == (["0.png"], {}), f"{name}: {value}"
    _, reasons = chosen(raw([(50, 100)]), {"filters": {name: stricter}})
    assert reasons == {"0.png": f"filter_{name}"}, f"{name}: {stricter}"


def test_a_rejected_row_has_size_filter_and_fix() -> None:
    _, rejected = select(recipe({"filters": {"min_width": 60}}), raw(), {}, stage="validated_dataset")
    row = rejected.filter(pl.col("path") == "4.png").row(0, named=True)
    assert row["detail"] == "the image is 30x30 (height x width), and filters.min_width is 60"
    assert row["stage"] == "validated_dataset"
    assert row["fix"] == "change filters.min_width of dataset d, now 60"
    assert row["content_hash"]


def test_a_limit_selects_the_same_images_independently_of_the_others() -> None:
    many = raw([(64, 64)] * 40)
    kept, reasons = chosen(many, {"limit": 7})
    assert len(kept) == 7
    assert set(reasons.values()) == {"filter_limit"}
    assert chosen(many.sample(fraction=1.0, shuffle=True, seed=3), {"limit": 7})[0] == kept
    assert set(kept) <= set(chosen(many, {"limit": 12})[0]), (
        "a larger limit includes the images of a smaller one"
    )
    survivors = many.filter(pl.col("path").is_in(kept) | (pl.col("path") > "20.png"))
    assert chosen(survivors, {"limit": 7})[0] == kept


def test_a_limit_applies_after_the_filters() -> None:
    kept, reasons = chosen(raw(), {"filters": {"min_width": 60}, "limit": 2})
    assert len(kept) == 2
    assert sorted(reasons.values()) == ["filter_limit", "filter_min_width", "filter_min_width"]


def copied(table: pl.DataFrame) -> pl.DataFrame:
    """The table followed by two copies of each image."""
    copies = [
        table.with_columns(path=pl.col("path") + again, sample_id=pl.col("sample_id") + again)
        for again in ("", " 2", " 3")
    ]
    return pl.concat(copies)


def test_I24_a_limit_takes_copies_last() -> None:
    table = copied(raw())
    once, _ = chosen(table, {"limit": 5})
    assert once == [f"{index}.png" for index in range(5)]
    assert chosen(table, {"limit": 3})[0] == chosen(raw(), {"limit": 3})[0]
    more, reasons = chosen(table, {"limit": 7})
    assert len(more) == 7
    assert {*once} < {*more}
    assert set(reasons.values()) == {"filter_limit"}
    every, _ = chosen(table, {"limit": 3, "duplicates": "keep_all"})
    assert len({path.partition(" ")[0] for path in every}) == 1


def test_each_dataset_has_its_own_filters_and_limit() -> None:
    both = pl.concat([raw(), raw(dataset="e")])
    kept, rejected = select(recipe({"limit": 1}, {"name": "e"}), both, {}, stage="validated_dataset")
    assert kept["dataset"].to_list().count("d") == 1
    assert kept["dataset"].to_list().count("e") == 5
    assert len(rejected) == 4


def test_an_expression_over_the_manifest_selects_images() -> None:
    manifest = pl.DataFrame({"path": [f"./{i}.png" for i in range(5)], "score": [1, 2, 3, 4, None]})
    dataset = {"path": "photos/all.csv", "filters": {"where": "score >= 2 AND path <> './2.png'"}}
    kept, reasons = chosen(raw(), dataset, d=manifest)
    assert kept == ["1.png", "3.png"]
    assert set(reasons.values()) == {"filter_where"}


@pytest.mark.parametrize("where", ["score >", "nosuch > 1", "score"])
def test_an_invalid_expression_is_an_error_that_lists_the_columns(where: str) -> None:
    manifest = pl.DataFrame({"path": ["0.png"], "score": [1]})
    (dataset,) = recipe({"path": "all.csv", "filters": {"where": where}}).datasets
    with pytest.raises(DatasetError) as excinfo:
        selected_rows(dataset, manifest)
    assert where in excinfo.value.what
    assert "score (Int64)" in excinfo.value.fix
    assert Path(excinfo.value.where).name == "all.csv"
