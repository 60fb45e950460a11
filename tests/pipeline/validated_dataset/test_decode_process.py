"""An image with much work is decoded in a process, which is ended when the image takes too long."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.images.decode import DecodeLimits
from pipeline.images.formats import ImageError
from pipeline.validated_dataset.decode_process import decode_and_measure, decode_in_process
from tests.hostile_images import jpeg_with_scans, png

LIMITS = DecodeLimits()


def test_the_process_gives_the_result_of_the_thread_for_bytes_and_files(folder: Any) -> None:
    data = folder.picture(1, 30, 50)
    path = folder.add("a.png", data)
    expected = decode_and_measure(io.BytesIO(data), LIMITS)
    assert decode_in_process(io.BytesIO(data), LIMITS) == expected
    with path.open("rb") as file:
        file.read(5)
        assert decode_in_process(file, LIMITS) == expected


def test_an_error_of_the_process_is_that_of_the_thread() -> None:
    data = png(edge_px=200)[:200]
    with pytest.raises(ImageError) as in_thread:
        decode_and_measure(io.BytesIO(data), LIMITS)
    with pytest.raises(ImageError) as in_process:
        decode_in_process(io.BytesIO(data), LIMITS)
    assert (in_process.value.reason, in_process.value.fix) == (in_thread.value.reason, in_thread.value.fix)
    assert in_process.value.reason == "truncated"


def test_a_slow_image_is_rejected_by_name_and_the_others_are_kept(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched = "pipeline.validated_dataset.decode_check.decode_in_process"
    monkeypatch.setattr(patched, partial(decode_in_process, max_cpu_s=1))
    folder.add("good.png")
    folder.add("slow.jpg", jpeg_with_scans(90, edge_px=9_000))
    result = folder.ingest()
    assert result.table["path"].to_list() == ["good.png"]
    (row,) = result.rejected.rows(named=True)
    assert (row["path"], row["reason"]) == ("slow.jpg", "too_slow")
    assert "more than 1 s of processor time" in row["detail"]
    assert "baseline JPEG" in row["fix"]


def test_images_with_much_work_are_decoded_in_a_process_and_kept(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.add("a.jpg", jpeg_with_scans(12, edge_px=80))
    expected = folder.ingest().table
    folder.output_dir = folder.output_dir.with_name("other")
    monkeypatch.setattr("pipeline.validated_dataset.decode_check.MAX_THREAD_PX", 0)
    monkeypatch.setattr(
        "pipeline.validated_dataset.decode_check.decode_and_measure", lambda *_: pytest.fail("in a thread")
    )
    assert folder.ingest().table.equals(expected)


def test_a_crash_of_the_decoder_is_an_error_of_the_image(tmp_path: Path, monkeypatch: Any) -> None:
    package = tmp_path / "PIL"
    package.mkdir()
    (package / "__init__.py").write_text("import os; os.abort()", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ImageError, match="crashed with status -6") as caught:
        decode_in_process(io.BytesIO(png(edge_px=20)), LIMITS)
    assert caught.value.reason == "undecodable"
