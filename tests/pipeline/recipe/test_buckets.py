from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import RecipeError
from pipeline.images.geometry import Size, placement_of
from pipeline.recipe import BucketSettings, Recipe, recipe_from_mapping
from pipeline.recipe.buckets import step_violation


def recipe(**buckets: Any) -> Recipe:
    values = {"datasets": [{"name": "d", "path": "d"}], "output_dir": "out", "model": {"base": "a/b"}}
    return recipe_from_mapping("small", values | {"buckets": buckets})


@pytest.mark.parametrize(
    ("buckets", "limit", "sizes"),
    [
        ({"sizes": ["64x128", "128x64"]}, None, {Size(64, 128), Size(128, 64)}),
        ({"resolutions": [128, 64], "max_aspect_ratio": 1.0}, None, {Size(64, 64), Size(128, 128)}),
        ({"resolution": 64, "max_aspect_ratio": 1.0, "upscale": "never"}, Fraction(1), {Size(64, 64)}),
        *(
            ({"resolution": 64, "max_aspect_ratio": 1.0, "upscale": f"limit({text})"}, limit, {Size(64, 64)})
            for text, limit in {
                "1.3333": Fraction(13333, 10000),
                "1.333333": Fraction(1333333, 10**6),
                "1.3333333333333333": Fraction(4, 3),
                "1.00000000000000000001": Fraction(1),
                "99999999999999999999": Fraction(16_384),
            }.items()
        ),
        (
            {"resolution": 64, "max_aspect_ratio": 1.0, "upscale": "limit(1.5)"},
            Fraction(3, 2),
            {Size(64, 64)},
        ),
    ],
    ids=str,
)
def test_settings_define_the_sizes_and_the_upscale_limit(
    buckets: dict[str, Any], limit: Fraction | None, sizes: set[Size]
) -> None:
    valid_recipe = recipe(**buckets)
    assert Recipe.model_validate_json(valid_recipe.model_dump_json()) == valid_recipe
    placement = placement_of(valid_recipe.buckets)
    assert placement.upscale_limit == limit
    assert set(placement.sizes) == sizes


def test_resolutions_are_sorted_from_the_smallest() -> None:
    areas = [
        buckets.sizes[0]
        for buckets in placement_of(BucketSettings(resolutions=(512, 256), max_aspect_ratio=1.0)).sets
    ]
    assert areas == [Size(256, 256), Size(512, 512)]


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ({"sizes": ["64"]}, "must be <height>x<width>"),
        ({"sizes": ["64x100"]}, "use 96 or 104"),
        ({"sizes": ["64x99992"]}, "must be at most 16384 pixels"),
        ({"sizes": ["64x64", "128x128"]}, "64x64 is never used: 128x128 has the same aspect ratio"),
        ({"sizes": ["64x64", "64x64"]}, "duplicate size 64x64"),
        ({"sizes": ["64x64"], "resolutions": [64]}, "remove one of them"),
        ({"resolutions": [64, 64]}, "duplicate value in buckets.resolutions"),
        (
            {"resolutions": [64, 100], "step": 8},
            r"buckets.resolutions\[1\] must be a multiple of buckets.step, got 100 and 8",
        ),
        ({"upscale": "sometimes"}, r"use allow, never, or limit\(1.5\)"),
        ({"upscale": "limit(0.5)"}, "at least 1"),
        ({"small_images": "reject"}, "requires upscale: never or limit"),
        ({"crop_seed": 4}, "set crop: random"),
        ({"per_image": "each", "resolutions": [64]}, "set resolutions, or remove per_image"),
        ({"crop": "focus"}, r"set datasets\[\].focus_columns"),
        ({"underfilled": "pad"}, "use partial, repeat or drop"),
    ],
    ids=str,
)
def test_B03_B08_a_contradiction_is_a_mistake_with_a_fix(buckets: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(**buckets)


@given(st.integers(8, 4096), st.integers(1, 512))
def test_every_suggested_resolution_and_step_is_valid(resolution: int, step: int):
    violation = step_violation("buckets.resolution", resolution, step)
    assert (violation is None) == (resolution % step == 0)
    if violation is None:
        return
    head, _, tail = violation.fix.partition(", or set buckets.step to ")
    for suggested in numbers(head):
        assert step_violation("buckets.resolution", suggested, step) is None
    for suggested in numbers(tail):
        assert step_violation("buckets.resolution", resolution, suggested) is None
        assert suggested % 8 == 0
        assert suggested < step


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.replace(",", " ").split() if word.isdigit()]


def test_a_resolution_that_is_not_a_multiple_of_the_step_has_suggestions():
    violation = step_violation("buckets.resolution", 1000, 64)
    assert violation is not None
    assert violation.what == "buckets.resolution must be a multiple of buckets.step, got 1000 and 64"
    assert violation.fix == "use 960 or 1024, or set buckets.step to 8 or 40"
