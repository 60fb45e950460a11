"""Decode every image once, completely, on the CPU, and record why an image does not decode.

A decode result belongs to a content hash and a decoder version. The same bytes are decoded once, whatever
their files are called and however often the job runs; a repaired file has other bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import polars as pl

from pipeline.images.decode import (
    DecodeLimits,
    File,
    decode_cost,
    decoder_version,
    is_current_decoder,
    limits_of_recipe,
    open_content,
)
from pipeline.images.decode_limits import DECODE_MEMORY, MAX_BYTES_PER_PX, MAX_JPEG_SCANS
from pipeline.images.decoder_warnings import counted_warnings
from pipeline.images.failures import image_errors
from pipeline.images.formats import ImageError, sniff
from pipeline.log import Log
from pipeline.raw_images.parallel import in_threads
from pipeline.raw_images.scan_index import DECODED
from pipeline.reporting.rejections import printable
from pipeline.storage.source import Source, threads_for
from pipeline.storage.tables import table_of
from pipeline.validated_dataset.decode_process import DecodeResult, decode_and_measure, decode_in_process
from pipeline.versions import LOOK_VERSION

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

# Files that are rejected for other reasons, such as `out_of_memory`, are tried again by every run.
CONTENT_REASONS = frozenset(
    [
        *("truncated", "undecodable", "not_an_image", "empty_file", "too_many_scans"),
        *("range_unknown", "hdr_colour", "colour_unknown"),
    ]
)
"""Rejection reasons that hold for a file's bytes."""

# A thread takes 5 to 10 s for so many and cannot be ended. A process can, but takes half a second to start.
MAX_THREAD_PX = 400_000_000
"""Number of pixels, times the scans of a JPEG, above which an image is decoded in a process."""

_COLUMNS = ["sample_id", "dataset", "path", "content_hash", "height", "width"]

Row = dict[str, Any]


@dataclass
class DecodeResults:
    """Results of decoding each distinct content once, and errors of files that could not be read.

    Attributes:
        table: One row per content with the columns `DECODED`, from this run and earlier ones.
        content_errors: Error by content hash, for contents that do not decode.
        file_errors: Error by sample id, for files that could not be read as recorded, such as `vanished`.
        num_decoded: Number of contents decoded by this run.
    """

    table: pl.DataFrame
    content_errors: dict[str, ImageError] = field(default_factory=dict[str, ImageError])
    file_errors: dict[str, ImageError] = field(default_factory=dict[str, ImageError])
    num_decoded: int = 0

    def error_of(self, row: Row) -> ImageError | None:
        """Return why a sample's pixels are rejected; None if they decode."""
        return self.file_errors.get(row["sample_id"]) or self.content_errors.get(row["content_hash"])


class _FileResult(NamedTuple):
    """The result of decoding one file.

    Attributes:
        error: Why the file is rejected; None if it decodes to the scanned content and size.
        version: Version of the decoder and of the values; empty if the file could not be read.
        values: Values of a decoded image by name (`images.pixel_values`).
        decoding: Names of its decoding rules; None if it has none.
    """

    error: ImageError | None
    version: str = ""
    values: Mapping[str, Any] = MappingProxyType({})
    decoding: str | None = None

    @property
    def holds_for_content(self) -> bool:
        """True if every file with the same bytes has this result."""
        return self.error is None or self.error.reason in CONTENT_REASONS


def current_results(known: pl.DataFrame) -> pl.DataFrame:
    """Return the decode results of earlier runs that have a current version."""
    current = [version for version in known["decoder"].unique() if _is_current(version)]
    return known.filter(pl.col("decoder").is_in(current))


def _is_current(version: str) -> bool:
    decoder, _, look_version = version.rpartition(" ")
    return look_version == LOOK_VERSION and is_current_decoder(decoder)


def decode_contents(
    recipe: Recipe, sources: Mapping[str, Source], rows: pl.DataFrame, known: pl.DataFrame, *, log: Log
) -> DecodeResults:
    """Decode each content without a known result, from one of its files.

    `rows` are rows of raw_images. `known` has the columns `DECODED`.
    """
    # Grouped by content, so that copies are decoded once. A copy is tried if the first file cannot be read.
    unknown = rows.select(_COLUMNS).join(known, on="content_hash", how="anti", maintain_order="left")
    files_by_hash: dict[str, list[Row]] = {}
    for row in unknown.iter_rows(named=True):
        files_by_hash.setdefault(row["content_hash"], []).append(row)
    contents = list(files_by_hash.values())

    limits = limits_of_recipe(recipe.checks)

    def decode_one(files: Sequence[Row]) -> list[_FileResult]:
        return _decode_first_readable(sources, files, limits)

    results = DecodeResults(known, num_decoded=len(contents))

    def decoded() -> Iterator[Row]:
        threads = threads_for(sources.values())
        file_results = in_threads(decode_one, contents, log=log, doing="images decoded", threads=threads)
        for files, tried in zip(contents, file_results, strict=True):
            # A result that holds for one file only, such as `vanished`, is not stored for the content.
            if tried[-1].holds_for_content:
                yield _decoded_row(files[0]["content_hash"], tried[-1])
            for file, result in zip(files, tried, strict=False):
                if result.error is not None:
                    results.file_errors[file["sample_id"]] = result.error

    with counted_warnings(log):
        results.table = pl.concat([known, table_of(decoded(), DECODED)])
        results.file_errors |= _above_limits(sources, rows, known, limits)

    failed = results.table.filter(pl.col("reason").is_not_null())
    results.content_errors = {
        content_hash: ImageError(reason, detail, fix=fix)
        for content_hash, reason, detail, fix in failed.select(
            "content_hash", "reason", "detail", "fix"
        ).rows()
    }
    return results


def _above_limits(
    sources: Mapping[str, Source], rows: pl.DataFrame, known: pl.DataFrame, limits: DecodeLimits
) -> dict[str, ImageError]:
    """Return an error by sample id for known images that the current limits refuse."""
    if limits.max_bytes is None:
        return {}

    # An earlier run may have decoded them with higher limits, and the encoder trusts what passes here.
    # An upper bound from the scanned size, so that nearly all headers stay unread.
    num_bytes = pl.col("height").cast(pl.Int64) * pl.col("width") * MAX_BYTES_PER_PX
    decodes = known.filter(pl.col("reason").is_null())
    large = rows.filter(num_bytes > limits.max_bytes).join(decodes, on="content_hash", how="semi")

    errors: dict[str, ImageError] = {}
    for row in large.select(_COLUMNS).iter_rows(named=True):
        file = sources[row["dataset"]].file(row["path"])
        try:
            with image_errors(str(file)), file.open() as opened:
                decode_cost(opened, limits=limits)
        except ImageError as err:
            errors[row["sample_id"]] = err
    return errors


def _decode_first_readable(
    sources: Mapping[str, Source], files: Sequence[Row], limits: DecodeLimits
) -> list[_FileResult]:
    """Decode files with the same content in turn until one result holds for all of them."""
    results: list[_FileResult] = []
    for file in files:
        results.append(_decode_file(sources[file["dataset"]].file(file["path"]), file, limits))
        if results[-1].holds_for_content:
            break
    return results


def _decode_file(file: File, row: Row, limits: DecodeLimits) -> _FileResult:
    version = ""
    try:
        with image_errors(str(file)), open_content(file, row["content_hash"]) as content:
            version = f"{decoder_version(sniff(content.read(64)))} {LOOK_VERSION}"
            content.seek(0)
            size, values, decoding = _decode_content(content, row, limits)

            # The geometry was computed from the header's size; a decoder that disagrees would shift every
            # crop.
            if size != (row["height"], row["width"]):
                recorded = f"{row['height']}x{row['width']} (height x width)"
                detail = f"it decodes to {size}, but its header records {recorded}"
                raise ImageError("size_disagrees", detail, fix="save the image again, or remove it")
            return _FileResult(None, version, values, decoding)
    except ImageError as err:
        return _FileResult(err, version)


def _decode_content(content: BinaryIO, row: Row, limits: DecodeLimits) -> DecodeResult:
    """Decode in this thread, or in a process that can be ended if the header announces much work."""
    # A cheap bound first: counting the scans of a JPEG reads the complete file.
    if row["height"] * row["width"] * MAX_JPEG_SCANS > MAX_THREAD_PX:
        cost = decode_cost(content, limits=limits)
        if cost.passes_px > MAX_THREAD_PX:
            with DECODE_MEMORY.reserved(cost.num_bytes):
                return decode_in_process(content, limits)
    return decode_and_measure(content, limits)


def _decoded_row(content_hash: str, result: _FileResult) -> Row:
    row: Row = {"content_hash": content_hash, "decoder": result.version, "decoding": result.decoding}
    row |= result.values
    if result.error is not None:
        row |= {"reason": result.error.reason}
        row |= {"detail": printable(result.error.detail), "fix": printable(result.error.fix)}
    return row
