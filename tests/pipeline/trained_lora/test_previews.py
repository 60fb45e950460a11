"""The preview sheet shows every step and prompt at a readable size, and the comparison the first and last."""

from __future__ import annotations

import io
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from pipeline.reporting.grids import CELL_PX, LABEL_PX
from pipeline.reporting.lettering import font
from pipeline.trained_lora.previews import (
    BEFORE_AFTER_PX,
    MAX_STEPS,
    PROMPT_KEY,
    Preview,
    before_after,
    preview_file,
    preview_sheet,
    read_previews,
)

PROMPTS = ["a red rose", "a blue rose in a glass vase on the windowsill of an old farmhouse kitchen"]


def save(folder: Path, step: int, number: int, prompt: str | None, colour: tuple[int, int, int]) -> None:
    chunks = PngInfo()
    if prompt is not None:
        chunks.add_itxt(PROMPT_KEY, prompt)
    Image.new("RGB", (64, 64), colour).save(preview_file(folder, step, number), pnginfo=chunks)


def pixels(data: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), dtype=np.int64)


def count_cells(data: bytes, colour: tuple[int, int, int]) -> float:
    """Return the area of a colour in cells of full size."""
    return float((np.abs(pixels(data) - colour).max(axis=2) < 30).sum()) / CELL_PX**2


def test_the_sheet_has_all_steps_and_all_prompts_enlarged_to_a_readable_size(tmp_path: Path) -> None:
    for step in range(0, 60, 10):
        for number in range(6):
            save(tmp_path, step, number, f"prompt {number}", (250, 0, 0) if step == 50 else (0, 0, 250))
    sheet = preview_sheet(read_previews(tmp_path))
    assert CELL_PX >= 256
    assert count_cells(sheet, (0, 0, 250)) == pytest.approx(5 * 6, abs=0.5)
    assert count_cells(sheet, (250, 0, 0)) == pytest.approx(6, abs=0.5)
    assert (np.abs(pixels(sheet)[-40, -40] - (250, 0, 0)) < 30).all(), "the last step is not at the bottom"


def test_a_long_run_has_evenly_spaced_rows_and_the_title_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []

    def record(*arguments: object, title: str, **settings: object) -> Image.Image:
        titles.append(title)
        assert len(arguments[0]) == MAX_STEPS  # pyright: ignore[reportArgumentType]
        return Image.new("RGB", (8, 8))

    for step in range(100):
        save(tmp_path, step, 0, "a rose", (0, 0, 250))
    sheet = preview_sheet(read_previews(tmp_path))
    assert count_cells(sheet, (0, 0, 250)) == pytest.approx(MAX_STEPS, abs=0.5)

    monkeypatch.setattr("pipeline.trained_lora.previews.picture_grid", record)
    preview_sheet(read_previews(tmp_path))
    assert titles == [f"Previews: {MAX_STEPS} of 100 steps, 1 prompt"]


def test_prompts_are_written_above_their_columns_and_wrapped(tmp_path: Path) -> None:
    for number, prompt in enumerate(PROMPTS):
        save(tmp_path, 0, number, prompt, (0, 250, 0))
    picture = pixels(preview_sheet(read_previews(tmp_path)))
    top = picture.shape[0] - CELL_PX - 8
    headings = [picture[30 : top - 4, left : left + CELL_PX] for left in (LABEL_PX, LABEL_PX + CELL_PX + 8)]
    num_lines = [int((np.diff((each.min(axis=(1, 2)) < 128).astype(int)) == 1).sum()) for each in headings]
    assert num_lines[0] == 1
    assert num_lines[1] >= 2, "the long prompt is not wrapped"


def test_a_preview_without_a_stored_prompt_gets_its_number(tmp_path: Path) -> None:
    save(tmp_path, 0, 0, None, (0, 0, 0))
    save(tmp_path, 0, 1, "stored", (0, 0, 0))
    assert [each.heading for each in read_previews(tmp_path)] == ["prompt 1", "stored"]


@pytest.mark.parametrize("prompt", ["", "日本の花\n第二行", "a\x00b\x1b[31m", "роза и Ünï 😀", "x" * 5000])
def test_any_prompt_can_be_drawn(tmp_path: Path, prompt: str) -> None:
    preview = Preview(0, 0, prompt, preview_file(tmp_path, 0, 0))
    Image.new("RGB", (64, 64), (0, 0, 250)).save(preview.path)
    assert count_cells(preview_sheet([preview]), (0, 0, 250)) > 0.9


def test_R09_a_broken_preview_is_omitted(tmp_path: Path) -> None:
    save(tmp_path, 0, 0, "a rose", (0, 0, 250))
    preview_file(tmp_path, 10, 0).write_bytes(b"no picture")
    assert [each.step for each in read_previews(tmp_path)] == [0]
    assert preview_sheet([]) == before_after([]) == b""
    assert read_previews(tmp_path / "missing") == []


def test_previews_are_read_up_to_a_step(tmp_path: Path) -> None:
    for step in (0, 20, 100, 1000):
        save(tmp_path, step, 0, "a", (0, 0, 0))
    for last_step, steps in {19: [0], 20: [0, 20], 999: [0, 20, 100], None: [0, 20, 100, 1000]}.items():
        assert [each.step for each in read_previews(tmp_path, last_step=last_step)] == steps


def test_before_and_after_are_side_by_side_and_large(tmp_path: Path) -> None:
    for step, colour in ((0, (0, 0, 250)), (10, (0, 250, 0)), (20, (250, 0, 0))):
        save(tmp_path, step, 0, "a rose", colour)
        save(tmp_path, step, 1, "another prompt", (0, 0, 0))
    picture = pixels(before_after(read_previews(tmp_path)))
    row = picture[-BEFORE_AFTER_PX // 2]
    assert BEFORE_AFTER_PX >= 512
    assert (np.abs(row[8 + 256] - (0, 0, 250)) < 30).all()
    assert (np.abs(row[8 + BEFORE_AFTER_PX + 8 + 256] - (250, 0, 0)) < 30).all()


def test_a_run_without_a_first_preview_has_no_comparison(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step, 0, "a rose", (0, 0, 0))
    assert before_after(read_previews(tmp_path)) == b""


def drawn(letter: str) -> bytes:
    picture = Image.new("L", (30, 30))
    ImageDraw.Draw(picture).text((2, 2), letter, fill=255, font=font(20))
    return picture.tobytes()


def test_letters_of_european_languages_have_a_shape() -> None:
    """A missing letter would be drawn as the same box as an unassigned code point."""
    letters = "ÄößéñřЖд"
    assert [letter for letter in letters if drawn(letter) == drawn("\U000e0fff")] == []
    assert [pair for pair in combinations(letters, 2) if drawn(pair[0]) == drawn(pair[1])] == []
