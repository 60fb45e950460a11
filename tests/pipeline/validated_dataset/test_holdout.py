"""Similar images are held out together, and only from datasets with a validation fraction."""

from __future__ import annotations

import hashlib

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from pipeline.recipe import recipe_from_mapping
from pipeline.validated_dataset.holdout import held_out, times_drawn

SAMPLES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), max_size=60)


def table(samples: list[tuple[str, int]]) -> pl.DataFrame:
    names = [hashlib.sha256(str(group).encode()).hexdigest() for _, group in samples]
    columns = {"dataset": [dataset for dataset, _ in samples], "duplicate_group": names}
    return pl.DataFrame(columns, schema={"dataset": pl.String, "duplicate_group": pl.String})


@given(SAMPLES, st.floats(0, 0.99), st.floats(0, 0.99))
def test_I24_no_group_is_both_trained_on_and_held_out(
    samples: list[tuple[str, int]], one: float, other: float
) -> None:
    rows = table(samples).with_columns(held_out=held_out(table(samples), {"a": one, "b": other, "c": 0.0}))
    sides = rows.group_by("duplicate_group").agg(pl.col("held_out").n_unique())
    assert (sides["held_out"] == 1).all()
    assert not rows.filter(pl.col("dataset") == "c")["held_out"].any()


def test_about_the_fraction_is_held_out_and_a_larger_fraction_includes_a_smaller_one() -> None:
    rows = table([("a", number) for number in range(4_000)])
    few, many = (held_out(rows, {"a": fraction}) for fraction in (0.1, 0.3))
    # 4,000 draws of 0.1 have a standard deviation of 19.
    assert abs(int(few.sum()) - 400) < 4 * 19
    assert (many | ~few).all()
    assert held_out(rows.reverse(), {"a": 0.1}).reverse().equals(few)


def test_a_dataset_without_a_fraction_keeps_all_its_images() -> None:
    rows = table([("a", number) for number in range(100)] + [("b", number) for number in range(100, 200)])
    held = rows.with_columns(held_out=held_out(rows, {"a": 0.9})).filter("held_out")
    assert set(held["dataset"]) == {"a"}


def test_without_fractions_no_image_is_held_out() -> None:
    rows = table([("a", 1), ("b", 2)])
    for fractions in ({}, {"a": 0.0}, {"a": 0.0, "b": 0.0}):
        held = held_out(rows, fractions)
        assert held.dtype == pl.Boolean
        assert held.to_list() == [False, False]


def test_B01_an_epoch_draws_training_samples_by_repeats_and_held_out_ones_never() -> None:
    rows = table([(name, number) for name in "ab" for number in range(50)] + [("c", 50)])
    recipe = recipe_from_mapping(
        "small",
        {
            "datasets": [
                {"name": "a", "path": "/a", "repeats": 3, "validation_fraction": 0.4},
                {"name": "b", "path": "/b", "validation_fraction": 0.4},
            ],
            "cache_dir": "/cache",
            "output_dir": "/out",
            "model": {"base": "no model"},
        },
    )
    times = times_drawn(rows, recipe.datasets)
    held = held_out(rows, {"a": 0.4, "b": 0.4})
    assert held.any()
    # The recipe no longer has the dataset c.
    expected = [
        0 if out else {"a": 3, "b": 1, "c": 1}[name] for name, out in zip(rows["dataset"], held, strict=True)
    ]
    assert times.to_list() == expected
