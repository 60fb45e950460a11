"""Decode an image file: read its header, decode its pixels, and resize them for a bucket.

Every stage opens images through this module, so the pixels that are validated are the pixels that are
encoded. A file's format follows from its first bytes, not from its suffix. Every failure of an image is an
`ImageError`. Pillow's LOAD_TRUNCATED_IMAGES is never set: a truncated image is rejected.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from PIL import Image

from pipeline.images import colour
from pipeline.images.avif import require_stated_sizes
from pipeline.images.colour import Background
from pipeline.images.colour_key import load_with_key
from pipeline.images.decode_limits import (
    DECODE_MEMORY,
    MAX_DECODE_BYTES,
    TimedFile,
    contents,
    decode_bytes,
    require_few_scans,
)
from pipeline.images.failures import changed_error, image_errors
from pipeline.images.formats import ImageError, formats_of, plugin_version, plugin_versions, require_image
from pipeline.images.geometry import MAX_IMAGE_EDGE_PX, Geometry, Size
from pipeline.images.orientation import TRANSPOSE, has_late_metadata, orientation_of, oriented_size
from pipeline.images.stated_colour import stated_profile
from pipeline.storage.regular_files import open_regular, read_all
from pipeline.storage.source import MAX_BUFFERED_BYTES, SourceFile
from pipeline.versions import PREPROCESSING_VERSION

if TYPE_CHECKING:
    from pipeline.recipe import CheckSettings

MAX_IMAGE_PX = 178_956_970
"""Default of the recipe's `checks.max_image_pixels`: the largest height times width that is decoded. It is
the size at which Pillow refuses an image."""

MAX_HEADER_CPU_S = 10
"""Processor time for reading a header. Usual images take less than a millisecond, but a header may consist of
millions of parts."""

MAX_QUICK_BYTES = 2_000_000
"""Size of a file up to which reading its header takes at most a second, whatever it contains."""

DECODER = f"latentline-{PREPROCESSING_VERSION} pillow-{Image.__version__}"
"""Version of the decoder, recorded with each decode result. A new version decodes every file again."""

File: TypeAlias = Path | SourceFile
"""An image file, local or remote."""

Convert: TypeAlias = Callable[[Image.Image, Background], Image.Image]
"""Function that converts a decoded image; the second argument is the colour behind transparent pixels."""

# This module checks the limit itself, before decoding and with the file's name. Pillow's own check would warn
# or raise during decoding, depending on the process's warning filters.
Image.MAX_IMAGE_PIXELS = None


class DecodeLimits(NamedTuple):
    """Limits above which an image is refused.

    Attributes:
        max_px: Maximum height times width.
        max_bytes: Maximum memory that decoding may need; None for any. Such an image waits until no other
            is being decoded.
    """

    max_px: int = MAX_IMAGE_PX
    max_bytes: int | None = MAX_DECODE_BYTES


def limits_of_recipe(checks: CheckSettings) -> DecodeLimits:
    """Return the limits of a recipe's `checks`."""
    return DecodeLimits(checks.max_image_pixels, checks.max_decode_bytes)


def limits_of_accepted(original_size: Size) -> DecodeLimits:
    """Return limits for an image that a recipe's limits, which may be above the defaults, have accepted."""
    # Never below the default, so that an image that has become larger is opened and the error names its size.
    return DecodeLimits(max(MAX_IMAGE_PX, original_size.height * original_size.width), max_bytes=None)


@dataclass(frozen=True)
class Header:
    """The properties of an image file that are known before its pixels are decoded.

    Attributes:
        format: Pillow's name of the format.
        mode: Pillow's mode of the stored pixels.
        channels: Number of stored channels; 1 for a palette.
        size: Size after EXIF orientation.
        orientation: EXIF orientation, 1 to 8; 1 if there is none.
        notes: Sorted codes: "animated" (only the first frame is used), "colour_profile" (converted to sRGB).
    """

    format: str
    mode: str
    channels: int
    size: Size
    orientation: int
    notes: tuple[str, ...]


def read_header(source: bytes | File | BinaryIO, *, max_px: int = MAX_IMAGE_PX) -> Header:
    """Read an image's header; an open file must be at its start, and `max_px` limits height times width.

    Raises:
        ImageError: The image cannot be opened, or it exceeds the limits.
    """
    with _opened(source, max_px, max_cpu_s=MAX_HEADER_CPU_S) as (image, file), ExitStack() as memory:
        with suppress(ImageError):  # validation rejects colours that cannot be converted
            _use_stated_colour(image, file)

        # Only loading such a PNG shows its orientation.
        if has_late_metadata(image):
            num_bytes = decode_bytes(image, num_scans=1, converts=False)
            memory.enter_context(DECODE_MEMORY.reserved(num_bytes))
            with suppress(Exception):  # validation reports damaged pixels
                image.load()

        orientation = orientation_of(image)
        notes = {"animated": _is_animated(image), "colour_profile": colour.changes_colours(image)}
        return Header(
            format=str(image.format),
            mode=image.mode,
            channels=len(image.getbands()),
            size=oriented_size(image, orientation),
            orientation=orientation,
            notes=tuple(name for name in sorted(notes) if notes[name]),
        )


def decode(source: bytes | File, background: Background, *, max_px: int = MAX_IMAGE_PX) -> Image.Image:
    """Return the image of `decoded`, and release its memory from the budget of the process."""
    with decoded(source, background, limits=DecodeLimits(max_px)) as image:
        return image


class DecodeCost(NamedTuple):
    """What decoding an image takes, from its header.

    Attributes:
        num_bytes: Memory at the peak.
        passes_px: Number of pixels, times the number of scans of a JPEG.
    """

    num_bytes: int
    passes_px: int


def decoding_of(rules: Iterable[str]) -> str | None:
    """Return decoding rules as text for tables and keys; None for an image without any."""
    return " ".join(sorted(set(rules))) or None


def decode_cost(file: BinaryIO, *, limits: DecodeLimits) -> DecodeCost:
    """Return what decoding an open file takes, and go back to its start; raises like `read_header`."""
    with _opened(file, limits.max_px) as (image, _):
        with suppress(ImageError):
            _use_stated_colour(image, file)
        cost, _ = _require_cost(image, file, limits.max_bytes)
    file.seek(0)
    return cost


@contextmanager
def decoded(
    source: bytes | File | BinaryIO,
    background: Background,
    *,
    limits: DecodeLimits,
    draft_px: int | None = None,
    convert: Convert | None = None,
    rules: list[str] | None = None,
) -> Generator[Image.Image]:
    """Decode the first frame completely, upright and as 8-bit sRGB (mode RGB).

    The memory for it is reserved from the budget of the process until the context ends. An open file must be
    at its start. For thumbnails, `draft_px` lets a JPEG be decoded at 1/2, 1/4 or 1/8 of its size, if its
    edges stay at least this long. `convert` replaces the conversion to sRGB; its errors must be `ImageError`.

    `rules` receives the names of the image's *decoding rules*: rules that release 0.3.0 did not have and that
    apply to this image. They are part of the keys of its cache entries, so a new rule, under a new name,
    changes the keys of the images that it applies to and of no others.

    Raises:
        ImageError: The image cannot be decoded.
    """
    with ExitStack() as memory:
        with _opened(source, limits.max_px) as (image, file):
            # Other conversions read numbers that are no colours.
            has_stated_colour = convert is None and _use_stated_colour(image, file)
            if draft_px is not None:
                image.draft(None, (draft_px, draft_px))
            # Conversion loses it, and validation estimates the quality from it.
            quantization = getattr(image, "quantization", None)
            cost, orientation_before = _require_cost(image, file, limits.max_bytes)
            memory.enter_context(DECODE_MEMORY.reserved(cost.num_bytes))
            has_other_key = load_with_key(image, file)
            if rules is not None:
                own_rules = {"colour_key": has_other_key, "stated_colour": has_stated_colour}
                rules += [name for name, applies in own_rules.items() if applies]
                rules += colour.decoding_rules(image)

            # Loading a TIFF makes it upright and removes its orientation. A PNG may store its orientation
            # behind the pixels, where it is only visible now.
            is_late = image.format in {"TIFF", "PNG"}
            orientation = orientation_of(image) if is_late else orientation_before
            rgb = _upright((convert or colour.to_srgb)(image, background), orientation)
            if rgb is not image:
                image.close()
            if quantization:
                rgb.info["quantization"] = quantization
        yield rgb


def _use_stated_colour(image: Image.Image, file: BinaryIO) -> bool:
    """Give an opened image the profile of `stated_profile`; return whether that changes its colours.

    Raises:
        ImageError: See `stated_profile`.
    """
    profile = stated_profile(image, file)
    if profile is None:
        return False
    changed_before = colour.changes_colours(image)
    image.info["icc_profile"] = profile
    return changed_before or colour.changes_colours(image)


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    return image.transpose(TRANSPOSE[orientation]) if orientation in TRANSPOSE else image


def _require_cost(image: Image.Image, file: BinaryIO, max_bytes: int | None) -> tuple[DecodeCost, int]:
    """Return what decoding an opened image takes, and its orientation as it is visible before decoding."""
    if image.format == "AVIF":
        require_stated_sizes(contents(file), image.size)
    num_scans = require_few_scans(file) if image.format in {"JPEG", "MPO"} else 1
    orientation = 1 if has_late_metadata(image) else orientation_of(image)
    converts = orientation != 1 or not colour.is_srgb(image)
    num_bytes = decode_bytes(image, num_scans=num_scans, converts=converts)
    if max_bytes is not None and num_bytes > max_bytes:
        detail = f"decoding it needs {num_bytes:,} bytes of memory, and the limit is {max_bytes:,}"
        fix = "make it smaller, or save it as an upright 8-bit RGB image"
        fix += f"; or set checks.max_decode_bytes to {num_bytes} if you trust the file"
        raise ImageError("too_much_memory", detail, fix=fix)
    return DecodeCost(num_bytes, image.width * image.height * num_scans), orientation


def decoder_version(image_format: str | None) -> str:
    """Return `DECODER` for a format, with the version of the plug-in that opens the format."""
    plugin = plugin_version(image_format)
    return DECODER if plugin is None else f"{DECODER} {plugin}"


def is_current_decoder(version: str) -> bool:
    """Return True if `decoder_version` can return this version now; results of any other are outdated."""
    return version == DECODER or version in {f"{DECODER} {plugin}" for plugin in plugin_versions()}


def load_pixels(
    file: File, geometry: Geometry, background: Background, *, content_hash: str
) -> npt.NDArray[np.uint8]:
    """Return the pixels that the VAE encodes: a uint8 array (H, W, 3), sRGB, of the geometry's target size.

    `content_hash` is `hash_bytes` of the file for which the geometry was computed.

    Raises:
        ImageError: The file is missing (`vanished`), has other content (`changed`), or does not decode.
    """
    original = geometry.original_size
    with (
        image_errors(str(file)),
        open_content(file, content_hash) as content,
        decoded(content, background, limits=limits_of_accepted(original)) as image,
    ):
        if Size(image.height, image.width) != original:
            decoded_size = f"{image.height}x{image.width} (height x width)"
            detail = f"it decodes to {decoded_size}, but the recorded size is {original}"
            fix = "start the job again; if the error returns, export the image again"
            raise ImageError("size_disagrees", detail, where=str(file), fix=fix)

        target = geometry.target_size
        size_wh = (target.width, target.height)

        # Pillow's BICUBIC antialiases when it shrinks. Four photographs from scikit-image of up to 2
        # megapixels, shrunk to the area of 512x512 with one thread:
        #
        #     filter    time     PSNR against an ideal low pass    values that ring by over 4 levels (maximum)
        #     BICUBIC   6.9 ms   45 dB                             0.01%  (7 levels)
        #     LANCZOS   9.8 ms   49 dB                             0.08%  (17 levels)
        #
        # A VAE's reconstruction is far below 45 dB, so the better PSNR of LANCZOS is lost, while a model
        # learns the halos of its ringing.
        #
        # Only the crop's region of the source is resized, so memory does not grow with the area that is
        # cropped away, even for an extreme aspect ratio.
        resized = image.resize(size_wh, Image.Resampling.BICUBIC, box=geometry.source_box)
        return np.array(resized, dtype=np.uint8)


@contextmanager
def open_content(file: File, content_hash: str) -> Generator[BinaryIO]:
    """Open a file that still has the recorded content; small files are read into memory.

    Raises:
        ImageError: The file is missing (`vanished`), has other content (`changed`), or cannot be read.
    """
    with image_errors(str(file)):
        opened = file.open() if isinstance(file, SourceFile) else open_regular(file)
    with opened:
        stat_before = _stat_if_large(opened)
        with image_errors(str(file)):
            if stat_before is None:
                data = read_all(opened) if isinstance(opened, io.BufferedReader) else opened.read()
                content: BinaryIO = io.BytesIO(data)
                current_hash = hash_bytes(data)
            else:
                content, current_hash = opened, hashlib.file_digest(opened, "sha256").hexdigest()
                opened.seek(0)
        if current_hash != content_hash:
            raise changed_error(file)
        yield content

        # A large file is read twice, so another program may have written to it in between.
        if _stat_if_large(opened) != stat_before:
            raise changed_error(file)


def _stat_if_large(file: BinaryIO) -> tuple[int, int, int] | None:
    """Return size and times of a local file above `MAX_BUFFERED_BYTES`, otherwise None."""
    if not isinstance(file, io.BufferedReader):
        return None
    stat = os.fstat(file.fileno())
    is_large = stat.st_size > MAX_BUFFERED_BYTES
    return (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) if is_large else None


def hash_bytes(data: bytes) -> str:
    """Return the content hash of a file's bytes: SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def read_bytes(file: File) -> bytes:
    """Read a file into memory.

    Raises:
        ImageError: The file is missing (`vanished`) or cannot be read (`unreadable`).
    """
    with image_errors(str(file)):
        if isinstance(file, SourceFile):
            return file.read_bytes()
        with open_regular(file) as opened:
            return read_all(opened)


@contextmanager
def _opened(
    source: bytes | File | BinaryIO, max_px: int, *, max_cpu_s: float | None = None
) -> Generator[tuple[Image.Image, BinaryIO]]:
    """Open an image within the limits, and its file; failures before it is closed become an `ImageError`."""
    is_file = isinstance(source, (Path, SourceFile))
    where = str(source) if is_file else getattr(source, "name", "an image in memory")
    with image_errors(str(where)), ExitStack() as stack:
        if isinstance(source, Path):
            file: BinaryIO = stack.enter_context(open_regular(source))
        elif isinstance(source, SourceFile):
            file = stack.enter_context(source.open())
        else:
            file = io.BytesIO(source) if isinstance(source, bytes) else source

        start = file.read(64)
        require_image(start)

        # A check at each read doubles the time of a JPEG's header (24 to 51 us), and a small file's header is
        # read quickly in any case.
        opened = file
        if max_cpu_s is not None and file.seek(0, os.SEEK_END) > MAX_QUICK_BYTES:
            opened = cast("BinaryIO", TimedFile(file, max_cpu_s))
        file.seek(0)
        with Image.open(opened, formats=formats_of(start)) as image:
            _require_limits(image, max_px)
            yield image, file


def _require_limits(image: Image.Image, max_px: int) -> None:
    width, height = image.size
    fix = "make it smaller, or remove it"
    if max(height, width) > MAX_IMAGE_EDGE_PX:
        detail = f"an edge must be at most {MAX_IMAGE_EDGE_PX:,} pixels long, got {height} high, {width} wide"
        raise ImageError("too_large", detail, fix=fix)
    if height * width > max_px:
        fix += f"; or set checks.max_image_pixels to {height * width} if you trust the file"
        detail = (
            f"it must have at most {max_px:,} pixels, got {height * width:,} ({height} high, {width} wide)"
        )
        raise ImageError("too_large", detail, fix=fix)
    if min(height, width) < 1:
        raise ImageError(
            "undecodable", f"it contains zero pixels ({height} high, {width} wide)", fix="remove it"
        )


def _is_animated(image: Image.Image) -> bool:
    try:
        # The frames of an MPO are views or maps of the same picture.
        return image.format != "MPO" and bool(getattr(image, "is_animated", False))
    # Only a note depends on it. Damage of later frames is no reason to reject the first one.
    except Exception:
        return False
