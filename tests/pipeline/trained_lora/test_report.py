from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from pipeline.trained_lora.report import CELL_PX, loss_curve, preview_sheet, running_mean


def test_the_running_mean_covers_the_preceding_losses() -> None:
    assert running_mean([5.0, 1.0, 3.0]) == [5.0, 3.0, 3.0]
    ramp = running_mean([float(number) for number in range(200)])
    assert ramp[100] == pytest.approx(95.5)


def test_the_loss_curve_is_a_small_png() -> None:
    metrics = [{"step": step, "loss": 1 / (step + 1)} for step in range(500)]
    drawn = loss_curve(metrics, [{"step": 0, "loss": 1.0}, {"step": 500, "loss": 0.5}])
    with Image.open(io.BytesIO(drawn)) as picture:
        assert picture.format == "PNG"
    assert len(drawn) < 66_000


def test_the_sheet_has_rows_for_the_first_and_last_step_and_steps_between(tmp_path: Path) -> None:
    assert preview_sheet(tmp_path) == b""
    for step in range(0, 100, 10):
        for number in range(2):
            colour = (0, 255, 0) if step == 90 else (255, 0, 0)
            Image.new("RGB", (64, 64), colour).save(tmp_path / f"step-{step:08d}-{number:02d}.png")
    with Image.open(io.BytesIO(preview_sheet(tmp_path))) as sheet:
        assert sheet.size == (80 + 2 * CELL_PX, 4 * CELL_PX)
        red, green, _ = sheet.convert("RGB").getpixel((80 + 20, 3 * CELL_PX + 20))
        assert green > 200
        assert red < 60
