"""A header of very many parts is given up after a bounded processor time."""

from __future__ import annotations

import io

import pytest

from pipeline.images.decode import read_header
from pipeline.images.decode_limits import TimedFile
from pipeline.images.formats import ImageError
from tests.hostile_images import png, png_chunk
from tests.pipeline.dataset_folder import Folder

LONG_HEADER = png(edge_px=16, bit_depth=8, colour_type=2, chunks=png_chunk(b"quIz", b"") * 100_000)


def test_a_header_that_takes_too_long_is_rejected_and_the_other_images_are_kept(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.add("long.png", LONG_HEADER)
    folder.add("good.png")
    assert len(folder.scan().table) == 2

    monkeypatch.setattr("pipeline.images.decode.MAX_HEADER_CPU_S", 0.01)
    monkeypatch.setattr("pipeline.images.decode.MAX_QUICK_BYTES", 1_000_000)
    result = folder.scan()
    assert result.rejected.select("path", "reason").rows() == [("long.png", "too_slow")]
    assert "0.01 s of processor time" in result.rejected["detail"].item()
    assert result.table["path"].to_list() == ["good.png"]


def test_reading_within_the_time_gives_the_file_s_bytes() -> None:
    file = TimedFile(io.BytesIO(b"abcdef"), max_cpu_s=10)
    assert file.read(2) == b"ab"
    file.seek(4)
    assert (file.tell(), file.read()) == (4, b"ef")
    with pytest.raises(ImageError, match="too_slow"):
        TimedFile(io.BytesIO(b"abcdef"), max_cpu_s=-1).read()


def test_the_limit_is_far_above_the_time_of_a_usual_header() -> None:
    assert read_header(LONG_HEADER).size == (16, 16)
