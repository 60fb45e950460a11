"""The one way from an image file to pixels: header, decoding, and the resize to a bucket's size.

Every stage that opens an image calls this module, so that what was validated is what is encoded. A file's
format is what its first bytes say, whatever its suffix. Every failure of one image, of whichever kind, is one
`ImageError`. Pillow's LOAD_TRUNCATED_IMAGES is never set: half a picture is no picture.

The resize is Pillow's BICUBIC, which antialiases when it shrinks. Measured on JPEGs of four photographs of
scikit-image of up to 2 megapixels, shrunk to the area of 512 squared, one thread, means: BICUBIC 6.9 ms,
LANCZOS 9.8 ms; PSNR against an ideal low pass 45 and 49 dB, both far above what a VAE gives back; ringing of
more than 4 levels beyond the pixels around in 0.01% and 0.08% of the values, the worst 7 and 17 levels. Halos
are learnt and the last 4 dB are not seen: BICUBIC.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from pipeline.images import colour
from pipeline.images.colour import Background
from pipeline.images.formats import ImageError, formats_of, plugin_of, plugins, require_image
from pipeline.images.geometry import MAX_IMAGE_EDGE_PX, Geometry, Size
from pipeline.storage.source import SourceFile, UnreachableError
from pipeline.versions import PREPROCESSING_VERSION

MAX_IMAGE_PX = 178_956_970
"""Height times width of the largest image that is decoded, unless the recipe's `checks.max_image_pixels` says
otherwise: 537 MB as RGB; where Pillow too would refuse."""

DECODER = f"latentline-{PREPROCESSING_VERSION} pillow-{Image.__version__}"
"""What a verdict about a file's pixels holds for; with another one each file is decoded anew. See
`decoder_of`."""

_CODEC_OUT_OF_MEMORY = "out of memory"
"""Beginning of the OSError, without a number, that Pillow makes of what its decoders in C say."""

File: TypeAlias = Path | SourceFile
"""Where an image lies."""

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation to what puts the image upright."""

# The limit is checked here, before decoding, for each image and with its name; Pillow's own check would warn
# or raise in the middle of the work, depending on the process's warning filters.
Image.MAX_IMAGE_PIXELS = None


@dataclass(frozen=True)
class Header:
    """What an image file says of itself before its pixels are decoded.

    Attributes:
        format: Pillow's name of the format, by the first bytes.
        mode: Pillow's mode of the stored pixels.
        channels: Stored channels a pixel; 1 for a palette.
        size: After EXIF orientation.
        orientation: EXIF's, 1 to 8; 1 where there is none.
        notes: Codes, sorted: "animated" (only the first frame is used), "colour_profile" (converted to sRGB).
    """

    format: str
    mode: str
    channels: int
    size: Size
    orientation: int
    notes: tuple[str, ...]


def read_header(source: bytes | File | BinaryIO, *, max_px: int = MAX_IMAGE_PX) -> Header:
    """What the file says of itself; pixels are decoded only if metadata may come after them (rare PNGs).

    Args:
        source: The file's bytes, its path, or the open file, read from its start.
        max_px: Most height times width.

    Raises:
        ImageError: It is no image that can be opened, or larger than the limits.
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
    """The first frame, upright, in 8-bit sRGB (mode RGB), every pixel decoded.

    Args:
        source: The file's bytes, or its path.
        background: Shows through transparent pixels.
        max_px: Most height times width.
        draft_px: For a thumbnail: a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, edges at least this.

    Raises:
        ImageError: For every failure of this image.
    """
    with _opened(source, max_px) as image:
        first_open = _orientation(image)
        if draft_px is not None:
            image.draft(None, (draft_px, draft_px))
        image.load()
        # TIFF is upright once loaded, and says so by having no orientation any more; a PNG may hold its
        # orientation behind the pixels, and only now shows it.
        orientation = _orientation(image) if image.format in {"TIFF", "PNG"} else first_open
        rgb = colour.to_srgb(image, background)
        return rgb.transpose(_TRANSPOSE[orientation]) if orientation in _TRANSPOSE else rgb


def decoder_of(kind: str | None) -> str:
    """What a verdict about a file of this format holds for: `DECODER`, and a plug-in where one opens it."""
    plugin = plugin_of(kind)
    return DECODER if plugin is None else f"{DECODER} {plugin}"


def decoders() -> Iterator[str]:
    """All that `decoder_of` may say now, `DECODER` first; the verdict of another is none any more."""
    yield DECODER
    yield from (f"{DECODER} {plugin}" for plugin in plugins())


def load_pixels(
    file: File, geometry: Geometry, background: Background, *, content_hash: str
) -> npt.NDArray[np.uint8]:
    """The pixels that the VAE sees: uint8 array (H, W, 3), sRGB, of the geometry's target size.

    Exactly the crop's region of the source is resized, so the memory needed does not grow with what is
    cropped away, however extreme the aspect ratio.

    Args:
        file: The image file.
        geometry: As recorded for this image.
        background: Shows through transparent pixels.
        content_hash: `hash_bytes` of the file that the geometry was made for.

    Raises:
        ImageError: The file has gone (`vanished`), is not what was recorded (`changed`), or does not decode.
    """
    data = read_bytes(file)
    if hash_bytes(data) != content_hash:
        raise changed_error(file)
    # These bytes were let through by the limit of the recipe, which may be above the default.
    recorded_px = geometry.original_size.height * geometry.original_size.width
    image = decode(data, background, max_px=max(MAX_IMAGE_PX, recorded_px))
    if Size(image.height, image.width) != geometry.original_size:
        detail = f"it decodes to {image.height}x{image.width}, recorded is {geometry.original_size}"
        raise ImageError("size_disagrees", detail, where=str(file), fix="materialize raw_images again")
    target = geometry.target_size
    resized = image.resize((target.width, target.height), Image.Resampling.BICUBIC, box=geometry.source_box)
    return np.array(resized, dtype=np.uint8)


def hash_bytes(data: bytes) -> str:
    """The content hash of a file's bytes: SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def read_bytes(file: File) -> bytes:
    """The whole file.

    Raises:
        ImageError: `vanished` where there is none, `unreadable` where it cannot be read.
    """
    with one_image(str(file)):
        return file.read_bytes()


def changed_error(path: File | str) -> ImageError:
    """For a file whose bytes are not those that were recorded."""
    detail = "its content has changed since the scan"
    return ImageError("changed", detail, where=str(path), fix="run the job again once the file is finished")


def vanished_error(path: File | str) -> ImageError:
    """For a file that is no longer there."""
    detail = "it is no longer there"
    return ImageError("vanished", detail, where=str(path), fix="put it back, or run the job again without it")


@contextmanager
def _opened(source: bytes | File | BinaryIO, max_px: int) -> Generator[Image.Image]:
    """The image opened, its size within the limits; whatever fails until it is closed is an `ImageError`."""
    is_file = isinstance(source, (Path, SourceFile))
    where = str(source) if is_file else getattr(source, "name", "an image in memory")
    with one_image(str(where)), ExitStack() as stack:
        if isinstance(source, Path):
            file: BinaryIO = stack.enter_context(source.open("rb"))
        elif isinstance(source, SourceFile):
            file = io.BytesIO(source.read_bytes())
        else:
            file = io.BytesIO(source) if isinstance(source, bytes) else source
        start = file.read(64)
        require_image(start)
        file.seek(0)
        with Image.open(file, formats=formats_of(start)) as image:
            _require_limits(image, max_px)
            yield image


@contextmanager
def one_image(where: str) -> Generator[None]:
    """Turn every exception that reading or decoding one image raises into an `ImageError`.

    Decoders raise whatever their parsers meet: OSError, struct.error, SyntaxError, ValueError, zlib.error,
    KeyError, MemoryError. One image must not stop the others, and the text is kept with its file.
    """
    try:
        yield
    except ImageError as err:
        if err.where == where:
            raise
        raise ImageError(err.reason, err.detail, where=where, fix=err.fix) from err
    except FileNotFoundError as err:
        raise vanished_error(where) from err
    except Exception as err:
        raise _image_error(err, where) from err


def _image_error(err: Exception, where: str) -> ImageError:
    text = f"{type(err).__name__}: {' '.join(str(err).split())[:500]}"
    if isinstance(err, Image.UnidentifiedImageError):
        detail = "its first bytes are those of an image, but its header cannot be read"
        return ImageError("undecodable", detail, where=where, fix="export it again, or remove it")
    if isinstance(err, UnreachableError):
        fix = "see that the service responds and lets you read it, then run the job again"
        return ImageError("unreadable", str(err), where=where, fix=fix)
    if isinstance(err, OSError) and err.errno is not None:
        return ImageError("unreadable", text, where=where, fix="make the file readable, or remove it")
    if isinstance(err, MemoryError) or str(err).startswith(_CODEC_OUT_OF_MEMORY):
        fix = "make it smaller, or run on a machine with more memory"
        detail = f"decoding it took more memory than there is ({text})"
        return ImageError("out_of_memory", detail, where=where, fix=fix)
    if isinstance(err, (OSError, EOFError)) and ("truncated" in text.lower() or isinstance(err, EOFError)):
        fix = "copy or download it again: its end is missing"
        return ImageError("truncated", text, where=where, fix=fix)
    return ImageError("undecodable", text, where=where, fix="export it again, or remove it")


def _require_limits(image: Image.Image, max_px: int) -> None:
    width, height = image.size
    fix = "make it smaller, or remove it"
    if max(height, width) > MAX_IMAGE_EDGE_PX:
        detail = f"an edge of {height}x{width} is longer than {MAX_IMAGE_EDGE_PX:,} pixels"
        raise ImageError("too_large", detail, fix=fix)
    if height * width > max_px:
        fix += f"; or set checks.max_image_pixels to {height * width} if you trust the file"
        detail = f"{height}x{width} are {height * width:,} pixels, the limit is {max_px:,}"
        raise ImageError("too_large", detail, fix=fix)
    if min(height, width) < 1:
        raise ImageError("undecodable", f"it has no pixels ({height}x{width})", fix="remove it")


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation, 1 to 8, from EXIF or XMP; 1 where there is none or the metadata is damaged.

    A damaged EXIF block is no reason to lose a photograph, and viewers show it as stored.
    """
    try:
        if image.format == "PNG" and _has_late_metadata(image):
            image.load()
        # Not the PNG plug-in's own method, which decodes all pixels to look behind them.
        value = Image.Image.getexif(image).get(274, 1)
    except Exception:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _has_late_metadata(image: Image.Image) -> bool:
    """Whether a PNG holds EXIF or text behind its first pixel data."""
    file: BinaryIO | None = getattr(image, "fp", None)
    if file is None or getattr(image, "_im", None) is not None:
        return False
    position = file.tell()
    try:
        file.seek(8)
        seen_pixels = False
        while len(head := file.read(8)) == 8:
            length, kind = int.from_bytes(head[:4], "big"), head[4:]
            if seen_pixels and kind in {b"eXIf", b"tEXt", b"zTXt", b"iTXt"}:
                return True
            seen_pixels |= kind == b"IDAT"
            file.seek(length + 4, io.SEEK_CUR)
        return False
    finally:
        file.seek(position)


def _oriented_size(image: Image.Image) -> Size:
    """The size of the upright image. Pillow has turned a TIFF's size by its own tag already."""
    size = Size(image.height, image.width)
    turned_already = image.format == "TIFF" and 274 in getattr(image, "tag_v2", {})
    return size.transposed if _orientation(image) >= 5 and not turned_already else size


def _is_animated(image: Image.Image) -> bool:
    """Whether there are frames behind the first; in an MPO they are views or maps of the same picture."""
    try:
        return image.format != "MPO" and bool(getattr(image, "is_animated", False))
    except Exception:
        return False
