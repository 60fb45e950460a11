from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import polars as pl
import pytest

from pipeline.trained_lora.plan.inputs import PlanInput, PlanInputs, turn_name

SAMPLES = [
    PlanInput("a", "64x64", repeats=2, variants=3, views=4, dataset="photos", references="1x64x64"),
    PlanInput("b", "64x64", dataset="photos"),
    PlanInput("c", "64x64", dataset="day", slider=1, pair="p"),
    PlanInput("d", "64x64", dataset="night", slider=-1, pair="p"),
    PlanInput("e", "32x96", dataset="photos", references="1x64x64"),
    PlanInput("f", "32x96", dataset="day", slider=1, references="1x64x64"),
    PlanInput("g", "64x64", dataset="night", slider=-1),
    PlanInput("h", "64x64", dataset="photos", references="1x64x64"),
]
"""Samples that differ in all that decides their micro-batches, sorted by name."""


def test_samples_read_back_as_they_were_given_sorted_by_name() -> None:
    samples = PlanInputs.of(reversed(SAMPLES))
    assert list(samples) == SAMPLES
    assert samples[2:5] == SAMPLES[2:5]
    assert samples[-1] == SAMPLES[-1]
    counts = (samples.repeats, samples.variants, samples.views)
    assert [each.tolist() for each in counts] == [
        [2, *[1] * 7],
        [3, *[1] * 7],
        [4, *[1] * 7],
    ]


def test_a_sample_is_shown_once_with_one_caption_and_one_latent_unless_stated() -> None:
    stated = PlanInput("a", "64x64", 1, 1, 1, "", None, None, "")
    assert PlanInput("a", "64x64") == stated


def test_columns_of_sliders_and_references_may_be_missing() -> None:
    plain = [PlanInput(name, "64x64", repeats=2, dataset="photos") for name in "ab"]
    columns = ["variant_id", "bucket", "repeats", "variants", "views", "dataset"]
    assert list(PlanInputs(pl.DataFrame([asdict(each) for each in plain]).select(columns))) == plain


def test_only_samples_of_one_bucket_with_equal_references_on_one_side_of_a_slider_are_a_group() -> None:
    samples = PlanInputs.of(SAMPLES)
    groups = [samples.buckets.members(name).tolist() for name in samples.buckets.names]
    names = sorted("".join(SAMPLES[place].variant_id for place in group) for group in groups)
    assert names == ["ah", "b", "c", "dg", "e", "f"]
    assert [samples.buckets.names[code] for code in samples.buckets.codes] == [
        next(name for name in samples.buckets.names if place in samples.buckets.members(name))
        for place in range(len(SAMPLES))
    ]
    assert samples.datasets.names == ["day", "night", "photos"]
    assert samples.datasets.members("photos").tolist() == [0, 1, 4, 7]


def test_groups_without_references_and_sliders_have_the_names_of_their_buckets() -> None:
    """Their turns are drawn by name, and runs of earlier versions must keep them."""
    assert "64x64" in PlanInputs.of(SAMPLES).buckets.names


def test_both_sides_of_a_slider_have_the_same_turns_and_other_groups_have_others() -> None:
    samples = PlanInputs.of(SAMPLES)
    by_sample = {
        SAMPLES[place].variant_id: turn_name(samples.buckets.names[code])
        for place, code in enumerate(samples.buckets.codes)
    }
    assert by_sample["c"] == by_sample["d"]
    assert len(set(by_sample.values())) == len(samples.buckets.names) - 1


def test_random_choices_depend_on_the_pair_or_else_on_the_sample() -> None:
    samples = PlanInputs.of(SAMPLES)
    places = np.array([3, 0, 2], dtype=np.int32)
    assert list(samples.ids_at(places)) == ["d", "a", "c"]
    assert list(samples.random_names_at(places)) == ["p", "a", "p"]


LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize(
    ("names", "duplicates"),
    [
        ("", ""),
        ("a", ""),
        ("abc", ""),
        ("cac", "c"),
        ("dbbabdbc", "bd"),
        ("aa", "a"),
        (LETTERS[::-1] * 2, LETTERS),
    ],
)
def test_each_duplicate_name_is_listed_once_in_order(names: str, duplicates: str) -> None:
    samples = PlanInputs.of(replace(SAMPLES[0], variant_id=name) for name in names)
    assert samples.duplicates() == list(duplicates)
