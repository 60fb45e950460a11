"""Decode an image file: read its header, decode its pixels, and resize them for a bucket.

Every stage opens images through this module, so the pixels that are validated are the pixels that are
encoded. A file's format follows from its first bytes, not from its suffix. Every failure of an image is an
`ImageError`. Pillow's LOAD_TRUNCATED_IMAGES is never set: a truncated image is rejected.

The resize uses Pillow's BICUBIC, which antialiases when it shrinks. It was chosen by measuring four
photographs from scikit-image of up to 2 megapixels, shrunk to the area of 512x512 with one thread:

    filter     time     PSNR against an ideal low pass    values that ring by more than 4 levels (maximum)
    BICUBIC    6.9 ms   45 dB                             0.01%  (7 levels)
    LANCZOS    9.8 ms   49 dB                             0.08%  (17 levels)

A VAE's reconstruction is far below 45 dB, so the better PSNR of LANCZOS is lost, while a model learns the
halos of its ringing.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from pipeline.images import colour
from pipeline.images.colour import Background
from pipeline.images.formats import ImageError, formats_of, plugin_version, plugin_versions, require_image
from pipeline.images.geometry import MAX_IMAGE_EDGE_PX, Geometry, Size
from pipeline.storage.regular_files import RefusedFileError, open_regular, read_all
from pipeline.storage.remote_folder import UnreachableError
from pipeline.storage.source import SourceFile
from pipeline.versions import PREPROCESSING_VERSION

MAX_IMAGE_PX = 178_956_970
"""Default of the recipe's `checks.max_image_pixels`: the largest height times width that is decoded. It needs
537 MB as RGB, and it is the size at which Pillow refuses an image."""

DECODER = f"latentline-{PREPROCESSING_VERSION} pillow-{Image.__version__}"
"""Version of the decoder, recorded with each decode result. A new version decodes every file again."""

File: TypeAlias = Path | SourceFile
"""An image file, local or remote."""

_CODEC_OUT_OF_MEMORY = "out of memory"
"""Prefix of the OSError, without errno, that Pillow raises when a C decoder runs out of memory."""

_ORIENTATION_TAG = 274

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The operation that makes an image of each EXIF orientation upright."""

# This module checks the limit itself, before decoding and with the file's name. Pillow's own check would warn
# or raise during decoding, depending on the process's warning filters.
Image.MAX_IMAGE_PIXELS = None


@dataclass(frozen=True)
class Header:
    """The properties of an image file that are known before its pixels are decoded.

    Attributes:
        format: Pillow's name of the format, from the first bytes.
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
    """Read an image's header. Pixels are decoded only for the rare PNG with metadata behind them.

    Args:
        source: The file's bytes, its path, or the open file at its start.
        max_px: Maximum height times width.

    Raises:
        ImageError: The image cannot be opened, or it exceeds the limits.
    """
    with _opened(source, max_px) as image:
        size = _oriented_size(image)
        notes = {"animated": _is_animated(image), "colour_profile": colour.changes_colours(image)}
        return Header(
            format=str(image.format),
            mode=image.mode,
            channels=len(image.getbands()),
            size=size,
            orientation=_orientation(image),
            notes=tuple(name for name in sorted(notes) if notes[name]),
        )


def decode(
    source: bytes | File, background: Background, *, max_px: int = MAX_IMAGE_PX, draft_px: int | None = None
) -> Image.Image:
    """Decode the first frame completely, upright and as 8-bit sRGB (mode RGB).

    Args:
        source: The file's bytes, or its path.
        background: Colour that shows through transparent pixels.
        max_px: Maximum height times width.
        draft_px: For thumbnails: a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, if its edges stay at
            least this long.

    Raises:
        ImageError: The image cannot be decoded.
    """
    with _opened(source, max_px) as image:
        orientation_before = _orientation(image)
        if draft_px is not None:
            image.draft(None, (draft_px, draft_px))
        image.load()

        # Loading a TIFF makes it upright and removes its orientation. A PNG may store its orientation behind
        # the pixels, where it is only visible now.
        orientation = _orientation(image) if image.format in {"TIFF", "PNG"} else orientation_before
        rgb = colour.to_srgb(image, background)
        return rgb.transpose(_TRANSPOSE[orientation]) if orientation in _TRANSPOSE else rgb


def decoder_version(image_format: str | None) -> str:
    """Return the version of the decoder for a format: `DECODER`, plus the plug-in that opens the format."""
    plugin = plugin_version(image_format)
    return DECODER if plugin is None else f"{DECODER} {plugin}"


def is_current_decoder(version: str) -> bool:
    """Return True if `decoder_version` can return this version now; results of any other are outdated."""
    return version == DECODER or version in {f"{DECODER} {plugin}" for plugin in plugin_versions()}


def load_pixels(
    file: File, geometry: Geometry, background: Background, *, content_hash: str
) -> npt.NDArray[np.uint8]:
    """Return the pixels that the VAE encodes: a uint8 array (H, W, 3), sRGB, of the geometry's target size.

    Only the crop's region of the source is resized, so memory does not grow with the area that is cropped
    away, even for an extreme aspect ratio.

    Args:
        file: The image file.
        geometry: The geometry recorded for this image.
        background: Colour that shows through transparent pixels.
        content_hash: `hash_bytes` of the file for which the geometry was computed.

    Raises:
        ImageError: The file is missing (`vanished`), has other content (`changed`), or does not decode.
    """
    data = read_bytes(file)
    if hash_bytes(data) != content_hash:
        raise changed_error(file)

    # The recipe's limit, which accepted this content, may be above the default.
    original = geometry.original_size
    image = decode(data, background, max_px=max(MAX_IMAGE_PX, original.height * original.width))
    if Size(image.height, image.width) != original:
        detail = f"it decodes to {image.height}x{image.width}, but the recorded size is {original}"
        raise ImageError(
            "size_disagrees",
            detail,
            where=str(file),
            fix="start the job again; if the error returns, export the image again",
        )

    target = geometry.target_size
    resized = image.resize((target.width, target.height), Image.Resampling.BICUBIC, box=geometry.source_box)
    return np.array(resized, dtype=np.uint8)


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


def changed_error(path: File | str) -> ImageError:
    """Return the error for a file with other content than recorded."""
    detail = "its content has changed since the scan"
    return ImageError("changed", detail, where=str(path), fix="start the job again once the file is complete")


def vanished_error(path: File | str) -> ImageError:
    """Return the error for a file that no longer exists."""
    detail = "the file no longer exists"
    return ImageError(
        "vanished", detail, where=str(path), fix="restore it, or start the job again without it"
    )


@contextmanager
def image_errors(where: str) -> Generator[None]:
    """Convert every exception from reading or decoding one image into an `ImageError`.

    Decoders raise any exception their parsers meet: OSError, struct.error, SyntaxError, ValueError,
    zlib.error, KeyError, MemoryError. One image must not stop the others, and its file must be named.
    """
    try:
        yield
    except ImageError as err:
        if err.where == where:
            raise
        raise ImageError(err.reason, err.detail, where=where, fix=err.fix) from err
    except FileNotFoundError as err:
        raise vanished_error(where) from err
    except RefusedFileError as err:
        raise ImageError(err.reason, err.detail, where=where, fix=err.fix) from err
    except Exception as err:
        raise _image_error(err, where) from err


def _image_error(err: Exception, where: str) -> ImageError:
    text = f"{type(err).__name__}: {' '.join(str(err).split())[:500]}"
    if isinstance(err, Image.UnidentifiedImageError):
        detail = "it starts like an image, but its header cannot be read"
        return ImageError("undecodable", detail, where=where, fix="export it again, or remove it")
    if isinstance(err, UnreachableError):
        fix = "check that the service answers and that you may read the file, then start the job again"
        return ImageError("unreadable", str(err), where=where, fix=fix)
    if isinstance(err, OSError) and err.errno is not None:
        return ImageError("unreadable", text, where=where, fix="make the file readable, or remove it")
    if isinstance(err, MemoryError) or str(err).startswith(_CODEC_OUT_OF_MEMORY):
        fix = "make it smaller, or run on a machine with more memory"
        detail = f"there is not enough memory to decode it ({text})"
        return ImageError("out_of_memory", detail, where=where, fix=fix)
    if isinstance(err, (OSError, EOFError)) and ("truncated" in text.lower() or isinstance(err, EOFError)):
        fix = "copy or download it again: the end of the file is missing"
        return ImageError("truncated", text, where=where, fix=fix)
    return ImageError("undecodable", text, where=where, fix="export it again, or remove it")


@contextmanager
def _opened(source: bytes | File | BinaryIO, max_px: int) -> Generator[Image.Image]:
    """Open an image within the limits; failures before it is closed become an `ImageError`."""
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
        file.seek(0)
        with Image.open(file, formats=formats_of(start)) as image:
            _require_limits(image, max_px)
            yield image


def _require_limits(image: Image.Image, max_px: int) -> None:
    width, height = image.size
    fix = "make it smaller, or remove it"
    if max(height, width) > MAX_IMAGE_EDGE_PX:
        detail = f"an edge must be at most {MAX_IMAGE_EDGE_PX:,} pixels long, got {height}x{width}"
        raise ImageError("too_large", detail, fix=fix)
    if height * width > max_px:
        fix += f"; or set checks.max_image_pixels to {height * width} if you trust the file"
        detail = f"it must have at most {max_px:,} pixels, got {height * width:,} ({height}x{width})"
        raise ImageError("too_large", detail, fix=fix)
    if min(height, width) < 1:
        raise ImageError("undecodable", f"it contains zero pixels ({height}x{width})", fix="remove it")


def _orientation(image: Image.Image) -> int:
    """Return the orientation from EXIF or XMP, 1 to 8.

    It is 1 if there is none or the metadata is damaged: viewers show such a photograph as stored, so it stays
    usable.
    """
    try:
        if image.format == "PNG" and _has_late_metadata(image):
            image.load()
        # The PNG plug-in's own getexif would decode all pixels to search behind them.
        value = Image.Image.getexif(image).get(_ORIENTATION_TAG, 1)
    except Exception:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _has_late_metadata(image: Image.Image) -> bool:
    """Return True if a PNG that is not loaded yet has EXIF or text chunks behind its first pixel data.

    A PNG is a signature of 8 bytes and a list of chunks: length (4, big endian), type (4), data, checksum
    (4).
    """
    file: BinaryIO | None = getattr(image, "fp", None)
    if file is None or getattr(image, "_im", None) is not None:
        return False

    position = file.tell()
    try:
        file.seek(8)
        seen_pixels = False
        while len(header := file.read(8)) == 8:
            length, chunk_type = int.from_bytes(header[:4], "big"), header[4:]
            if seen_pixels and chunk_type in {b"eXIf", b"tEXt", b"zTXt", b"iTXt"}:
                return True
            seen_pixels |= chunk_type == b"IDAT"
            file.seek(length + 4, io.SEEK_CUR)
        return False
    finally:
        file.seek(position)


def _oriented_size(image: Image.Image) -> Size:
    """Return the size of the upright image. Pillow already applies a TIFF's own tag to its size."""
    size = Size(image.height, image.width)
    already_upright = image.format == "TIFF" and _ORIENTATION_TAG in getattr(image, "tag_v2", {})
    return size.transposed if _orientation(image) >= 5 and not already_upright else size


def _is_animated(image: Image.Image) -> bool:
    """Return True if the file has further frames. In an MPO, those are views or maps of the same picture."""
    try:
        return image.format != "MPO" and bool(getattr(image, "is_animated", False))
    except Exception:
        return False
