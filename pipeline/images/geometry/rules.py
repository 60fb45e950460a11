"""From the settings of a recipe to the rules by which its images are placed."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from pipeline.images.geometry.buckets import Buckets, ladder
from pipeline.images.geometry.placement import Placement
from pipeline.images.geometry.sizes import Size

if TYPE_CHECKING:
    from pipeline.recipe import BucketSettings


def placement_of(settings: BucketSettings) -> Placement:
    """The rules that `settings` state.

    Raises:
        BucketError: No bucket can have these settings.
    """
    if settings.sizes:
        sets = [Buckets(Size(height, width) for height, width in settings.size_pairs)]
    else:
        resolutions = sorted(settings.resolutions or (settings.resolution,))
        sets = [ladder(each, settings.step, settings.max_aspect_ratio) for each in resolutions]
    return Placement(
        sets=tuple(sets),
        upscale_limit=settings.upscale_limit,
        small=settings.small_images,
        crop=settings.crop,
        crop_seed=settings.crop_seed,
        step=settings.step,
        max_aspect_ratio=Fraction(settings.max_aspect_ratio).limit_denominator(1000),
        per_image=settings.per_image,
    )
