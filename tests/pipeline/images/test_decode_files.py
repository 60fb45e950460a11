"""The memory that each kind of image reserves, and how files are opened, read and closed."""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.images.colour import Background, to_srgb
from pipeline.images.decode import (
    MAX_IMAGE_PX,
    DecodeLimits,
    decode_cost,
    decoded,
    hash_bytes,
    open_content,
    read_bytes,
    read_header,
)
from pipeline.images.formats import ImageError
from pipeline.storage.source import LocalSource, SourceFile
from tests.hostile_images import jpeg_with_scans, png_chunk
from tests.pipeline.pixels import WHITE, pattern, saved


def with_orientation(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[274] = orientation
    return exif.tobytes()


RGB = Image.fromarray(pattern())
LATE = saved(RGB)[:-12] + png_chunk(b"eXIf", with_orientation(6).removeprefix(b"Exif\0\0")) + saved(RGB)[-12:]


@pytest.mark.parametrize(
    ("data", "bytes_per_px"),
    [
        (saved(RGB), 4),
        (saved(RGB, exif=with_orientation(1)), 4),
        (saved(RGB, exif=with_orientation(2)), 4 + 4),
        (saved(RGB, exif=with_orientation(6)), 4 + 4),
        (LATE, 4),
        (saved(RGB.convert("L")), 1 + 4),
        (saved(RGB.convert("RGBA")), 4 + 4),
        (saved(RGB.convert("CMYK"), "TIFF"), 4 + 8),
        (saved(RGB, "JPEG"), 4),
        (saved(RGB, "JPEG", exif=with_orientation(6)), 4 + 4),
        (saved(RGB, "MPO", save_all=True, append_images=[RGB]), 4),
        (jpeg_with_scans(17, edge_px=48), 4 + 6),
        (saved(RGB, "WEBP"), 4 + 12),
    ],
    ids=[
        *("RGB", "upright", "mirrored", "rotated", "rotated late", "grey", "with opacity", "CMYK TIFF"),
        *("JPEG", "rotated JPEG", "MPO", "JPEG of 17 scans", "WebP"),
    ],
)
def test_the_memory_of_decoding_is_that_of_stored_pixels_and_of_decoder_or_conversion(
    data: bytes, bytes_per_px: int
) -> None:
    cost = decode_cost(io.BytesIO(data), limits=DecodeLimits())
    size = read_header(data).size
    assert cost.num_bytes == size.height * size.width * bytes_per_px


def test_the_stored_pixels_are_freed_when_they_have_been_converted() -> None:
    stored: list[Image.Image] = []

    def convert(image: Image.Image, background: Background) -> Image.Image:
        stored.append(image)
        return to_srgb(image, background)

    with decoded(saved(RGB.convert("L")), WHITE, limits=DecodeLimits(), convert=convert) as image:
        assert np.asarray(image).shape == (24, 40, 3)
        with pytest.raises(ValueError, match="closed image"):
            stored[0].getpixel((0, 0))


def test_by_default_as_many_pixels_are_decoded_as_pillow_decodes_without_refusing() -> None:
    """Pillow warns above 256 MiB at three bytes per pixel, and refuses twice as many pixels."""
    assert MAX_IMAGE_PX == 2 * (2**30 // 4 // 3)


def test_a_file_is_opened_only_in_the_format_of_its_first_bytes() -> None:
    """It starts like a TIFF, and Pillow on its own opens it as a SPIDER image."""
    numbers = [0.0] * 27
    # Rows, a single image, columns, records, bytes of the header, bytes per record.
    numbers[1], numbers[4], numbers[11], numbers[12], numbers[21], numbers[22] = 4, 1, 4, 1, 128, 128
    data = (b"II*\0" + struct.pack(">27f", *numbers)[4:]).ljust(128 + 4 * 4 * 4, b"\0")
    with pytest.warns(UserWarning, match="Corrupt EXIF"), Image.open(io.BytesIO(data)) as image:
        assert image.format == "SPIDER"
    with (
        pytest.warns(UserWarning, match="Corrupt EXIF"),
        pytest.raises(ImageError, match="undecodable: it starts like an image"),
    ):
        read_header(data)


@pytest.mark.parametrize("spare_bytes", [0, 1])
def test_a_file_up_to_the_size_that_is_buffered_may_change_after_it_has_been_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare_bytes: int
) -> None:
    path, data = tmp_path / "x.png", saved(RGB)
    path.write_bytes(data)
    monkeypatch.setattr("pipeline.images.decode.MAX_BUFFERED_BYTES", len(data) + spare_bytes)
    with open_content(path, hash_bytes(data)) as content:
        path.write_bytes(b"\0" * len(data))
        assert content.read() == data


def test_files_of_a_source_are_read_like_local_files(tmp_path: Path) -> None:
    data = saved(RGB)
    (tmp_path / "x.png").write_bytes(data)
    file = SourceFile(LocalSource(tmp_path), "x.png")
    assert read_bytes(file) == read_bytes(tmp_path / "x.png") == data
    with open_content(file, hash_bytes(data)) as content:
        assert content.read() == data
    assert read_header(file) == read_header(tmp_path / "x.png")
    with pytest.raises(ImageError, match="vanished") as excinfo:
        read_bytes(SourceFile(LocalSource(tmp_path), "y.png"))
    assert excinfo.value.where == f"{tmp_path}/y.png"


class InMemorySource(LocalSource):
    """A folder whose files are opened like the small ones of a remote dataset."""

    def open(self, path: str, num_bytes: int = 0) -> Any:
        with super().open(path, num_bytes) as file:
            return io.BytesIO(file.read())


def test_files_that_a_source_has_read_into_memory_are_used(tmp_path: Path) -> None:
    data = saved(RGB)
    (tmp_path / "x.png").write_bytes(data)
    with open_content(SourceFile(InMemorySource(tmp_path), "x.png"), hash_bytes(data)) as content:
        assert content.read() == data


def test_only_headers_have_a_limit_of_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.images.decode.MAX_QUICK_BYTES", 10)
    monkeypatch.setattr("pipeline.images.decode.MAX_HEADER_CPU_S", -1)
    data = saved(RGB)
    with pytest.raises(ImageError, match="too_slow"):
        read_header(data)
    with decoded(data, WHITE, limits=DecodeLimits()) as image:
        assert image.size == (40, 24)


def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.png")
    for file in (tmp_path / "x.png", SourceFile(LocalSource(tmp_path), "x.png")):
        with pytest.raises(ImageError, match="not a regular file"):
            read_bytes(file)
