from __future__ import annotations

import polars as pl
import pytest

from pipeline.aspect_buckets.slider_pairs import with_pairs

SCALES = {"day": 1, "night": -1}


def pairs_of(*samples: tuple[str, str]) -> list[str | None]:
    """Return the pair of each (sample_id, bucket)."""
    rows = [(name, name.partition("/")[0], bucket) for name, bucket in samples]
    table = pl.DataFrame(rows, schema=["sample_id", "dataset", "bucket"], orient="row")
    return with_pairs(table, SCALES)["pair"].to_list()


def test_images_with_the_same_path_apart_from_the_suffix_are_a_pair() -> None:
    day, night = pairs_of(("day/a/tree.old.jpg", "64x64"), ("night/a/tree.old.png", "64x64"))
    assert day == night == "a/tree.old (64x64)"


@pytest.mark.parametrize(
    ("day", "night"),
    [
        (("day/tree.jpg", "64x64"), ("night/house.jpg", "64x64")),
        (("day/tree.jpg", "64x64"), ("night/tree.jpg", "32x96")),
        (("day/a/tree.jpg", "64x64"), ("night/tree.jpg", "64x64")),
        (("day/tree.a.jpg", "64x64"), ("night/tree.b.jpg", "64x64")),
        (("day/tree.jpg", "64x64"), ("day/tree.png", "64x64")),
        (("day/tree.jpg", "64x64"), ("other/tree.jpg", "64x64")),
    ],
    ids=["name", "bucket", "folder", "end of the name", "same side", "dataset without slider"],
)
def test_other_images_are_no_pair(day: tuple[str, str], night: tuple[str, str]) -> None:
    assert pairs_of(day, night) == [None, None]


def test_each_row_has_the_scale_of_its_dataset() -> None:
    table = pl.DataFrame(
        {"sample_id": ["day/a.jpg", "night/a.jpg", "other/a.jpg"], "dataset": ["day", "night", "other"]}
    )
    rows = with_pairs(table.with_columns(bucket=pl.lit("64x64")), SCALES)
    assert rows["slider"].to_list() == [1, -1, None]
    assert rows["pair"].to_list() == ["a (64x64)", "a (64x64)", None]
