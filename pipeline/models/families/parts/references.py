"""The torch-free side of reference images: images that the denoiser sees next to the noisy latent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from pipeline.errors import BucketError
from pipeline.images.geometry import Crop, Geometry, Size
from pipeline.models.diffusers_folder import ModelFolder


@dataclass(frozen=True)
class TextImages:
    """How a family's text encoder sees reference images.

    Attributes:
        size: Size that the family's pipeline gives to a reference of the given size before the image
            processor reads it.
        processor: Name and version of the image processor, part of each text key with images. Its settings,
            which are also part of these keys, come from the base model.
        num_tokens: Number of tokens that one image adds to an embedding, for estimates.
        in_negative: Whether the pipeline encodes negative prompts and the empty caption with the images too.
    """

    size: Callable[[Size], Size]
    processor: str
    num_tokens: int
    in_negative: bool = True


@dataclass(frozen=True)
class ReferenceSpec:
    """How a family sees reference images.

    Attributes:
        max_number: Maximum number of references of one image.
        size: Size that the family's pipeline gives to a reference of the given size before the VAE encodes
            it. Raises `BucketError` for a size that the pipeline refuses.
        crops: Whether the pipeline crops a reference to `size` after scaling it to `scaled`; otherwise it
            stretches it to `size`.
        required: Whether every image must have a reference.
        scaled: Size to which a cropped reference is scaled before the crop.
        in_text: How the text encoder sees the references; None if it sees only the caption.
    """

    max_number: int
    size: Callable[[ModelFolder, Size], Size]
    crops: bool = False
    required: bool = False
    scaled: Callable[[Size], Size] = lambda original: original
    in_text: TextImages | None = None

    def geometry(self, model: ModelFolder, original: Size) -> Geometry:
        """Return the geometry that the family's pipeline gives to a reference.

        Raises:
            BucketError: The pipeline refuses a reference of this size.
        """
        return self.fitted(original, scaled=self.scaled(original), target=self.size(model, original))

    def fitted(self, original: Size, *, scaled: Size, target: Size) -> Geometry:
        """Return the geometry of a target: the centre of the `scaled` reference, or the stretched one."""
        if not self.crops:
            return Geometry(original, target, Crop(0, 0, *target))

        top, left = (scaled.height - target.height) // 2, (scaled.width - target.width) // 2
        return Geometry(original, scaled, Crop(top, left, *target))


# FLUX.2's pipelines shrink a reference above this area, and refuse shorter edges and larger ratios of edges.
_FLUX2_MAX_PX = 1024 * 1024
_FLUX2_MIN_EDGE_PX = 64
_FLUX2_MAX_ASPECT_RATIO = 8


def flux2_references(max_number: int) -> ReferenceSpec:
    """Return the references of FLUX.2: shrunk to at most a megapixel, and cropped to multiples.

    `max_number` is the publisher's limit; the pipelines accept any number.
    """
    return ReferenceSpec(max_number, _flux2_size, crops=True, scaled=_flux2_scaled)


def _flux2_size(model: ModelFolder, original: Size) -> Size:
    _require_aspect_ratio(original, _FLUX2_MAX_ASPECT_RATIO)
    _require_edges(original, _FLUX2_MIN_EDGE_PX)
    return _floored(model, _flux2_scaled(original))


def _flux2_scaled(original: Size) -> Size:
    num_px = original.height * original.width
    if num_px <= _FLUX2_MAX_PX:
        return original
    scale = math.sqrt(_FLUX2_MAX_PX / num_px)
    return Size(*(int(edge * scale) for edge in original))


KONTEXT_RESOLUTIONS = (
    (672, 1568),
    (688, 1504),
    (720, 1456),
    (752, 1392),
    (800, 1328),
    (832, 1248),
    (880, 1184),
    (944, 1104),
    (1024, 1024),
    (1104, 944),
    (1184, 880),
    (1248, 832),
    (1328, 800),
    (1392, 752),
    (1456, 720),
    (1504, 688),
    (1568, 672),
)
"""Width and height of FLUX.1 Kontext's training images, `PREFERRED_KONTEXT_RESOLUTIONS` in diffusers."""


def _kontext_size(model: ModelFolder, original: Size) -> Size:
    _require_edges(original, _multiple(model))
    floored = _floored(model, original)
    aspect_ratio = floored.width / floored.height
    _, width, height = min(
        (abs(aspect_ratio - width / height), width, height) for width, height in KONTEXT_RESOLUTIONS
    )
    return _floored(model, Size(height, width))


KONTEXT_REFERENCES = ReferenceSpec(max_number=1, size=_kontext_size)
"""The reference of FLUX.1 Kontext: stretched to the nearest of its resolutions."""


# Areas, in pixels, of references of all Qwen families, and of references that Qwen-Image-Edit's text encoder
# sees: `VAE_IMAGE_SIZE` or `output_resolution` squared, and `CONDITION_IMAGE_SIZE` in diffusers.
QWEN_PX, _QWEN_EDIT_TEXT_PX = 1024 * 1024, 384 * 384

# Both edges of a reference of Qwen-Image-Edit and Qwen-Image 2.1 are multiples of this.
_QWEN_MULTIPLE_PX = 32

# Limit of Qwen2-VL's image processor.
_QWEN_MAX_ASPECT_RATIO = 200


def _qwen_size(model: ModelFolder, original: Size) -> Size:
    _require_aspect_ratio(original, _QWEN_MAX_ASPECT_RATIO)
    return _of_area(original, QWEN_PX)


def _of_area(original: Size, num_px: int) -> Size:
    # The order of operations is the same as in the pipelines, so that rounding gives the same size.
    aspect_ratio = original.width / original.height
    width = math.sqrt(num_px * aspect_ratio)
    edges = (width / aspect_ratio, width)
    return Size(*(round(edge / _QWEN_MULTIPLE_PX) * _QWEN_MULTIPLE_PX for edge in edges))


QWEN_EDIT_REFERENCES = ReferenceSpec(
    # The publisher recommends one to three: https://huggingface.co/Qwen/Qwen-Image-Edit-2509
    max_number=3,
    size=_qwen_size,
    required=True,
    in_text=TextImages(
        size=lambda original: _of_area(original, _QWEN_EDIT_TEXT_PX),
        processor="Qwen2VLImageProcessorPil, 1",
        num_tokens=200,
    ),
)
"""The references of Qwen-Image-Edit 2509 and later, stretched to a megapixel for the VAE."""

QWEN_FIRST_EDIT_REFERENCES = replace(
    QWEN_EDIT_REFERENCES,
    max_number=1,
    in_text=TextImages(
        size=lambda original: _of_area(original, QWEN_PX),
        processor="Qwen2VLImageProcessorPil, 1",
        num_tokens=1340,
    ),
)
"""The reference of the first Qwen-Image-Edit, stretched to a megapixel for VAE and text encoder."""

QWEN_IMAGE21_REFERENCES = ReferenceSpec(
    # The pipeline accepts any number; the limit is the same as for Qwen-Image-Edit.
    max_number=3,
    size=_qwen_size,
    in_text=TextImages(
        size=lambda original: _of_area(original, QWEN_PX),
        processor="Qwen2VLImageProcessorPil, 1",
        # Only the text around an image: the transformer puts the image's latent in place of its tokens.
        num_tokens=7,
    ),
)
"""The references of Qwen-Image 2.1, stretched to a megapixel for VAE and text encoder."""


# Area of references of Bria FIBO 2, from `default_sample_size` of its pipeline.
_FIBO2_PX = 1024 * 1024

# Both edges are multiples of the first number and at least the second one.
_FIBO2_MULTIPLE_PX, _FIBO2_MIN_EDGE_PX = 16, 64
_FIBO2_AREA_TOLERANCE = 0.1


@cache
def _fibo2_sizes(num_px: int) -> tuple[Size, ...]:
    """Return the sizes that Bria FIBO 2 was trained at, for an area in pixels."""
    min_px, max_px = ((1 + sign * _FIBO2_AREA_TOLERANCE) * num_px for sign in (-1, 1))
    return tuple(
        Size(height, width)
        for width in range(_FIBO2_MIN_EDGE_PX, 2 * num_px // _FIBO2_MIN_EDGE_PX, _FIBO2_MULTIPLE_PX)
        for height in range(_FIBO2_MIN_EDGE_PX, 2 * num_px // width, _FIBO2_MULTIPLE_PX)
        if min_px <= height * width <= max_px
    )


def _fibo2_size(original: Size) -> Size:
    """Return the size that loses the least to the crop, and then the one with the closest area."""
    aspect_ratio = original.width / original.height

    def order(size: Size) -> tuple[float, int, int]:
        ratio = size.width / size.height / aspect_ratio
        cropped = 1 - min(ratio, 1 / ratio)
        return round(cropped, 9), abs(size.height * size.width - _FIBO2_PX), -size.width

    return min(_fibo2_sizes(_FIBO2_PX), key=order)


def _fibo2_scaled(original: Size) -> Size:
    target = _fibo2_size(original)
    scale = max(target.height / original.height, target.width / original.width)
    return Size(*(math.ceil(edge * scale) for edge in original))


FIBO2_REFERENCES = ReferenceSpec(
    max_number=5,
    size=lambda model, original: _fibo2_size(original),
    crops=True,
    scaled=_fibo2_scaled,
    in_text=TextImages(
        size=_fibo2_size,
        processor="BriaFibo2ImageProcessor and Qwen2VLImageProcessorPil, 1",
        num_tokens=576,
        in_negative=False,
    ),
)
"""The references of Bria FIBO 2, cropped to a megapixel; the text encoder sees the crops, shrunk to 768 px.

The pipeline crops a single reference to the size of the result if the call sets it, otherwise by this rule.
"""


def _multiple(model: ModelFolder) -> int:
    # The edge of a token of FLUX.2 and Kontext: a patch of 2 latent values.
    return 2 ** len(model.config("vae")["block_out_channels"])


def _floored(model: ModelFolder, size: Size) -> Size:
    multiple = _multiple(model)
    return Size(*(edge // multiple * multiple for edge in size))


def _require_aspect_ratio(original: Size, limit: int) -> None:
    if max(original) > min(original) * limit:
        raise _refused(original, f"the aspect ratio of a reference must be at most {limit}:1")


def _require_edges(original: Size, min_px: int) -> None:
    if min(original) < min_px:
        raise _refused(original, f"the edges of a reference must be at least {min_px} px long")


def _refused(original: Size, limit: str) -> BucketError:
    return BucketError(
        f"{limit}, got {original} (height x width)",
        where="datasets[].references",
        fix="replace the reference, or remove its image from the dataset",
    )
