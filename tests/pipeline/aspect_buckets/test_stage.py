"""The table of aspect_buckets contains the geometry of each sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from pipeline.aspect_buckets import stage as buckets
from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.errors import BucketError
from pipeline.images.geometry import Geometry, Size, placement_of
from pipeline.storage.tables import SCHEMAS


def dataset(sizes: list[Size]) -> pl.DataFrame:
    columns: dict[str, Any] = {
        "sample_id": [f"d/{index:07}" for index in range(len(sizes))],
        "height": [size.height for size in sizes],
        "width": [size.width for size in sizes],
    }
    table = pl.DataFrame(columns)
    kinds = SCHEMAS["validated_dataset"]
    missing = [name for name in kinds if name not in columns]
    table = table.with_columns(
        pl.lit("x" if kinds[name] == pl.String else 0.5).alias(name) for name in missing
    )
    return table.select(pl.col(name).cast(kind) for name, kind in kinds.items())


def test_each_row_is_the_geometry_of_its_own_size(folder: Any) -> None:
    random = np.random.default_rng(0)
    sizes = [Size(*pair) for pair in random.integers(1, 5000, (200, 2)).tolist()]
    result = assign_buckets(folder.recipe, dataset(sizes), log=folder.log.append)
    placement = placement_of(folder.recipe.buckets)
    for size, row in zip(sizes, result.table.iter_rows(named=True), strict=True):
        geometry = placement.assign(size)
        assert geometry is not None
        assert Geometry.from_row(row) == geometry
        assert row["bucket"] == geometry.bucket
        assert (row["crop_loss"], row["scale"]) == (geometry.crop_loss, geometry.scale)
    assert (result.report["in"], result.report["kept"], result.report["rejected"]) == (200, 200, 0)
    assert sum(result.report["buckets"].values()) == 200
    assert result.rejected.is_empty()


def test_the_log_has_one_line_with_the_largest_buckets(folder: Any) -> None:
    small = [*[Size(512, 512)] * 3, Size(512, 1024)]
    many = [Size(height, 700) for height in range(200, 3000, 9)]
    assign_buckets(folder.recipe, dataset(small), log=folder.log.append)
    assign_buckets(folder.recipe, dataset(many), log=folder.log.append)
    first, second = folder.log
    assert first.startswith("2 buckets (height x width), samples: ")
    assert [part.split()[-1] for part in first.split(", ")[1:]] == ["3", "1"]
    assert second.startswith("9 buckets (height x width), samples: 96x40 155, 80x48 35, ")
    assert second.endswith(", 48x80 12, 1 more in the report")


def test_B06_the_order_of_the_rows_does_not_matter(folder: Any) -> None:
    sizes = [Size(height, 700) for height in range(200, 1500, 37)]
    table = dataset(sizes)
    straight = assign_buckets(folder.recipe, table, log=folder.log.append).table
    assert assign_buckets(folder.recipe, table.reverse(), log=folder.log.append).table.equals(straight)


@pytest.mark.parametrize("crop", ["random", "focus"])
@pytest.mark.parametrize("per_image", ["best", "each"])
def test_the_chunk_size_does_not_matter(
    folder: Any, monkeypatch: pytest.MonkeyPatch, crop: str, per_image: str
) -> None:
    changes = {"crop": crop, "per_image": per_image, "resolutions": (48, 96), "upscale": "limit(1.5)"}
    settings = folder.recipe.buckets.model_copy(update=changes | {"small_images": "reject"})
    recipe = folder.recipe.model_copy(update={"buckets": settings})
    random = np.random.default_rng(1)
    sizes = [Size(*pair) for pair in random.integers(10, 130, (50, 2)).tolist()]
    table = dataset(sizes).with_columns(focus_x=pl.Series(random.random(50)))
    together = assign_buckets(recipe, table, log=folder.log.append)
    monkeypatch.setattr(buckets, "CHUNK_ROWS", 7)
    apart = assign_buckets(recipe, table, log=folder.log.append)
    assert apart.table.equals(together.table)
    assert apart.rejected.equals(together.rejected)
    assert 0 < len(together.rejected) < 50
    assert (len(together.table) > together.report["kept"]) == (per_image == "each")


def test_the_table_matches_its_schema(folder: Any) -> None:
    folder.add("a.png")
    folder.ingest()
    result = folder.assign()
    assert folder.tables.read("aspect_buckets").equals(result.table)
    assert result.table["bucket"].to_list() == ["48x80"]


def test_B03_settings_that_allow_no_bucket_are_an_error(folder: Any) -> None:
    settings = folder.recipe.buckets.model_copy(update={"step": 48})
    recipe = folder.recipe.model_copy(update={"buckets": settings})
    with pytest.raises(BucketError, match=r"resolution must be a multiple of buckets\.step \(48\), got 64"):
        assign_buckets(recipe, dataset([Size(5, 5)]), log=folder.log.append)
