"""Warnings of image decoders are counted: one file can cause thousands of different ones."""

from __future__ import annotations

import warnings

import pytest

from pipeline.images.decode import read_header
from pipeline.images.decoder_warnings import counted_warnings
from tests.hostile_images import png_with_warnings
from tests.pipeline.dataset_folder import Folder


def test_the_warnings_of_one_file_are_one_line_in_scan_and_validation(
    folder: Folder, capfd: pytest.CaptureFixture[str]
) -> None:
    folder.add("a.png", png_with_warnings(20_000))
    folder.scan()
    (line,) = [line for line in folder.log if "warnings" in line]
    assert line.startswith("the image decoders gave 20,000 warnings, which are not shown; first: ")

    folder.log.clear()
    assert folder.validate().table["path"].to_list() == ["a.png"]
    assert len([line for line in folder.log if "warnings" in line]) == 1
    assert capfd.readouterr().err == ""


def test_warnings_of_other_code_are_shown() -> None:
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with counted_warnings(lines.append):
            warnings.warn("old", DeprecationWarning, stacklevel=1)
            read_header(png_with_warnings(3))
    assert [str(each.message) for each in shown] == ["old"]
    assert [line.partition(",")[0] for line in lines] == ["the image decoders gave 3 warnings"]

    before = warnings.showwarning
    with counted_warnings(lines.append):
        pass
    assert warnings.showwarning is before
    assert len(lines) == 1
