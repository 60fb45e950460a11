from fractions import Fraction
from typing import Any

import pytest

from pipeline.errors import RecipeError
from pipeline.images.geometry import Size, placement_of
from pipeline.recipe import BucketSettings, Recipe, recipe_from_mapping


def recipe(**buckets: Any) -> Recipe:
    values = {"datasets": [{"name": "d", "path": "d"}], "output_dir": "out", "model": {"base": "a/b"}}
    return recipe_from_mapping("small", values | {"buckets": buckets})


@pytest.mark.parametrize(
    ("buckets", "limit", "sizes"),
    [
        ({"sizes": ["64x128", "128x64"]}, None, {Size(64, 128), Size(128, 64)}),
        ({"resolutions": [128, 64], "max_aspect_ratio": 1.0}, None, {Size(64, 64), Size(128, 128)}),
        ({"resolution": 64, "max_aspect_ratio": 1.0, "upscale": "never"}, Fraction(1), {Size(64, 64)}),
        (
            {"resolution": 64, "max_aspect_ratio": 1.0, "upscale": "limit(1.5)"},
            Fraction(3, 2),
            {Size(64, 64)},
        ),
    ],
    ids=str,
)
def test_settings_become_rules(buckets: dict[str, Any], limit: Fraction | None, sizes: set[Size]) -> None:
    made = recipe(**buckets)
    assert Recipe.model_validate_json(made.model_dump_json()) == made
    placement = placement_of(made.buckets)
    assert placement.upscale_limit == limit
    assert set(placement.sizes) == sizes


def test_resolutions_are_tried_from_the_smallest_whatever_their_order() -> None:
    areas = [
        buckets.sizes[0]
        for buckets in placement_of(BucketSettings(resolutions=(512, 256), max_aspect_ratio=1.0)).sets
    ]
    assert areas == [Size(256, 256), Size(512, 512)]


@pytest.mark.parametrize(
    ("buckets", "said"),
    [
        ({"sizes": ["64"]}, "write height x width"),
        ({"sizes": ["64x100"]}, "use 96 or 104"),
        ({"sizes": ["64x99992"]}, "use edges of at most 16384"),
        ({"sizes": ["64x64", "128x128"]}, "64x64 has the aspect ratio of 128x128"),
        ({"sizes": ["64x64", "64x64"]}, "stands there twice"),
        ({"sizes": ["64x64"], "resolutions": [64]}, "remove one of them"),
        ({"resolutions": [64, 64]}, "a resolution stands there twice"),
        ({"resolutions": [64, 100], "step": 8}, "resolution 100 is not a multiple of step 8"),
        ({"upscale": "sometimes"}, r"use allow, never, or limit\(1.5\)"),
        ({"upscale": "limit(0.5)"}, "at least 1"),
        ({"small_images": "reject"}, "has no effect with upscale: allow"),
        ({"crop_seed": 4}, "set crop: random"),
        ({"per_image": "each", "resolutions": [64]}, "set resolutions, or remove per_image"),
        ({"crop": "focus"}, r"name them in datasets\[\].focus_columns"),
        ({"underfilled": "pad"}, "the choices are partial, repeat, drop"),
    ],
    ids=str,
)
def test_B03_B08_what_contradicts_itself_is_a_mistake_with_its_fix(
    buckets: dict[str, Any], said: str
) -> None:
    with pytest.raises(RecipeError, match=said):
        recipe(**buckets)
