"""Complete findings of the checks of aspect_buckets: numbers, order and wording of their rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.aspect_buckets import checks
from pipeline.recipe import Recipe
from pipeline.reporting.findings import CheckContext, Finding
from pipeline.storage.tables import SCHEMAS
from pipeline.validated_dataset.holdout import held_out
from tests.pipeline.dataset_folder import Folder


def blank(asset: str, columns: dict[str, list[Any]]) -> pl.DataFrame:
    """Return a table with these columns; all others are 0, false or empty."""
    count = len(next(iter(columns.values())))
    empty: dict[Any, Any] = {pl.String: "", pl.Boolean: False, pl.List: []}
    others = {name: [empty.get(kind.base_type(), 0)] * count for name, kind in SCHEMAS[asset].items()}
    return pl.DataFrame({**others, **columns}, schema=SCHEMAS[asset])


def table_of(samples: dict[str, int]) -> pl.DataFrame:
    """Return a table with so many samples in each of these buckets, none of which is cropped."""
    names = [
        (bucket, f"d/{bucket} {number}.png") for bucket, count in samples.items() for number in range(count)
    ]
    heights = [int(bucket.partition("x")[0]) for bucket, _ in names]
    widths = [int(bucket.partition("x")[2]) for bucket, _ in names]
    ids = [name for _, name in names]
    columns: dict[str, list[Any]] = {
        "sample_id": ids,
        "duplicate_group": ids,
        "dataset": ["d"] * len(names),
        "bucket": [bucket for bucket, _ in names],
        **dict.fromkeys(("height", "resized_height", "target_height"), heights),
        **dict.fromkeys(("width", "resized_width", "target_width"), widths),
    }
    return blank("aspect_buckets", columns)


@pytest.fixture
def based(folder: Folder, tiny_sd: Path) -> Folder:
    folder.model = str(tiny_sd)
    return folder


def findings_of(folder: Folder, table: pl.DataFrame, **sections: dict[str, Any]) -> dict[str, Finding]:
    folder.tables.write("aspect_buckets", table)
    before = blank("validated_dataset", {"sample_id": table["sample_id"].to_list()})
    folder.tables.write("validated_dataset", before)
    recipe = recipe_with(folder, **sections)
    return {finding.name: finding for finding in checks.run(CheckContext(recipe, folder.tables))}


def recipe_with(folder: Folder, **sections: dict[str, Any]) -> Recipe:
    recipe = folder.recipe
    changes = {name: getattr(recipe, name).model_copy(update=values) for name, values in sections.items()}
    return recipe.model_copy(update=changes)


def test_each_problem_with_a_bucket_or_a_crop_is_one_row(based: Folder) -> None:
    rows = table_of({"48x80": 2, "80x48": 1, "44x80": 1, "40x88": 1})
    name = pl.col("sample_id")
    wrong = rows.with_columns(
        target_width=pl.when(name == "d/48x80 1.png").then(72).otherwise("target_width").cast(pl.Int32),
        bucket=pl.when(name == "d/80x48 0.png").then(pl.lit("48x40")).otherwise("bucket"),
        crop_top=pl.when(name == "d/40x88 0.png").then(-1).otherwise(0).cast(pl.Int32),
        crop_left=pl.lit(0, pl.Int32),
        resized_height=pl.lit(80, pl.Int32),
        resized_width=pl.lit(88, pl.Int32),
    )
    finding = findings_of(based, wrong)["shape_uniformity"]
    assert finding.closes
    not_multiple = "has edges that are not multiples of 8, which this base model requires"
    assert finding.rows[0] == {"bucket": "48x80", "problem": "has several target sizes"}
    assert sorted(finding.rows[1:], key=str) == [
        {"bucket": "44x80", "problem": not_multiple},
        {"bucket": "48x40", "problem": "has the target size 80x48 (height x width)"},
        {"bucket": "48x80", "problem": "has the target size 48x72 (height x width)"},
        {"sample_id": "d/40x88 0.png", "problem": "has a crop outside the image"},
    ]
    assert finding.rows[-1] == {"sample_id": "d/40x88 0.png", "problem": "has a crop outside the image"}
    assert finding.summary == "5 problems with bucket sizes, the first: 48x80 has several target sizes"
    assert finding.numbers == {"num_rows": 5, "buckets": 4, "multiple": 8}


def test_the_fix_of_a_wrong_size_names_the_settings_that_decide_it(based: Folder) -> None:
    rows = table_of({"44x80": 1})
    fix = findings_of(based, rows)["shape_uniformity"].fix
    assert fix.startswith("set buckets.step to multiples of 8, and start the job again")
    fix = findings_of(based, rows, buckets={"sizes": ("44x80",)})["shape_uniformity"].fix
    assert fix.startswith("set buckets.step and the edges in buckets.sizes to multiples of 8")


BUCKETS = [f"{8 * height}x64" for height in range(1, 10)]


def test_a_bucket_with_far_fewer_samples_than_the_others_is_a_warning(based: Folder) -> None:
    """A bucket with far more samples is not."""
    samples = dict.fromkeys(BUCKETS, 10) | {"8x64": 2, "16x64": 1, "24x64": 40}
    finding = findings_of(based, table_of(samples))["file_size_outliers"]
    assert (finding.passed, finding.severity) == (False, "warn")
    assert finding.rows == [{"bucket": "16x64", "samples": 1}, {"bucket": "8x64", "samples": 2}]
    assert finding.summary == "2 of 9 buckets have far fewer samples than the median of 10"
    assert finding.numbers == {"num_rows": 2, "buckets": 9, "median": 10.0}


@pytest.mark.parametrize(
    ("samples", "summary", "median"),
    [
        (dict.fromkeys(BUCKETS, 3), "9 buckets, none has far fewer samples", 3.0),
        (dict.fromkeys(BUCKETS, 3) | {"8x64": 30}, "9 buckets, none has far fewer samples", 3.0),
        ({"8x64": 30, "16x64": 1}, "2 buckets, too few to compare", 15.5),
        ({"8x64": 2}, "1 bucket, too few to compare", 2.0),
    ],
    ids=["equal", "a large one", "two", "one"],
)
def test_buckets_of_similar_size_or_too_few_of_them_pass(
    based: Folder, samples: dict[str, int], summary: str, median: float
) -> None:
    finding = findings_of(based, table_of(samples))["file_size_outliers"]
    assert finding.passed
    assert finding.summary == summary
    assert finding.numbers == {"num_rows": 0, "buckets": len(samples), "median": median}


def test_an_empty_table_has_numbers_too(based: Folder) -> None:
    findings = findings_of(based, table_of({}))
    assert findings["file_size_outliers"].numbers == {"num_rows": 0, "buckets": 0, "median": 0.0}
    assert findings["crop_loss"].numbers == {"num_rows": 0, "limit": 0.25, "worst": 0.0}
    none = {"draws_per_epoch": 0, "in_full_batches": 0.0, "full_batches_per_epoch": 0}
    assert findings["underfilled"].numbers == {"num_rows": 0, "samples_at_once": 1, **none}


def test_the_numbers_of_batches_count_all_processes_and_only_full_batches(based: Folder) -> None:
    rows = table_of({"48x80": 14, "80x48": 6, "64x64": 5, "40x96": 1})
    sections = {"training": {"batch_size": 3}, "accelerate": {"num_processes": 2}}
    finding = findings_of(based, rows, **sections)["underfilled"]
    assert finding.rows == [{"bucket": "40x96", "draws": 1}, {"bucket": "64x64", "draws": 5}]
    assert finding.summary == "2 of 4 buckets do not fill a batch of 3 on 2 processes"
    # As text, because a whole number must not become 3.0 for the programs that read it.
    assert json.dumps(finding.numbers) == json.dumps(
        {
            "num_rows": 2,
            "samples_at_once": 6,
            "draws_per_epoch": 26,
            "in_full_batches": 0.6923,
            "full_batches_per_epoch": 3,
        }
    )


def test_a_bucket_of_held_out_samples_is_not_underfilled(based: Folder) -> None:
    based.validation_fraction = 0.5
    rows = table_of(dict.fromkeys(BUCKETS, 1))
    held = held_out(rows, {"d": 0.5})
    assert 0 < held.sum() < len(BUCKETS)
    finding = findings_of(based, rows, training={"batch_size": 2})["underfilled"]
    expected = sorted(rows.filter(~held)["bucket"])
    assert finding.rows == [{"bucket": bucket, "draws": 1} for bucket in expected]


def test_equal_crop_losses_are_listed_by_name_with_four_digits(based: Folder) -> None:
    losses = {"c": 0.61236, "a": 0.61236, "b": 0.61236, "long": 0.71235, "little": 0.25, "square": 0.0}
    rows = table_of({"48x80": len(losses)}).with_columns(
        sample_id=pl.Series([f"d/{name}.png" for name in losses]),
        crop_loss=pl.Series([*losses.values()]),
        height=pl.lit(17, pl.Int32),
    )
    finding = findings_of(based, rows)["crop_loss"]
    size = {"size": "17x80", "bucket": "48x80"}
    assert finding.rows == [
        {"sample_id": "d/long.png", "crop_loss": 0.7124, **size},
        *({"sample_id": f"d/{name}.png", "crop_loss": 0.6124, **size} for name in "abc"),
    ]
    assert finding.numbers == {"num_rows": 4, "limit": 0.25, "worst": 0.7124}
    first = "d/long.png (17x80 to 48x80, 71%)"
    assert finding.summary == f"4 images lose more than 25% to the crop, the first: {first}"
