"""The section `buckets`: the available target sizes, and how images are fitted into them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from pipeline.recipe.settings import Settings, Violation, one_of, reject

MAX_EDGE_PX = 16_384
"""Longest edge of a bucket."""

# A base model may require a larger multiple, which `require_size_multiple` checks.
LATENT_FACTOR = 8
"""Smallest downscaling factor of the supported VAEs; every bucket edge must be a multiple of it."""

_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")
_LIMIT = re.compile(r"limit\((\d+(?:\.\d+)?)\)")


def check_size(value: str) -> str:
    """Return `value` if it is `<height>x<width>` with edges up to `MAX_EDGE_PX`."""
    match = _SIZE.fullmatch(value)
    if not match:
        reject(f"a size must be <height>x<width>, got {value!r}", "write both in pixels, such as 832x1216")
    for edge in (int(edge) for edge in match.groups()):
        if edge > MAX_EDGE_PX:
            what = f"the edges of a size must be at most {MAX_EDGE_PX} pixels, got {value}"
            reject(what, "use shorter edges")
    return value


def check_upscale(value: str) -> str:
    """Return `value` if it is `allow`, `never`, or `limit(x)` with x >= 1."""
    if value in ("allow", "never"):
        return value
    match = _LIMIT.fullmatch(value)
    if not match:
        reject(
            f"buckets.upscale must be allow, never or limit(...), got {value!r}",
            "use allow, never, or limit(1.5)",
        )
    if Fraction(match[1]) < 1:
        reject(
            f"the limit of buckets.upscale must be at least 1, got {value}",
            "use never, or a limit such as 1.5",
        )
    return value


Resolution = Annotated[int, Field(ge=8, le=MAX_EDGE_PX)]


class BucketSettings(Settings):
    """Sizes that images are scaled and cropped to."""

    requirements = (("crop_seed", "crop", "random"),)

    resolution: Resolution = Field(
        default=1024,
        description="Pixel budget of a bucket, as the edge of a square: 1024 allows 1024x1024 pixels, or as "
        "many in another aspect ratio. Must be a multiple of `step`.",
    )
    resolutions: tuple[Resolution, ...] = Field(
        default=(),
        description="Several resolutions instead of `resolution`; `per_image` decides which one an image "
        "gets.",
    )
    per_image: Literal["best", "each"] = Field(
        default="best",
        description="How images use several `resolutions`. best: each image gets the largest resolution that "
        "it fills within the limit of `upscale` (without enlarging, for `upscale: allow`), or else the "
        "smallest one. each: an image is used at every resolution that `upscale` lets it fill, and an epoch "
        "shows it once at each.",
    )
    step: int = Field(
        default=64,
        ge=1,
        le=MAX_EDGE_PX,
        description="Bucket edges are multiples of this number of pixels. Smaller steps crop less but create "
        "more buckets.",
    )
    max_aspect_ratio: float = Field(
        default=3.0,
        ge=1.0,
        description="Largest allowed ratio of long to short edge, in either orientation.",
    )
    sizes: tuple[Annotated[str, AfterValidator(check_size)], ...] = Field(
        default=(),
        description="Explicit list of bucket sizes as height x width, such as [1024x1024, 832x1216], instead "
        "of the sizes derived from `resolution` and `step`. `latentline fit-buckets` finds a list that suits "
        "the dataset.",
    )
    upscale: Annotated[str, AfterValidator(check_upscale)] = Field(
        default="allow",
        description="allow: small images are enlarged to fill their bucket. never: no image is enlarged. "
        "limit(1.5): images are enlarged at most 1.5 times.",
    )
    small_images: Literal["own_bucket", "reject"] = Field(
        default="own_bucket",
        description="Treatment of images that `upscale` does not allow to be enlarged. own_bucket: a bucket "
        "of the image's own size, rounded down to steps. reject: the image is rejected.",
    )
    crop: Literal["centre", "top", "random", "focus"] = Field(
        default="centre",
        description="Part of an image that is kept if it does not fit its bucket. centre: the middle. top: "
        "the upper part. random: a position derived from the sample and `crop_seed`, the same in every run. "
        "focus: the part around the point in `datasets[].focus_columns`, or the middle if an image has none.",
    )
    crop_seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of `crop: random`.")
    underfilled: Literal["partial", "repeat", "drop"] = Field(
        default="partial",
        description="Treatment of samples that do not fill the last batch of their bucket. partial: use a "
        "smaller batch. repeat: fill the batch with other samples of the bucket. drop: skip them in this "
        "epoch; every epoch skips different samples.",
    )
    max_crop_loss: float = Field(
        default=0.25,
        ge=0.0,
        le=1.0,
        description="A warning lists images that lose more than this fraction of their area to the crop.",
    )

    @property
    def size_pairs(self) -> tuple[tuple[int, int], ...]:
        """`sizes` as (height, width)."""
        pairs = (size.split("x") for size in self.sizes)
        return tuple((int(height), int(width)) for height, width in pairs)

    @property
    def budgets(self) -> tuple[int, ...]:
        """The values of `resolutions`, or else of `resolution`."""
        return self.resolutions or (self.resolution,)

    @property
    def upscale_limit(self) -> Fraction | None:
        """Largest factor that `upscale` allows, exact to six decimals; None for any factor."""
        if self.upscale == "allow":
            return None
        if self.upscale == "never":
            return Fraction(1)
        # Products with edges of images must fit into 64 bits.
        limit = Fraction(self.upscale[len("limit(") : -1]).limit_denominator(10**6)
        return min(limit, Fraction(MAX_EDGE_PX))

    def with_resolutions(self, resolution: int | None, resolutions: tuple[int, ...]) -> BucketSettings:
        """Return these settings with a dataset's own resolutions, if it has any, in place of all sizes."""
        if resolution is None and not resolutions:
            return self
        own = {"resolution": resolution or self.resolution, "resolutions": resolutions, "sizes": ()}
        return self.model_copy(update=own)

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        yield from self._step_violations()
        yield from self._size_violations()
        yield from self._unused_sizes()

        if self.resolutions and self.sizes:
            what = "buckets.sizes and buckets.resolutions cannot be used together"
            yield Violation("sizes", what, "remove one of them", involves=("sizes", "resolutions"))
        if len(set(self.resolutions)) < len(self.resolutions):
            yield Violation("resolutions", "duplicate value in buckets.resolutions", "remove one")
        if self.small_images == "reject" and self.upscale == "allow":
            what = "small_images: reject requires upscale: never or limit(...), got upscale: allow"
            fix = "set upscale: never or limit(1.5), or remove small_images"
            yield Violation("small_images", what, fix, involves=("small_images", "upscale"))

    def _step_violations(self) -> Iterator[Violation]:
        if self.sizes and not self.resolutions:
            return
        keys = {f"resolutions[{index}]": each for index, each in enumerate(self.resolutions)}
        for key, resolution in (keys or {"resolution": self.resolution}).items():
            if violation := step_violation(f"buckets.{key}", resolution, self.step):
                involves = ("resolution", "resolutions", "step", "sizes")
                yield replace(violation, key=key, involves=involves)

    def _size_violations(self) -> Iterator[Violation]:
        # A step below 8 states that the base model accepts such edges.
        multiple = min(self.step, LATENT_FACTOR)
        for index, size in enumerate(self.size_pairs):
            for edge in (edge for edge in size if edge % multiple):
                below = edge // multiple * multiple or multiple
                what = (
                    f"the edges of a size must be multiples of {multiple}, got {edge} in {self.sizes[index]}"
                )
                fix = f"use {below} or {below + multiple}"
                yield Violation(f"sizes[{index}]", what, fix, involves=("sizes", "step"))

    def _unused_sizes(self) -> Iterator[Violation]:
        # Images go to the nearest aspect ratio and then to the larger size, so a smaller one is never used.
        largest: dict[Fraction, tuple[int, int]] = {}
        for height, width in self.size_pairs:
            ratio = Fraction(width, height)
            largest[ratio] = max(largest.get(ratio, (height, width)), (height, width))

        for index, (height, width) in enumerate(self.size_pairs):
            best = largest[Fraction(width, height)]
            if (height, width) in self.size_pairs[:index]:
                what = f"duplicate size {height}x{width} (height x width)"
                yield Violation(f"sizes[{index}]", what, "remove one", involves=("sizes",))
            elif best != (height, width):
                what = f"size {height}x{width} is never used: {best[0]}x{best[1]} has the same aspect ratio "
                what += "(height x width)"
                fix = "remove it, or use resolutions for buckets of several areas"
                yield Violation(f"sizes[{index}]", what, fix, involves=("sizes",))


def step_violation(name: str, resolution: int, step: int) -> Violation | None:
    """Return the violation, with working alternatives, if `resolution` is not a multiple of `step`.

    `name` is the full name of the resolution's key.
    """
    if resolution % step == 0:
        return None

    # Both neighbours are offered, and the largest steps that divide the resolution as it is.
    below, above = resolution // step * step, (resolution // step + 1) * step
    fix = f"use {above}" if below == 0 else f"use {below} or {above}"
    smaller_steps = [n for n in range(LATENT_FACTOR, step, LATENT_FACTOR) if resolution % n == 0]
    if smaller_steps:
        fix += f", or set buckets.step to {one_of(smaller_steps[-4:])}"
    what = f"{name} must be a multiple of buckets.step, got {resolution} and {step}"
    return Violation(name, what, fix, involves=("datasets", "buckets"))
