"""Turn every exception from reading or decoding one image into an `ImageError` that names the file."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from PIL import Image

from pipeline.images.formats import ImageError
from pipeline.storage.regular_files import RefusedFileError
from pipeline.storage.remote_folder import UnreachableError

# Start of the OSError, without errno, that Pillow raises when a C decoder runs out of memory.
_CODEC_OUT_OF_MEMORY = "out of memory"


def changed_error(path: object) -> ImageError:
    """Return the error for a file with other content than recorded."""
    detail = "its content has changed since the scan"
    return ImageError("changed", detail, where=str(path), fix="start the job again once the file is complete")


def vanished_error(path: object) -> ImageError:
    """Return the error for a file that no longer exists."""
    detail = "the file no longer exists"
    return ImageError(
        "vanished", detail, where=str(path), fix="restore it, or start the job again without it"
    )


@contextmanager
def image_errors(where: str) -> Generator[None]:
    """Convert every exception from reading or decoding one image into an `ImageError`."""
    try:
        yield
    # The code that finds a defect may not know the file's name, such as a conversion of the pixels.
    except ImageError as err:
        if err.where == where:
            raise
        raise ImageError(err.reason, err.detail, where=where, fix=err.fix) from err
    except FileNotFoundError as err:
        raise vanished_error(where) from err
    except RefusedFileError as err:
        raise ImageError(err.reason, err.detail, where=where, fix=err.fix) from err
    # Decoders raise any exception that their parsers meet: OSError, struct.error, SyntaxError, ValueError,
    # zlib.error, KeyError, MemoryError. One image must not stop the rest, and its file must be named.
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
