"""The section `buckets`: which sizes there are, and how images are fitted into them."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from pipeline.recipe.rules import LATENT_FACTOR, Broken, divisible, raise_broken, reject
from pipeline.recipe.section import Settings

MAX_EDGE_PX = 16_384

_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")
_LIMIT = re.compile(r"limit\((\d+(?:\.\d+)?)\)")


def check_size(value: str) -> str:
    """`value` if it reads <height>x<width> with edges that a model can have."""
    found = _SIZE.fullmatch(value)
    if not found:
        reject(f"{value!r} is no size", "write height x width in pixels, such as 832x1216")
    edges = [int(edge) for edge in found.groups()]
    for edge in edges:
        if edge > MAX_EDGE_PX:
            reject(f"{value} has an edge of {edge} pixels", f"use edges of at most {MAX_EDGE_PX}")
        if edge % LATENT_FACTOR:
            below = edge // LATENT_FACTOR * LATENT_FACTOR or LATENT_FACTOR
            reject(
                f"{value}: {edge} is not a multiple of {LATENT_FACTOR}",
                f"use {below} or {below + LATENT_FACTOR}",
            )
    return value


def check_upscale(value: str) -> str:
    """`value` if it is allow, never, or limit(x) with x of at least 1."""
    if value in ("allow", "never"):
        return value
    found = _LIMIT.fullmatch(value)
    if not found:
        reject(f"upscale is {value!r}", "use allow, never, or limit(1.5)")
    if Fraction(found[1]) < 1:
        reject(f"{value} would make images smaller than their bucket", "use a limit of at least 1")
    return value


Resolution = Annotated[int, Field(ge=8, le=MAX_EDGE_PX)]


class BucketSettings(Settings):
    """The sizes that images are scaled and cropped to."""

    resolution: Resolution = Field(
        default=1024,
        description="Pixel budget of a bucket, as the edge of a square: 1024 means 1024x1024 or as many "
        "pixels in another aspect ratio. A multiple of step.",
    )
    resolutions: tuple[Resolution, ...] = Field(
        default=(),
        description="Several budgets in place of resolution: see per_image.",
    )
    per_image: Literal["best", "each"] = Field(
        default="best",
        description="With resolutions. best: each image goes to the largest that it fills within the limit "
        "of upscale (1 with allow), or else to the smallest. each: it is a sample of each one that upscale "
        "lets it fill, and an epoch shows it once in each.",
    )
    step: int = Field(
        default=64,
        ge=1,
        le=MAX_EDGE_PX,
        description="Bucket edges are multiples of this many pixels; small steps crop less, in more buckets.",
    )
    max_aspect_ratio: float = Field(
        default=3.0,
        ge=1.0,
        description="No bucket is longer than this many times its short edge, lying or standing.",
    )
    sizes: tuple[Annotated[str, AfterValidator(check_size)], ...] = Field(
        default=(),
        description="An explicit list of bucket sizes, height x width, such as [1024x1024, 832x1216], in "
        "place of those that resolution and step make; `latentline fit-buckets` finds a good one.",
    )
    upscale: Annotated[str, AfterValidator(check_upscale)] = Field(
        default="allow",
        description="allow: small images are enlarged to their bucket. never: no image is enlarged. "
        "limit(1.5): none more than 1.5 times.",
    )
    small_images: Literal["own_bucket", "reject"] = Field(
        default="own_bucket",
        description="What upscale forbids to enlarge goes into a bucket of its own size, in steps, or is "
        "left out.",
    )
    crop: Literal["centre", "top", "random", "focus"] = Field(
        default="centre",
        description="What is kept of an image that overlaps its bucket: the middle; the upper part; a place "
        "that the sample and crop_seed decide, the same each time; or what is around the point that "
        "datasets[].focus_columns name, and the middle of images without one.",
    )
    crop_seed: int = Field(default=0, ge=0, lt=2**63, description="Of random crops.")
    underfilled: Literal["partial", "repeat", "drop"] = Field(
        default="partial",
        description="The samples of a bucket that do not fill its last batch: a smaller batch; filled up "
        "with others of the bucket; or left out, others in each epoch.",
    )
    max_crop_loss: float = Field(
        default=0.25,
        ge=0.0,
        le=1.0,
        description="A warning lists images that lose a larger share to the crop.",
    )

    @property
    def size_pairs(self) -> tuple[tuple[int, int], ...]:
        """`sizes` as (height, width)."""
        pairs = (size.split("x") for size in self.sizes)
        return tuple((int(height), int(width)) for height, width in pairs)

    @property
    def upscale_limit(self) -> Fraction | None:
        """The largest factor of `upscale`; None for any."""
        if self.upscale == "allow":
            return None
        return Fraction(1) if self.upscale == "never" else Fraction(self.upscale[len("limit(") : -1])

    @model_validator(mode="after")
    def _settings_agree(self) -> BucketSettings:
        broken = [*_indivisible(self), *_contradictions(self), *_unused_sizes(self)]
        if broken:
            keys = (
                "resolution",
                "resolutions",
                "per_image",
                "step",
                "sizes",
                "upscale",
                "small_images",
                "crop",
                "crop_seed",
            )
            raise_broken(broken, involves=keys)
        return self


def _indivisible(settings: BucketSettings) -> list[Broken]:
    if settings.resolutions:
        found = [divisible(resolution, settings.step) for resolution in settings.resolutions]
        return [
            Broken(f"resolutions[{index}]", broken.what, broken.fix)
            for index, broken in enumerate(found)
            if broken is not None
        ]
    broken = divisible(settings.resolution, settings.step)
    return [broken] if broken is not None and not settings.sizes else []


def _contradictions(settings: BucketSettings) -> list[Broken]:
    broken: list[Broken] = []
    if settings.resolutions and settings.sizes:
        what = "resolutions and sizes both say which buckets there are"
        broken.append(Broken("sizes", what, "remove one of them"))
    if len(set(settings.resolutions)) < len(settings.resolutions):
        broken.append(Broken("resolutions", "a resolution stands there twice", "remove one"))
    if settings.per_image == "each" and len(settings.resolutions) < 2:
        what = "per_image: each has no effect without several resolutions"
        broken.append(Broken("per_image", what, "set resolutions, or remove per_image"))
    if settings.small_images == "reject" and settings.upscale == "allow":
        what = "small_images: reject has no effect with upscale: allow, which enlarges every small image"
        broken.append(
            Broken("small_images", what, "set upscale: never or limit(1.5), or remove small_images")
        )
    if settings.crop_seed and settings.crop != "random":
        what = f"crop_seed {settings.crop_seed} has no effect with crop: {settings.crop}"
        broken.append(Broken("crop_seed", what, "set crop: random, or remove crop_seed"))
    return broken


def _unused_sizes(settings: BucketSettings) -> list[Broken]:
    """Of two sizes with one aspect ratio the smaller would never be used."""
    broken: list[Broken] = []
    largest: dict[Fraction, tuple[int, int]] = {}
    for height, width in settings.size_pairs:
        ratio = Fraction(width, height)
        largest[ratio] = max(largest.get(ratio, (height, width)), (height, width))
    seen: set[tuple[int, int]] = set()
    for index, (height, width) in enumerate(settings.size_pairs):
        best = largest[Fraction(width, height)]
        if (height, width) in seen:
            broken.append(Broken(f"sizes[{index}]", f"{height}x{width} stands there twice", "remove one"))
        elif best != (height, width):
            what = f"{height}x{width} has the aspect ratio of {best[0]}x{best[1]} and would never be used"
            fix = "remove it, or use resolutions for buckets of several areas"
            broken.append(Broken(f"sizes[{index}]", what, fix))
        seen.add((height, width))
    return broken
